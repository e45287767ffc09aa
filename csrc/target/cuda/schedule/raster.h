#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "expr/expr.h"

namespace deplo::loop_to_tile {

/// The first row and column of a block's tile. Blocks go down `raster` rows of tiles, then to the next column: those that run at the same time read
/// few different tiles of both operands.
inline std::pair<Expr, Expr> raster_place(Expr block, Expr rows, Expr columns, int64_t tile_rows, int64_t tile_columns, int64_t raster) {
  const Expr down = ceildiv(rows, tile_rows);
  const Expr across = ceildiv(columns, tile_columns);
  const Expr in_raster = across * raster;
  const Expr first = floordiv(block, in_raster) * raster;
  const bool whole = down.is_constant() && (down.value() % raster == 0 || down.value() < raster);
  const Expr high = whole ? Expr(std::min(down.value(), raster)) : min(down - first, raster);
  const Expr inside = mod(block, in_raster);
  return {(first + mod(inside, high)) * tile_rows, floordiv(inside, high) * tile_columns};
}

}  // namespace deplo::loop_to_tile
