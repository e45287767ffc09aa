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

/// Nodes of an expression for a place in memory: views of sizes that nothing is known of compose to what grows by their product.
constexpr int64_t kLongestPlace = 250;
/// How many nodes the expression would have if no two shared one, at most `most`.
int64_t length_of(Expr e, int64_t most);

}  // namespace deplo
