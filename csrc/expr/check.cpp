#include "expr/check.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace deplo {

void check_divisors(Expr e, const Ranges& ranges) {
  if (e.is_constant() || e.is_symbol()) return;
  for (const Expr& operand : e.operands()) check_divisors(operand, ranges);
  if (e.kind() != ExprKind::floordiv && e.kind() != ExprKind::mod) return;
  const Expr divisor = e.operands()[1];
  if (!divisor.is_constant() && decide(equal(divisor, 0), ranges) == std::optional<bool>(true))
    throw InternalError(fmt::format("{} divides by {}, which is 0", print(e), print(divisor)));
}

bool may_divide_by_zero(Expr e, const Ranges& ranges) {
  if (e.kind() == ExprKind::floordiv || e.kind() == ExprKind::mod) {
    const Interval divisor = bounds(e.operands()[1], ranges);
    if (!(divisor.lo && *divisor.lo > 0) && !(divisor.hi && *divisor.hi < 0)) return true;
  }
  return std::any_of(e.operands().begin(), e.operands().end(), [&](Expr operand) { return may_divide_by_zero(operand, ranges); });
}

std::string print(const SizeCheck& check) { return fmt::format("check {} else {}", print(check.cond), quote(check.error)); }

SizeCheck parse_size_check(Lexer& lexer) {
  SizeCheck check;
  check.location = lexer.peek().location();
  lexer.expect("check");
  check.cond = parse_cond(lexer);
  lexer.expect("else");
  check.error = lexer.quoted("the error's text");
  return check;
}

void run_size_checks(const std::vector<SizeCheck>& checks, const std::map<std::string, int64_t>& symbols) {
  for (const SizeCheck& check : checks)
    if (!evaluate(check.cond, symbols)) throw ExecutionError(check.error);
}

void verify(const SizeCheck& check, const Ranges& ranges) {
  located(check.location, [&] {
    for (const std::string& symbol : symbols_of(check.cond.expr))
      DEPLO_ASSERT(ranges.count(symbol), "check {} asks for the symbol {}, which has no range", print(check.cond), symbol);
    check_divisors(check.cond.expr, ranges);
  });
}

Expr bytes_of(DType dtype, const std::vector<Expr>& shape) { return product(shape) * Expr(size_of(dtype)); }

Expr bytes_of(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides) {
  Expr last = 0;
  for (size_t d = 0; d < shape.size(); ++d) last = last + (shape[d] - 1) * strides[d];
  return (last + 1) * Expr(size_of(dtype));
}

}  // namespace deplo
