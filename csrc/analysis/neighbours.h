#pragma once

#include <cstdint>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::analysis {

/// Whether points `step` elements apart that reach `reach` elements each reach some of the same ones, or lie between each other's (pooling without
/// overlap), rather than in pieces of their own.
bool overlaps(int64_t step, int64_t reach);

/// Whether sums in a nest's body run over neighbours of its points: some load's index is a sum of multiples of a loop's axis and of a reduction's,
/// such that points side by side overlap (depthwise convolutions, pooling).
bool sums_neighbours(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body);

}  // namespace deplo::analysis
