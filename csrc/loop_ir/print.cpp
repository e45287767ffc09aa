#include "base/error.h"
#include "loop_ir/text.h"

namespace deplo::loop_ir {
namespace {

std::string print_axis(const Axis& axis) { return fmt::format("{} in {}", axis.name, deplo::print(axis.extent)); }

struct Printer {
  std::string text;

  void line(const std::string& indent, const std::string& content) { text += indent + content + "\n"; }

  void block(const Block& body, const std::string& indent) {
    if (body.empty()) line(indent, "pass");
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s, indent); }, stmt->node);
  }

  void statement(const Let& s, const std::string& indent) { line(indent, print(s)); }
  void statement(const Load& s, const std::string& indent) { line(indent, print(s)); }
  void statement(const Store& s, const std::string& indent) { line(indent, print(s)); }
  void statement(const Check& s, const std::string& indent) { line(indent, print(s)); }
  void statement(const Local& s, const std::string& indent) {
    line(indent, fmt::format("local {}: {}", s.name, print_type(s.dtype, s.shape, contiguous_strides(s.shape))));
  }
  void statement(const For& s, const std::string& indent) {
    line(indent, fmt::format("for {} in {}:", s.axis, deplo::print(s.extent)));
    block(s.body, indent + "  ");
  }
  void statement(const Reduce& s, const std::string& indent) {
    std::vector<std::string> axes;
    for (const Axis& axis : s.axes) axes.push_back(print_axis(axis));
    line(indent, fmt::format("reduce {} over {}:", print_combination(s.results, s.dtypes, s.combiner, s.operands), joined(axes)));
    block(s.body, indent + "  ");
  }
  void statement(const Scan& s, const std::string& indent) {
    line(indent, fmt::format("scan {} over {}:", print_combination(s.results, s.dtypes, s.combiner, s.operands), print_axis(s.axis)));
    block(s.body, indent + "  ");
    line(indent, "then:");
    block(s.then, indent + "  ");
  }
};

}  // namespace

std::string print(const Kernel& kernel) {
  Printer printer;
  printer.line(
      "", fmt::format("loop @{}{}{}{}", kernel.name, print_params(kernel.params), print_ranges(kernel.symbols), print_provenance(kernel.provenance)));
  printer.block(kernel.body, "  ");
  return printer.text;
}

std::string print(const Module& module) { return print_module(module); }

const Param* Kernel::find_param(const std::string& param) const {
  for (const Param& p : params)
    if (p.name == param) return &p;
  return nullptr;
}

}  // namespace deplo::loop_ir
