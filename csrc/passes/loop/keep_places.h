#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Where attention reads keys and values at places that other integers give (caches in pages, by a table of blocks), a kernel before it computes and
/// checks the places, and keeps those in range: one for each key, or for each block of keys that lie together. Layers that read by the same integers
/// share them.
/// Before: fused kernels. After: kernels that sum values weighted by a softmax check no index.
loop_ir::Module keep_places(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
