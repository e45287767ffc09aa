#include "expr/check.h"

#include <algorithm>

#include "base/error.h"

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

Expr bytes_of(DType dtype, const std::vector<Expr>& shape) { return product(shape) * Expr(size_of(dtype)); }

Expr bytes_of(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides) {
  Expr last = 0;
  for (size_t d = 0; d < shape.size(); ++d) last = last + (shape[d] - 1) * strides[d];
  return (last + 1) * Expr(size_of(dtype));
}

}  // namespace deplo
