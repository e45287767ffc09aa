#pragma once

#include <string>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/location.h"
#include "base/ref.h"
#include "expr/expr.h"
#include "program_ir/module.h"
#include "scalar/functions.h"

namespace deplo::loop_ir {

// Loop IR: affine loop nests over buffers with SSA bodies. Which computations share a nest is decided here.
//
//   loop @k0_softmax(x: f32[s0, 2048], out y: f32[s0, 2048]) where s0 in 2.. from "softmax"
//     for i in s0:
//       reduce m: f32 = max(a) over j in 2048:
//         a = load x[i, j]
//       reduce s: f32 = sum(e) over j in 2048:
//         a = load x[i, j]
//         d = sub(a, m)
//         e = exp(d)
//       for j in 2048:
//         ...
//         store y[i, j] = r
//
// Semantics. `for` runs its body once per index in [0, extent), in any order: iterations are independent but for
// combining stores. `reduce` evaluates its body at every point of its axes and combines the operands in an
// implementation-chosen association; its results are defined after it. `scan` does so in increasing order along one axis and
// runs its `then:` block after each update, where the results are the running values (inclusive). Names are SSA: a name is defined once per kernel
// scope and visible to later statements of its block and of nested blocks; a nested block may not redefine a visible name.
// Index expressions may use axes in scope, symbols, and i64 values in scope (`k = load idx[i]`, then `load w[k, j]`).
// `load b[..] if guard else c` reads only where the guard holds. `store b[..] = v if guard` likewise. An index is in range wherever the guard holds.
// `store sum b[..] = v` combines with what is there; iterations of a `for` may collide in it, in which case that loop is a
// sequential one. `local` declares a buffer private to each iteration of the enclosing loops, of undefined contents.
// `check k >= 0 else index_out_of_range` sets the kernel's error word if its condition is false, and goes on; guards keep later accesses in range.
// Buffers never overlap. Loads of a buffer that the kernel writes see the writes of earlier statements of the same iteration
// of the shared loops, never of other iterations.
// Low-precision floats are loaded as stored: bodies compute in compute_type(dtype) through explicit casts.

struct Stmt;
using Block = Refs<Stmt>;

/// name = fn(operands): dtype.  Text: `e = exp(d)`, `c: f32 = constant 1.5`, `n: i64 = index i*8 + j`, `h: bf16 = cast(e)`.
struct Let {
  std::string name;
  DType dtype = DType::f32;
  Fn fn = Fn::constant;
  std::vector<std::string> operands;
  Scalar literal;  ///< of constant
  Expr index;      ///< of index
  bool operator==(const Let&) const = default;
};

struct Load {
  std::string name;
  DType dtype = DType::f32;  ///< the buffer's
  std::string buffer;
  std::vector<Expr> index;
  std::vector<Cond> guard;  ///< empty: always
  Scalar fill;              ///< where the guard does not hold; nothing without one
  bool operator==(const Load& other) const {
    return name == other.name && dtype == other.dtype && buffer == other.buffer && index == other.index && guard == other.guard &&
           (guard.empty() || fill == other.fill);
  }
};

struct Store {
  std::string buffer;
  std::vector<Expr> index;
  std::string value;
  std::vector<Cond> guard;
  Combiner combiner = Combiner::set;  ///< set: plain store
  bool atomic = false;                ///< in Tile IR: other threads may combine into the same place
  bool operator==(const Store&) const = default;
};

/// Whether devices combine so in memory, whoever else does at the same time.
inline bool combines_atomically(Combiner combiner, DType dtype) {
  return combiner == Combiner::sum && (dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i32 || dtype == DType::i64);
}

struct For {
  std::string axis;
  Expr extent;
  Block body;
  bool operator==(const For&) const = default;
};

struct Axis {
  std::string name;
  Expr extent;
  bool operator==(const Axis&) const = default;
};

struct Reduce {
  std::vector<std::string> results;
  std::vector<DType> dtypes;  ///< of the results
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;  ///< defined in body
  std::vector<Axis> axes;
  Block body;
  bool operator==(const Reduce&) const = default;
};

struct Scan {
  std::vector<std::string> results;
  std::vector<DType> dtypes;
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;
  Axis axis;
  Block body;
  Block then;  ///< sees the body's names and the running results
  bool operator==(const Scan&) const = default;
};

struct Local {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Expr> shape;  ///< row-major
  bool operator==(const Local&) const = default;
};

/// Error codes of a kernel's error word; the Program turns them into eager's exceptions.
enum class ErrorCode : int32_t { none = 0, index_out_of_range = 1, division_by_zero = 2, assertion = 3 };

struct Check {
  Cond cond;
  ErrorCode code = ErrorCode::index_out_of_range;
  bool operator==(const Check&) const = default;
};

struct Stmt {
  std::variant<Let, Load, Store, For, Reduce, Scan, Local, Check> node;
  Location location{};
  bool operator==(const Stmt&) const = default;
};

enum class ParamKind : uint8_t { in, out, inout };

struct Param {
  std::string name;
  ParamKind kind = ParamKind::in;
  DType dtype = DType::f32;
  std::vector<Expr> shape;
  std::vector<Expr> strides;
  bool is_static = false;
  Location location{};
  bool operator==(const Param&) const = default;
};

struct Kernel {
  std::string name;
  std::vector<Param> params;
  Ranges symbols;
  Block body;
  std::vector<std::string> provenance;  ///< names of the torch nodes it implements
  const Param* find_param(const std::string& param) const;
  Location location{};
  bool operator==(const Kernel&) const = default;
};

using Module = ModuleOf<Kernel>;

std::string print(const Kernel& kernel);
std::string print(const Module& module);
Module parse(const std::string& text, const std::string& file = "<loop>");
void verify(const Kernel& kernel);
void verify(const Module& module);

}  // namespace deplo::loop_ir
