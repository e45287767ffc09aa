#pragma once

#include <functional>
#include <string>

#include "passes/loop/share_axes.h"

namespace deplo {

/// Finishes the body of a fused kernel: merges inner loops over equal axes where no dependence runs between their iterations, forwards
/// stored values to later loads of the same place, and turns buffers that only this kernel uses (`is_private`) into values or `local`
/// row buffers without the shared axes.
/// `buffer` gives dtype and shape of a program buffer.
loop_ir::Block localize(const NestGroup& group, const std::function<bool(const std::string&)>& is_private,
                        const std::function<const Buffer&(const std::string&)>& buffer, const Ranges& symbols);

/// The first half of it: what stands in the shared axes, cleaned, with loops merged and stored values forwarded. `ranges`: of symbols and shared
/// axes.
loop_ir::Block merge_loops(const loop_ir::Block& body, const Ranges& ranges);

}  // namespace deplo
