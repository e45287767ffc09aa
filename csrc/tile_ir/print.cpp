#include "base/error.h"
#include "loop_ir/text.h"
#include "tile_ir/text.h"

namespace deplo::tile_ir {
namespace {

std::string print_axis(const Axis& a) {
  std::string text = fmt::format("{} in {}..{}", a.name, deplo::print(a.lo), deplo::print(a.hi));
  if (a.step != 1) text += fmt::format(" step {}", a.step);
  if (a.by != 1) text += fmt::format(" by {}", a.by);
  return text;
}

std::string print_reduce_axis(const Axis& a) {
  return a.kind == LoopKind::serial ? print_axis(a) : fmt::format("{} {}", to_string(a.kind), print_axis(a));
}

struct Printer {
  std::string text;

  void line(const std::string& indent, const std::string& content) { text += indent + content + "\n"; }

  void block(const Block& body, const std::string& indent) {
    if (body.empty()) line(indent, "pass");
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s, indent); }, stmt->node);
  }

  void statement(const Let& s, const std::string& indent) { line(indent, loop_ir::print(s)); }
  void statement(const Load& s, const std::string& indent) { line(indent, loop_ir::print(s)); }
  void statement(const Store& s, const std::string& indent) { line(indent, loop_ir::print(s)); }
  void statement(const Check& s, const std::string& indent) { line(indent, loop_ir::print(s)); }
  void statement(const Barrier&, const std::string& indent) { line(indent, "barrier"); }
  void statement(const Alloc& s, const std::string& indent) {
    line(indent, fmt::format("alloc {}: {}{} {}", s.name, deplo::to_string(s.dtype), print_shape(s.shape), to_string(s.space)));
  }
  void statement(const Prefetch& s, const std::string& indent) {
    line(indent, fmt::format("prefetch {}{}{}", s.buffer, print_shape(s.index), s.level == 1 ? "" : fmt::format(" level {}", s.level)));
  }
  void statement(const Matrix& s, const std::string& indent) {
    auto place = [](const Matrix::Place& p) { return p.buffer + print_shape(p.index); };
    std::string what = s.kind == Matrix::Kind::store ? fmt::format("{} = {}", place(s.a), s.array) : fmt::format("{} = 0", s.array);
    if (s.kind == Matrix::Kind::load) what = fmt::format("{} = {}", s.array, place(s.a));
    if (s.kind == Matrix::Kind::multiply)
      what = fmt::format("{} += {} * {}{}", s.array, place(s.a), s.bytes ? fmt::format("{} ", to_string(*s.bytes)) : "", place(s.b));
    line(indent, "matrix " + what);
  }
  void statement(const CopyAsync& s, const std::string& indent) {
    std::string text =
        fmt::format("copy_async {}{} = {}{} along {} by {}", s.buffer, print_shape(s.index), s.from, print_shape(s.from_index), s.along, s.elements);
    if (!s.count.is(s.elements)) text += " first " + deplo::print(s.count);
    if (!s.guard.empty()) text += " if " + deplo::print(s.guard);
    line(indent, text);
  }
  void statement(const CopyGroup& s, const std::string& indent) {
    line(indent, s.pending == CopyGroup::kCommit ? "copy_commit" : fmt::format("copy_wait {}", s.pending));
  }
  void statement(const LoadMatrix& s, const std::string& indent) {
    line(indent, fmt::format("{} = load_matrix {}{} x{}{}", s.name, s.buffer, print_shape(s.index), s.count, s.transposed ? " transposed" : ""));
  }
  void statement(const JoinMatrix& s, const std::string& indent) {
    std::vector<std::string> places;
    for (const std::vector<Expr>& place : s.places) places.push_back(s.array + print_shape(place));
    line(indent, fmt::format("{} = join_matrix {} {}", s.name, to_string(s.dtype), joined(places)));
  }
  void statement(const Mma& s, const std::string& indent) {
    line(indent, fmt::format("mma {0}{1}, {0}{2} += {3} * {4} half {5}", s.array, print_shape(s.low), print_shape(s.high), s.a, s.b, s.half));
  }
  void statement(const MultiplyTiles& s, const std::string& indent) {
    line(indent, fmt::format("multiply_tiles {} += {}", s.array, deplo::print(s.products)));
  }
  void statement(const MultiplyGroup& s, const std::string& indent) {
    line(indent, fmt::format("multiply_group {}[{}] += {}", s.array, deplo::print(s.unit), deplo::print(s.products)));
  }
  void statement(const For& s, const std::string& indent) {
    bool alone = s.axis.kind == LoopKind::parallel || s.axis.kind == LoopKind::unroll;
    std::string head = s.axis.kind == LoopKind::serial ? "for"
                       : alone                         ? std::string(to_string(s.axis.kind))
                                                       : fmt::format("for {}", to_string(s.axis.kind));
    line(indent, fmt::format("{} {}:", head, print_axis(s.axis)));
    block(s.body, indent + "  ");
  }
  void statement(const If& s, const std::string& indent) {
    line(indent, fmt::format("if {}:", deplo::print(s.guard)));
    block(s.body, indent + "  ");
  }
  void statement(const Reduce& s, const std::string& indent) {
    std::vector<std::string> axes;
    for (const Axis& axis : s.axes) axes.push_back(print_reduce_axis(axis));
    line(indent, fmt::format("reduce {} over {}:", loop_ir::print_combination(s.results, s.dtypes, s.combiner, s.operands), joined(axes)));
    block(s.body, indent + "  ");
  }
  void statement(const Scan& s, const std::string& indent) {
    std::vector<std::string> axes;
    for (const Axis& axis : s.axes) axes.push_back(print_reduce_axis(axis));
    line(indent, fmt::format("scan {} over {}:", loop_ir::print_combination(s.results, s.dtypes, s.combiner, s.operands), joined(axes)));
    block(s.body, indent + "  ");
    line(indent, "then:");
    block(s.then, indent + "  ");
  }
};

}  // namespace

std::string_view to_string(LoopKind kind) {
  for (const auto& [value, word] : kLoopKinds)
    if (value == kind) return word;
  return "";
}

std::string_view to_string(Space space) {
  for (const auto& [value, word] : kSpaces)
    if (value == space) return word;
  return "";
}

std::string print(const Kernel& kernel) {
  Printer printer;
  if (!kernel.schedule.kind.empty()) printer.line("", fmt::format("schedule @{}: {}", kernel.name, deplo::print(kernel.schedule)));
  std::string head = fmt::format("tile @{}{}{}", kernel.name, loop_ir::print_params(kernel.params), print_ranges(kernel.symbols));
  if (!kernel.chunks.is(1)) head += " chunks " + deplo::print(kernel.chunks);
  printer.line("", head + print_provenance(kernel.provenance));
  printer.block(kernel.body, "  ");
  return printer.text;
}

std::string print(const Module& module) { return print_module(module); }

}  // namespace deplo::tile_ir
