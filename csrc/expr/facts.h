#pragma once

#include <vector>

#include "expr/expr.h"

namespace deplo {

/// Every a % b as a - b * (a // b): sums that are equal then cancel more often.
Expr expand_mods(Expr e);
/// e where each of `zeros` is known to be 0: its term with the largest atoms is replaced by what it equals.
Expr rewrite_by_facts(Expr e, const std::vector<Expr>& zeros);

}  // namespace deplo
