#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "loop_ir/ir.h"
#include "tile_ir/ir.h"

namespace deplo::loop_to_tile {

/// A kernel in which dimensions of images through which memory runs in one step are one: a few channels that lie last, and the points of a row
/// before them. Rows of windows are then side by side, whatever they are called.
struct MergedKernel {
  /// Of a parameter: the dimension that took another one in, which is gone, and how many elements that one had.
  struct Dimensions {
    size_t outer = 0, inner = 0;
    int64_t elements = 1;
  };

  explicit MergedKernel(const loop_ir::Kernel& given);

  /// The statements with all dimensions of the given kernel's parameters.
  tile_ir::Block apart(const tile_ir::Block& block) const;

  loop_ir::Kernel merged;
  std::map<std::string, Dimensions> dimensions;  ///< by parameter
};

}  // namespace deplo::loop_to_tile
