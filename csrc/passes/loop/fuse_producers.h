#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Substitutes pointwise producers and index maps into the kernels that read them, where that saves more traffic than it recomputes.
///
/// A producer that stores v[i...] = f(i...) without reduction can stand wherever v[g(j...)] is loaded, with i := g(j...); guards
/// combine. It happens for all readers of v or for none, so that v disappears. Decided by cost, while a kernel has room (kMostStatements): pure index
/// maps always; anything whose elements are each computed about once; cheap functions when they are read several times, if the reads of the
/// producer's own operands do not multiply; a wider copy of what stays in memory anyway; prologues of contractions only when nearly free, a
/// concatenation of three parts or more not at all where others read it, too. A reduction is never recomputed.
/// Before: every kernel is a perfect nest that stores at its axes in order. After: the same holds.
loop_ir::Module fuse_producers(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
