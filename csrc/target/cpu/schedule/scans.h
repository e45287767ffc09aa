#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Takes what a scan does to its elements before and after it out of it where that takes long: a scan runs one element at a time, the loops that are
/// made of the rest have lanes. Values cross in rows.
loop_ir::Kernel take_out_of_scans(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
