#pragma once

#include <string>

#include "target/cuda/schedule/products.h"

namespace deplo::loop_to_tile {

/// Products of tiles whose sums lie in groups of 128 threads: each thread has two halves of groups of columns side by side.
class GpuThreadGroups : public GpuProducts {
 protected:
  using GpuProducts::GpuProducts;

  /// What a schedule says a tile is along an axis: a multiple of `of` up to `most`.
  static int64_t tile_of(ScheduleReader& reader, const std::string& axis, int64_t of, int64_t most);
  /// The number of a directive that has nothing else.
  static int64_t number_of(ScheduleReader& reader, const std::string& word, int64_t least, int64_t most);
  /// Names the block's indices and finds its tile, for tiles of so many rows and columns; how many tiles a batch has.
  Expr begin_block(int64_t rows, int64_t columns);
  /// for half, group, lane: body, over a thread's own outputs of `columns` columns, `lanes` side by side.
  Ref<tile_ir::Stmt> over_outputs(int64_t columns, int64_t lanes, tile_ir::Block body) const;

  int64_t raster_ = 0;
  std::string block_, thread_, half_, group_, column_;
  Expr first_row_, first_column_;
  Substitution batch_map_;
};

}  // namespace deplo::loop_to_tile
