#include "loop_ir/turns.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "expr/node.h"
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

std::vector<Expr> choices_in(Expr e, const std::string& axis) {
  std::vector<Expr> found;
  if (e.is_constant() || e.is_symbol()) return found;
  if ((e.kind() == ExprKind::min || e.kind() == ExprKind::max) && uses(e, axis)) found.push_back(e);
  for (const Expr& operand : e.operands())
    for (const Expr& inner : choices_in(operand, axis)) found.push_back(inner);
  return found;
}

namespace {

/// The first point of the axis from which on e >= 0 holds, or does not, where e changes but once: quotients, minima and maxima with constants in
/// linear functions of the axis.
std::optional<Expr> change_of_sign(Expr e, const std::string& axis) {
  if (const auto step = linear_coefficient(e, axis)) {
    if (!step->is_constant() || step->is(0)) return std::nullopt;
    const Expr rest = e - *step * Expr::symbol(axis);
    return step->value() > 0 ? ceildiv(Expr(0) - rest, *step) : floordiv(rest, Expr(0) - *step) + 1;
  }
  // scale * atom + rest >= 0
  std::optional<Term> varying;
  Expr rest = 0;
  for (const Term& term : terms_of(e)) {
    const Expr t = from_terms({term});
    if (!uses(t, axis)) {
      rest = rest + t;
    } else if (varying || term.atoms.size() != 1) {
      return std::nullopt;
    } else {
      varying = term;
    }
  }
  if (!varying) return std::nullopt;
  const int64_t scale = varying->coefficient;
  const Expr atom = varying->atoms[0];
  const Expr bound = scale > 0 ? ceildiv(Expr(0) - rest, scale) : floordiv(rest, -scale);  // atom >= bound, or atom <= bound
  const auto beside = [&](Expr operand) { return change_of_sign(scale > 0 ? operand - bound : bound - operand, axis); };
  if (atom.kind() == ExprKind::floordiv && atom.operands()[1].is_constant() && atom.operands()[1].value() > 0) {
    const Expr by = atom.operands()[1];
    const Expr of = atom.operands()[0];
    return change_of_sign(scale > 0 ? of - bound * by : bound * by + by - 1 - of, axis);
  }
  if (atom.kind() == ExprKind::min || atom.kind() == ExprKind::max)
    for (const size_t k : {0, 1})
      if (atom.operands().size() == 2 && !uses(atom.operands()[1 - k], axis)) return beside(atom.operands()[k]);
  return std::nullopt;
}

}  // namespace

std::vector<Expr> turning_points(const Block& body, const Axis& axis, const Ranges& symbols, bool of_places) {
  std::vector<Expr> points;
  auto note_choices = [&](Expr e) {
    for (const Expr& choice : choices_in(e, axis.name)) {
      if (choice.operands().size() != 2) continue;
      const Expr difference = choice.operands()[0] - choice.operands()[1];
      std::set<std::string> asked = symbols_of(difference);
      asked.erase(axis.name);
      if (std::any_of(asked.begin(), asked.end(), [&](const std::string& name) { return !symbols.count(name); })) continue;
      if (const auto point = change_of_sign(difference, axis.name)) insert_turn(simplify(*point, symbols), axis.extent, points, symbols);
    }
  };
  auto note = [&](const std::vector<Cond>& guard) {
    for (const Cond& cond : guard) {
      std::set<std::string> asked = symbols_of(cond.expr);
      if (!asked.erase(axis.name) || std::any_of(asked.begin(), asked.end(), [&](const std::string& name) { return !symbols.count(name); })) continue;
      for (const Expr& point : turns_of(cond, axis.name)) insert_turn(point, axis.extent, points, symbols);
    }
  };
  visit(body, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node)) {
      note(load->guard);
      for (const Expr& e : load->index)
        if (of_places) note_choices(e);
    }
    if (const auto* store = std::get_if<Store>(&stmt.node)) note(store->guard);
    if (const auto* let = std::get_if<Let>(&stmt.node); let && let->fn == Fn::index && of_places) note_choices(let->index);
  });
  return points;
}

}  // namespace deplo::loop_ir
