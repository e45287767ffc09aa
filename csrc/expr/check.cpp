#include "expr/check.h"

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

Expr bytes_of(DType dtype, const std::vector<Expr>& shape) { return product(shape) * Expr(size_of(dtype)); }

Expr bytes_of(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides) {
  Expr last = 0;
  for (size_t d = 0; d < shape.size(); ++d) last = last + (shape[d] - 1) * strides[d];
  return (last + 1) * Expr(size_of(dtype));
}

}  // namespace deplo
