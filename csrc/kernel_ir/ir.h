#pragma once

#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/location.h"
#include "base/ref.h"
#include "expr/expr.h"
#include "loop_ir/ir.h"
#include "program_ir/groups.h"
#include "program_ir/module.h"
#include "program_ir/tiles.h"
#include "scalar/functions.h"

namespace deplo::kernel_ir {

// Kernel IR: imperative code for one kernel with explicit vectors. Codegen translates it and decides nothing.
//
//   kernel @k0_softmax(x: ptr f32, out y: ptr f32) symbols (s0) sizes (n = (s0 + 3) // 4) chunks (s0 + 3) // 4 scratch 0
//     for i in (s0*thread // threads)..(s0*(thread + 1) // threads) step 1:
//       ninf: f32x8 = splat -inf
//       var m0: f32x8 = ninf
//       for j in 0..2048 step 8:
//         a: f32x8 = load x[i*2048 + j]
//         b: f32x8 = max(m0, a)
//         m0 <- b
//       m: f32 = lanes max(m0)
//       ...
//       n: mask8 = first s0 - j
//       t: f32x8 = load x[i*2048 + j] mask n else ninf
//       g: f32x8 = load x[j] stride 64
//       h: f32x8 = load w[0] gather idx
//       store y[i*2048 + j] = e mask n
//
// Semantics: every value has a type: a dtype and a number of lanes (1: scalar; bool lanes are a mask). Statements run in
// order; a value is defined once and visible to later statements of its block and nested blocks. `var` declares a mutable register, `<-`
// assigns it; reading a var's name gives its current value. `sizes` are computed by the host from the symbols, by what shapes are computed with: a
// kernel and the host cannot disagree about an extent. Index expressions are i64 arithmetic over symbols, loop variables, `thread`, `threads`
// (GPU: block_x, block_y, block_z, thread_x, thread_y) and scalar i64 values and vars in scope. Offsets are in elements from a pointer's base.
// A vector load or store touches offset + lane * stride, or offset + gather[lane]; lanes whose mask is off touch no memory
// (loads give `else`, or 0). No alignment is assumed. Out-of-range accesses are errors of the producer, found by the verifier where it can prove one
// and by the interpreter. `first n` is the mask of lanes l < n (n may be negative or exceed the lanes). `if` takes a guard over scalars, or a scalar
// bool value. Functions of the scalar table apply lane by lane, all operands of one lane count. `error code if c` sets the error word when any lane
// of the bool value c is true.
// A GPU's threads read each other's values by `v: f32 = exchange x xor 16`, `v: f32 = exchange x from 0` and `v: f32 = exchange x below 4`, among the
// 32 of a warp; where no thread is so many numbers below, a thread gets its own.
// A GPU's threads copy from global to shared memory without waiting: `copy_async t[o] = x[p] by 8 first n if c` copies the elements below n of 8, 0
// for the others and where c does not hold; `copy_commit` closes a group of a thread's copies and `copy_wait 2` waits until at most two of its groups
// are under way. A copy takes place at any time until then. Other threads see it behind a barrier after the wait.
// The 32 threads of a warp work on matrices together. `a: bf16x8 = load_matrix t[o]` loads as many matrices of 8 x 8 elements of 16 bits as it
// has pairs of lanes: the offset of thread 8 m + i is where row i of matrix m begins, and thread l gets elements 2 (l % 4) and the next one of
// row l / 4 of each; `transposed`: of column l / 4. `mma c, d lane 2 += a * b half 1` adds the product of a 16 x 16 matrix (a: its quarters in
// the order of columns) and a 16 x 8 one (b: its two halves below each other, transposed, by default the first two lanes' of each; `half 1`:
// lanes 4 to 7) to the sums, of which thread l holds two in lanes 2 and 3 of var c, row l / 4, and two in those of d, row l / 4 + 8, columns 2 (l
// % 4) and the next one. Of bytes, `a: i8x16 = load_matrix t[o]`, a row has 16 elements, of which a thread gets four; `mma` multiplies 16 x 32
// and 32 x 8 bytes, signed or not each, and adds to i32, exactly but for wraps; of f32 a row has 4 elements, rounded to tf32. `a: bf16x8 =
// join_matrix p, q, r, s lane 2` makes such matrices of what threads have: of each f32 value lanes 2 and 3 (of f32x4 lane 2), rounded.
// `multiply_tiles a, b, c, d += x by ... * w by ...` is what a block's threads do together to tiles that come by copies of their own
// (`program_ir/tiles.h`); the vars hold two columns of f32 each, of rows h = 0 and 1 of one g after the other. `multiply_group a, b += x ... * w
// ...` is what groups of 128 threads do with tiles in shared memory (`program_ir/groups.h`); a var holds the sums of lanes / 2 values of g, of
// one h, in the same order. `matrix` statements work on the eight registers of a matrix unit, each 16 rows of 64 bytes: t0 holds 16 x 16 f32 or
// i32, 16 x 32 bf16 or 16 x 64 bytes, which may be words of memory. `matrix t0 = 0`, `matrix t0: i32 = 0`, `matrix t0 = c[p] stride s` and `matrix
// c[p] stride s = t0` (rows s elements apart), and `matrix t0 += t4 * t6`, which adds, for row i and column j, the products of a[i, 2p] with
// b[p, 2j] and of a[i, 2p + 1] with b[p, 2j + 1] for the 16 p, in the unit's order; subnormals may count as 0. `matrix t0 += u8 t4 * i8 t6` adds
// those of the four a[i, 4p + q] with b[p, 4j + q], bytes without or with a sign each, to sums of i32, exactly but for wraps.

struct Type {
  DType dtype = DType::f32;
  int lanes = 1;
  bool operator==(const Type&) const = default;
};

struct Stmt;
using Block = Refs<Stmt>;

/// name: type = fn(operands); also constant (a splat of the literal) and index (value + lane * lane_step).
struct Let {
  std::string name;
  Type type;
  Fn fn = Fn::constant;
  std::vector<std::string> operands;
  Scalar literal;
  Expr index;
  Expr lane_step;
  bool operator==(const Let&) const = default;
};

/// A scalar value in every lane.
struct Splat {
  std::string name;
  Type type;
  std::string operand;
  bool operator==(const Splat&) const = default;
};

/// The mask of lanes below count.
struct FirstLanes {
  std::string name;
  int lanes = 1;
  Expr count;
  bool operator==(const FirstLanes&) const = default;
};

/// All lanes of a vector combined pairwise (lane l with l + n/2, and so on) by a binary function: sum is add.
struct ReduceLanes {
  std::string name;
  DType dtype = DType::f32;
  Fn fn = Fn::add;
  std::string operand;
  bool operator==(const ReduceLanes&) const = default;
};

/// Lane `lane` of a vector as a scalar.
struct Extract {
  std::string name;
  DType dtype = DType::f32;
  std::string operand;
  int lane = 0;
  bool operator==(const Extract&) const = default;
};

/// Lanes chosen from the concatenation of a and b (b may be empty).
struct Shuffle {
  std::string name;
  Type type;
  std::string a;
  std::string b;
  std::vector<int> lanes;
  bool operator==(const Shuffle&) const = default;
};

/// How a thread names another one.
enum class Partner : uint8_t { differs, number, below };

/// A scalar of another thread of the same 32 (consecutive in thread_x, then thread_y): the one whose number differs by `lane` in the exclusive or, is
/// `lane`, or is `lane` lower (its own where there is none). All 32 take part.
struct Exchange {
  std::string name;
  DType dtype = DType::f32;
  std::string operand;
  int lane = 0;
  Partner partner = Partner::differs;
  bool operator==(const Exchange&) const = default;
};

struct Load {
  std::string name;
  Type type;
  std::string buffer;
  Expr offset;
  Expr stride = 1;          ///< between lanes; 1 for scalars
  std::string gather;       ///< name of an integer vector of per-lane offsets; empty: none
  std::string mask;         ///< name of a bool value with as many lanes; empty: all
  std::string passthrough;  ///< value of the lanes that are off; empty: 0
  bool operator==(const Load&) const = default;
};

struct Store {
  std::string buffer;
  Expr offset;
  Expr stride = 1;
  std::string gather;
  std::string value;
  std::string mask;
  Combiner combiner = Combiner::set;  ///< read-modify-write, lane after lane
  bool atomic = false;                ///< other threads may combine into the same place
  bool operator==(const Store&) const = default;
};

struct Var {
  std::string name;
  Type type;
  std::string init;
  bool operator==(const Var&) const = default;
};

struct Assign {
  std::string name;
  std::string value;
  bool operator==(const Assign&) const = default;
};

struct For {
  std::string name;
  Expr lo;
  Expr hi;
  Expr step = 1;
  int unroll = 1;  ///< a hint to codegen
  Block body;
  bool operator==(const For&) const = default;
};

struct If {
  std::vector<Cond> guard;
  std::string condition;  ///< a scalar bool value; used when guard is empty
  Block then;
  Block otherwise;
  bool operator==(const If&) const = default;
};

enum class Space : uint8_t { stack, scratch, shared };

/// An array visible in the rest of the block. scratch arrays lie at `offset` bytes in the scratch memory of the thread, of a GPU's block.
struct Alloc {
  std::string name;
  DType dtype = DType::f32;
  Expr count;
  Space space = Space::stack;
  Expr offset;
  bool operator==(const Alloc&) const = default;
};

struct Prefetch {
  std::string buffer;
  Expr offset;
  int level = 1;
  bool operator==(const Prefetch&) const = default;
};

constexpr int kMatrixRegisters = 8;
constexpr int64_t kMatrixRows = 16;
constexpr int64_t kMatrixRowBytes = 64;

/// One instruction of a matrix unit.
struct Matrix {
  enum class Kind : uint8_t { zero, load, store, multiply };
  Kind kind = Kind::zero;
  int target = 0;      ///< the register written, or stored
  std::string buffer;  ///< load and store: f32 or i32, to load bf16 or bytes, too
  Expr offset;
  Expr stride = 0;  ///< between rows, in elements
  int a = 0;        ///< multiply: registers
  int b = 0;
  DType dtype = DType::f32;     ///< zero: of the sums
  DType a_dtype = DType::bf16;  ///< multiply: as what the rows of both count, bf16, or each u8 or i8
  DType b_dtype = DType::bf16;
  bool operator==(const Matrix&) const = default;
};

/// Elements from global to shared memory, not waited for.
struct CopyAsync {
  std::string buffer;
  Expr offset;
  std::string from;
  Expr from_offset;
  int elements = 8;
  Expr count = 8;           ///< elements that are copied; 0 for the others
  std::vector<Cond> guard;  ///< under which any are
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
  Type type;  ///< 32 bits for each matrix
  std::string buffer;
  Expr offset;
  bool transposed = false;
  bool operator==(const LoadMatrix&) const = default;
};

/// Matrices of 8 x 8 elements of which the threads of a warp hold float32 values: two lanes of each part.
struct JoinMatrix {
  std::string name;
  Type type;  ///< two lanes for each part
  std::vector<std::string> parts;
  int lane = 0;
  bool operator==(const JoinMatrix&) const = default;
};

/// A product of matrices added to the vars of a warp's threads.
struct Mma {
  std::string low;
  std::string high;
  int lane = 0;
  std::string a;
  std::string b;
  int half = 0;
  bool operator==(const Mma&) const = default;
};

/// Products of tiles added to vars.
struct MultiplyTiles {
  std::vector<std::string> sums;
  TileProducts products;
  bool operator==(const MultiplyTiles&) const = default;
};

/// Products of groups of threads added to vars.
struct MultiplyGroup {
  std::vector<std::string> sums;
  GroupProducts products;
  bool operator==(const MultiplyGroup&) const = default;

  /// The var of sums of a half of a group of 8 columns; they are its lanes g % (lanes / 2) * 2 and the next one.
  size_t var_of(int64_t h, int64_t g) const { return static_cast<size_t>(g / (products.lanes / 2) * 2 + h); }
};

struct Barrier {
  bool operator==(const Barrier&) const = default;
};

struct SetError {
  loop_ir::ErrorCode code = loop_ir::ErrorCode::index_out_of_range;
  std::string condition;
  bool operator==(const SetError&) const = default;
};

struct Stmt {
  std::variant<Let, Splat, FirstLanes, ReduceLanes, Extract, Shuffle, Exchange, Load, Store, Var, Assign, For, If, Alloc, Prefetch, Barrier, SetError,
               Matrix, CopyAsync, CopyGroup, LoadMatrix, JoinMatrix, Mma, MultiplyTiles, MultiplyGroup>
      node;
  Location location{};
  bool operator==(const Stmt&) const = default;
};

struct Param {
  std::string name;
  DType dtype = DType::f32;
  loop_ir::ParamKind kind = loop_ir::ParamKind::in;
  Location location{};
  bool operator==(const Param&) const = default;
};

/// A value that the host computes from the symbols of the program.
struct Size {
  std::string name;
  Expr value;
  bool operator==(const Size&) const = default;
};

struct Kernel {
  std::string name;
  std::vector<Param> params;
  std::vector<std::string> symbols;  ///< passed in this order
  std::vector<Size> sizes;           ///< passed after the symbols
  Block body;
  Expr chunks = 1;
  Expr scratch_bytes = 0;   ///< per thread; GPU: per block
  std::vector<Expr> grid;   ///< GPU: blocks in x, y, z; empty on a CPU
  std::vector<Expr> block;  ///< GPU: threads in x, y
  std::vector<std::string> provenance;
  Location location{};
  bool operator==(const Kernel&) const = default;
};

using Module = ModuleOf<Kernel>;

/// What a launch passes: the values of `kernel.symbols`, then those of its sizes. ExecutionError for a size that divides by 0.
std::vector<int64_t> passed_values(const Kernel& kernel, const std::map<std::string, int64_t>& symbols);

std::string print(const Kernel& kernel);
std::string print(const Module& module);
Module parse(const std::string& text, const std::string& file = "<kernel>");
void verify(const Kernel& kernel);
void verify(const Module& module);

}  // namespace deplo::kernel_ir
