#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Where windows of a product overlap over an image that is found at crooked places (enlarged by its nearest neighbours, reflected at its borders,
/// put together of parts), a kernel of its own computes the image, which windows then read where it lies. On CPUs, whose blocks pack what they
/// multiply: they would find each element again for each tap. Before: cleaned perfect nests. After: such products load that factor at sums of axes,
/// without guards: the image has its border around it.
loop_ir::Module keep_windows(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
