#include "base/error.h"
#include "base/text.h"
#include "torch_ir/ir.h"

namespace deplo::torch_ir {
namespace {

std::string print_list(const std::vector<Expr>& items) {
  std::string text = "[";
  for (const Expr& item : items) text += (text.size() > 1 ? ", " : "") + print(item);
  return text + "]";
}

std::string print_input(const Input& input) {
  if (input.kind == InputKind::symbol) return input.name + ": sym";
  return fmt::format("{}: {} {}{}", input.name, print(input.type), to_string(input.kind), input.is_static ? " static" : "");
}

std::string print_where(const Graph& graph) {
  std::string text;
  for (const auto& [name, range] : graph.symbols) {
    text += text.empty() ? " where " : ", ";
    text += name + " in " + (range.lo ? print(*range.lo) : "") + ".." + (range.hi ? print(*range.hi) : "");
  }
  for (const Cond& fact : graph.facts) text += (text.empty() ? " where " : ", ") + print(fact);
  return text;
}

}  // namespace

std::vector<Expr> default_strides(const std::vector<Expr>& shape) {
  std::vector<Expr> strides(shape.size(), Expr(1));
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = shape[i].is(0) ? strides[i] : strides[i] * shape[i];
  return strides;
}

std::string_view to_string(InputKind kind) {
  switch (kind) {
    case InputKind::user: return "user";
    case InputKind::parameter: return "parameter";
    case InputKind::buffer: return "buffer";
    case InputKind::constant: return "constant";
    case InputKind::symbol: return "sym";
  }
  return "";
}

std::string print(const TensorType& type) {
  std::string text = std::string(to_string(type.dtype)) + print_list(type.shape);
  return type.strides == default_strides(type.shape) ? text : text + " strides " + print_list(type.strides);
}

std::string print(const Node& node) {
  std::vector<std::string> results;
  std::vector<std::string> arguments;
  for (const Result& result : node.results) results.push_back(result.name + ": " + (result.type ? print(*result.type) : "none"));
  for (const auto& [name, value] : node.arguments) arguments.push_back(name + "=" + print(value));
  std::string text = joined(results) + (results.empty() ? "" : " = ") + node.op + "(" + joined(arguments) + ")";
  if (!node.source.empty()) text += " at " + quote(node.source);
  if (!node.module.empty()) text += " in " + quote(node.module);
  return text;
}

std::string print(const Graph& graph) {
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  for (const Input& input : graph.inputs) inputs.push_back(print_input(input));
  for (const Attribute& output : graph.outputs) outputs.push_back(print(output));
  std::string text = "torch @" + graph.name + "(" + joined(inputs) + ")" + print_where(graph) + "\n";
  for (const SizeCheck& check : graph.checks) text += "  " + print(check) + "\n";
  for (const auto& node : graph.nodes) text += "  " + print(*node) + "\n";
  for (const Write& write : graph.writes) text += "  write " + write.value + " to " + write.input + "\n";
  return text + "  return" + (outputs.empty() ? "" : " ") + joined(outputs) + "\n";
}

}  // namespace deplo::torch_ir
