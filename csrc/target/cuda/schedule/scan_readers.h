#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Where a row of running results is read once, element by element, in order or backwards, by the loop behind its scan: the scan with that loop in
/// its `then`, and no row. Other kernels stay as they are.
loop_ir::Kernel join_scan_readers(const loop_ir::Kernel& kernel);

/// A running product of what was float64 before, which stays infinite or 0 once it has left float64's range: parts of it do not tell whether it has.
bool is_product_of_doubles(const loop_ir::Stmt& stmt);

}  // namespace deplo::loop_to_tile
