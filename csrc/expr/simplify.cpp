#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "base/error.h"
#include "expr/expr.h"
#include "expr/facts.h"
#include "expr/node.h"

namespace deplo {
namespace {

using Bound = std::optional<int64_t>;

Bound add(Bound a, Bound b) {
  int64_t r = 0;
  if (!a || !b || __builtin_add_overflow(*a, *b, &r)) return std::nullopt;
  return r;
}

Bound multiply(Bound a, Bound b) {
  int64_t r = 0;
  if (a && *a == 0) return 0;
  if (b && *b == 0) return 0;
  if (!a || !b || __builtin_mul_overflow(*a, *b, &r)) return std::nullopt;
  return r;
}

Interval multiply(const Interval& a, const Interval& b) {
  if (a.lo && b.lo && *a.lo >= 0 && *b.lo >= 0) return {multiply(a.lo, b.lo), a.hi && b.hi ? multiply(a.hi, b.hi) : std::nullopt};
  if (!a.lo || !a.hi || !b.lo || !b.hi) {
    // A constant factor keeps a half-open interval.
    const Interval* c = a.lo && a.hi && *a.lo == *a.hi ? &a : b.lo && b.hi && *b.lo == *b.hi ? &b : nullptr;
    if (!c) return {};
    const Interval& x = c == &a ? b : a;
    Bound k = c->lo;
    return *k >= 0 ? Interval{x.lo ? multiply(k, x.lo) : std::nullopt, x.hi ? multiply(k, x.hi) : std::nullopt}
                   : Interval{x.hi ? multiply(k, x.hi) : std::nullopt, x.lo ? multiply(k, x.lo) : std::nullopt};
  }
  Bound corners[] = {multiply(a.lo, b.lo), multiply(a.lo, b.hi), multiply(a.hi, b.lo), multiply(a.hi, b.hi)};
  Interval r{corners[0], corners[0]};
  for (const Bound& c : corners) {
    if (!c || !r.lo) return {};
    r.lo = std::min(*r.lo, *c);
    r.hi = std::max(*r.hi, *c);
  }
  return r;
}

Interval opposite(const Interval& a) { return {multiply(a.hi, -1), multiply(a.lo, -1)}; }

/// Of a floordiv b for b of at least 1.
Interval quotients(const Interval& a, const Interval& b) {
  Interval r;
  if (a.lo) r.lo = *a.lo >= 0 ? (b.hi ? floor_divide(*a.lo, *b.hi) : 0) : floor_divide(*a.lo, *b.lo);
  if (a.hi) r.hi = *a.hi >= 0 ? floor_divide(*a.hi, *b.lo) : (b.hi ? floor_divide(*a.hi, *b.hi) : -1);
  return r;
}

/// Of a mod b for b of at least 1.
Interval remainders(const Interval& a, const Interval& b) {
  Interval r{0, add(b.hi, -1)};
  if (a.lo && *a.lo >= 0 && a.hi && (!r.hi || *a.hi < *r.hi)) r.hi = a.hi;
  return r;
}

/// The bounds of a division whose divisor may have either sign: `positive` has those for a divisor of at least 1. By a negative divisor it is
/// what the operands' opposites give, or the opposite of that. 0 divides nothing.
template <class F>
Interval by_signs(const Interval& a, const Interval& b, const F& positive, Interval (*result)(const Interval&) = nullptr) {
  std::optional<Interval> found;
  auto include = [&](const Interval& r) {
    if (!found)
      found = r;
    else
      found = Interval{found->lo && r.lo ? Bound(std::min(*found->lo, *r.lo)) : std::nullopt,
                       found->hi && r.hi ? Bound(std::max(*found->hi, *r.hi)) : std::nullopt};
  };
  if (!b.hi || *b.hi >= 1) include(positive(a, {std::max<int64_t>(b.lo.value_or(1), 1), b.hi}));
  if (!b.lo || *b.lo <= -1) {
    Interval r = positive(opposite(a), opposite({b.lo, std::min<int64_t>(b.hi.value_or(-1), -1)}));
    include(result ? result(r) : r);
  }
  return found.value_or(Interval{});
}

constexpr int kMaxDepth = 12;

/// The bounds of expressions under some ranges. Terms share symbols and subexpressions, whose bounds are found once for a question.
class Bounder {
 public:
  explicit Bounder(const Ranges& ranges) : ranges_(ranges) {}
  Interval interval(Expr e, int depth);
  /// Replaces one axis whose bounds are symbolic by the extreme that makes e smallest (or largest); nothing if none is linear in e.
  std::optional<Expr> eliminate_one(Expr e, bool lowest, const std::set<std::string>* only, int depth);

 private:
  /// What is at most (or at least) `factor` times an expression, and linear in what one of its quotients divides.
  struct Scaled {
    Expr times;
    int64_t factor = 1;
  };
  std::optional<Scaled> without_quotient(Expr e, bool lowest) const;
  struct Known {
    int depth;  ///< a bound from less deep is at least as narrow
    Interval interval;
  };
  Interval of_atom(Expr e, int depth);
  Interval of_terms(Expr e, int depth);
  const Ranges& ranges_;
  std::unordered_map<const ExprNode*, Known> known_;
};

std::optional<Expr> Bounder::eliminate_one(Expr e, bool lowest, const std::set<std::string>* only, int depth) {
  for (const std::string& name : symbols_of(e)) {
    if (only && !only->count(name)) continue;
    auto it = ranges_.find(name);
    if (it == ranges_.end()) continue;
    bool symbolic = (it->second.lo && !it->second.lo->is_constant()) || (it->second.hi && !it->second.hi->is_constant());
    if (!only && !symbolic) continue;
    auto c = linear_coefficient(e, name);
    if (!c) continue;
    Interval sign = interval(*c, depth + 1);
    bool positive = sign.lo && *sign.lo >= 0;
    bool negative = sign.hi && *sign.hi <= 0;
    if (!positive && !negative) continue;
    const auto& extreme = positive == lowest ? it->second.lo : it->second.hi;
    if (!extreme) continue;
    return substitute(e, {{name, *extreme}});
  }
  return std::nullopt;
}

std::optional<Bounder::Scaled> Bounder::without_quotient(Expr e, bool lowest) const {
  constexpr int64_t kMostFactor = 1 << 16;
  constexpr int64_t kMostCoefficient = int64_t{1} << 31;  // so that products fit in 64 bits
  const auto is_symbolic = [&](const std::string& name) {
    const auto it = ranges_.find(name);
    return it != ranges_.end() && ((it->second.lo && !it->second.lo->is_constant()) || (it->second.hi && !it->second.hi->is_constant()));
  };
  const auto is_small = [&](const std::vector<Term>& terms) {
    return std::all_of(terms.begin(), terms.end(),
                       [](const Term& t) { return t.coefficient >= -kMostCoefficient && t.coefficient <= kMostCoefficient; });
  };
  const std::vector<Term> terms = terms_of(e);
  for (const Term& term : terms) {
    if (term.atoms.size() != 1 || term.atoms[0].kind() != ExprKind::floordiv) continue;
    const Expr a = term.atoms[0].operands()[0];
    const auto c = term.atoms[0].operands()[1].as_constant();
    const int64_t k = term.coefficient;
    if (!c || *c <= 1 || *c > kMostFactor || k < -kMostFactor || k > kMostFactor || !is_small(terms) || !is_small(terms_of(a))) continue;
    const auto names = symbols_of(a);
    if (std::none_of(names.begin(), names.end(), is_symbolic)) continue;
    // a - c < c * (a floordiv c) <= a.
    const Expr least = (k > 0) == lowest ? a - (*c - 1) : a;
    return Scaled{*c * (e - from_terms({term})) + k * least, *c};
  }
  return std::nullopt;
}

Interval Bounder::of_atom(Expr e, int depth) {
  switch (e.kind()) {
    case ExprKind::constant: return {e.value(), e.value()};
    case ExprKind::symbol: {
      auto it = ranges_.find(e.name());
      if (it == ranges_.end() || depth > kMaxDepth) return {};
      Interval r;
      if (it->second.lo) r.lo = interval(*it->second.lo, depth + 1).lo;
      if (it->second.hi) r.hi = interval(*it->second.hi, depth + 1).hi;
      return r;
    }
    case ExprKind::floordiv: {
      Interval a = interval(e.operands()[0], depth + 1);
      Interval b = interval(e.operands()[1], depth + 1);
      return by_signs(a, b, quotients);
    }
    case ExprKind::mod: {
      Interval a = interval(e.operands()[0], depth + 1);
      Interval b = interval(e.operands()[1], depth + 1);
      return by_signs(a, b, remainders, opposite);
    }
    case ExprKind::min:
    case ExprKind::max: {
      Interval a = interval(e.operands()[0], depth + 1);
      Interval b = interval(e.operands()[1], depth + 1);
      Interval r;
      if (e.kind() == ExprKind::min) {
        if (a.lo && b.lo) r.lo = std::min(*a.lo, *b.lo);
        r.hi = a.hi && b.hi ? Bound(std::min(*a.hi, *b.hi)) : a.hi ? a.hi : b.hi;
      } else {
        r.lo = a.lo && b.lo ? Bound(std::max(*a.lo, *b.lo)) : a.lo ? a.lo : b.lo;
        if (a.hi && b.hi) r.hi = std::max(*a.hi, *b.hi);
      }
      return r;
    }
    case ExprKind::add:
    case ExprKind::mul: break;
  }
  return interval(e, depth + 1);
}

Interval Bounder::interval(Expr e, int depth) {
  if (e.is_constant()) return {e.value(), e.value()};
  if (depth > kMaxDepth) return {};
  auto it = known_.find(e.node());
  if (it != known_.end() && it->second.depth <= depth) return it->second.interval;
  Interval found = of_terms(e, depth);
  known_[e.node()] = {depth, found};
  return found;
}

Interval Bounder::of_terms(Expr e, int depth) {
  Interval sum{0, 0};
  const std::vector<Term> terms = terms_of(e);
  for (const Term& term : terms) {
    Interval t{1, 1};
    for (const Expr& atom : term.atoms) t = multiply(t, of_atom(atom, depth));
    t = multiply({term.coefficient, term.coefficient}, t);  // last: a negative half-open range times another is unbounded
    sum = {add(sum.lo, t.lo), add(sum.hi, t.hi)};
  }
  if (depth <= 4 && terms.size() > 1) {
    // Terms that share a symbol (s0 - 1 - i with i <= s0 - 1) cancel only after substitution.
    if (!sum.lo || *sum.lo < 0)
      if (auto low = eliminate_one(e, true, nullptr, depth)) {
        Interval tighter = interval(*low, depth + 1);
        if (tighter.lo && (!sum.lo || *tighter.lo > *sum.lo)) sum.lo = tighter.lo;
      }
    if (!sum.hi || *sum.hi >= 0)
      if (auto high = eliminate_one(e, false, nullptr, depth)) {
        Interval tighter = interval(*high, depth + 1);
        if (tighter.hi && (!sum.hi || *tighter.hi < *sum.hi)) sum.hi = tighter.hi;
      }
    if (!sum.lo || *sum.lo < 0)
      if (const auto low = without_quotient(e, true)) {
        const Interval scaled = interval(low->times, depth + 1);
        if (scaled.lo) {
          const int64_t bound = floor_divide(*scaled.lo, low->factor) + (floor_mod(*scaled.lo, low->factor) != 0 ? 1 : 0);
          if (!sum.lo || bound > *sum.lo) sum.lo = bound;
        }
      }
    if (!sum.hi || *sum.hi >= 0)
      if (const auto high = without_quotient(e, false)) {
        const Interval scaled = interval(high->times, depth + 1);
        if (scaled.hi) {
          const int64_t bound = floor_divide(*scaled.hi, high->factor);
          if (!sum.hi || bound < *sum.hi) sum.hi = bound;
        }
      }
  }
  return sum;
}

bool within(Expr e, Expr extent, const Ranges& ranges) { return provably_nonnegative(e, ranges) && provably_nonnegative(extent - 1 - e, ranges); }

// Splits e into (multiples of g, rest) by its coefficients.
std::pair<Expr, Expr> split_multiples(Expr e, int64_t g) {
  Expr multiples = 0;
  Expr rest = 0;
  for (const Term& term : terms_of(e)) {
    Expr t = from_terms({term});
    if (!term.atoms.empty() && term.coefficient % g == 0)
      multiples = multiples + t;
    else
      rest = rest + t;
  }
  return {multiples, rest};
}

Expr simplify_division(Expr a, Expr b, const Ranges& ranges, bool want_mod) {
  Expr quotient = 0;
  Expr rest = a;
  if (within(rest, b, ranges)) return want_mod ? rest : quotient;
  // Taking an exact multiple of b out of the numerator may leave a rest within [0, b).
  for (const Term& term : terms_of(a)) {
    Expr t = from_terms({term});
    if (auto q = exact_quotient(t, b)) {
      quotient = quotient + *q;
      rest = rest - t;
    }
  }
  if (within(rest, b, ranges)) return want_mod ? rest : quotient;
  if (within(rest + b, b, ranges)) return want_mod ? rest + b : quotient - 1;
  if (auto c = b.as_constant()) {
    // (g*x + r) / (g*d) with 0 <= r < g is x / d.
    std::set<int64_t> divisors;
    for (const Term& term : terms_of(rest))
      if (!term.atoms.empty()) divisors.insert(std::gcd(term.coefficient, *c));
    for (auto it = divisors.rbegin(); it != divisors.rend(); ++it) {
      int64_t g = *it;
      if (g <= 1) continue;
      auto [multiples, r] = split_multiples(rest, g);
      if (multiples.is(0) || !within(r, g, ranges)) continue;
      Expr x = *exact_quotient(multiples, g);
      return want_mod ? Expr(g) * simplify(mod(x, *c / g), ranges) + r : quotient + simplify(floordiv(x, *c / g), ranges);
    }
  }
  return want_mod ? mod(rest, b) : quotient + floordiv(rest, b);
}

// The remainders a mod c, with c a multiple of b, that e divides by b.
std::vector<Expr> divided_remainders(Expr e, Expr a, Expr b) {
  std::vector<Expr> found;
  for (const Term& term : terms_of(e))
    for (const Expr& atom : term.atoms) {
      if (atom.kind() != ExprKind::floordiv || atom.operands()[1] != b) continue;
      Expr m = atom.operands()[0];
      if (m.kind() != ExprKind::mod || !exact_quotient(m.operands()[1], b)) continue;
      const Expr apart = m.operands()[0] - a;
      if (apart.is(0) || (apart.is_constant() && exact_quotient(apart, b))) found.push_back(m);
    }
  return found;
}

/// Whether a symbol of a polynomial has a range of one value.
bool has_single_value(Expr e, const Ranges& ranges) {
  if (e.is_symbol()) {
    auto it = ranges.find(e.name());
    if (it == ranges.end() || !it->second.lo || !it->second.hi) return false;
    if (it->second.lo->is_constant() && it->second.hi->is_constant()) return *it->second.lo == *it->second.hi;
    const Interval r = Bounder(ranges).interval(e, 0);
    return r.lo && r.hi && *r.lo == *r.hi;
  }
  return std::any_of(e.operands().begin(), e.operands().end(), [&](const Expr& part) { return has_single_value(part, ranges); });
}

// The remainders in e of a, or of a and a constant.
std::vector<Expr> remainders_of(Expr e, Expr a) {
  std::vector<Expr> found;
  for (const Term& term : terms_of(e))
    for (const Expr& atom : term.atoms)
      if (atom.kind() == ExprKind::mod && (atom.operands()[0] - a).is_constant() && atom.operands()[1].is_constant() &&
          atom.operands()[1].value() > 0)
        found.push_back(atom);
  return found;
}

// k * (a mod b) + k*b * (a floordiv b) is k * a; it takes the place of the mod wherever that leaves fewer terms. So does
// k * (a mod b) + k*b * (((a + d * b) mod c) floordiv b), which is k * ((a + d * b) mod c) for multiples c of b, and k * (a mod b) + k*b * ((a
// floordiv b + d) mod c), which is k * ((a + b * d) mod (b * c)).
Expr recombine(Expr e) {
  auto is_mod = [](const Expr& x) { return x.kind() == ExprKind::mod; };
  auto holds_mod = [&](const Expr& t) {
    return is_mod(t) || (t.kind() == ExprKind::mul && std::any_of(t.operands().begin(), t.operands().end(), is_mod));
  };
  if (e.kind() != ExprKind::add || std::none_of(e.operands().begin(), e.operands().end(), holds_mod)) return e;
  auto terms = terms_of(e);
  for (const Term& term : terms) {
    for (size_t i = 0; i < term.atoms.size(); ++i) {
      if (term.atoms[i].kind() != ExprKind::mod) continue;
      Expr a = term.atoms[i].operands()[0];
      Expr b = term.atoms[i].operands()[1];
      Term rest{term.coefficient, term.atoms};
      rest.atoms.erase(rest.atoms.begin() + static_cast<long>(i));
      Expr k = from_terms({rest});
      Expr partner = k * b * floordiv(a, b);
      auto present = [&](Expr x) {
        auto parts = terms_of(x);
        return parts.size() == 1 && std::any_of(terms.begin(), terms.end(),
                                                [&](const Term& t) { return t.atoms == parts[0].atoms && t.coefficient == parts[0].coefficient; });
      };
      Expr without = e - from_terms({term}) - partner + k * a;
      if (present(partner) || terms_of(without).size() < terms.size()) return recombine(without);
      for (const Expr& m : divided_remainders(e, a, b))
        if (present(k * b * floordiv(m, b))) return recombine(e - from_terms({term}) - k * b * floordiv(m, b) + k * m);
      const Expr whole = floordiv(a, b);
      for (const Expr& m : remainders_of(e, whole))
        if (present(k * b * m))
          return recombine(e - from_terms({term}) - k * b * m + k * mod(a + b * (m.operands()[0] - whole), b * m.operands()[1]));
    }
  }
  return e;
}

}  // namespace

Interval bounds(Expr e, const Ranges& ranges) { return Bounder(ranges).interval(e, 0); }

bool provably_nonnegative(Expr e, const Ranges& ranges) {
  Interval r = Bounder(ranges).interval(e, 0);
  return r.lo && *r.lo >= 0;
}

std::optional<bool> decide(const Cond& cond, const Ranges& ranges) {
  Interval r = Bounder(ranges).interval(cond.expr, 0);
  bool never_zero = (r.lo && *r.lo > 0) || (r.hi && *r.hi < 0);
  bool always_zero = r.lo && r.hi && *r.lo == 0 && *r.hi == 0;
  switch (cond.kind) {
    case Cond::Kind::ge0:
      if (r.lo && *r.lo >= 0) return true;
      if (r.hi && *r.hi < 0) return false;
      return std::nullopt;
    case Cond::Kind::eq0:
      if (always_zero) return true;
      if (never_zero) return false;
      return std::nullopt;
    case Cond::Kind::ne0:
      if (never_zero) return true;
      if (always_zero) return false;
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<Expr> upper_bound(Expr e, const std::set<std::string>& eliminate, const Ranges& ranges) {
  for (size_t round = 0; round <= eliminate.size(); ++round) {
    bool left = false;
    for (const std::string& name : eliminate) left = left || uses(e, name);
    if (!left) return e;
    auto next = Bounder(ranges).eliminate_one(e, false, &eliminate, 0);
    if (!next) return std::nullopt;
    e = *next;
  }
  return std::nullopt;
}

Expr simplify(Expr e, const Ranges& ranges) {
  if (e.is_constant() || (e.node()->polynomial && !has_single_value(e, ranges))) return e;
  switch (e.kind()) {
    case ExprKind::constant:
    case ExprKind::symbol: break;
    case ExprKind::add: {
      std::vector<Term> terms;
      bool changed = false;
      for (const Expr& t : e.operands()) {
        Expr part = simplify(t, ranges);
        changed = changed || part != t;
        auto more = terms_of(part);
        terms.insert(terms.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
      }
      e = recombine(changed ? from_terms(std::move(terms)) : e);
      break;
    }
    case ExprKind::mul: {
      Expr result = 1;
      bool changed = false;
      for (const Expr& t : e.operands()) {
        Expr part = simplify(t, ranges);
        changed = changed || part != t;
        result = result * part;
      }
      if (changed) e = result;
      break;
    }
    case ExprKind::floordiv:
    case ExprKind::mod: {
      Expr a = simplify(e.operands()[0], ranges);
      Expr b = simplify(e.operands()[1], ranges);
      e = simplify_division(a, b, ranges, e.kind() == ExprKind::mod);
      break;
    }
    case ExprKind::min:
    case ExprKind::max: {
      Expr a = simplify(e.operands()[0], ranges);
      Expr b = simplify(e.operands()[1], ranges);
      bool is_min = e.kind() == ExprKind::min;
      if (provably_nonnegative(b - a, ranges))
        e = is_min ? a : b;
      else if (provably_nonnegative(a - b, ranges))
        e = is_min ? b : a;
      else
        e = is_min ? min(a, b) : max(a, b);
      break;
    }
  }
  // A symbol whose range is one value is that value.
  if (e.is_symbol()) {
    Interval r = bounds(e, ranges);
    if (r.lo && r.hi && *r.lo == *r.hi) return *r.lo;
  }
  return e;
}

namespace {

/// e with `f` applied to the operands of its atoms (of floordiv, mod, min and max), and then to it.
template <class F>
Expr rebuild(Expr e, const F& f) {
  switch (e.kind()) {
    case ExprKind::constant:
    case ExprKind::symbol: return f(e);
    case ExprKind::add:
    case ExprKind::mul: {
      Expr sum = 0;
      for (const Term& term : terms_of(e)) {
        Expr t = term.coefficient;
        for (const Expr& atom : term.atoms) t = t * rebuild(atom, f);
        sum = sum + t;
      }
      return f(sum);
    }
    case ExprKind::floordiv: return f(floordiv(rebuild(e.operands()[0], f), rebuild(e.operands()[1], f)));
    case ExprKind::mod: return f(mod(rebuild(e.operands()[0], f), rebuild(e.operands()[1], f)));
    case ExprKind::min: return f(min(rebuild(e.operands()[0], f), rebuild(e.operands()[1], f)));
    case ExprKind::max: return f(max(rebuild(e.operands()[0], f), rebuild(e.operands()[1], f)));
  }
  return e;
}

int64_t nodes_of(Expr e) {
  int64_t count = 1;
  for (const Expr& operand : e.operands()) count += nodes_of(operand);
  return count;
}

/// The term that is rewritten: the one with the largest atoms.
Term leading_term(Expr e) {
  Term best{0, {}};
  int64_t most = -1;
  for (const Term& term : terms_of(e)) {
    int64_t nodes = 0;
    for (const Expr& atom : term.atoms) nodes += nodes_of(atom);
    if (nodes <= most) continue;
    best = term;
    most = nodes;
  }
  return best;
}

constexpr int kMostRewrites = 64;

}  // namespace

Expr expand_mods(Expr e) {
  return rebuild(e, [](Expr x) {
    if (x.kind() != ExprKind::mod) return x;
    return x.operands()[0] - x.operands()[1] * floordiv(x.operands()[0], x.operands()[1]);
  });
}

Expr rewrite_by_facts(Expr e, const std::vector<Expr>& zeros) {
  if (zeros.empty()) return e;
  std::vector<std::pair<Expr, Expr>> rules;  // a leading term with a coefficient of at least 1, and its fact
  for (Expr zero : zeros) {
    Term lead = leading_term(zero);
    if (lead.atoms.empty()) continue;
    if (lead.coefficient < 0) {
      zero = Expr(0) - zero;
      lead.coefficient = -lead.coefficient;
    }
    rules.emplace_back(from_terms({lead}), zero);
  }
  return rebuild(e, [&](Expr x) {
    for (int round = 0; round < kMostRewrites; ++round) {
      Expr before = x;
      for (const auto& [lead, zero] : rules)
        for (const Term& term : terms_of(x))
          if (auto q = exact_quotient(from_terms({term}), lead)) {
            x = x - *q * zero;
            break;
          }
      if (x == before) break;
    }
    return x;
  });
}

Cond simplify(const Cond& cond, const Ranges& ranges) {
  const Expr e = simplify(cond.expr, ranges);
  const bool largest = e.kind() == ExprKind::max;
  if (cond.kind != Cond::Kind::ge0 || (!largest && e.kind() != ExprKind::min)) return {cond.kind, e};
  // Of a maximum one operand decides that is not negative, of a minimum one that is: those that are surely neither say nothing.
  std::optional<Expr> left;
  for (const Expr& operand : e.operands()) {
    const Cond alone{Cond::Kind::ge0, operand};
    if (decide(alone, ranges) == std::optional<bool>(!largest)) continue;
    left = !left ? operand : largest ? max(*left, operand) : min(*left, operand);
  }
  return {cond.kind, left.value_or(e)};
}

}  // namespace deplo
