#pragma once

#include <vector>

#include "torch_ir/ir.h"

namespace deplo::rules {

/// What is known of symbolic sizes in every call: the ranges of the symbols, expressions that are 0, and expressions that are not negative.
struct KnownSizes {
  Ranges ranges;
  std::vector<Expr> zeros;
  std::vector<Expr> nonnegative;
};
KnownSizes known_sizes(const torch_ir::Graph& graph);

/// The graph with every size, stride and integer argument in its simplest form, so that sizes which PyTorch wrote in different ways are one
/// expression wherever that can be proven.
torch_ir::Graph simplify_sizes(torch_ir::Graph graph, const KnownSizes& known);

/// e in its simplest form.
Expr simplify_size(Expr e, const KnownSizes& known);

/// What the sizes of a call must fulfil and may not: the graph's checks, sizes of results that are not negative, divisors that are not 0.
std::vector<SizeCheck> needed_checks(const torch_ir::Graph& graph, const KnownSizes& known);

/// True only if a and b are equal in every call.
bool provably_equal(Expr a, Expr b, const KnownSizes& known);
/// True only if e is not negative in any call.
bool provably_nonnegative(Expr e, const KnownSizes& known);

}  // namespace deplo::rules
