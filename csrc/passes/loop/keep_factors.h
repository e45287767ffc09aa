#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Where the target would multiply point by point because of how a factor of a product of matrices is found (at places that other numbers say, put
/// together of parts, through functions), a kernel of its own computes the factor, and its checks, and keeps it in the dtype that it was found in.
/// Products that fusion will make a part of something multiplied in tiles (attention over pages of a cache) stay as they are. Before: cleaned perfect
/// nests. After: such products load that factor at an element for each of its axes.
loop_ir::Module keep_factors(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
