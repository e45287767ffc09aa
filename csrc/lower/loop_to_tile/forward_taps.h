#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Turns reduce axes of constant extent around whose taps run against the axes that they are added to: the gradient of a convolution's input reads
/// x[i - k + 1], and a window slides over x[i + k'] with k' = K - 1 - k. Sums add the same products, in another order. Axes that run both ways in
/// some loads, or stand in no index beside an outer axis, stay as they are.
loop_ir::Kernel with_forward_taps(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
