#include "tensor_ir/rewrite.h"

#include <algorithm>

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

/// Whether an operand has another name.
bool mentions(const Op& op, const Renaming& names) {
  const std::vector<std::string> operands = operands_of(op);
  return std::any_of(operands.begin(), operands.end(), [&](const std::string& name) { return names.count(name) > 0; });
}

}  // namespace

Ref<Op> rename_operands(const Ref<Op>& op, const Renaming& names) {
  if (names.empty() || !mentions(*op, names)) return op;
  Op copy = *op;
  return rename(copy.node, names) ? std::make_shared<Op>(std::move(copy)) : op;
}

Ref<Op> rename_all(const Ref<Op>& op, const Renaming& names) {
  const bool defines = std::any_of(op->results.begin(), op->results.end(), [&](const Value& value) { return names.count(value.name) > 0; });
  if (!defines && !mentions(*op, names)) return op;
  Op copy = *op;
  bool changed = rename(copy.node, names);
  for (Value& value : copy.results) changed |= rename(value.name, names);
  return changed ? std::make_shared<Op>(std::move(copy)) : op;
}

Editor::Editor(Graph graph) : graph_(std::move(graph)) {
  ops_.reserve(graph_.ops.size());
  definitions_.reserve(graph_.ops.size());
  types_.reserve(graph_.ops.size() + graph_.inputs.size());
  for (const Input& input : graph_.inputs) {
    if (input.kind == torch_ir::InputKind::symbol) continue;
    types_[input.name] = &input.type;
    inputs_.insert(input.name);
  }
  for (const Output& output : graph_.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value.value)) outputs_.insert(value->name);
}

std::string Editor::fresh() {
  if (taken_.empty()) {
    taken_ = inputs_;
    for (const auto& op : graph_.ops)
      for (const Value& value : op->results) taken_.insert(value.name);
  }
  while (true) {
    std::string name = fmt::format("%v{}", next_++);
    if (taken_.insert(name).second) return name;
  }
}

Value Editor::emit(Ref<Op> op) {
  for (const Value& value : op->results) {
    definitions_[value.name] = op.get();
    types_[value.name] = &value.type;
  }
  ops_.push_back(std::move(op));
  return ops_.back()->results.empty() ? Value{} : ops_.back()->results[0];
}

const Op* Editor::definition(const std::string& name) const {
  auto it = definitions_.find(name);
  return it == definitions_.end() ? nullptr : it->second;
}

const Scalar* Editor::literal(const std::string& name) const {
  const Op* op = definition(name);
  const auto* node = op ? std::get_if<Elementwise>(&op->node) : nullptr;
  return node && node->fn == Fn::constant ? &node->literal : nullptr;
}

Value Editor::value(const std::string& name) const { return {name, *types_.at(name)}; }

bool Editor::may_replace(const std::string& from, const std::string& to) const {
  return !outputs_.count(from) || (!inputs_.count(to) && !outputs_.count(to));
}

bool Editor::replace(const std::string& from, const std::string& to) {
  if (!may_replace(from, to)) return false;
  if (outputs_.count(from)) outputs_.insert(to);
  names_[from] = to;
  return true;
}

Graph Editor::run(const std::function<void(Editor&, const Ref<Op>&)>& visit) {
  for (const auto& op : graph_.ops) visit(*this, rename_operands(op, names_));
  graph_.ops = std::move(ops_);
  for (auto& write : graph_.writes) rename(write.value, names_);
  for (Output& output : graph_.outputs) rename(output.value, names_);
  return std::move(graph_);
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
