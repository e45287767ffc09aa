#include <algorithm>
#include <set>

#include "base/error.h"
#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {
namespace {

std::string print_shape(const std::vector<Expr>& shape) {
  std::string text = "[";
  for (const Expr& extent : shape) text += (text.size() > 1 ? ", " : "") + print(extent);
  return text + "]";
}

Ref<Op> finish(std::vector<Value> results, decltype(Op::node) node, std::string provenance) {
  return std::make_shared<Op>(Op{std::move(results), std::move(node), std::move(provenance)});
}

void check_same_shape(std::string_view what, const std::vector<Value>& operands) {
  DEPLO_ASSERT(!operands.empty(), "{} has no operands", what);
  for (const Value& v : operands)
    DEPLO_ASSERT(v.type.shape == operands[0].type.shape, "[{}] operand {} has shape {}, {} has {}", what, operands[0].name,
                 print_shape(operands[0].type.shape), v.name, print_shape(v.type.shape));
}

std::vector<std::string> names_of(const std::vector<Value>& values) {
  std::vector<std::string> names;
  for (const Value& v : values) names.push_back(v.name);
  return names;
}

// dtypes of a combiner's results: those of the operands, but welford and online_softmax give two of their one operand.
std::vector<Value> combined(std::vector<std::string> names, Combiner combiner, const std::vector<Value>& operands, const std::vector<Expr>& shape) {
  auto count = static_cast<size_t>(result_count(combiner));
  const bool partial = combiner == Combiner::online_softmax && operands.size() == 2;
  DEPLO_ASSERT(partial || operands.size() == static_cast<size_t>(operand_count(combiner)), "{} takes {} operands, not {}", to_string(combiner),
               operand_count(combiner), operands.size());
  DEPLO_ASSERT(names.size() == count, "{} gives {} results, not {}", to_string(combiner), count, names.size());
  std::vector<Value> results;
  for (size_t k = 0; k < count; ++k) {
    DType dtype = k < operands.size() ? operands[k].type.dtype : operands[0].type.dtype;
    results.push_back({std::move(names[k]), {dtype, shape}});
  }
  return results;
}

void check_combiner(Combiner combiner, const std::vector<Value>& operands) {
  DType dtype = operands.at(0).type.dtype;
  bool arithmetic = combiner == Combiner::sum || combiner == Combiner::prod;
  bool floating = combiner == Combiner::welford || combiner == Combiner::online_softmax;
  DEPLO_ASSERT(combiner != Combiner::set, "set is a combiner of scatter only");
  DEPLO_ASSERT(!arithmetic || dtype != DType::boolean, "{} does not take bool", to_string(combiner));
  DEPLO_ASSERT(!floating || is_float(dtype), "{} does not take {}", to_string(combiner), to_string(dtype));
  DEPLO_ASSERT(operands.size() == 1 || combiner != Combiner::online_softmax || operands[1].type.dtype == dtype,
               "both operands of online_softmax must be of one dtype");
  DEPLO_ASSERT(operand_count(combiner) < 2 || operands.at(1).type.dtype == DType::i64, "the second operand of {} must be i64", to_string(combiner));
}

void check_axes(const std::vector<std::string>& axes, const std::vector<Indirect>& indirects, size_t rank, std::string_view what) {
  DEPLO_ASSERT(axes.size() == rank, "{} names {} axes for {} dimensions", what, axes.size(), rank);
  std::set<std::string> names;
  for (const std::string& axis : axes) DEPLO_ASSERT(names.insert(axis).second, "{} names the axis {} twice", what, axis);
  for (const Indirect& j : indirects) DEPLO_ASSERT(names.insert(j.name).second, "{} names the coordinate {} twice", what, j.name);
}

}  // namespace

Ref<Op> make_elementwise(std::string result, Fn fn, DType dtype, const std::vector<Value>& operands, std::string provenance) {
  check_same_shape(to_string(fn), operands);
  std::vector<DType> dtypes;
  for (const Value& v : operands) dtypes.push_back(v.type.dtype);
  std::string complaint = type_error(fn, dtype, dtypes.data(), static_cast<int>(dtypes.size()));
  DEPLO_ASSERT(complaint.empty(), "{}: {}", result, complaint);
  Elementwise node;
  node.fn = fn;
  node.operands = names_of(operands);
  return finish({{std::move(result), {dtype, operands[0].type.shape}}}, std::move(node), std::move(provenance));
}

Ref<Op> make_constant(std::string result, TensorType type, Scalar literal, std::string provenance) {
  Elementwise node;
  node.fn = Fn::constant;
  DEPLO_ASSERT(literal.dtype == type.dtype, "{}: a {} literal for a {} constant", result, to_string(literal.dtype), to_string(type.dtype));
  node.literal = literal;
  return finish({{std::move(result), std::move(type)}}, std::move(node), std::move(provenance));
}

Ref<Op> make_index(std::string result, TensorType type, std::vector<std::string> axes, Expr index, std::string provenance) {
  check_axes(axes, {}, type.shape.size(), "index");
  std::string complaint = type_error(Fn::index, type.dtype, nullptr, 0);
  DEPLO_ASSERT(complaint.empty(), "{}: {}", result, complaint);
  Elementwise node;
  node.fn = Fn::index;
  node.axes = std::move(axes);
  node.index = index;
  return finish({{std::move(result), std::move(type)}}, std::move(node), std::move(provenance));
}

Ref<Op> make_reduction(std::vector<std::string> results, Combiner combiner, const std::vector<Value>& operands, std::vector<int> axes,
                       std::string provenance) {
  check_same_shape(to_string(combiner), operands);
  check_combiner(combiner, operands);
  const std::vector<Expr>& shape = operands[0].type.shape;
  std::sort(axes.begin(), axes.end());
  DEPLO_ASSERT(std::adjacent_find(axes.begin(), axes.end()) == axes.end(), "reduce {} names an axis twice", to_string(combiner));
  std::vector<Expr> kept;
  for (size_t d = 0; d < shape.size(); ++d)
    if (!std::binary_search(axes.begin(), axes.end(), static_cast<int>(d))) kept.push_back(shape[d]);
  DEPLO_ASSERT(kept.size() + axes.size() == shape.size(), "reduce {} has an axis outside shape {}", to_string(combiner), print_shape(shape));
  Reduction node{combiner, names_of(operands), std::move(axes)};
  return finish(combined(std::move(results), combiner, operands, kept), std::move(node), std::move(provenance));
}

Ref<Op> make_scan(std::vector<std::string> results, Combiner combiner, const std::vector<Value>& operands, int axis, std::string provenance) {
  check_same_shape(to_string(combiner), operands);
  check_combiner(combiner, operands);
  const std::vector<Expr>& shape = operands[0].type.shape;
  DEPLO_ASSERT(axis >= 0 && static_cast<size_t>(axis) < shape.size(), "scan axis {} is outside shape {}", axis, print_shape(shape));
  Scan node{combiner, names_of(operands), axis};
  return finish(combined(std::move(results), combiner, operands, shape), std::move(node), std::move(provenance));
}

Ref<Op> make_map(Value result, IndexMap map, std::string provenance) {
  check_axes(map.axes, map.indirects, result.type.shape.size(), "map");
  // What cannot be reached is not kept, so that equal maps have one form.
  auto last = std::find_if(map.sources.begin(), map.sources.end(), [](const Source& s) { return s.guard.empty(); });
  if (last != map.sources.end()) {
    map.sources.erase(last + 1, map.sources.end());
    map.fill = {result.type.dtype, 0, 0};
  }
  DEPLO_ASSERT(map.fill.dtype == result.type.dtype, "{}: a {} fill for a {} map", result.name, to_string(map.fill.dtype),
               to_string(result.type.dtype));
  return finish({std::move(result)}, std::move(map), std::move(provenance));
}

Ref<Op> make_scatter(Value result, Scatter scatter, std::string provenance) {
  DEPLO_ASSERT(operand_count(scatter.combiner) == 1 && result_count(scatter.combiner) == 1, "{} does not combine in a scatter",
               to_string(scatter.combiner));
  DEPLO_ASSERT(scatter.index.size() == result.type.shape.size(), "scatter indexes {} of {} dimensions", scatter.index.size(),
               result.type.shape.size());
  check_axes(scatter.axes, scatter.indirects, scatter.axes.size(), "scatter");
  return finish({std::move(result)}, std::move(scatter), std::move(provenance));
}

Ref<Op> make_library(std::vector<Value> results, Library library, std::string provenance) {
  DEPLO_ASSERT(library.strides.size() == results.size(), "library {}: strides of {} results, not {}", library.op, library.strides.size(),
               results.size());
  for (size_t k = 0; k < results.size(); ++k)
    DEPLO_ASSERT(library.strides[k].size() == results[k].type.shape.size(), "library {}: {} strides for {} dimensions of result {}", library.op,
                 library.strides[k].size(), results[k].type.shape.size(), k);
  return finish(std::move(results), std::move(library), std::move(provenance));
}

namespace {

void collect_values(const Attribute& attribute, std::vector<std::string>& names) {
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) names.push_back(value->name);
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) collect_values(item, names);
}

}  // namespace

std::vector<std::string> operands_of(const Op& op) {
  std::vector<std::string> names;
  std::visit(Overloaded{[&](const Elementwise& n) { names = n.operands; }, [&](const Reduction& n) { names = n.operands; },
                        [&](const Scan& n) { names = n.operands; },
                        [&](const IndexMap& n) {
                          for (const Indirect& j : n.indirects) names.push_back(j.tensor);
                          for (const Source& s : n.sources) names.push_back(s.operand);
                        },
                        [&](const Scatter& n) {
                          names = {n.base, n.updates};
                          for (const Indirect& j : n.indirects) names.push_back(j.tensor);
                        },
                        [&](const Library& n) {
                          for (const auto& [name, value] : n.arguments) collect_values(value, names);
                        }},
             op.node);
  return names;
}

}  // namespace deplo::tensor_ir
