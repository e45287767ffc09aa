#include "kernel_ir/rewrite.h"

namespace deplo::kernel_ir {
namespace {

/// Applies the callbacks to the fields of one statement in place and remembers whether one changed.
struct Mapper {
  const Uses& uses;
  bool changed = false;

  void value(std::string& name) {
    if (name.empty()) return;
    std::string mapped = uses.value(name);
    changed = changed || mapped != name;
    name = std::move(mapped);
  }
  void index(Expr& e) {
    Expr mapped = uses.index(e);
    changed = changed || mapped != e;
    e = mapped;
  }

  void fields(Let& s) {
    for (std::string& operand : s.operands) value(operand);
    if (s.fn != Fn::index) return;
    index(s.index);
    index(s.lane_step);
  }
  void fields(Splat& s) { value(s.operand); }
  void fields(FirstLanes& s) { index(s.count); }
  void fields(ReduceLanes& s) { value(s.operand); }
  void fields(Extract& s) { value(s.operand); }
  void fields(Shuffle& s) {
    value(s.a);
    value(s.b);
  }
  void fields(Exchange& s) { value(s.operand); }
  void fields(Load& s) {
    index(s.offset);
    index(s.stride);
    value(s.gather);
    value(s.mask);
    value(s.passthrough);
  }
  void fields(Store& s) {
    index(s.offset);
    index(s.stride);
    value(s.gather);
    value(s.value);
    value(s.mask);
  }
  void fields(Var& s) { value(s.init); }
  void fields(Assign& s) { value(s.value); }
  void fields(For& s) {
    index(s.lo);
    index(s.hi);
    index(s.step);
  }
  void fields(If& s) {
    for (Cond& c : s.guard) index(c.expr);
    if (s.guard.empty()) value(s.condition);
  }
  void fields(Alloc& s) {
    index(s.count);
    index(s.offset);
  }
  void fields(Prefetch& s) { index(s.offset); }
  void fields(Barrier& /*s*/) {}
  void fields(Matrix& s) {
    index(s.offset);
    index(s.stride);
  }
  void fields(CopyAsync& s) {
    index(s.offset);
    index(s.from_offset);
    index(s.count);
    for (Cond& c : s.guard) index(c.expr);
  }
  void fields(CopyGroup& /*s*/) {}
  void fields(LoadMatrix& s) { index(s.offset); }
  void fields(JoinMatrix& s) {
    for (std::string& part : s.parts) value(part);
  }
  void fields(Mma& s) {
    value(s.a);
    value(s.b);
  }
  void fields(MultiplyTiles& s) {
    for_each_expr(s.products, [&](Expr& e) { index(e); });
  }
  void fields(MultiplyGroup& s) {
    for (std::string& matrix : s.products.matrices) value(matrix);
    for_each_place(s.products, [&](Expr& e) { index(e); });
  }
  void fields(SetError& s) { value(s.condition); }
};

}  // namespace

std::string defined_value(const Stmt& stmt) {
  return std::visit(
      []<class S>(const S& s) -> std::string {
        if constexpr (requires { s.name; } && !std::is_same_v<S, Var> && !std::is_same_v<S, Assign> && !std::is_same_v<S, For> &&
                      !std::is_same_v<S, Alloc>)
          return s.name;
        else
          return "";
      },
      stmt.node);
}

Ref<Stmt> map_uses(const Ref<Stmt>& stmt, const Uses& uses) {
  Stmt copy = *stmt;
  Mapper mapper{uses};
  std::visit([&](auto& s) { mapper.fields(s); }, copy.node);
  return mapper.changed ? std::make_shared<Stmt>(std::move(copy)) : stmt;
}

}  // namespace deplo::kernel_ir
