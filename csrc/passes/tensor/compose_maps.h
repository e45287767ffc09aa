#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Makes views vanish: a map of a map reads the source of the latter, a map of an index expression is one, and a map that keeps fewer
/// elements than a single-use elementwise op computes moves to its operands: exp(neg(x))[5:8] computes 3 elements.
/// A map with guards is entered where the guards and fills of both can be joined. Indices and guards are simplified by the ranges.
/// Before: verified Tensor IR. After: a map reads another map only where guards or indirect coordinates forbid joining them.
tensor_ir::Graph compose_maps(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
