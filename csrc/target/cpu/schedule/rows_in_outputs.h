#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Lets a local be the row of an output that each iteration of the outer nest stores last, element by element from the same elements of the local: a
/// softmax keeps its exponentials where their quotients will be. The row so comes into the cache while they are computed, not when it is stored.
loop_ir::Kernel rows_in_outputs(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
