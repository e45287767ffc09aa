#include "tensor_ir/rewrite.h"

#include "base/error.h"

namespace deplo::tensor_ir {
namespace {

bool rename(std::string& name, const Renaming& names) {
  auto it = names.find(name);
  if (it == names.end() || it->second == name) return false;
  name = it->second;
  return true;
}

bool rename(std::vector<std::string>& list, const Renaming& names) {
  bool changed = false;
  for (std::string& name : list) changed |= rename(name, names);
  return changed;
}

bool rename(Attribute& attribute, const Renaming& names) {
  if (auto* value = std::get_if<ValueName>(&attribute.value)) return rename(value->name, names);
  bool changed = false;
  if (auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (Attribute& item : *list) changed |= rename(item, names);
  return changed;
}

bool rename(std::vector<Indirect>& list, const Renaming& names) {
  bool changed = false;
  for (Indirect& j : list) changed |= rename(j.tensor, names);
  return changed;
}

bool rename(decltype(Op::node)& node, const Renaming& names) {
  return std::visit(Overloaded{[&](Elementwise& n) { return rename(n.operands, names); }, [&](Reduction& n) { return rename(n.operands, names); },
                               [&](Scan& n) { return rename(n.operands, names); },
                               [&](IndexMap& n) {
                                 bool changed = rename(n.indirects, names);
                                 for (Source& source : n.sources) changed |= rename(source.operand, names);
                                 return changed;
                               },
                               [&](Scatter& n) {
                                 bool changed = rename(n.indirects, names);
                                 changed |= rename(n.base, names);
                                 return rename(n.updates, names) || changed;
                               },
                               [&](Library& n) {
                                 bool changed = false;
                                 for (auto& [name, value] : n.arguments) changed |= rename(value, names);
                                 return changed;
                               }},
                    node);
}

}  // namespace

Ref<Op> rename_operands(const Ref<Op>& op, const Renaming& names) {
  Op copy = *op;
  return rename(copy.node, names) ? std::make_shared<Op>(std::move(copy)) : op;
}

Ref<Op> rename_all(const Ref<Op>& op, const Renaming& names) {
  Op copy = *op;
  bool changed = rename(copy.node, names);
  for (Value& value : copy.results) changed |= rename(value.name, names);
  return changed ? std::make_shared<Op>(std::move(copy)) : op;
}

Graph rewrite(Graph graph, const std::function<Replacement(const Ref<Op>&)>& f) {
  Renaming names;
  std::vector<Ref<Op>> ops;
  for (const auto& op : graph.ops) {
    Replacement made = f(rename_operands(op, names));
    for (auto& replacement : made.ops) ops.push_back(std::move(replacement));
    for (auto& [from, to] : made.names) names[from] = to;
  }
  graph.ops = std::move(ops);
  for (auto& write : graph.writes) rename(write.value, names);
  for (Output& output : graph.outputs) rename(output.value, names);
  return graph;
}

FreshNames::FreshNames(const Graph& graph) {
  for (const Input& input : graph.inputs) taken_[input.name] = true;
  for (const auto& op : graph.ops)
    for (const Value& value : op->results) taken_[value.name] = true;
}

std::string FreshNames::operator()() {
  while (true) {
    std::string name = fmt::format("%v{}", next_++);
    if (taken_.emplace(name, true).second) return name;
  }
}

std::map<std::string, TensorType> types_of(const Graph& graph) {
  std::map<std::string, TensorType> types;
  for (const Input& input : graph.inputs) types[input.name] = input.type;
  for (const auto& op : graph.ops)
    for (const Value& value : op->results) types[value.name] = value.type;
  return types;
}

std::map<std::string, Ref<Op>> definitions_of(const Graph& graph) {
  std::map<std::string, Ref<Op>> definitions;
  for (const auto& op : graph.ops)
    for (const Value& value : op->results) definitions[value.name] = op;
  return definitions;
}

IndexMap rename_axes(const IndexMap& map, const std::vector<std::string>& axes) {
  Substitution values;
  for (size_t d = 0; d < axes.size(); ++d) values[map.axes.at(d)] = Expr::symbol(axes[d]);
  IndexMap renamed = map;
  renamed.axes = axes;
  auto change = [&](std::vector<Expr>& list) {
    for (Expr& e : list) e = substitute(e, values);
  };
  for (Indirect& j : renamed.indirects) change(j.index);
  for (Source& source : renamed.sources) {
    change(source.index);
    for (Cond& cond : source.guard) cond = substitute(cond, values);
  }
  return renamed;
}

}  // namespace deplo::tensor_ir
