#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Names kernels after the torch ops that they implement, in their order: k3_rms_norm_linear_silu.
loop_ir::Module name_kernels(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
