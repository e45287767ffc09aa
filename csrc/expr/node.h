#pragma once

#include <string>
#include <vector>

#include "expr/expr.h"

namespace deplo {

/// The shared node behind an Expr. Only expr/ builds nodes.
struct ExprNode {
  ExprKind kind = ExprKind::constant;
  int64_t value = 0;
  std::string name;
  std::vector<Expr> operands;
  uint64_t symbols = 0;     ///< a bit for each symbol in it; several symbols may share one. Set by intern
  bool polynomial = false;  ///< sums and products alone: no floordiv, mod, min or max in it. Set by intern
};

/// The unique node equal to `node`.
Expr intern(ExprNode node);

/// One term of a canonical sum: coefficient * product of sorted atoms (no atoms: a constant).
struct Term {
  int64_t coefficient = 0;
  std::vector<Expr> atoms;
};
std::vector<Term> terms_of(Expr e);
Expr from_terms(std::vector<Term> terms);
/// The product of a term's atoms, without its coefficient.
Expr atoms_product(const Term& term);

}  // namespace deplo
