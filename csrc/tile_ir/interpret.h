#pragma once

#include <map>
#include <string>
#include <vector>

#include "program_ir/interpret.h"
#include "tile_ir/ir.h"

namespace deplo::tile_ir {

/// Runs one kernel sequentially as its schedule says: tiles, staging through allocs, the threads of a GPU block in step between barriers.
/// Throws IndexError (failed check), UserError (division by zero, failed assertion).
void interpret(const Kernel& kernel, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& symbols, Mode mode);

/// Runs a module; see deplo::interpret for inputs and results.
std::vector<Array> interpret(const Module& module, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library = no_library());

}  // namespace deplo::tile_ir
