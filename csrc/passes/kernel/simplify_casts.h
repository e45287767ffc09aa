#pragma once

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// Whole numbers that bytes or a mask hold, constants, their sums, differences and products go through casts to narrower floats unchanged where these
/// have as many bits: what reads such a cast reads the number itself. A value that is rounded to bf16 only to be multiplied by another bf16 number in
/// a multiply-add becomes `narrow`, an instruction of some CPUs, for which subnormals may count as 0 as they may in `dot2`.
/// Before: verified Kernel IR. After: the same values, but for such subnormals.
kernel_ir::Module simplify_casts(kernel_ir::Module module, const PassContext& ctx);

}  // namespace deplo
