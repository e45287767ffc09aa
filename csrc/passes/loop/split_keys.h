#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Makes two kernels of a sum of values weighted by a softmax (`analysis/weighted_sum.h`) with few rows and many keys, where a grid of blocks would
/// else be too small (`Target::key_parts`): one sums parts of the keys relative to their own greatest scores, with weights rounded as their
/// operands of 16 bits are, the other combines the parts and does what followed. The number of parts is a constant, so results do not depend on the
/// device that runs them. Before: fusion is done. After: the first kernel is such a sum as well, and `analysis::key_part` finds its part.
loop_ir::Module split_keys(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
