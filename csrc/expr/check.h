#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/location.h"
#include "expr/expr.h"

namespace deplo {

// What verifiers and lowerings ask of sizes.

/// Throws InternalError if e divides by what is 0 for every value in the ranges.
void check_divisors(Expr e, const Ranges& ranges);
/// True if a divisor in e may be 0 under the ranges.
bool may_divide_by_zero(Expr e, const Ranges& ranges);

/// What the sizes of a call must fulfil, else it fails before anything ran: `check s0 - s1 != 0 else "integer division or modulo by zero"`.
struct SizeCheck {
  Cond cond;
  std::string error;
  Location location{};
  bool operator==(const SizeCheck&) const = default;
};
std::string print(const SizeCheck& check);
/// Reads what print() writes; call it only at `check`.
SizeCheck parse_size_check(Lexer& lexer);
/// Throws ExecutionError with the text of the first check that does not hold.
void run_size_checks(const std::vector<SizeCheck>& checks, const std::map<std::string, int64_t>& symbols);
/// Throws InternalError for a symbol without a range, or a division by what is always 0.
void verify(const SizeCheck& check, const Ranges& ranges);

/// Bytes of an array without gaps; UnsupportedError if a number in it does not fit in 64 bits.
Expr bytes_of(DType dtype, const std::vector<Expr>& shape);
/// The same from its first element to its last.
Expr bytes_of(DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides);

}  // namespace deplo
