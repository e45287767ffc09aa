#include "loop_ir/turns.h"

#include <algorithm>
#include <set>

#include "loop_ir/rewrite.h"

namespace deplo::loop_ir {

std::vector<Expr> turns_of(const Cond& cond, const std::string& axis) {
  auto step = linear_coefficient(cond.expr, axis);
  if (!step || !(step->is(1) || step->is(-1))) return {};
  Expr zero = (Expr::symbol(axis) * *step - cond.expr) * *step;  // where the expression is 0
  if (cond.kind != Cond::Kind::ge0) return {zero, zero + 1};
  return {step->is(1) ? zero : zero + 1};
}

void insert_turn(Expr point, Expr extent, std::vector<Expr>& points, const Ranges& symbols) {
  auto before = [&](Expr a, Expr b) { return provably_nonnegative(simplify(b - a - 1, symbols), symbols); };
  if (!before(0, point) || !before(point, extent)) return;
  auto at = points.begin();
  while (at != points.end() && before(*at, point)) ++at;
  if (at != points.end() && !before(point, *at)) return;
  points.insert(at, point);
}

std::vector<Expr> turning_points(const Block& body, const Axis& axis, const Ranges& symbols) {
  std::vector<Expr> points;
  auto note = [&](const std::vector<Cond>& guard) {
    for (const Cond& cond : guard) {
      std::set<std::string> asked = symbols_of(cond.expr);
      if (!asked.erase(axis.name) || std::any_of(asked.begin(), asked.end(), [&](const std::string& name) { return !symbols.count(name); })) continue;
      for (const Expr& point : turns_of(cond, axis.name)) insert_turn(point, axis.extent, points, symbols);
    }
  };
  visit(body, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node)) note(load->guard);
    if (const auto* store = std::get_if<Store>(&stmt.node)) note(store->guard);
  });
  return points;
}

}  // namespace deplo::loop_ir
