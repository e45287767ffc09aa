#pragma once

#include <set>
#include <string>

#include "base/context.h"
#include "loop_ir/build.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Replaces an axis x that occurs in x // k or x % k, where k divides its extent, by x0*k + x1, so that coordinates become affine:
/// heads and features of a reshaped operand, groups of query heads. Loops and reduce axes alike. Rows and keys of attention, and of chains of
/// products, stay whole: schedules take blocks of them.
/// Before: cleaned kernels. After: floordiv and mod remain only where no split removes them.
loop_ir::Module split_axes(loop_ir::Module module, const PassContext& context);
/// The same of one kernel's body, whose names are in `names`; axes in `whole` stay.
loop_ir::Block split_axes_of(loop_ir::Block body, const Ranges& symbols, loop_ir::Names& names, const std::set<std::string>& whole = {});

}  // namespace deplo
