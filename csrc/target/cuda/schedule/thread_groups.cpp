#include "target/cuda/schedule/thread_groups.h"

#include <fmt/format.h>

#include <tuple>
#include <utility>

#include "target/cuda/schedule/raster.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;

int64_t GpuThreadGroups::tile_of(ScheduleReader& reader, const std::string& axis, int64_t of, int64_t most) {
  const Directive* d = reader.find("tile", axis);
  if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", axis));
  reader.only(*d, {axis});
  const int64_t n = reader.number(*d, axis, of, most);
  if (n % of != 0) reader.fail(*d, fmt::format("allowed: multiples of {}", of));
  return n;
}

int64_t GpuThreadGroups::number_of(ScheduleReader& reader, const std::string& word, int64_t least, int64_t most) {
  const Directive& d = reader.one(word);
  reader.only(d, {""});
  return reader.number(d, "", least, most);
}

Expr GpuThreadGroups::begin_block(int64_t rows, int64_t columns) {
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
  half_ = names_.fresh("h");
  group_ = names_.fresh("g");
  column_ = names_.fresh("w");
  const Expr tiles = ceildiv(count(rows_), rows) * ceildiv(count(columns_), columns);
  std::tie(first_row_, first_column_) = raster_place(mod(sym(block_), tiles), count(rows_), count(columns_), rows, columns, raster_);
  batch_map_ = unflatten(batch_, floordiv(sym(block_), tiles));
  return tiles;
}

Ref<tile_ir::Stmt> GpuThreadGroups::over_outputs(int64_t columns, int64_t lanes, tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(column_, 0, lanes, LoopKind::lanes), std::move(body)})};
  inner = {make(tile_ir::For{axis(group_, 0, columns / (4 * lanes), LoopKind::unroll), std::move(inner)})};
  return make(tile_ir::For{axis(half_, 0, 2, LoopKind::unroll), std::move(inner)});
}

}  // namespace deplo::loop_to_tile
