#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/schedule.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Proposes a schedule of kind `nest` for a kernel without packed contractions for a CPU: outer axes that touch memory in step are merged, the axis
/// along which most accesses are contiguous gets the vector lanes, what remains outside runs in parallel, reductions keep several accumulators. Axes
/// along which stores may collide stay serial, in order.
Schedule propose_cpu_nest(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// Any kernel has schedules of this kind. Throws UserError where this one does not fit.
tile_ir::Kernel apply_cpu_nest(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx);

}  // namespace deplo
