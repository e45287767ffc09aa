#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Puts kernels that sum over neighbours (a blur of a blur, pooling of pooling, depthwise convolutions in a row) under the nest of the axes that they
/// have in common, with what flows between them as local arrays. A kernel joins the only one that reads its result, if that reads neighbours in it,
/// and if the target makes of both what takes less time than they do apart (`Target::chains`): it computes again what tiles share.
/// Before: layouts are chosen. After: arrays that vanished are locals, their dimensions in the order of memory.
loop_ir::Module chain_windows(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
