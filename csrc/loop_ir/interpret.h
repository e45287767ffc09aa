#pragma once

#include <map>
#include <string>
#include <vector>

#include "loop_ir/ir.h"
#include "program_ir/interpret.h"

namespace deplo::loop_ir {

/// Runs one kernel over the arrays bound to its parameters. Throws IndexError (failed check), UserError (division by zero, failed assertion).
void interpret(const Kernel& kernel, const std::vector<Array*>& arguments, const std::map<std::string, int64_t>& symbols, Mode mode);

/// Runs a module; see deplo::interpret for inputs and results.
std::vector<Array> interpret(const Module& module, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library = no_library());

}  // namespace deplo::loop_ir
