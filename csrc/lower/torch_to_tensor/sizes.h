#pragma once

#include "torch_ir/ir.h"

namespace deplo::rules {

/// The graph with every size, stride and integer argument in its simplest form under the ranges, so that sizes which PyTorch wrote in different ways
/// are one expression wherever that can be proven.
torch_ir::Graph simplify_sizes(torch_ir::Graph graph);

/// e in its simplest form.
Expr simplify_size(Expr e, const Ranges& ranges);

/// True only if a and b are equal for every value in the ranges.
bool provably_equal(Expr a, Expr b, const Ranges& ranges);

}  // namespace deplo::rules
