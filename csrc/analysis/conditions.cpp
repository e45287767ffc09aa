#include "analysis/conditions.h"

#include <cmath>
#include <limits>

namespace deplo::analysis {

using loop_ir::Block;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Stmt;

namespace {

void define(const Block& block, std::map<std::string, const Stmt*>& into) {
  for (const auto& stmt : block) {
    if (const auto* let = std::get_if<Let>(&stmt->node)) into[let->name] = stmt.get();
    if (const auto* load = std::get_if<Load>(&stmt->node)) into[load->name] = stmt.get();
  }
}

bool is_positive(double x) { return x > 0; }
bool is_zero(double x) { return x == 0; }
template <class Is>
bool is_fill(const Load& load, Is is) {
  return !load.guard.empty() && is_float(load.fill.dtype) && is(load.fill.f);
}

}  // namespace

ValueConditions::ValueConditions(const Block& rows, const std::vector<const Block*>& keys, Stored stored) : stored_(std::move(stored)) {
  define(rows, rows_);
  for (const Block* block : keys) define(*block, keys_);
}

std::vector<Cond> ValueConditions::finite(const std::string& value) { return above(value, -std::numeric_limits<double>::infinity()); }

std::vector<Cond> ValueConditions::above(const std::string& value, double bound) {
  conds_.clear();
  bound_ = bound;
  find_above(value);
  return std::move(conds_);
}

std::vector<Cond> ValueConditions::nonzero(const std::string& value) {
  conds_.clear();
  bound_ = -std::numeric_limits<double>::infinity();
  find_nonzero(value);
  return std::move(conds_);
}

bool ValueConditions::is_weight(const std::string& name) const {
  const Let* l = let(name);
  if (!l) return false;
  switch (l->fn) {
    case Fn::exp: return true;
    case Fn::cast:
    case Fn::neg:
    case Fn::div: return is_weight(l->operands[0]);
    case Fn::mul: return is_weight(l->operands[0]) || is_weight(l->operands[1]);
    case Fn::where: return is_weight(l->operands[1]) || is_weight(l->operands[2]);
    default: return false;
  }
}

const Stmt* ValueConditions::definition(const std::string& name) const {
  for (const auto* all : {&keys_, &rows_})
    if (auto it = all->find(name); it != all->end()) return it->second;
  return nullptr;
}

const Let* ValueConditions::let(const std::string& name) const {
  const Stmt* stmt = definition(name);
  return stmt ? std::get_if<Let>(&stmt->node) : nullptr;
}

/// Of a constant float, perhaps converted.
template <class Is>
bool ValueConditions::is_constant(const std::string& name, Is is) const {
  const Let* l = let(name);
  if (!l || !is_float(l->dtype)) return false;
  if (l->fn == Fn::constant) return is(l->literal.f);
  return l->fn == Fn::cast && is_constant(l->operands[0], is);
}

/// Conditions without which the value is at most the bound.
void ValueConditions::find_above(const std::string& name) {
  const Stmt* stmt = definition(name);
  if (!stmt) return;
  const auto is_below = [&](double x) { return x <= bound_; };
  if (const auto* load = std::get_if<Load>(&stmt->node)) {
    if (is_fill(*load, is_below)) conds_.insert(conds_.end(), load->guard.begin(), load->guard.end());
    if (load->buffer == stored_.buffer) find_above(stored_.value);
    return;
  }
  const auto& l = std::get<Let>(stmt->node);
  switch (l.fn) {
    case Fn::add:
      find_above(l.operands[0]);
      find_above(l.operands[1]);
      break;
    case Fn::sub: find_above(l.operands[0]); break;
    case Fn::mul:
      if (!std::isinf(bound_)) break;  // a product of finite numbers may be anything
      for (size_t i : {0, 1})
        if (is_constant(l.operands[1 - i], is_positive)) find_above(l.operands[i]);
      break;
    case Fn::cast:
      if (is_float(l.dtype)) find_above(l.operands[0]);
      break;
    case Fn::where:
      for (size_t i : {1, 2}) {
        if (!is_constant(l.operands[i], is_below)) continue;
        holds(l.operands[0], i == 2);
        find_above(l.operands[3 - i]);
      }
      break;
    default: break;
  }
}

/// Conditions without which the value is 0.
void ValueConditions::find_nonzero(const std::string& name) {
  const Stmt* stmt = definition(name);
  if (!stmt) return;
  if (const auto* load = std::get_if<Load>(&stmt->node)) {
    if (is_fill(*load, is_zero)) conds_.insert(conds_.end(), load->guard.begin(), load->guard.end());
    return;
  }
  const auto& l = std::get<Let>(stmt->node);
  switch (l.fn) {
    case Fn::exp: find_above(l.operands[0]); break;
    case Fn::mul:
      find_nonzero(l.operands[0]);
      find_nonzero(l.operands[1]);
      break;
    case Fn::div:
    case Fn::neg: find_nonzero(l.operands[0]); break;
    case Fn::cast:
      if (is_float(l.dtype)) find_nonzero(l.operands[0]);
      break;
    case Fn::where:
      for (size_t i : {1, 2}) {
        if (!is_constant(l.operands[i], is_zero)) continue;
        holds(l.operands[0], i == 2);
        find_nonzero(l.operands[3 - i]);
      }
      break;
    default: break;
  }
}

/// Conditions without which the comparison is not so.
void ValueConditions::holds(const std::string& name, bool wanted) {
  const Let* l = let(name);
  if (!l) return;
  if (l->fn == Fn::bit_not) return holds(l->operands[0], !wanted);
  if (l->fn == (wanted ? Fn::bit_and : Fn::bit_or)) {
    holds(l->operands[0], wanted);
    holds(l->operands[1], wanted);
    return;
  }
  const bool compares = l->fn == Fn::lt || l->fn == Fn::le || l->fn == Fn::gt || l->fn == Fn::ge;
  const auto x = compares ? index_of(l->operands[0]) : std::nullopt;
  const auto y = compares ? index_of(l->operands[1]) : std::nullopt;
  if (!x || !y) return;
  Cond c = l->fn == Fn::lt ? less(*x, *y) : l->fn == Fn::le ? less_equal(*x, *y) : l->fn == Fn::gt ? less(*y, *x) : less_equal(*y, *x);
  conds_.push_back(wanted ? c : negated(c));
}

/// The value as an expression of axes and of i64 values that no key changes.
std::optional<Expr> ValueConditions::index_of(const std::string& name) const {
  const Stmt* stmt = definition(name);
  const Let* l = let(name);
  const bool whole = l && (l->dtype == DType::i64 || l->dtype == DType::i32);
  if (whole && l->fn == Fn::index) return l->index;
  if (whole && l->fn == Fn::constant) return Expr(l->literal.i);
  const bool of_row = rows_.count(name) > 0;
  const DType dtype = !stmt ? DType::boolean : l ? l->dtype : std::get<Load>(stmt->node).dtype;
  if (of_row && dtype == DType::i64) return Expr::symbol(name);
  return std::nullopt;
}

std::vector<KeyLimit> key_limits(const std::vector<Cond>& conds, const std::string& axis, const std::string& key) {
  std::vector<KeyLimit> out;
  for (const Cond& c : conds) {
    // In terms of one axis of keys.
    const Cond cond = substitute(c, {{axis, Expr::symbol(key)}});
    const auto step = linear_coefficient(cond.expr, key);
    if (cond.kind != Cond::Kind::ge0 || !step || !(step->is(1) || step->is(-1))) continue;
    const bool above = step->is(-1);  // limit - key >= 0
    out.push_back({above, above ? cond.expr + Expr::symbol(key) : Expr::symbol(key) - cond.expr});
  }
  return out;
}

}  // namespace deplo::analysis
