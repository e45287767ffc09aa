#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Whether a kernel sums values weighted by a softmax in which some keys never count.
bool has_masked_keys(const loop_ir::Kernel& kernel);

/// Where a kernel sums values weighted by a softmax (`analysis/weighted_sum.h`), its loops over keys end, and begin, where masks say that no further
/// key counts; the extents then use axes and i64 values of the outer nest. Nothing is read of the keys left out, or of their values. Any other kernel
/// stays as it is.
loop_ir::Kernel without_masked_keys(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
