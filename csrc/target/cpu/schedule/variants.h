#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/tuned.h"

namespace deplo {

/// Sizes of a kernel's loops by axis, with the hints' sizes.
using Extents = std::map<std::string, int64_t>;
Extents extents_of(const loop_ir::Kernel& kernel, const PassContext& ctx);

/// The longest path of additions to each sum that a schedule forms tile by tile, by the name of its axes, in additions: chains, then their sums in a
/// tile of it, then those of the tiles. The error of the sum is bounded by as many roundings.
std::map<std::string, int64_t> longest_sums(const Schedule& schedule, const Extents& extents);

/// Schedules that differ from `base` in one decision each, and whose sums are no longer than `longest`; not all of them fit the kernel. `wide`: all
/// that may be worth a try.
std::vector<Direction> cpu_directions(const Schedule& base, const Extents& extents, const std::map<std::string, int64_t>& longest, bool wide,
                                      const PassContext& ctx);

}  // namespace deplo
