#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Makes views vanish: a map of a map reads the source of the latter, a map of an index expression is one, and where the maps that read an
/// elementwise op keep, all together, fewer elements than it computes, they move to its operands: exp(neg(x))[5:8] computes 3 elements. Parts
/// that make up the whole (split) stay behind it.
/// A scatter over a view that a map puts back to its places in what is viewed becomes a scatter into that, and old values put back where they
/// were are dropped: an update through views changes the whole in place.
/// Parts that are never read, for one before them holds wherever they do, are gone.
/// A map with guards is entered where the guards and fills of both can be joined. Indices and guards are simplified by the ranges.
/// Before: verified Tensor IR. After: a map reads another map only where guards or indirect coordinates forbid joining them, or
/// where it is a concatenation of three parts or more that several values are computed from, some by products: each would choose among the
/// parts again. A slice of one part reads that part all the same.
tensor_ir::Graph compose_maps(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
