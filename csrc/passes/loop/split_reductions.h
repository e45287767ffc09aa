#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Makes two kernels of a long reduction with too few results to keep cores busy: one reduces chunks of the longest outer reduce
/// axis, which run in parallel, the other reduces their partial results. Chunks depend on shapes alone, so results do not depend
/// on the number of threads; they also bound the length of each chain of additions. Likewise contractions of few tiles and a long k, if
/// neither operand is packed once. On a grid sums down columns are cut sooner than those along rows; which of the two a sum of temporaries is follows
/// from what these are made of (LikelyLines).
/// Before: kernels that reduce are a nest around one reduction, as lowering made them.
loop_ir::Module split_reductions(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
