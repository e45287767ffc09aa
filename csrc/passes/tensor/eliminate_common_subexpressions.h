#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Lets equal ops be computed once. Library ops stay apart, and so do outputs: each has memory of its own.
/// Before: verified Tensor IR. After: no two ops (but those) differ in their names alone.
tensor_ir::Graph eliminate_common_subexpressions(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
