#include "base/error.h"
#include "kernel_ir/text.h"
#include "loop_ir/text.h"
#include "program_ir/text.h"

namespace deplo::kernel_ir {
namespace {

std::string suffix(const std::string& word, const std::string& name) { return name.empty() ? "" : fmt::format(" {} {}", word, name); }

struct Printer {
  std::string text;

  void line(const std::string& indent, const std::string& content) { text += indent + content + "\n"; }

  void block(const Block& body, const std::string& indent) {
    if (body.empty()) line(indent, "pass");
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s, indent); }, stmt->node);
  }

  static std::string head(const std::string& name, Type type) { return fmt::format("{}: {} = ", name, print(type)); }
  static std::string place(const std::string& buffer, Expr offset) { return fmt::format("{}[{}]", buffer, deplo::print(offset)); }

  void statement(const Let& s, const std::string& indent) {
    std::string value = fmt::format("{}({})", to_string(s.fn), joined(s.operands));
    if (s.fn == Fn::constant) value = "constant " + print_literal(s.literal);
    if (s.fn == Fn::index) {
      value = "index " + deplo::print(s.index);
      if (!s.lane_step.is(0)) value += " step " + deplo::print(s.lane_step);
    }
    line(indent, head(s.name, s.type) + value);
  }
  void statement(const Splat& s, const std::string& indent) { line(indent, head(s.name, s.type) + "splat " + s.operand); }
  void statement(const FirstLanes& s, const std::string& indent) {
    line(indent, head(s.name, {DType::boolean, s.lanes}) + "first " + deplo::print(s.count));
  }
  void statement(const ReduceLanes& s, const std::string& indent) {
    line(indent, head(s.name, {s.dtype, 1}) + fmt::format("lanes {}({})", to_string(s.fn), s.operand));
  }
  void statement(const Extract& s, const std::string& indent) {
    line(indent, head(s.name, {s.dtype, 1}) + fmt::format("extract {} {}", s.operand, s.lane));
  }
  void statement(const Shuffle& s, const std::string& indent) {
    std::vector<std::string> lanes;
    for (int lane : s.lanes) lanes.push_back(std::to_string(lane));
    line(indent, head(s.name, s.type) + fmt::format("shuffle {}{} [{}]", s.a, s.b.empty() ? "" : ", " + s.b, joined(lanes)));
  }
  void statement(const Exchange& s, const std::string& indent) {
    const char* how = s.partner == Partner::differs ? "xor" : s.partner == Partner::number ? "from" : "below";
    line(indent, head(s.name, {s.dtype, 1}) + fmt::format("exchange {} {} {}", s.operand, how, s.lane));
  }
  void statement(const Load& s, const std::string& indent) {
    std::string value = "load " + place(s.buffer, s.offset);
    if (!s.stride.is(1)) value += " stride " + deplo::print(s.stride);
    line(indent, head(s.name, s.type) + value + suffix("gather", s.gather) + suffix("mask", s.mask) + suffix("else", s.passthrough));
  }
  void statement(const Store& s, const std::string& indent) {
    std::string how = s.combiner == Combiner::set ? "" : std::string(to_string(s.combiner)) + " ";
    std::string target = fmt::format("store {}{}{} = {}", s.atomic ? "atomic " : "", how, place(s.buffer, s.offset), s.value);
    if (!s.stride.is(1)) target += " stride " + deplo::print(s.stride);
    line(indent, target + suffix("gather", s.gather) + suffix("mask", s.mask));
  }
  void statement(const Var& s, const std::string& indent) { line(indent, "var " + head(s.name, s.type) + s.init); }
  void statement(const Assign& s, const std::string& indent) { line(indent, s.name + " <- " + s.value); }
  void statement(const For& s, const std::string& indent) {
    std::string unroll = s.unroll > 1 ? fmt::format(" unroll {}", s.unroll) : "";
    line(indent, fmt::format("for {} in {}..{} step {}{}:", s.name, deplo::print(s.lo), deplo::print(s.hi), deplo::print(s.step), unroll));
    block(s.body, indent + "  ");
  }
  void statement(const If& s, const std::string& indent) {
    line(indent, s.guard.empty() ? fmt::format("if value {}:", s.condition) : fmt::format("if {}:", deplo::print(s.guard)));
    block(s.then, indent + "  ");
    if (s.otherwise.empty()) return;
    line(indent, "else:");
    block(s.otherwise, indent + "  ");
  }
  void statement(const Alloc& s, const std::string& indent) {
    std::string where = s.space == Space::stack ? "stack" : s.space == Space::shared ? "shared" : "scratch " + deplo::print(s.offset);
    line(indent, fmt::format("alloc {}: {}[{}] {}", s.name, deplo::to_string(s.dtype), deplo::print(s.count), where));
  }
  void statement(const Prefetch& s, const std::string& indent) {
    line(indent, fmt::format("prefetch {} level {}", place(s.buffer, s.offset), s.level));
  }
  void statement(const Barrier& /*s*/, const std::string& indent) { line(indent, "barrier"); }
  void statement(const Matrix& s, const std::string& indent) {
    std::string rows = fmt::format("{} stride {}", place(s.buffer, s.offset), deplo::print(s.stride));
    auto factor = [](int t, DType dtype) { return dtype == DType::bf16 ? fmt::format("t{}", t) : fmt::format("{} t{}", to_string(dtype), t); };
    const std::string sums = s.dtype == DType::f32 ? "" : fmt::format(": {}", to_string(s.dtype));
    std::string what = s.kind == Matrix::Kind::zero    ? fmt::format("t{}{} = 0", s.target, sums)
                       : s.kind == Matrix::Kind::load  ? fmt::format("t{} = {}", s.target, rows)
                       : s.kind == Matrix::Kind::store ? fmt::format("{} = t{}", rows, s.target)
                                                       : fmt::format("t{} += {} * {}", s.target, factor(s.a, s.a_dtype), factor(s.b, s.b_dtype));
    line(indent, "matrix " + what);
  }
  void statement(const CopyAsync& s, const std::string& indent) {
    std::string text = fmt::format("copy_async {} = {} by {}", place(s.buffer, s.offset), place(s.from, s.from_offset), s.elements);
    if (!s.count.is(s.elements)) text += " first " + deplo::print(s.count);
    if (!s.guard.empty()) text += " if " + deplo::print(s.guard);
    line(indent, text);
  }
  void statement(const CopyGroup& s, const std::string& indent) {
    line(indent, s.pending == CopyGroup::kCommit ? "copy_commit" : fmt::format("copy_wait {}", s.pending));
  }
  void statement(const LoadMatrix& s, const std::string& indent) {
    line(indent, head(s.name, s.type) + "load_matrix " + place(s.buffer, s.offset) + (s.transposed ? " transposed" : ""));
  }
  void statement(const JoinMatrix& s, const std::string& indent) {
    line(indent, fmt::format("{}join_matrix {} lane {}", head(s.name, s.type), joined(s.parts), s.lane));
  }
  void statement(const Mma& s, const std::string& indent) {
    line(indent, fmt::format("mma {}, {} lane {} += {} * {} half {}", s.low, s.high, s.lane, s.a, s.b, s.half));
  }
  void statement(const MultiplyTiles& s, const std::string& indent) {
    line(indent, fmt::format("multiply_tiles {} += {}", joined(s.sums), deplo::print(s.products)));
  }
  void statement(const MultiplyGroup& s, const std::string& indent) {
    line(indent, fmt::format("multiply_group {} += {}", joined(s.sums), deplo::print(s.products)));
  }
  void statement(const SetError& s, const std::string& indent) {
    line(indent, fmt::format("error {} if {}", loop_ir::to_string(s.code), s.condition));
  }
};

std::string print_list(const std::string& word, const std::vector<Expr>& exprs) {
  if (exprs.empty()) return "";
  std::vector<std::string> parts;
  for (Expr e : exprs) parts.push_back(deplo::print(e));
  return fmt::format(" {} ({})", word, joined(parts));
}

}  // namespace

std::string print(Type type) {
  std::string name(deplo::to_string(type.dtype));
  return type.lanes == 1 ? name : fmt::format("{}x{}", name, type.lanes);
}

std::string print(const Kernel& kernel) {
  std::vector<std::string> params;
  for (const Param& p : kernel.params) {
    std::string_view kind = p.kind == loop_ir::ParamKind::in ? "" : p.kind == loop_ir::ParamKind::out ? "out " : "inout ";
    params.push_back(fmt::format("{}{}: ptr {}", kind, p.name, deplo::to_string(p.dtype)));
  }
  std::vector<std::string> sizes;
  for (const Size& s : kernel.sizes) sizes.push_back(fmt::format("{} = {}", s.name, deplo::print(s.value)));
  const std::string computed = sizes.empty() ? "" : fmt::format(" sizes ({})", joined(sizes));
  Printer printer;
  printer.line("", fmt::format("kernel @{}({}) symbols ({}){} chunks {} scratch {}{}{}{}", kernel.name, joined(params), joined(kernel.symbols),
                               computed, deplo::print(kernel.chunks), deplo::print(kernel.scratch_bytes), print_list("grid", kernel.grid),
                               print_list("block", kernel.block), print_provenance(kernel.provenance)));
  printer.block(kernel.body, "  ");
  return printer.text;
}

std::string print(const Module& module) { return print_module(module); }

}  // namespace deplo::kernel_ir
