#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace deplo {

class Lexer;
struct ExprNode;

// Integer index expressions and symbolic sizes.
//
// Semantics: values are mathematical integers that fit in 64 bits. floordiv and mod are Python's for every sign of both operands (rounding
// toward minus infinity, the sign of the divisor) wherever they are evaluated, folded, bounded or compiled. A divisor is never 0 where an
// expression is evaluated (a size of 0 means that no point is evaluated): on the host such a size fails as in eager mode. A symbol is a size
// (s0), a loop axis (i) or an SSA integer value (v3); which of them it is, and its range, is known to the IR that uses it, not to the expression.
//
// Expressions are hash-consed and canonical: sums of products with sorted terms, constants folded, so that equal
// expressions are one object and == compares pointers. Building and comparing is thread-safe.

enum class ExprKind : uint8_t { constant, symbol, add, mul, floordiv, mod, min, max };

class Expr {
 public:
  Expr();                                                 ///< 0
  Expr(int64_t value);                                    // NOLINT(google-explicit-constructor): integers are expressions
  Expr(int value) : Expr(static_cast<int64_t>(value)) {}  // NOLINT(google-explicit-constructor)
  static Expr symbol(const std::string& name);

  ExprKind kind() const;
  int64_t value() const;            ///< of a constant
  const std::string& name() const;  ///< of a symbol
  const std::vector<Expr>& operands() const;
  bool is_constant() const { return kind() == ExprKind::constant; }
  bool is_symbol() const { return kind() == ExprKind::symbol; }
  bool is(int64_t constant) const { return is_constant() && value() == constant; }
  std::optional<int64_t> as_constant() const;

  bool operator==(const Expr& other) const { return node_ == other.node_; }
  bool operator!=(const Expr& other) const { return node_ != other.node_; }
  /// Address of the unique node; for hash tables only, never for an order that reaches output.
  const ExprNode* node() const { return node_; }

 private:
  friend Expr intern(ExprNode node);
  const ExprNode* node_;
};

/// Of integers, as floordiv and mod of expressions: rounding down; ExecutionError for a divisor of 0, as eager mode's.
int64_t floor_divide(int64_t a, int64_t b);
int64_t floor_mod(int64_t a, int64_t b);

/// Arithmetic folds constants: UnsupportedError where a result does not fit in 64 bits.
Expr operator+(Expr a, Expr b);
Expr operator-(Expr a, Expr b);
Expr operator*(Expr a, Expr b);
Expr floordiv(Expr a, Expr b);
Expr mod(Expr a, Expr b);
Expr min(Expr a, Expr b);
Expr max(Expr a, Expr b);
/// ceil(a / b) for positive b.
Expr ceildiv(Expr a, Expr b);
Expr product(const std::vector<Expr>& factors);

/// A total structural order, the same in every process.
int compare(Expr a, Expr b);

/// One condition of a guard; a guard is a conjunction.
struct Cond {
  enum class Kind : uint8_t { ge0, eq0, ne0 };
  Kind kind = Kind::ge0;
  Expr expr;  ///< compared with zero
  bool operator==(const Cond&) const = default;
};
Cond less(Expr a, Expr b);        ///< a < b
Cond less_equal(Expr a, Expr b);  ///< a <= b
Cond equal(Expr a, Expr b);
Cond not_equal(Expr a, Expr b);
/// Holds where the other does not.
Cond negated(const Cond& cond);

/// Inclusive bounds of a symbol, themselves expressions; a missing bound is infinite.
struct Range {
  std::optional<Expr> lo;
  std::optional<Expr> hi;
  bool operator==(const Range&) const = default;
};
using Ranges = std::map<std::string, Range>;
/// The range [0, extent - 1] of a loop axis.
Range axis_range(Expr extent);

struct Interval {
  std::optional<int64_t> lo;
  std::optional<int64_t> hi;
};

using Substitution = std::map<std::string, Expr>;

Expr substitute(Expr e, const Substitution& values);
Cond substitute(const Cond& cond, const Substitution& values);
/// Uses the ranges to remove floordiv, mod, min and max where they are provably trivial.
Expr simplify(Expr e, const Ranges& ranges);
Cond simplify(const Cond& cond, const Ranges& ranges);
/// Numeric bounds of e.
Interval bounds(Expr e, const Ranges& ranges);
/// True only if proven for every value in the ranges.
bool provably_nonnegative(Expr e, const Ranges& ranges);
/// true / false when decided by the ranges, nothing otherwise.
std::optional<bool> decide(const Cond& cond, const Ranges& ranges);
/// A symbolic upper bound of e with the symbols in `eliminate` replaced by their extremes; nothing if e is not monotone in one.
std::optional<Expr> upper_bound(Expr e, const std::set<std::string>& eliminate, const Ranges& ranges);

/// Throws InternalError naming a symbol that has no value.
int64_t evaluate(Expr e, const std::map<std::string, int64_t>& values);
bool evaluate(const Cond& cond, const std::map<std::string, int64_t>& values);

void collect_symbols(Expr e, std::set<std::string>& symbols);
std::set<std::string> symbols_of(Expr e);
bool uses(Expr e, const std::string& symbol);
/// c with e == c * symbol + rest and neither using the symbol; nothing if e is not linear in it.
std::optional<Expr> linear_coefficient(Expr e, const std::string& symbol);
/// e / divisor when the division is exact term by term (constants and symbols), else nothing.
std::optional<Expr> exact_quotient(Expr e, Expr divisor);

std::string print(Expr e);
std::string print(const Cond& cond);
std::string print(const std::vector<Cond>& guard);  ///< "a >= 0 and b == 0"
/// Reads what print() writes; also `a < b`, `<=`, `>`, `!=` for conditions.
Expr parse_expr(Lexer& lexer);
Cond parse_cond(Lexer& lexer);
std::vector<Cond> parse_guard(Lexer& lexer);
Expr parse_expr(const std::string& text);

}  // namespace deplo

template <>
struct std::hash<deplo::Expr> {
  size_t operator()(const deplo::Expr& e) const { return std::hash<const void*>()(e.node()); }
};
