#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Removes arithmetic that changes no bit of any result, NaN and -0 included: x * 1, x - 0, a double negation, a cast through a type
/// that holds every value of the first, a choice between equals, a lower bound of what becomes an integer and is not below it; divides by powers of
/// two as products. Before: verified Tensor IR. After: none of these is left.
tensor_ir::Graph simplify_algebra(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
