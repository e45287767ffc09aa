#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/array.h"
#include "program_ir/interpret.h"
#include "torch_ir/ir.h"

namespace deplo::torch_ir {

/// The meaning of a graph: every node by `library` (ATen), but for the ops that read memory by strides, which an Array does not have.
/// `inputs` are in calling order, a symbol input as a 0-d i64 array; `symbols` may be empty where shapes determine them. Returns the
/// outputs (an integer as 0-d i64, None as an empty bool array), then every input that the graph writes, in calling order.
/// In exact mode conversions between float types are skipped.
std::vector<Array> interpret(const Graph& graph, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library);

}  // namespace deplo::torch_ir
