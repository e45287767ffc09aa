#pragma once

#include <vector>

#include "schedule/tuned.h"

namespace deplo {

/// Schedules of a GPU's kernel that differ from `base` in one decision each: a tile with the warps, groups or threads that share it, stages,
/// rows of a block, and so on. Not all of them fit the kernel. `wide`: numbers farther off as well. No sum has a longer chain than `proposals` give
/// it: threads that share a row, or a column's rows, are never fewer.
std::vector<Direction> gpu_directions(const Schedule& base, const std::vector<Schedule>& proposals, bool wide);

}  // namespace deplo
