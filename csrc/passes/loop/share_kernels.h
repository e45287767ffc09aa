#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Gives parameters, axes, values and locals canonical names, and lets steps whose kernels are then equal call one kernel: the layers
/// of a network are scheduled and compiled once. Which torch ops a kernel implements is no part of its identity.
loop_ir::Module share_kernels(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
