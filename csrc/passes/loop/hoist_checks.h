#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Moves checks that do not depend on a loop in front of it, once for all of its iterations, and lets the loads in it that they guard read the
/// nearest place in range without a guard: what they read where a check fails is no result. Matrices that an index chose are then read as others.
/// Before: fused kernels. After: a loop that surely runs holds no check of values from outside of it; the outermost nest stays perfect.
loop_ir::Module hoist_checks(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
