#pragma once

#include <string>

#include "target/cuda/schedule/matrix_tile.h"

namespace deplo::loop_to_tile {

/// A tile of numbers that are rounded to tf32 where matrices are loaded from it, or made of its numbers: `load_matrix` reads what lies along k, all
/// else is loaded number by number, from lines so far apart that a warp's numbers lie in different banks.
MatrixTile with_numbers(MatrixTile tile, const std::string& name, const std::string& next);

/// Where a warp's matrices lie in a tile.
struct MatrixPlace {
  Expr lane;          ///< of the thread
  Expr begin;         ///< of the tile in its array
  Expr first, depth;  ///< the first row or column of 16, and the first k of 8
};

/// 16 rows, or 16 columns, of 8 k of a tile whose lines are rows or columns side by side, as matrix `name`.
tile_ir::Block load_numbers(const MatrixTile& tile, const MatrixPlace& place, const std::string& name, loop_ir::Names& names);

}  // namespace deplo::loop_to_tile
