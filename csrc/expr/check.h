#pragma once

#include <vector>

#include "base/dtype.h"
#include "expr/expr.h"

namespace deplo {

// What verifiers and lowerings ask of sizes.

/// Throws InternalError if e divides by what is 0 for every value in the ranges.
void check_divisors(Expr e, const Ranges& ranges);
/// True if a divisor in e may be 0 under the ranges.
bool may_divide_by_zero(Expr e, const Ranges& ranges);
/// Bytes of an array without gaps; UnsupportedError if a number in it does not fit in 64 bits.
Expr bytes_of(DType dtype, const std::vector<Expr>& shape);
/// The same from its first element to its last.
Expr bytes_of(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides);

}  // namespace deplo
