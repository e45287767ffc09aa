#include <map>
#include <set>

#include "base/error.h"
#include "base/require.h"
#include "expr/check.h"
#include "expr/points.h"
#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {
namespace {

struct Verifier {
  const Graph& graph;
  std::map<std::string, TensorType> types;

  [[noreturn]] void fail(const std::string& where, const std::string& text) const {
    throw InternalError(fmt::format("tensor @{}: {}: {}", graph.name, where, text));
  }

  const TensorType& type(const std::string& where, const std::string& name) const {
    auto it = types.find(name);
    if (it == types.end()) fail(where, "the value " + name + " is not defined here");
    return it->second;
  }

  std::vector<Value> operands(const std::string& where, const std::vector<std::string>& names) const {
    std::vector<Value> values;
    for (const std::string& name : names) values.push_back({name, type(where, name)});
    return values;
  }

  void define(const Value& value) {
    DEPLO_REQUIRE(value.name.size() > 1 && value.name[0] == '%', value.name, "a value's name starts with %");
    DEPLO_REQUIRE(types.emplace(value.name, value.type).second, value.name, "defined twice");
    for (const Expr& extent : value.type.shape) not_negative(value.name, extent, "size");
    bytes_of(value.type.dtype, value.type.shape);
  }

  void not_negative(const std::string& where, Expr e, const std::string& what) const {
    if (e.is_constant() && e.value() >= 0) return;
    expression(where, e, {});
    DEPLO_REQUIRE(decide(less(e, 0), graph.symbols) != std::optional<bool>(true), where, "has the " + what + " " + print(e));
  }

  // `names`: axes and coordinates that e may use besides the graph's symbols.
  void expression(const std::string& where, Expr e, const std::set<std::string>& names) const {
    if (e.is_constant()) return;
    for (const std::string& name : symbols_of(e))
      DEPLO_REQUIRE(names.count(name) || graph.symbols.count(name), where, fmt::format("{} is no axis, coordinate or symbol", name));
    check_divisors(e, graph.symbols);
  }

  void guard(const std::string& where, const std::vector<Cond>& conds, const std::set<std::string>& names) const {
    for (const Cond& cond : conds) expression(where, cond.expr, names);
  }

  // The names of axes and of the coordinates, each of which may use those before it.
  std::set<std::string> coordinates(const std::string& where, const std::vector<std::string>& axes, const std::vector<Indirect>& list) const {
    std::set<std::string> names(axes.begin(), axes.end());
    for (const std::string& axis : axes) DEPLO_REQUIRE(!graph.symbols.count(axis), where, "the axis " + axis + " hides a symbol");
    for (const Indirect& j : list) {
      const TensorType& t = type(where, j.tensor);
      DEPLO_REQUIRE(is_integer(t.dtype), where, fmt::format("{} indexes with {}, which is {}", j.name, j.tensor, to_string(t.dtype)));
      DEPLO_REQUIRE(t.shape.size() == j.index.size(), where,
                    fmt::format("{} has {} dimensions, indexed with {}", j.tensor, t.shape.size(), j.index.size()));
      for (const Expr& e : j.index) expression(where, e, names);
      expression(where, j.extent, {});
      DEPLO_REQUIRE(!graph.symbols.count(j.name), where, "the coordinate " + j.name + " hides a symbol");
      names.insert(j.name);
    }
    return names;
  }

  void in_range(const std::string& where, const Points& points, const std::string& buffer, const std::vector<Expr>& index,
                const std::vector<Expr>& shape, const std::vector<Cond>& guard) const {
    if (auto why = points.escape(buffer, index, shape, guard)) fail(where, *why);
  }

  /// The points of `shape`, and every value of the coordinates at each of them.
  Points points_of(const std::vector<std::string>& axes, const std::vector<Expr>& shape, const std::vector<Indirect>& list) const {
    Points points(graph.symbols);
    for (size_t d = 0; d < axes.size(); ++d) points.add_axis(axes[d], 0, shape[d]);
    for (const Indirect& j : list) points.add_axis(j.name, 0, j.extent);
    return points;
  }

  void indirect_in_range(const std::string& where, const Points& points, const std::vector<Indirect>& list) const {
    for (const Indirect& j : list) in_range(where, points, j.tensor, j.index, type(where, j.tensor).shape, {});
  }

  void same_results(const Op& op, const Ref<Op>& rebuilt) const {
    DEPLO_REQUIRE(op.results == rebuilt->results, op.results[0].name, "the result's type does not follow from the operands: " + print(op));
  }

  void check(const Op& op, const Elementwise& n) const {
    const Value& result = op.results.at(0);
    if (n.fn == Fn::constant) return same_results(op, make_constant(result.name, result.type, n.literal));
    if (n.fn == Fn::index) {
      same_results(op, make_index(result.name, result.type, n.axes, n.index));
      return expression(result.name, n.index, coordinates(result.name, n.axes, {}));
    }
    same_results(op, make_elementwise(result.name, n.fn, result.type.dtype, operands(result.name, n.operands)));
  }

  std::vector<std::string> result_names(const Op& op) const {
    std::vector<std::string> names;
    for (const Value& v : op.results) names.push_back(v.name);
    return names;
  }

  void check(const Op& op, const Reduction& n) const {
    same_results(op, make_reduction(result_names(op), n.combiner, operands(op.results[0].name, n.operands), n.axes));
  }

  void check(const Op& op, const Scan& n) const {
    same_results(op, make_scan(result_names(op), n.combiner, operands(op.results[0].name, n.operands), n.axis));
  }

  void check(const Op& op, const IndexMap& n) const {
    const Value& result = op.results.at(0);
    make_map(result, n);
    auto names = coordinates(result.name, n.axes, n.indirects);
    Points points = points_of(n.axes, result.type.shape, n.indirects);
    indirect_in_range(result.name, points_of(n.axes, result.type.shape, {}), n.indirects);
    for (const Source& source : n.sources) {
      const TensorType& t = type(result.name, source.operand);
      DEPLO_REQUIRE(t.dtype == result.type.dtype, result.name,
                    fmt::format("{} is {}, the map is {}", source.operand, to_string(t.dtype), to_string(result.type.dtype)));
      DEPLO_REQUIRE(t.shape.size() == source.index.size(), result.name,
                    fmt::format("{} has {} dimensions, indexed with {}", source.operand, t.shape.size(), source.index.size()));
      for (const Expr& e : source.index) expression(result.name, e, names);
      guard(result.name, source.guard, names);
      in_range(result.name, points, source.operand, source.index, t.shape, source.guard);
      points.add_failed(source.guard);
    }
  }

  void check(const Op& op, const Scatter& n) const {
    const Value& result = op.results.at(0);
    make_scatter(result, n);
    const TensorType& base = type(result.name, n.base);
    const TensorType& updates = type(result.name, n.updates);
    DEPLO_REQUIRE(base == result.type, result.name, "a scatter has the type of its base");
    DEPLO_REQUIRE(updates.dtype == base.dtype, result.name,
                  fmt::format("updates are {}, the base is {}", to_string(updates.dtype), to_string(base.dtype)));
    DEPLO_REQUIRE(updates.shape.size() == n.axes.size(), result.name, "one axis per dimension of the updates");
    auto names = coordinates(result.name, n.axes, n.indirects);
    for (const Expr& e : n.index) expression(result.name, e, names);
    guard(result.name, n.guard, names);
    indirect_in_range(result.name, points_of(n.axes, updates.shape, {}), n.indirects);
    in_range(result.name, points_of(n.axes, updates.shape, n.indirects), n.base, n.index, base.shape, n.guard);
  }

  void check(const Op& op, const Library& n) const {
    make_library(op.results, n);
    const std::vector<std::string> names = operands_of(op);
    for (const std::string& name : names) type("library " + n.op, name);
    DEPLO_REQUIRE(n.operands.empty() || n.operands.size() == names.size(), "library " + n.op,
                  fmt::format("layouts of {} operands, not {}", n.operands.size(), names.size()));
    for (size_t k = 0; k < n.operands.size(); ++k) {
      if (!n.operands[k]) continue;
      DEPLO_REQUIRE(n.operands[k]->size() == type("library " + n.op, names[k]).shape.size(), "library " + n.op,
                    "one stride per dimension of " + names[k]);
      for (const Expr& e : *n.operands[k]) not_negative("library " + n.op, e, "stride");
    }
    for (const auto& list : n.strides)
      for (const Expr& e : list) not_negative("library " + n.op, e, "stride");
  }

  void run() {
    for (const Input& input : graph.inputs) located(input.location, [&] { check_input(input); });
    for (const SizeCheck& check : graph.checks) deplo::verify(check, graph.symbols);
    for (const auto& op : graph.ops) located(op->location, [&] { check_op(*op); });
    for (const auto& write : graph.writes) located(write.location, [&] { check_write(write); });
    for (const Output& output : graph.outputs) located(graph.return_location, [&] { check_output(output); });
  }

  void check_input(const Input& input) {
    if (input.kind == torch_ir::InputKind::symbol) {
      DEPLO_REQUIRE(graph.symbols.count(input.name), input.name, "the symbol has no range");
      return;
    }
    define({input.name, input.type});
    DEPLO_REQUIRE(input.strides.size() == input.type.shape.size(), input.name,
                  fmt::format("has {} dimensions but {} strides", input.type.shape.size(), input.strides.size()));
    for (const Expr& stride : input.strides) not_negative(input.name, stride, "stride");
    bytes_of(input.type.dtype, input.type.shape, input.strides);
  }

  void check_op(const Op& op) {
    DEPLO_REQUIRE(!op.results.empty() || std::holds_alternative<Library>(op.node), "op", "no result");
    std::visit([&](const auto& node) { check(op, node); }, op.node);
    for (const Value& value : op.results) define(value);
  }

  void check_write(const torch_ir::Write& write) const {
    bool known = false;
    for (const Input& input : graph.inputs) known = known || (input.name == write.input && input.kind != torch_ir::InputKind::symbol);
    DEPLO_REQUIRE(known, write.input, "written, but no tensor input");
    const TensorType& value = type("write", write.value);
    const TensorType& input = type("write", write.input);
    bool same = value.dtype == input.dtype && value.shape.size() == input.shape.size();
    for (size_t d = 0; same && d < value.shape.size(); ++d)
      same = decide(equal(value.shape[d], input.shape[d]), graph.symbols) != std::optional<bool>(false);
    DEPLO_REQUIRE(same, write.input, "written with another type by " + write.value);
  }

  void check_output(const Output& output) const {
    if (const auto* value = std::get_if<ValueName>(&output.value.value))
      DEPLO_REQUIRE(type("return", value->name).shape.size() == output.strides.size(), value->name, "one stride per dimension of an output");
    for (const Expr& stride : output.strides) not_negative("return", stride, "stride");
    if (const auto* e = std::get_if<Expr>(&output.value.value)) expression("return", *e, {});
  }
};

}  // namespace

void verify(const Graph& graph) { Verifier{graph, {}}.run(); }

}  // namespace deplo::tensor_ir
