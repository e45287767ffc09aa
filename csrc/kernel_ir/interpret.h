#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "program_ir/interpret.h"

namespace deplo::kernel_ir {

/// Runs every piece of one kernel, one after another: thread 0 .. chunks - 1 on a CPU, each block's threads in step between barriers on a GPU.
/// Vectors may have any number of lanes. `buffers` are the parameters' memory as flat arrays, whose offset 0 is the pointer's base. An access
/// outside a buffer that a mask does not switch off is an InternalError. Exact mode is for kernels before expand_math, whose sequences
/// depend on float32 rounding. Throws IndexError (index out of range), ExecutionError (division by zero, failed assertion).
void interpret(const Kernel& kernel, const std::vector<Array*>& buffers, const std::map<std::string, int64_t>& symbols, Mode mode);

/// Runs a module, laying each array out in memory by its buffer's strides; see deplo::interpret for inputs and results.
std::vector<Array> interpret(const Module& module, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library = no_library());

}  // namespace deplo::kernel_ir
