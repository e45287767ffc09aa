#include "expr/points.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "expr/node.h"

namespace deplo {
namespace {

Range numbers_of(const Range& range, const Ranges& numbers) {
  Range r;
  if (range.lo)
    if (auto lo = bounds(*range.lo, numbers).lo) r.lo = *lo;
  if (range.hi)
    if (auto hi = bounds(*range.hi, numbers).hi) r.hi = *hi;
  return r;
}

int64_t constant_of(Expr e) {
  for (const Term& term : terms_of(e))
    if (term.atoms.empty()) return term.coefficient;
  return 0;
}

}  // namespace

Points::Points(const Ranges& symbols) : ranges_(symbols) {
  for (const auto& [name, range] : symbols) numbers_[name] = numbers_of(range, symbols);
}

void Points::add_axis(const std::string& name, Expr lo, Expr hi, int64_t step) {
  lo = substitute(lo, names_);
  hi = substitute(hi, names_);
  names_.erase(name);
  axes_.push_back({name, lo, hi, step});
  none_ = none_ || (lo.is_constant() && hi.is_constant() && lo.value() >= hi.value());
  ranges_[name] = {lo, hi - 1};
  numbers_[name] = numbers_of(ranges_[name], numbers_);
  found_.clear();
}

void Points::add_guard(const std::vector<Cond>& guard) {
  found_.extremes.clear();
  found_.ranges.clear();
  found_.runs.clear();
  for (const Cond& cond : guard) holds_.push_back(substitute(cond, names_));
}

void Points::add_failed(const std::vector<Cond>& guard) {
  found_.extremes.clear();
  found_.ranges.clear();
  found_.runs.clear();
  if (guard.size() == 1) return add_guard({negated(guard[0])});
  fails_.emplace_back();
  for (const Cond& cond : guard) fails_.back().push_back(substitute(cond, names_));
}

void Points::define(const std::string& name, Expr value) {
  numbers_[name] = numbers_of({value, value}, numbers_);
  if (names_.count(name)) found_.slacks.clear();
  names_[name] = substitute(value, names_);
}

bool Points::surely_inside(Expr index, Expr size) const {
  Interval places = bounds(index, numbers_);
  if (!places.lo || *places.lo < 0 || !places.hi) return false;
  auto least = bounds(size, numbers_).lo;
  return least && *places.hi < *least;
}

std::optional<Range> Points::values_of(const Axis& axis, const Substitution& outer) const {
  Expr start = at(axis.lo, outer);
  Expr first = start;
  Expr last = at(axis.hi, outer) - 1;
  for (const Cond& cond : holds_) {
    Expr e = at(cond.expr, outer);
    auto coefficient = uses(e, axis.name) ? linear_coefficient(e, axis.name) : std::nullopt;
    if (!coefficient || !coefficient->is_constant()) continue;
    Expr rest = e - *coefficient * Expr::symbol(axis.name);
    bool is_inner = std::any_of(axes_.begin(), axes_.end(), [&](const Axis& other) { return !outer.count(other.name) && uses(rest, other.name); });
    if (is_inner || cond.kind == Cond::Kind::ne0) continue;
    int64_t c = coefficient->value();
    bool exact = cond.kind == Cond::Kind::eq0;
    if (c > 0 || exact) first = max(first, c > 0 ? ceildiv(Expr(0) - rest, c) : ceildiv(rest, -c));
    if (c < 0 || exact) last = min(last, c < 0 ? floordiv(rest, -c) : floordiv(Expr(0) - rest, c));
  }
  if (axis.step != 1) {
    first = start + ceildiv(first - start, axis.step) * axis.step;
    last = start + floordiv(last - start, axis.step) * axis.step;
  }
  first = simplify(first, ranges_);
  last = simplify(last, ranges_);
  if (decide(less_equal(first, last), ranges_) != std::optional<bool>(true)) return std::nullopt;
  return Range{first, last};
}

bool Points::runs_at(const Substitution& values) const {
  auto is = [&](bool wanted) {
    return [&, wanted](const Cond& cond) { return decide(Cond{cond.kind, at(cond.expr, values)}, ranges_) == std::optional<bool>(wanted); };
  };
  return std::all_of(holds_.begin(), holds_.end(), is(true)) &&
         std::all_of(fails_.begin(), fails_.end(), [&](const auto& guard) { return std::any_of(guard.begin(), guard.end(), is(false)); });
}

std::optional<Points::Point> Points::extreme(Expr e, bool large) const {
  Point point;
  std::vector<const ExprNode*> chosen;
  for (const Axis& axis : axes_) {
    auto [values_at, is_new] = found_.ranges.try_emplace(chosen);
    if (is_new) values_at->second = values_of(axis, point.values);
    const auto& values = values_at->second;
    if (!values) return std::nullopt;
    Expr here = at(e, point.values);
    bool falls = false;
    if (uses(here, axis.name)) {
      auto end = [&](Expr place) { return substitute(here, {{axis.name, place}}); };
      auto coefficient = linear_coefficient(here, axis.name);
      falls = !provably_nonnegative(coefficient ? *coefficient : simplify(end(*values->hi) - end(*values->lo), ranges_), ranges_);
    }
    const Expr value = large != falls ? *values->hi : *values->lo;
    point.values[axis.name] = value;
    chosen.push_back(value.node());
  }
  auto [runs, is_new] = found_.runs.try_emplace(chosen);
  if (is_new) runs->second = runs_at(point.values);
  if (!runs->second) return std::nullopt;
  point.value = at(e, point.values);
  return point;
}

const std::optional<Points::Point>& Points::shared_extreme(Expr rest, bool large) const {
  auto [it, is_new] = found_.extremes.try_emplace({rest.node(), large});
  if (is_new) it->second = extreme(rest, large);
  return it->second;
}

const Points::Slack& Points::shared_slack(Expr rest, Expr size) const {
  auto [it, is_new] = found_.slacks.try_emplace({rest.node(), size.node()});
  if (is_new) {
    it->second.rest = substitute(rest, names_);
    it->second.low = bounds(it->second.rest, ranges_).lo;
    it->second.high = bounds(size - 1 - it->second.rest, ranges_).lo;
  }
  return it->second;
}

std::optional<std::string> Points::escape(const std::string& buffer, size_t dimension, Expr index, Expr size, bool large) const {
  const int64_t constant = constant_of(index);
  const auto& point = shared_extreme(index - constant, large);
  if (!point) return std::nullopt;
  Expr place = point->value + constant;
  Cond out = large ? less_equal(size, place) : less(place, 0);
  if (decide({out.kind, simplify(out.expr, ranges_)}, ranges_) != std::optional<bool>(true)) return std::nullopt;
  std::vector<std::string> places;
  for (const Axis& axis : axes_)
    if (uses(index, axis.name)) places.push_back(axis.name + " = " + print(point->values.at(axis.name)));
  std::string where = places.empty() ? "" : fmt::format(" is {} at {},", print(place), joined(places));
  return fmt::format("index {} of dimension {} of {}{} {}outside 0..{}", print(index), dimension, buffer, where, places.empty() ? "is " : "",
                     print(size));
}

std::optional<std::string> Points::escape(const std::string& buffer, const std::vector<Expr>& index, const std::vector<Expr>& shape,
                                          const std::vector<Cond>& guard) const {
  if (unknown_) return std::nullopt;
  try {
    std::optional<Points> guarded;
    for (size_t d = 0; d < index.size(); ++d) {
      if (surely_inside(index[d], shape[d])) continue;
      const int64_t constant = constant_of(index[d]);
      const Slack& slack = shared_slack(index[d] - constant, shape[d]);
      Expr e = slack.rest + constant;
      int64_t left = 0;
      const bool above = slack.low && !__builtin_add_overflow(*slack.low, constant, &left) && left >= 0;
      const bool below = slack.high && !__builtin_sub_overflow(*slack.high, constant, &left) && left >= 0;
      if (above && below) continue;
      auto is_asked = [&](Expr nonnegative) { return std::find(guard.begin(), guard.end(), Cond{Cond::Kind::ge0, nonnegative}) != guard.end(); };
      bool low = !above && !is_asked(index[d]);
      bool high = !below && !is_asked(shape[d] - 1 - index[d]);
      if (!low && !high) continue;
      if (!guarded && !guard.empty()) {
        guarded = *this;
        guarded->add_guard(guard);
      }
      const Points& here = guarded ? *guarded : *this;
      auto found = high ? here.escape(buffer, d, e, shape[d], true) : std::nullopt;
      if (!found && low) found = here.escape(buffer, d, e, shape[d], false);
      if (found) return found;
    }
    return std::nullopt;
  } catch (const UnsupportedError&) {
    return std::nullopt;  // numbers beyond 64 bits
  }
}

}  // namespace deplo
