#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Maps one kernel to GPU blocks and threads by one of four schedules, named in the result's `schedule`:
///   points       a thread per point of the outer axes, which runs everything inside
///   rows         a block per point of the outer axes; its threads share the loops and reductions inside through shared memory
///   contraction  64 x 64 outputs per block, 4 x 4 per thread in registers, operands staged through shared memory, k in steps of 16
///   serial       one thread, for stores that collide in order
/// Throws UnsupportedError when a local buffer does not fit in shared memory.
tile_ir::Kernel schedule_gpu(const loop_ir::Kernel& kernel, const PassContext& ctx);

}  // namespace deplo
