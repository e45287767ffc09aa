#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Keeps a temporary whose elements follow from something narrower as that: an integer product's operand in bytes, a float32 copy of bfloat16 numbers
/// in 16 bits, a number that was quantised as its byte. What makes the wider value of it (a cast, a zero point, a scale) moves to the readers. Less
/// memory travels, and contractions see what instructions for narrow operands need.
///
/// Happens only if one kernel writes the buffer as a whole, and all its stores cast from one dtype without a loss, or compute the same few steps with
/// constants from bytes; and if what guarded loads give where their guard fails is a value of the narrower buffer's, too.
/// Before: fused kernels. After: the same with narrower buffers between them.
loop_ir::Module narrow_buffers(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
