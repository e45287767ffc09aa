#pragma once

#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tile_ir/interpret.h"
#include "tile_ir/ir.h"

namespace deplo {

using Sizes = std::map<std::string, int64_t>;
/// Changes the random arguments of a kernel, in the order of its parameters.
using Prepare = std::function<void(std::vector<Array>&)>;

/// Runs the compiled kernel, its arguments between borders that nothing may touch. The error word.
int run_native(const tile_ir::Kernel& tile, const std::vector<Array*>& arguments, const Sizes& sizes, int vector_bytes, int threads);

Array filled(DType dtype, std::vector<int64_t> shape, std::mt19937& rng);

/// Requires that `got` is about as near to `exact`, computed in float64, as `wanted` is.
void same(const Array& wanted, const Array& exact, const Array& got, const std::string& name);

std::vector<Array*> pointers(std::vector<Array>& arrays);

/// The Tile interpreter and the compiled Kernel IR agree at every vector width and number of threads.
void agree(const std::string& text, const Sizes& sizes = {}, const Prepare& prepare = {});

}  // namespace deplo
