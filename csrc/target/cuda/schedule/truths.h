#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// With reductions of truths (any, all) as those of int32 numbers, which threads share.
loop_ir::Kernel with_counted_truths(loop_ir::Kernel kernel);

}  // namespace deplo::loop_to_tile
