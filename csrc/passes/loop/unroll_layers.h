#pragma once

#include <optional>

#include "loop_ir/ir.h"
#include "torch_ir/rolled.h"

namespace deplo {

/// The module of all layers, of what the passes made of the graph that `roll_layers` kept: steps of the third layer that is kept stand for those of
/// each layer that was left out. Nothing if those of the second and of the third differ in more than what a layer has for itself, or layers are
/// joined otherwise than by values that they pass to the next one: then the whole graph is to be compiled. Before: steps call kernels of their own,
/// whose parameters are named as the steps' buffers.
std::optional<loop_ir::Module> unroll_layers(const loop_ir::Module& module, const torch_ir::Rolled& rolled);

}  // namespace deplo
