#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Schedules a kernel without packed contractions for a CPU: outer axes that touch memory in step are merged, the axis along which
/// most accesses are contiguous gets the vector lanes, what remains outside runs in parallel, reductions keep several accumulators.
/// Axes along which stores may collide stay serial, in order.
tile_ir::Kernel schedule_cpu_nest(const loop_ir::Kernel& kernel, const PassContext& ctx);

}  // namespace deplo
