#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Marks kernels that depend on nothing but static inputs and constants as `once` steps and their results as packed buffers:
/// they run at the first call and again only when such an input changed.
/// Before: any Loop IR. After: every `once` step reads static inputs and packed buffers only, and uses no symbol.
loop_ir::Module hoist_static(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
