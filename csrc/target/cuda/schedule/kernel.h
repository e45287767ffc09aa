#pragma once

#include <string>
#include <vector>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/schedule.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Proposes how to map one kernel to GPU blocks and threads:
///   gpu_points       a thread per point of the outer axes, which runs everything inside
///   gpu_rows         a block per point of the outer axes; its threads share the loops and reductions inside through shared memory
///   gpu_contraction  64 x 64 outputs per block, 4 x 4 per thread in registers, operands staged through shared memory, k in steps of 16
///   gpu_matrix       the same of bf16 or f16 operands, or of bytes, on matrix units, operands copied several stages of k ahead
///   gpu_taps         products of a window of few taps with weights, on matrix units, both in shared memory as a whole
///   gpu_tiles        the same by groups of threads that multiply tiles which a warp copies by tensor maps, on sm_90a
///   gpu_stencil      a tile of points that reach their neighbours, which are copied to shared memory
///   gpu_stencils     the same of neighbours that the kernel itself makes, tile by tile, in shared memory
///   gpu_serial       one thread, for stores that collide in order
/// Local buffers of rows lie in shared memory where their size is a constant that fits, else in scratch memory of the block. A thread's own
/// lie on its stack if they are small, else in its part of the block's scratch memory.
Schedule propose_gpu(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// Schedules of all forms that may be as fast, that one first: what searches begin with.
std::vector<Schedule> propose_gpu_forms(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// The architecture that schedules are for.
std::string gpu_arch(const PassContext& ctx);
/// As `Target::key_parts`.
int64_t gpu_key_parts(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// As `Target::chains`.
bool gpu_chains(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// As `Target::multiplies`.
bool gpu_multiplies(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// Throws UserError where the schedule does not fit.
tile_ir::Kernel apply_gpu(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx);

}  // namespace deplo
