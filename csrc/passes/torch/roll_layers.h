#pragma once

#include <optional>

#include "torch_ir/rolled.h"

namespace deplo {

/// The graph without most of its equal layers, for the passes to work on; `unroll_layers` puts the layers back. Layers are stretches of calls of one
/// length that differ in the inputs that each has for itself, and in reading the layer before. Nothing where there are too few of them.
std::optional<torch_ir::Rolled> roll_layers(const torch_ir::Graph& graph);

}  // namespace deplo
