#pragma once

#include <optional>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/schedule.h"
#include "tile_ir/ir.h"

namespace deplo {

/// Proposes a schedule of kind `rows` for a kernel whose rows (the innermost shared axis) hold contractions between other statements, as attention
/// does: a block of rows runs each statement for all its rows before the next, so that a contraction sees a matrix of rows. Locals and values that
/// cross from one such phase to another become scratch arrays over the block, which is sized to stay in the second-level cache.
/// Nothing if no contraction in the rows can be scheduled so.
std::optional<Schedule> propose_cpu_rows(const loop_ir::Kernel& kernel, const PassContext& ctx);
/// Throws UserError where the schedule does not fit the kernel.
/// Whether such a schedule multiplies the factors of all sums of products in blocks.
bool cpu_rows_take_all(const loop_ir::Kernel& kernel, const PassContext& ctx);

tile_ir::Kernel apply_cpu_rows(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx);

}  // namespace deplo
