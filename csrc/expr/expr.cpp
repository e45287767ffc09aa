#include "expr/expr.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/error.h"
#include "expr/named.h"
#include "expr/node.h"

namespace deplo {
namespace {

// Addresses and small numbers differ in a few bits: these reach all others.
size_t mixed(size_t h) {
  h *= 0x9E3779B97F4A7C15ULL;
  return h ^ (h >> 32);
}

struct NodeHash {
  size_t operator()(const ExprNode* n) const {
    size_t h = mixed(static_cast<size_t>(n->kind) + 16 * static_cast<size_t>(n->value));
    if (!n->name.empty()) h ^= std::hash<std::string>()(n->name);
    for (const Expr& e : n->operands) h = mixed(h + reinterpret_cast<size_t>(e.node()));
    return h;
  }
};

struct NodeEqual {
  bool operator()(const ExprNode* a, const ExprNode* b) const {
    return a->kind == b->kind && a->value == b->value && a->name == b->name && a->operands == b->operands;
  }
};

// Sharded so that compiling threads seldom meet. Nodes live as long as the process: they are few and small.
struct Table {
  std::mutex mutex;
  std::unordered_map<const ExprNode*, std::unique_ptr<ExprNode>, NodeHash, NodeEqual> nodes;
};

std::vector<Table>& tables() {
  static auto* shards = new std::vector<Table>(16);
  return *shards;
}

uint64_t bit_of(const std::string& symbol) { return uint64_t{1} << (std::hash<std::string>()(symbol) % 64); }

uint64_t bits_of(const ExprNode& node) {
  uint64_t bits = node.kind == ExprKind::symbol ? bit_of(node.name) : 0;
  for (const Expr& e : node.operands) bits |= e.node()->symbols;
  return bits;
}

bool is_polynomial(const ExprNode& node) {
  const bool here = node.kind == ExprKind::constant || node.kind == ExprKind::symbol || node.kind == ExprKind::add || node.kind == ExprKind::mul;
  return here && std::all_of(node.operands.begin(), node.operands.end(), [](const Expr& e) { return e.node()->polynomial; });
}

[[noreturn]] void too_large(int64_t a, char sign, int64_t b) {
  throw UnsupportedError(fmt::format("{} {} {} does not fit in 64 bits: sizes and indices must", a, sign, b));
}

int64_t plus(int64_t a, int64_t b) {
  int64_t r = 0;
  if (__builtin_add_overflow(a, b, &r)) too_large(a, '+', b);
  return r;
}

int64_t times(int64_t a, int64_t b) {
  int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r)) too_large(a, '*', b);
  return r;
}

/// Terms that one expression may have: products of sums grow fast.
constexpr size_t kMaxTerms = 4096;

bool atoms_less(const std::vector<Expr>& a, const std::vector<Expr>& b) {
  size_t n = std::min(a.size(), b.size());
  for (size_t i = 0; i < n; ++i)
    if (int c = compare(a[i], b[i])) return c < 0;
  return a.size() > b.size();  // constants (no atoms) last
}

Expr binary(ExprKind kind, Expr a, Expr b) { return intern({kind, 0, "", {a, b}}); }

}  // namespace

Expr intern(ExprNode node) {
  Table& table = tables()[NodeHash()(&node) % tables().size()];
  std::lock_guard lock(table.mutex);
  Expr e{};
  if (auto it = table.nodes.find(&node); it != table.nodes.end()) {
    e.node_ = it->first;
    return e;
  }
  node.symbols = bits_of(node);
  node.polynomial = is_polynomial(node);
  auto owned = std::make_unique<ExprNode>(std::move(node));
  e.node_ = owned.get();
  table.nodes.emplace(e.node_, std::move(owned));
  return e;
}

Expr::Expr() {
  static const auto* zero = new ExprNode{ExprKind::constant, 0, "", {}, 0, true};
  node_ = zero;
}

Expr::Expr(int64_t value) : Expr() {
  // The constants that most expressions have, found without a lock.
  static const auto* few = [] {
    auto* nodes = new std::array<const ExprNode*, 64>();
    for (size_t k = 1; k < nodes->size(); ++k) (*nodes)[k] = intern({ExprKind::constant, static_cast<int64_t>(k) - 16, "", {}}).node();
    return nodes;
  }();
  if (value == 0) return;
  if (value > -16 && value < 48)
    node_ = (*few)[static_cast<size_t>(value + 16)];
  else
    *this = intern({ExprKind::constant, value, "", {}});
}

Expr Expr::symbol(const std::string& name) { return intern({ExprKind::symbol, 0, name, {}}); }
ExprKind Expr::kind() const { return node_->kind; }
int64_t Expr::value() const { return node_->value; }
const std::string& Expr::name() const { return node_->name; }
const std::vector<Expr>& Expr::operands() const { return node_->operands; }

std::optional<int64_t> Expr::as_constant() const {
  if (!is_constant()) return std::nullopt;
  return value();
}

int compare(Expr a, Expr b) {
  if (a == b) return 0;
  if (a.kind() != b.kind()) {
    // Symbols first, constants last: the order in which people write terms.
    auto rank = [](ExprKind k) { return k == ExprKind::symbol ? 0 : k == ExprKind::constant ? 9 : static_cast<int>(k); };
    return rank(a.kind()) < rank(b.kind()) ? -1 : 1;
  }
  if (a.is_constant()) return a.value() < b.value() ? -1 : 1;
  if (a.is_symbol()) return a.name().compare(b.name()) < 0 ? -1 : 1;
  const auto& x = a.operands();
  const auto& y = b.operands();
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
    if (int c = compare(x[i], y[i])) return c;
  return x.size() < y.size() ? -1 : 1;
}

std::vector<Term> terms_of(Expr e) {
  auto one = [](Expr t) -> Term {
    if (t.is_constant()) return {t.value(), {}};
    if (t.kind() == ExprKind::mul) {
      Term term{1, {}};
      for (const Expr& factor : t.operands()) {
        if (factor.is_constant())
          term.coefficient = times(term.coefficient, factor.value());
        else
          term.atoms.push_back(factor);
      }
      return term;
    }
    return {1, {t}};
  };
  std::vector<Term> terms;
  terms.reserve(e.kind() == ExprKind::add ? e.operands().size() : 1);
  if (e.kind() == ExprKind::add)
    for (const Expr& t : e.operands()) terms.push_back(one(t));
  else if (!e.is(0))
    terms.push_back(one(e));
  return terms;
}

Expr atoms_product(const Term& term) { return from_terms({{1, term.atoms}}); }

Expr from_terms(std::vector<Term> terms) {
  std::sort(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return atoms_less(a.atoms, b.atoms); });
  std::vector<Term> merged;
  merged.reserve(terms.size());
  for (Term& term : terms) {
    if (!merged.empty() && merged.back().atoms == term.atoms)
      merged.back().coefficient = plus(merged.back().coefficient, term.coefficient);
    else
      merged.push_back(std::move(term));
  }
  std::vector<Expr> sum;
  sum.reserve(merged.size());
  for (const Term& term : merged) {
    if (term.coefficient == 0) continue;
    if (term.atoms.empty()) {
      sum.emplace_back(term.coefficient);
    } else if (term.atoms.size() == 1 && term.coefficient == 1) {
      sum.push_back(term.atoms[0]);
    } else {
      std::vector<Expr> factors = term.atoms;
      if (term.coefficient != 1) factors.emplace_back(term.coefficient);
      sum.push_back(intern({ExprKind::mul, 0, "", std::move(factors)}));
    }
  }
  if (sum.empty()) return 0;
  if (sum.size() == 1) return sum[0];
  return intern({ExprKind::add, 0, "", std::move(sum)});
}

Expr operator+(Expr a, Expr b) {
  if (a.is(0)) return b;
  if (b.is(0)) return a;
  auto terms = terms_of(a);
  auto others = terms_of(b);
  terms.insert(terms.end(), std::make_move_iterator(others.begin()), std::make_move_iterator(others.end()));
  return from_terms(std::move(terms));
}

Expr operator-(Expr a, Expr b) { return a + Expr(-1) * b; }

Expr operator*(Expr a, Expr b) {
  if (a.is(1)) return b;
  if (b.is(1)) return a;
  std::vector<Term> left = terms_of(a);
  std::vector<Term> right = terms_of(b);
  DEPLO_SUPPORT(left.size() * right.size() <= kMaxTerms, "an index expression has more than {} terms", kMaxTerms);
  std::vector<Term> terms;
  for (const Term& x : left) {
    for (const Term& y : right) {
      Term term{times(x.coefficient, y.coefficient), x.atoms};
      term.atoms.insert(term.atoms.end(), y.atoms.begin(), y.atoms.end());
      std::sort(term.atoms.begin(), term.atoms.end(), [](const Expr& p, const Expr& q) { return compare(p, q) < 0; });
      terms.push_back(std::move(term));
    }
  }
  return from_terms(std::move(terms));
}

namespace {

// Splits a into quotient * b + rest, taking every term that b divides exactly.
std::pair<Expr, Expr> divide_terms(Expr a, Expr b) {
  Expr quotient = 0;
  Expr rest = 0;
  for (const Term& term : terms_of(a)) {
    Expr t = from_terms({term});
    if (auto q = exact_quotient(t, b))
      quotient = quotient + *q;
    else if (auto c = b.as_constant(); c && term.atoms.empty()) {
      quotient = quotient + floor_divide(term.coefficient, *c);
      rest = rest + floor_mod(term.coefficient, *c);
    } else {
      rest = rest + t;
    }
  }
  return {quotient, rest};
}

}  // namespace

namespace {

/// True if every term but the constant has a negative coefficient, and there is one.
bool is_negative_sum(Expr e) {
  bool any = false;
  for (const Term& term : terms_of(e)) {
    if (term.atoms.empty()) continue;
    if (term.coefficient >= 0) return false;
    any = true;
  }
  return any;
}

/// True if no term has a positive coefficient: divisions by such a sum are written as those by its opposite.
bool is_minus(Expr e) {
  const std::vector<Term> terms = terms_of(e);
  return !terms.empty() && std::all_of(terms.begin(), terms.end(), [](const Term& term) { return term.coefficient < 0; });
}

/// e, of which only its remainder by c counts, with x in place of x % m in each term k*(x % m) where c divides k*m.
Expr without_inner_mods(Expr e, int64_t c) {
  for (const Term& term : terms_of(e)) {
    if (term.atoms.size() != 1 || term.atoms[0].kind() != ExprKind::mod) continue;
    auto m = term.atoms[0].operands()[1].as_constant();
    if (m && *m > 0 && times(floor_mod(term.coefficient, c), *m) % c == 0)
      e = e - from_terms({term}) + term.atoms[0].operands()[0] * term.coefficient;
  }
  return e;
}

}  // namespace

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) throw ExecutionError(fmt::format("ZeroDivisionError: {} // 0 in a size", a));
  if (b == -1) return times(a, -1);  // the only quotient that may not fit
  int64_t q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}

int64_t floor_mod(int64_t a, int64_t b) {
  if (b == 0) throw ExecutionError(fmt::format("ZeroDivisionError: {} % 0 in a size", a));
  if (b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}

Expr floordiv(Expr a, Expr b) {
  if (b.is(1) || a.is(0)) return a;
  DEPLO_ASSERT(!b.is(0), "floordiv of {} by zero", print(a));
  if (a.is_constant() && b.is_constant()) return floor_divide(a.value(), b.value());
  if (a == b) return 1;
  if (is_minus(b)) return floordiv(Expr(0) - a, Expr(0) - b);
  auto [quotient, rest] = divide_terms(a, b);
  if (rest.is(0)) return quotient;
  if (rest.kind() == ExprKind::floordiv && b.is_constant() && rest.operands()[1].is_constant())
    return quotient + floordiv(rest.operands()[0], rest.operands()[1] * b);
  if (rest.is_constant() && b.is_constant()) return quotient + floor_divide(rest.value(), b.value());
  // -x // c is -ceil(x / c): one form for both.
  if (auto c = b.as_constant(); c && *c > 1 && is_negative_sum(rest)) return quotient - floordiv(*c - 1 - rest, b);
  return quotient + binary(ExprKind::floordiv, rest, b);
}

Expr mod(Expr a, Expr b) {
  if (b.is(1) || a.is(0) || a == b) return 0;
  DEPLO_ASSERT(!b.is(0), "mod of {} by zero", print(a));
  if (a.is_constant() && b.is_constant()) return floor_mod(a.value(), b.value());
  if (is_minus(b)) return Expr(0) - mod(Expr(0) - a, Expr(0) - b);
  Expr rest = divide_terms(a, b).second;
  if (rest.is(0)) return 0;
  if (rest.is_constant() && b.is_constant()) return mod(rest, b);
  if (rest.kind() == ExprKind::mod && exact_quotient(rest.operands()[1], b)) return mod(rest.operands()[0], b);
  if (auto c = b.as_constant(); c && *c > 1)
    if (Expr whole = without_inner_mods(rest, *c); whole != rest) return mod(whole, b);
  return binary(ExprKind::mod, rest, b);
}

Expr min(Expr a, Expr b) {
  if (a == b) return a;
  if (auto c = (a - b).as_constant()) return *c <= 0 ? a : b;
  return compare(a, b) < 0 ? binary(ExprKind::min, a, b) : binary(ExprKind::min, b, a);
}

Expr max(Expr a, Expr b) {
  if (a == b) return a;
  if (auto c = (a - b).as_constant()) return *c >= 0 ? a : b;
  return compare(a, b) < 0 ? binary(ExprKind::max, a, b) : binary(ExprKind::max, b, a);
}

Expr ceildiv(Expr a, Expr b) { return floordiv(a + b - 1, b); }

Expr product(const std::vector<Expr>& factors) {
  Expr result = 1;
  for (const Expr& f : factors) result = result * f;
  return result;
}

Cond less(Expr a, Expr b) { return {Cond::Kind::ge0, b - a - 1}; }
Cond less_equal(Expr a, Expr b) { return {Cond::Kind::ge0, b - a}; }
Cond equal(Expr a, Expr b) { return {Cond::Kind::eq0, a - b}; }
Cond not_equal(Expr a, Expr b) { return {Cond::Kind::ne0, a - b}; }

Cond negated(const Cond& cond) {
  switch (cond.kind) {
    case Cond::Kind::ge0: return {Cond::Kind::ge0, Expr(-1) - cond.expr};
    case Cond::Kind::eq0: return {Cond::Kind::ne0, cond.expr};
    case Cond::Kind::ne0: break;
  }
  return {Cond::Kind::eq0, cond.expr};
}
Range axis_range(Expr extent) { return {Expr(0), extent - 1}; }

// An expression without any of the names is itself, found without building it anew.
Expr substitute(Expr e, const Substitution& values) {
  if (e.node()->symbols == 0 || values.empty()) return e;
  if (e.is_symbol()) {
    auto it = values.find(e.name());
    return it == values.end() ? e : it->second;
  }
  std::vector<Expr> operands;
  operands.reserve(e.operands().size());
  bool same = true;
  for (const Expr& operand : e.operands()) {
    operands.push_back(substitute(operand, values));
    same = same && operands.back() == operand;
  }
  if (same) return e;
  switch (e.kind()) {
    case ExprKind::constant:
    case ExprKind::symbol: break;
    case ExprKind::add: {
      std::vector<Term> terms;
      for (Expr operand : operands)
        for (Term& term : terms_of(operand)) terms.push_back(std::move(term));
      return from_terms(std::move(terms));
    }
    case ExprKind::mul: return product(operands);
    case ExprKind::floordiv: return floordiv(operands[0], operands[1]);
    case ExprKind::mod: return mod(operands[0], operands[1]);
    case ExprKind::min: return min(operands[0], operands[1]);
    case ExprKind::max: return max(operands[0], operands[1]);
  }
  return e;
}

Cond substitute(const Cond& cond, const Substitution& values) { return {cond.kind, substitute(cond.expr, values)}; }

namespace {

/// value_of(name) of each symbol.
template <class ValueOf>
int64_t value_of(const ExprNode& e, const ValueOf& value_of_symbol) {
  auto operand = [&](size_t i) { return value_of(*e.operands[i].node(), value_of_symbol); };
  switch (e.kind) {
    case ExprKind::constant: return e.value;
    case ExprKind::symbol: return value_of_symbol(e.name);
    case ExprKind::add: {
      int64_t sum = 0;
      for (size_t i = 0; i < e.operands.size(); ++i) sum = plus(sum, operand(i));
      return sum;
    }
    case ExprKind::mul: {
      int64_t result = 1;
      for (size_t i = 0; i < e.operands.size(); ++i) result = times(result, operand(i));
      return result;
    }
    case ExprKind::floordiv: return floor_divide(operand(0), operand(1));
    case ExprKind::mod: return floor_mod(operand(0), operand(1));
    case ExprKind::min: return std::min(operand(0), operand(1));
    case ExprKind::max: return std::max(operand(0), operand(1));
  }
  return 0;
}

bool holds(Cond::Kind kind, int64_t v) {
  switch (kind) {
    case Cond::Kind::ge0: return v >= 0;
    case Cond::Kind::eq0: return v == 0;
    case Cond::Kind::ne0: return v != 0;
  }
  return false;
}

}  // namespace

int64_t evaluate(Expr e, const std::map<std::string, int64_t>& values) {
  return value_of(*e.node(), [&](const std::string& name) {
    auto it = values.find(name);
    DEPLO_ASSERT(it != values.end(), "no value for symbol {}", name);
    return it->second;
  });
}

bool evaluate(const Cond& cond, const std::map<std::string, int64_t>& values) { return holds(cond.kind, evaluate(cond.expr, values)); }

int64_t evaluate(Expr e, const NamedIntegers& values) {
  return value_of(*e.node(), [&](const std::string& name) { return values.at(name); });
}

bool evaluate(const Cond& cond, const NamedIntegers& values) { return holds(cond.kind, evaluate(cond.expr, values)); }

void collect_symbols(Expr e, std::set<std::string>& symbols) {
  if (e.is_symbol()) symbols.insert(e.name());
  for (const Expr& t : e.operands()) collect_symbols(t, symbols);
}

std::set<std::string> symbols_of(Expr e) {
  std::set<std::string> symbols;
  collect_symbols(e, symbols);
  return symbols;
}

namespace {

bool uses(Expr e, const std::string& symbol, uint64_t bit) {
  if ((e.node()->symbols & bit) == 0) return false;
  if (e.is_symbol()) return e.name() == symbol;
  return std::any_of(e.operands().begin(), e.operands().end(), [&](const Expr& t) { return uses(t, symbol, bit); });
}

}  // namespace

bool uses(Expr e, const std::string& symbol) { return uses(e, symbol, bit_of(symbol)); }

std::optional<Expr> linear_coefficient(Expr e, const std::string& symbol) {
  if (!uses(e, symbol)) return 0;
  Expr coefficient = 0;
  for (const Term& term : terms_of(e)) {
    Term rest{term.coefficient, {}};
    int power = 0;
    for (const Expr& atom : term.atoms) {
      if (atom.is_symbol() && atom.name() == symbol)
        ++power;
      else if (uses(atom, symbol))
        return std::nullopt;
      else
        rest.atoms.push_back(atom);
    }
    if (power > 1) return std::nullopt;
    if (power == 1) coefficient = coefficient + from_terms({rest});
  }
  return coefficient;
}

std::optional<Expr> exact_quotient(Expr e, Expr divisor) {
  auto divisor_terms = terms_of(divisor);
  if (divisor_terms.size() != 1) return e == divisor ? std::optional<Expr>(1) : std::nullopt;
  const Term& d = divisor_terms[0];
  if (d.coefficient == 0) return std::nullopt;
  Expr quotient = 0;
  for (Term term : terms_of(e)) {
    if (floor_mod(term.coefficient, d.coefficient) != 0) return std::nullopt;
    term.coefficient = floor_divide(term.coefficient, d.coefficient);
    for (const Expr& atom : d.atoms) {
      auto it = std::find(term.atoms.begin(), term.atoms.end(), atom);
      if (it == term.atoms.end()) return std::nullopt;
      term.atoms.erase(it);
    }
    quotient = quotient + from_terms({term});
  }
  return quotient;
}

int64_t length_of(Expr e, int64_t most) {
  int64_t length = 1;
  if (e.is_constant() || e.is_symbol()) return length;
  for (const Expr& operand : e.operands()) {
    if (length >= most) break;
    length += length_of(operand, most - length);
  }
  return std::min(length, most);
}

}  // namespace deplo
