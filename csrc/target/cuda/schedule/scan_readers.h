#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Where a row of running results is read once, element by element, in order or backwards, by the loop behind its scan: the scan with that loop in
/// its `then`, and no row. Other kernels stay as they are.
loop_ir::Kernel join_scan_readers(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
