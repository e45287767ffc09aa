#pragma once

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// Replaces float32 applications of exp, log, tanh, erf, sin, pow and kin by their vector sequences (vector_math.h).
/// Before: verified Kernel IR. After: the only transcendental functions left are of other dtypes, or without a sequence;
/// codegen calls libm for those, lane by lane.
kernel_ir::Module expand_math(kernel_ir::Module module, const PassContext& ctx);

}  // namespace deplo
