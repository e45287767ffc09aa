#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// A temporary that a kernel copies, element by element in the same order, to another buffer (a clone that is kept for a gradient, beside the layer
/// that reads the original) is that buffer: its writer stores there, its readers read there, and nothing is copied. Not where places in the
/// other buffer would be quotients.
/// Before: cleaned kernels, those of copies perfect nests.
loop_ir::Module forward_copies(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
