#pragma once

#include <string>

#include "base/context.h"
#include "torch_ir/ir.h"

namespace deplo::aten {

/// Torch IR that a person wrote, judged by PyTorch: runs every call on tensors without data and throws UserError `file:line:column: ...` where
/// PyTorch refuses the operands, or gives a result another dtype or shape than its type says. Symbols are of their hints, or of sizes that divide
/// well; what PyTorch refuses for such sizes alone is not judged, and neither are operators that cannot run without data.
void check_types(const torch_ir::Graph& graph, const std::string& file, const SizeHints& hints);

}  // namespace deplo::aten
