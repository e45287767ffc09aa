#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Removes ops whose results nothing reads. Library ops stay: they may draw random numbers or have effects.
/// Before: verified Tensor IR. After: every other op is read by an op, a write or an output.
tensor_ir::Graph eliminate_dead_code(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
