#pragma once

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// Two vectors that are stored to every other element of the same stretch of memory, one to the even and one to the odd places, become two stores of
/// whole vectors, as packing pairs of k needs it.
/// Before: verified Kernel IR. After: every element is written as before; a store moves down past statements that do not touch its places.
kernel_ir::Module merge_stores(kernel_ir::Module module, const PassContext& ctx);

}  // namespace deplo
