#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/array.h"
#include "program_ir/interpret.h"
#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {

/// The meaning of a graph: every op over whole arrays. `inputs` are in calling order, a symbol input as a 0-d i64 array; `symbols` may be
/// empty where shapes determine them. Returns the outputs (an integer as 0-d i64, None as an empty bool array), then every
/// input that the graph writes, in calling order. Throws IndexError, and UserError for an integer division by zero.
std::vector<Array> interpret(const Graph& graph, const std::vector<Array>& inputs, const std::map<std::string, int64_t>& symbols, Mode mode,
                             const LibraryCall& library = no_library());

/// The value of one op other than library, given its operands. `symbols` gives every symbol a value.
std::vector<Array> evaluate_op(const Op& op, const std::map<std::string, const Array*>& operands, const std::map<std::string, int64_t>& symbols,
                               Mode mode);

}  // namespace deplo::tensor_ir
