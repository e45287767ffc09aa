#include "base/error.h"
#include "base/text.h"
#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {
namespace {

std::string print_list(const std::vector<Expr>& items) {
  std::string text = "[";
  for (const Expr& item : items) text += (text.size() > 1 ? ", " : "") + print(item);
  return text + "]";
}

std::string print_type(const TensorType& type) { return std::string(to_string(type.dtype)) + print_list(type.shape); }

std::string print_literal(const Scalar& value) {
  if (is_float(value.dtype)) return print_float(value.f);
  if (value.dtype == DType::boolean) return value.i ? "true" : "false";
  return std::to_string(value.i);
}

std::string print_guard(const std::vector<Cond>& guard) { return guard.empty() ? "" : " if " + print(guard); }

std::string print_indirects(const std::vector<Indirect>& indirects) {
  std::string text;
  for (const Indirect& j : indirects)
    text += fmt::format("{} {} = {}{} in 0..{}{}", text.empty() ? " with" : ",", j.name, j.tensor, print_list(j.index), print(j.extent),
                        j.asserts   ? " asserted"
                        : j.checked ? ""
                                    : " unchecked");
  return text;
}

std::string print_map(const IndexMap& map) {
  std::string text = fmt::format("map ({}){} ->", joined(map.axes), print_indirects(map.indirects));
  bool first = true;
  for (const Source& source : map.sources) {
    text += fmt::format("{} {}{}{}", first ? "" : " |", source.operand, print_list(source.index), print_guard(source.guard));
    first = false;
  }
  bool total = !map.sources.empty() && map.sources.back().guard.empty();
  return total ? text : text + " else " + print_literal(map.fill);
}

std::string print_axes(const std::vector<int>& axes) {
  std::vector<std::string> parts;
  for (int axis : axes) parts.push_back(std::to_string(axis));
  return "[" + joined(parts) + "]";
}

std::string print_elementwise(const Elementwise& node) {
  if (node.fn == Fn::constant) return "constant " + print_literal(node.literal);
  if (node.fn == Fn::index) return fmt::format("index ({}) -> {}", joined(node.axes), print(node.index));
  return fmt::format("{}({})", to_string(node.fn), joined(node.operands));
}

std::string print_library(const Library& node) {
  std::vector<std::string> arguments;
  std::vector<std::string> strides;
  for (const auto& [name, value] : node.arguments) arguments.push_back(name + "=" + print(value));
  for (const auto& list : node.strides) strides.push_back(print_list(list));
  std::string layout = strides.empty() ? "" : " strides " + joined(strides);
  std::vector<std::string> operands;
  for (const auto& list : node.operands) operands.push_back(list ? print_list(*list) : "any");
  if (!operands.empty()) layout = " operands " + joined(operands) + layout;
  return fmt::format("library {}({}){} reason {}", node.op, joined(arguments), layout, quote(node.reason));
}

std::string print_input(const Input& input) {
  if (input.kind == torch_ir::InputKind::symbol) return input.name + ": sym";
  std::string layout = input.strides == torch_ir::default_strides(input.type.shape) ? "" : " strides " + print_list(input.strides);
  return fmt::format("{}: {}{} {}{}", input.name, print_type(input.type), layout, torch_ir::to_string(input.kind), input.is_static ? " static" : "");
}

std::string print_ranges(const Ranges& symbols) {
  std::string text;
  for (const auto& [name, range] : symbols) {
    text += text.empty() ? " where " : ", ";
    text += name + " in " + (range.lo ? print(*range.lo) : "") + ".." + (range.hi ? print(*range.hi) : "");
  }
  return text;
}

std::string print_output(const Output& output) {
  std::string text = print(output.value);
  return std::holds_alternative<ValueName>(output.value.value) ? text + " strides " + print_list(output.strides) : text;
}

}  // namespace

std::string print(const Op& op) {
  std::vector<std::string> results;
  for (const Value& v : op.results) results.push_back(v.name + ": " + print_type(v.type));
  std::string body = std::visit(
      Overloaded{
          [](const Elementwise& n) { return print_elementwise(n); },
          [](const Reduction& n) { return fmt::format("reduce {}({}) axes={}", to_string(n.combiner), joined(n.operands), print_axes(n.axes)); },
          [](const Scan& n) { return fmt::format("scan {}({}) axis={}", to_string(n.combiner), joined(n.operands), n.axis); },
          [](const IndexMap& n) { return print_map(n); },
          [](const Scatter& n) {
            return fmt::format("scatter {}({}, {}) ({}){} -> {}{}", to_string(n.combiner), n.base, n.updates, joined(n.axes),
                               print_indirects(n.indirects), print_list(n.index), print_guard(n.guard));
          },
          [](const Library& n) { return print_library(n); }},
      op.node);
  return joined(results) + (results.empty() ? "" : " = ") + body + (op.provenance.empty() ? "" : " from " + quote(op.provenance));
}

std::string print(const Graph& graph) {
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  for (const Input& input : graph.inputs) inputs.push_back(print_input(input));
  for (const Output& output : graph.outputs) outputs.push_back(print_output(output));
  std::string text = "tensor @" + graph.name + "(" + joined(inputs) + ")" + print_ranges(graph.symbols) + "\n";
  for (const SizeCheck& check : graph.checks) text += "  " + print(check) + "\n";
  for (const auto& op : graph.ops) text += "  " + print(*op) + "\n";
  for (const auto& write : graph.writes) text += "  write " + write.value + " to " + write.input + "\n";
  return text + "  return" + (outputs.empty() ? "" : " ") + joined(outputs) + "\n";
}

}  // namespace deplo::tensor_ir
