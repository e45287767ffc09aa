#pragma once

#include <vector>

#include "torch_ir/ir.h"

namespace deplo::rules {

/// A call of a `_foreach` overload as the calls of the same operator of single tensors that it stands for, one per result; empty for every
/// other call, and for overloads without such an operator.
std::vector<torch_ir::Node> single_calls(const torch_ir::Node& node);

}  // namespace deplo::rules
