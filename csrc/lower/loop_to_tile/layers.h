#pragma once

#include <set>
#include <string>

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

// What schedulers ask of layers: products with weights.

constexpr const char* kOnlyRow = "row_of_one";  ///< the axis of a layer's only row

/// Params that are bound to static inputs, or to what `once` steps made, at every call of the kernel.
std::set<std::string> static_params(const loop_ir::Module& module, const loop_ir::Kernel& kernel);
/// Whether a param is a static input of the program, whose elements can be looked at, at every call of the kernel.
bool holds_inputs(const loop_ir::Module& module, const loop_ir::Kernel& kernel, const std::string& param);

/// Gives the only row of a layer back its axis: that of extent 1 of a buffer that is not static. Unchanged where there is another row, or no such
/// buffer.
loop_ir::Kernel with_row(const loop_ir::Kernel& kernel, const std::set<std::string>& statics);

}  // namespace deplo::loop_to_tile
