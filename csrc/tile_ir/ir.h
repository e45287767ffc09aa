#pragma once

#include <string>
#include <variant>
#include <vector>

#include "base/location.h"
#include "base/ref.h"
#include "expr/expr.h"
#include "loop_ir/ir.h"
#include "program_ir/groups.h"
#include "program_ir/tiles.h"
#include "schedule/schedule.h"

namespace deplo::tile_ir {

// Tile IR: the nests of Loop IR with their schedule made explicit: order, tiles, threads, vector axes, staging. Target-neutral.
//
//   schedule @k0_softmax: nest parallel(i, work=32768) vectorize(j, by=4) vectorize(j, nth=1)
//   tile @k0_softmax(x: f32[s0, 2048] strides [2048, 1], out y: f32[s0, 2048] strides [2048, 1]) where s0 in 2.. chunks s0 // 4
//     parallel i in 0..s0:
//       reduce m: f32 = max(a) over lanes j in 0..2048 by 4:
//         a = load x[i, j]
//       for lanes j in 0..2048 by 4:
//         ...
//   a contraction's register block:
//         alloc acc: f32[6, 16] register
//         unroll r in 0..6:
//           for lanes c in 0..16:
//             z: f32 = constant 0.0
//             store acc[r, c] = z
//         for k in 0..512:
//           unroll r in 0..6:
//             a = load pa[t, k, r]
//             for lanes c in 0..16:
//               b = load pb[p, k, c]
//               s = load acc[r, c]
//               f = fma(a, b, s)
//               store acc[r, c] = f
//
// Semantics: statements run in order. Loops run over lo, lo + step, ... < hi, with a kind:
//   serial    in increasing order
//   parallel  outermost only, at most one on the path to any statement: iterations are independent and may run on different threads;
//             the partition into `chunks` pieces depends on shapes alone
//   lanes     iterations are independent and may run at once in vector registers; step 1; `by u`: u vectors in flight. Innermost
//             but for serial/unroll loops that contain no other lanes loop; tails are handled by the lowering. In a reduce: u x V partial results,
//             combined as a tree
//   unroll    constant extent; the body is repeated
//   block_x, block_y, block_z, thread_x, thread_y   GPU indices; step 1; a thread loop's extent is constant
// `alloc` declares memory private to the enclosing parallel iteration (shared: to the block), of undefined contents:
//   register  indexed by unroll axes, constants and at most one lanes axis (its last dimension): becomes vector variables
//   stack     a small array of constant size
//   scratch   memory from the runtime, per thread (GPU: per block, its threads share it); the shape may be symbolic in sizes (not axes); base
//             aligned to 64 bytes
//   shared    GPU block memory
//   matrix    the sums of a matrix unit, f32 or i32 [m, n] of multiples of 16, one array at a time, for `matrix` statements alone
// `matrix` statements work on a whole such array t[m, n]: `matrix t = 0`, `matrix t = c[i, j]` and `matrix c[i, j] = t` for the m x n elements of
// memory from there on along its last two dimensions, and two kinds of products. `matrix t += a[i, k] * b[p, 0, 0]` adds to f32 those of m x 32 bf16
// elements of a, from a[i, k] on, and 32 x n of b, pairs of whose rows lie side by side in its last dimension ([32 / 2][n][2]). The order of the
// additions is the unit's; subnormals may count as 0. `matrix t += a[i, k] * i8 b[p, 0]` adds to i32, which wraps around, those of m x 64 bytes of a
// (u8 or i8) and 64 x n of b, four of whose rows are the bytes of an i32 word, the lowest one first ([64 / 4][n] words of u8 or i8).
// A GPU's threads copy without waiting, `copy_async t[s, i, j] = x[p, q] along 1 by 8 first n if c`: 8 elements side by side in the last
// dimension of a shared array, from there on along dimension 1 of a parameter; those at n and above, and all where c does not hold, are 0.
// `copy_commit` and `copy_wait 2` close groups of a thread's copies, and wait until at most two are under way; a copy takes place at any time
// until then. `a = load_matrix t[s, i, j] x4` and `mma acc[i, 0, g, 2], acc[i, 1, g, 2] += a * b half 1` are what a warp's 32 threads do
// together, as in Kernel IR: each names the beginning of a row of 8 elements, and its sums lie in two places of a register array, each in this
// and the next element; `a = join_matrix bf16 s[i, 0, 2, 0], s[i, 1, 2, 0]` takes matrices from such places of f32 numbers, or such as they are,
// instead, two numbers of each, of f32 one. Rows of bytes have 16 elements, and sums of i32; rows of f32 have 4, rounded to tf32.
// `multiply_tiles acc += x by ... * w by ...` is what a block's threads do together to tiles that come by copies of their own
// (`program_ir/tiles.h`); a thread's sums are acc[h, g, c], f32[2, columns / 8, 2] in registers. `multiply_group acc[u] += x ... * w ...` is
// what groups of 128 threads do with tiles that lie in shared memory (`program_ir/groups.h`); a thread's sums are acc[u, h, g, c], f32[units, 2,
// columns / (4 lanes), lanes] in registers. `if` runs its body when the guard holds; a guard may use axes. `barrier` joins a GPU block.
// `prefetch` is a hint. Values, loads, stores, checks and reductions mean what they mean in Loop IR. Reduce axes are loops with kinds (outer
// first). The first ones may be thread loops around the reduction, of kind thread_x or thread_y with their names and extents: what their threads
// reduce is combined, and all of them get the result; all threads of the block must then be there, and there is an element where the combination
// is online_softmax. The axes of a scan say the order of its elements, outer first: one serial loop, or at most one serial or unrolled loop of
// pieces, a thread loop around the scan, and a thread's own elements side by side, of an unrolled or a lanes loop. Results of one thread's
// elements then count what threads before it had; all threads of the block are there, and what `then` does lets threads see nothing of each
// other.

struct Stmt;
using Block = Refs<Stmt>;

using loop_ir::Check;
using loop_ir::ErrorCode;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Param;
using loop_ir::ParamKind;
using loop_ir::Store;

enum class LoopKind : uint8_t { serial, parallel, lanes, unroll, block_x, block_y, block_z, thread_x, thread_y };

struct Axis {
  std::string name;
  Expr lo;
  Expr hi;
  int64_t step = 1;
  LoopKind kind = LoopKind::serial;
  int64_t by = 1;  ///< lanes: vectors in flight; serial: unroll factor
  bool operator==(const Axis&) const = default;
};

/// Whether it is a thread loop around, in a reduction.
inline bool is_thread(const Axis& axis) { return axis.kind == LoopKind::thread_x || axis.kind == LoopKind::thread_y; }

struct For {
  Axis axis;
  Block body;
  bool operator==(const For&) const = default;
};

struct Reduce {
  std::vector<std::string> results;
  std::vector<DType> dtypes;
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;
  std::vector<Axis> axes;
  Block body;
  bool operator==(const Reduce&) const = default;
};

struct Scan {
  std::vector<std::string> results;
  std::vector<DType> dtypes;
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;
  std::vector<Axis> axes;  ///< outer first
  Block body;
  Block then;
  bool operator==(const Scan&) const = default;
};

enum class Space : uint8_t { reg, stack, scratch, shared, matrix };

struct Alloc {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Expr> shape;  ///< row-major
  Space space = Space::stack;
  bool operator==(const Alloc&) const = default;
};

struct If {
  std::vector<Cond> guard;
  Block body;
  bool operator==(const If&) const = default;
};

struct Barrier {
  bool operator==(const Barrier&) const = default;
};

struct Prefetch {
  std::string buffer;
  std::vector<Expr> index;
  int level = 1;  ///< cache level to bring the line to: 1, 2 or 3
  bool operator==(const Prefetch&) const = default;
};

constexpr int64_t kMatrixSide = 16;   ///< rows, and f32 lanes, of one register of a matrix unit
constexpr int64_t kMatrixDepth = 32;  ///< products that one instruction adds to each sum
constexpr int64_t kMatrixBytes = 64;  ///< those of bytes

/// A statement on a whole matrix array; `a` and `b` are elements where memory begins.
struct Matrix {
  enum class Kind : uint8_t { zero, load, store, multiply };
  struct Place {
    std::string buffer;
    std::vector<Expr> index;
    bool operator==(const Place&) const = default;
  };
  Kind kind = Kind::zero;
  std::string array;
  Place a;                          ///< load, store and multiply
  Place b;                          ///< multiply
  std::optional<DType> bytes = {};  ///< multiply: of what b's words are made, where it has words
  bool operator==(const Matrix&) const = default;
};

/// Elements from a parameter to a shared array, not waited for.
struct CopyAsync {
  std::string buffer;
  std::vector<Expr> index;
  std::string from;
  std::vector<Expr> from_index;
  int64_t along = 0;  ///< dimension of `from` in which elements follow, behind its end those of the next row in memory
  int64_t elements = 8;
  Expr count = 8;
  std::vector<Cond> guard;
  bool operator==(const CopyAsync&) const = default;
};

/// Closes a group of copies, or waits until at most `pending` groups are under way.
struct CopyGroup {
  static constexpr int kCommit = -1;
  int pending = kCommit;
  bool operator==(const CopyGroup&) const = default;
};

/// Matrices of 8 x 8 elements, by the threads of a warp.
struct LoadMatrix {
  std::string name;
  DType dtype = DType::bf16;
  std::string buffer;
  std::vector<Expr> index;
  int count = 4;  ///< of matrices: 1, 2 or 4
  bool transposed = false;
  bool operator==(const LoadMatrix&) const = default;
};

/// Matrices of 8 x 8 elements of which each thread of a warp holds two numbers at each place of a register array, in this and the next element.
struct JoinMatrix {
  std::string name;
  DType dtype = DType::bf16;
  std::string array;
  std::vector<std::vector<Expr>> places;
  bool operator==(const JoinMatrix&) const = default;
};

/// A product of matrices added to sums in registers.
struct Mma {
  std::string array;
  std::vector<Expr> low;
  std::vector<Expr> high;
  std::string a;
  std::string b;
  int half = 0;
  bool operator==(const Mma&) const = default;
};

/// Products of tiles added to sums in registers.
struct MultiplyTiles {
  std::string array;
  TileProducts products;
  bool operator==(const MultiplyTiles&) const = default;
};

/// Products of groups of threads added to sums in registers.
struct MultiplyGroup {
  std::string array;
  Expr unit;  ///< its first index
  GroupProducts products;
  bool operator==(const MultiplyGroup&) const = default;
};

struct Stmt {
  std::variant<Let, Load, Store, For, Reduce, Scan, Alloc, If, Check, Barrier, Prefetch, Matrix, CopyAsync, CopyGroup, LoadMatrix, JoinMatrix, Mma,
               MultiplyTiles, MultiplyGroup>
      node;
  Location location{};
  bool operator==(const Stmt&) const = default;
};

struct Kernel {
  std::string name;
  std::vector<Param> params;
  Ranges symbols;
  Block body;
  Expr chunks = 1;    ///< pieces into which the parallel loop is worth splitting, from shapes alone
  Schedule schedule;  ///< that was applied; of no kind if unknown
  std::vector<std::string> provenance;
  Location location{};
  bool operator==(const Kernel&) const = default;
};

using Module = ModuleOf<Kernel>;

std::string print(const Kernel& kernel);
std::string print(const Module& module);
Module parse(const std::string& text, const std::string& file = "<tile>");
void verify(const Kernel& kernel);
void verify(const Module& module);

}  // namespace deplo::tile_ir
