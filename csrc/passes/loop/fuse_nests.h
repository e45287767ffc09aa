#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Puts kernels under one nest where they can share outer axes: a consumer reads, along those axes, only what the same iteration of its
/// producer stored, or both read the same inputs. What only the kernel itself needs becomes a value or a `local` row buffer.
///
/// Softmax, norms and attention become one kernel each, contractions take their epilogues, and gated pairs of contractions share a
/// nest. Decided by cost: the shared axes must leave enough parallel work, and a contraction gives up an axis (its consumer needs
/// whole rows of it) only if the rows that stay in cache outweigh the operands that are read again for each block of rows.
/// What was decided of two kernels is not decided again for others of their shapes (FusionShapes): equal layers are fused once.
/// Before: cleaned perfect nests. After: kernels are perfect nests of shared axes over a body of inner loops, values and stores.
loop_ir::Module fuse_nests(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
