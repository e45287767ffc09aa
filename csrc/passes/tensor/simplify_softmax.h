#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Softmaxes as attention with sinks writes them, in the form that other passes know.
/// A softmax of numbers whose own maximum was subtracted, and maybe rounded, is that of the numbers: one maximum, and no rounding, is enough.
/// Where one number is concatenated to those of an axis, and what is computed of all of them is reduced along that axis or read but for one part, the
/// parts are computed and reduced by themselves, and their reductions combined.
/// Rows of weights that are zeros where nothing was left of them are summed as a softmax, and their results chosen instead.
/// Before: Tensor IR with composed maps. After: such softmaxes have one maximum, and such concatenations are gone.
tensor_ir::Graph simplify_softmax(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
