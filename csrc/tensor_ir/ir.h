#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/location.h"
#include "base/ref.h"
#include "expr/expr.h"
#include "scalar/functions.h"
#include "torch_ir/ir.h"

namespace deplo::tensor_ir {

// Tensor IR: what is computed, in three primitives and library calls; no loops, no memory.
//
// Semantics: a graph is functional; each value is defined once, before its uses. dtypes are explicit: no op converts
// unless it is `cast`. Shapes broadcast only through `map`.
//   elementwise  %d: f32[s0, 8] = sub(%x, %b)                 operands have the result's shape
//                %c: f32[4] = constant 1.5                    every element
//                %n: i64[4, 8] = index (i0, i1) -> i0*8 + i1  an expression over the coordinates
//   reduction    %m: f32[s0] = reduce max(%x) axes=[1]        the axes vanish; over no element: the identity
//                %v: f32[4], %k: i64[4] = reduce argmax(%x, %n) axes=[1]
//   scan         %s: f32[4, 8] = scan sum(%x) axis=1          inclusive, in increasing order
//   indexmap     %y: f32[4, 8] = map (i0, i1) -> %a[i0, i1 - 2] if i1 - 2 >= 0 else 0.0
//                %y: f32[4, 8] = map (i0, i1) with j = %idx[i0] in 0..100 -> %w[j, i1]
//     Sources separated by `|` are tried in order: the first whose guard holds gives the element, else the fill. Only
//     the chosen source is read. An index is in range wherever its guard holds. An indirect coordinate j is the value of
//     an integer tensor; a negative value counts from the end (wraps once by the extent); outside 0..extent it raises
//     IndexError. `with j = %idx[i0] unchecked` promises the range 0..extent instead; `asserted` raises RuntimeError, for
//     negative values too.
//   scatter      %y: f32[9, 8] = scatter sum(%base, %u) (i0, i1) with j = %idx[i0] in 0..9 -> [j, i1]
//     starts from %base; then, for every element of %u in row-major order, combines it into the given place (if its guard holds).
//   library      %y: f32[4], %k: i64[4] = library aten.sort.stable(self=%x, dim=0) strides [1], [1] reason "sort"
//     an ATen call as in Torch IR; the strides are those that ATen gives the results. `operands [1, 4], any` before them says how operands must lie
//     in memory, in the order of the arguments, where that decides the results (random numbers fill memory in order).
// `check s0 - s1 != 0 else "integer division or modulo by zero"` lines come before the ops: the call fails where one does not hold.
// Provenance: each op may carry `from "name of the torch node"`, which kernels show to people.

struct TensorType {
  DType dtype = DType::f32;
  std::vector<Expr> shape;
  bool operator==(const TensorType&) const = default;
};

struct Value {
  std::string name;  ///< with its %
  TensorType type;
  bool operator==(const Value&) const = default;
};

/// fn over the operands, point by point. `cast` and `bitcast` convert to the result's dtype.
struct Elementwise {
  Fn fn = Fn::constant;
  std::vector<std::string> operands;
  Scalar literal;                 ///< of constant
  std::vector<std::string> axes;  ///< coordinate names of index
  Expr index;                     ///< of index
  bool operator==(const Elementwise&) const = default;
};

struct Reduction {
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;
  std::vector<int> axes;  ///< sorted
  bool operator==(const Reduction&) const = default;
};

struct Scan {
  Combiner combiner = Combiner::sum;
  std::vector<std::string> operands;
  int axis = 0;
  bool operator==(const Scan&) const = default;
};

/// name = the value of integer tensor `tensor` at `index`, used as a coordinate in [0, extent).
struct Indirect {
  std::string name;
  std::string tensor;
  std::vector<Expr> index;  ///< over the map's axes
  Expr extent;
  bool checked = true;
  bool asserts = false;  ///< a value outside, negative ones too, is a failed assertion rather than a bad index
  bool operator==(const Indirect&) const = default;
};

struct Source {
  std::string operand;
  std::vector<Expr> index;  ///< over the map's axes, indirect names and symbols
  std::vector<Cond> guard;  ///< empty: always
  bool operator==(const Source&) const = default;
};

struct IndexMap {
  std::vector<std::string> axes;  ///< one name per result dimension
  std::vector<Indirect> indirects;
  std::vector<Source> sources;
  Scalar fill;  ///< where no guard holds
  bool operator==(const IndexMap&) const = default;
};

struct Scatter {
  Combiner combiner = Combiner::set;
  std::string base;
  std::string updates;
  std::vector<std::string> axes;  ///< one name per dimension of updates
  std::vector<Indirect> indirects;
  std::vector<Expr> index;  ///< one per dimension of base
  std::vector<Cond> guard;
  bool operator==(const Scatter&) const = default;
};

struct Library {
  std::string op;
  std::vector<std::pair<std::string, Attribute>> arguments;
  std::string reason;
  /// Strides that ATen gives each result, as Torch IR recorded them.
  std::vector<std::vector<Expr>> strides;
  /// For each of operands_of(op) the strides that ATen must see, or nothing where it may lie as it does. Empty if none has any.
  std::vector<std::optional<std::vector<Expr>>> operands;
  bool operator==(const Library&) const = default;
};

struct Op {
  std::vector<Value> results;
  std::variant<Elementwise, Reduction, Scan, IndexMap, Scatter, Library> node;
  std::string provenance;
  Location location{};
  bool operator==(const Op&) const = default;
};

struct Input {
  std::string name;
  TensorType type;
  std::vector<Expr> strides;
  torch_ir::InputKind kind = torch_ir::InputKind::user;
  bool is_static = false;
  Location location{};
  bool operator==(const Input&) const = default;
};

/// What the caller gets: a tensor laid out with the given strides, an integer, or None.
struct Output {
  Attribute value;  ///< ValueName, Expr or None
  std::vector<Expr> strides;
  bool operator==(const Output&) const = default;
};

struct Graph {
  std::string name;
  std::vector<Input> inputs;
  Ranges symbols;
  std::vector<SizeCheck> checks;  ///< run before the ops
  Refs<Op> ops;
  std::vector<torch_ir::Write> writes;
  std::vector<Output> outputs;
  Location return_location{};
  bool operator==(const Graph&) const = default;
};

// Builders: each checks operand shapes and dtypes (InternalError) and returns the op. `result` is the new value's name.
Ref<Op> make_elementwise(std::string result, Fn fn, DType dtype, const std::vector<Value>& operands, std::string provenance = "");
Ref<Op> make_constant(std::string result, TensorType type, Scalar literal, std::string provenance = "");
Ref<Op> make_index(std::string result, TensorType type, std::vector<std::string> axes, Expr index, std::string provenance = "");
Ref<Op> make_reduction(std::vector<std::string> results, Combiner combiner, const std::vector<Value>& operands, std::vector<int> axes,
                       std::string provenance = "");
Ref<Op> make_scan(std::vector<std::string> results, Combiner combiner, const std::vector<Value>& operands, int axis, std::string provenance = "");
Ref<Op> make_map(Value result, IndexMap map, std::string provenance = "");
Ref<Op> make_scatter(Value result, Scatter scatter, std::string provenance = "");
Ref<Op> make_library(std::vector<Value> results, Library library, std::string provenance = "");

/// Names of the tensors that an op reads, in order, with repeats.
std::vector<std::string> operands_of(const Op& op);

std::string print(const Graph& graph);
std::string print(const Op& op);
Graph parse(const std::string& text, const std::string& file = "<tensor>");
void verify(const Graph& graph);

}  // namespace deplo::tensor_ir
