#pragma once

#include "base/context.h"
#include "kernel_ir/ir.h"
#include "loop_ir/ir.h"
#include "tensor_ir/ir.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Lifts each primitive to a perfect nest, one kernel per op that touches memory. No fusion. Afterwards every nest stores its results
/// at its free axes in order, which makes producer substitution exact.
loop_ir::Module lower_tensor_to_loop(const tensor_ir::Graph& graph, const PassContext& context);

/// Gives every kernel a schedule (the user's, or the heuristics' of the target) and applies it.
tile_ir::Module lower_loop_to_tile(const loop_ir::Module& module, const PassContext& context);

/// Expands lanes, reductions, tails and partitions into explicit vectors, masks and loops for the target's width.
kernel_ir::Module lower_tile_to_kernel(const tile_ir::Module& module, const PassContext& context);

}  // namespace deplo
