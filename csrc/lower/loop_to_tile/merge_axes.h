#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Merges neighbours (i, j) of the outer perfect nest into one axis of extent I*J where every access moves along i by J times its step
/// along j, and neither occurs in a guard, an index value or the extent of an inner loop. A 1x1 convolution so gets one axis of pixels.
loop_ir::Kernel merge_outer_axes(const loop_ir::Kernel& kernel);

/// The same for the axes of each reduction and of loops inside of the outer nest: the sum over an image's rows and columns runs along one axis.
loop_ir::Kernel merge_inner_axes(const loop_ir::Kernel& kernel);

/// The kernel with the last two of its outer axes as one, where memory goes on from row to row; what the last one does not move is then computed from
/// the place in all rows.
loop_ir::Kernel join_rows(const loop_ir::Kernel& kernel);

/// The kernel with the last two of its outer axes as one, where the last is short and stores go on from row to row: statements
/// alone, whose loads are computed from the place in all rows.
loop_ir::Kernel join_short_rows(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
