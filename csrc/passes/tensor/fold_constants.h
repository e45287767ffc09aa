#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Evaluates ops whose operands are the same literal everywhere, and turns casts and maps of index expressions into index
/// expressions. Results are rounded as the op would. An integer division by zero stays, to raise its error at run time.
/// Before: verified Tensor IR. After: no op but a reduction, scan or scatter reads constants alone.
tensor_ir::Graph fold_constants(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
