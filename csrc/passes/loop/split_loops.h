#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Splits innermost loops where guards turn (index-set splitting, as `split_index_set` does between kernels): a loop over both halves of a rotation,
/// whose every place computes one half and chooses the other, becomes a loop over each. Parts of one length that read the same elements are one loop
/// again, with a store for each part, and join the loops in front of them that now run over as much. On CPUs an axis each point of which is another
/// part (a stack of many) is gone: a store for each of them, instead of choosing among all at every point. Before: fused kernels. After: parts are at
/// least a vector long; the outermost nest stays perfect.
loop_ir::Module split_loops(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
