#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Moves the dimension innermost that lies along the lanes of the kernels which access a buffer: of temporaries, and of copies of static inputs that
/// a kernel would read across its lanes (the weights of a depthwise convolution whose channels lie next to each other in the image). The lanes of
/// a kernel are taken to run along the axis along which most of the memory lies that its other accesses move over. Operands of contractions are left
/// out, as schedules pack them, but for one that changes from call to call, is read many times, and has no long axis along its memory: blocks would
/// gather it again and again (the weights in the gradient of a convolution's input), so a copy has an axis of the result innermost.
/// Before: fused kernels. After: the copies are kernels of their own; those of static inputs
/// read nothing else, for hoist_static.
loop_ir::Module choose_layouts(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
