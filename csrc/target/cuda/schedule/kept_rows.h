#pragma once

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// The kernel without the rows that its loops keep for later ones, where those can compute each element again from what they load: rows too long for
/// registers. A row that is stored in part, that a scan makes, or that follows from what the kernel stores, stays.
loop_ir::Kernel without_kept_rows(const loop_ir::Kernel& kernel);

/// The kernel with rows of its own for what one of its loops stores and later ones read again element by element (a residual sum, then its norm): a
/// thread finds such elements in its registers, whoever stored them.
loop_ir::Kernel with_kept_stores(const loop_ir::Kernel& kernel);

}  // namespace deplo::loop_to_tile
