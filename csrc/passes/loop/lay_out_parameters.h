#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Copies a static input that a kernel would read across its lanes, so that the copy's last dimension lies along them: the weights of a depthwise
/// convolution whose channels lie next to each other in the image. The lanes run along the axis that lies along most other accesses. Operands of
/// contractions are left out, for their schedules pack them.
/// Before: fused kernels. After: the copies are kernels of their own that read nothing but static inputs, for hoist_static.
loop_ir::Module lay_out_parameters(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
