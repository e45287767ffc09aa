#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Keeps a temporary whose elements are a widening cast of something narrower as that: an integer product's operand in bytes, a float32 copy of
/// bfloat16 numbers in 16 bits. The cast moves to the readers. Less memory travels, and contractions see what instructions for narrow operands need.
///
/// Happens only if one kernel writes the buffer as a whole, all its stores cast from one dtype, and the cast loses nothing.
/// Before: fused kernels. After: the same with narrower buffers between them.
loop_ir::Module narrow_buffers(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
