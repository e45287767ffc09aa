#pragma once

#include <optional>
#include <vector>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/schedule.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Proposes a schedule of kind `online` for a kernel that sums values weighted by the softmax of scores, both by contractions, for rows of which
/// neither keys nor values depend (`analysis/weighted_sum.h`). Keys and values are packed once for many rows, block by block of keys; for each block
/// of rows the scores of a block of keys are computed, exponentiated and multiplied with the values while they are in cache, and what was summed
/// before is scaled when the maximum grows. Blocks of keys whose scores are -inf for all of the rows, by guards that are affine in row and key, are
/// left out: nothing is read of such keys or values, whatever they hold. Few rows read keys and values where they lie (`direct`), a block of rows at
/// a time. Nothing if the kernel is not of this form, or has few rows and memory runs another way.
std::optional<Schedule> propose_cpu_online(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// The schedule of another version of such a kernel, and the sizes at which it is the better one.
struct FewRows {
  Schedule schedule;
  std::vector<Cond> when;
};
/// Where the number of rows differs from call to call and the schedule is one for many: that for few.
std::optional<FewRows> propose_cpu_online_few(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// Throws UserError where the schedule does not fit the kernel.
tile_ir::Kernel apply_cpu_online(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx);
/// Into how many parts the keys of such a kernel are worth cutting for the threads of a call; 1: none.
int64_t cpu_key_parts(const loop_ir::Kernel& kernel, const PassContext& ctx);

}  // namespace deplo
