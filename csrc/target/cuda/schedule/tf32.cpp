#include "target/cuda/schedule/tf32.h"

namespace deplo::loop_to_tile {

namespace {

constexpr int64_t kQuarter = 4;  // k of a matrix of 8 rows
constexpr int64_t kApart = 8;    // numbers: four lines side by side are then in different banks, eight numbers each

}  // namespace

MatrixTile with_numbers(MatrixTile tile, const std::string& name, const std::string& next) {
  tile.tile = name;
  tile.next = next;
  if (!tile.along_k) {
    tile.alike = 0;
    tile.apart = kApart;
  }
  return tile;
}

tile_ir::Block load_numbers(const MatrixTile& tile, const MatrixPlace& place, const std::string& name, loop_ir::Names& names) {
  const std::string own = names.fresh("own");
  tile_ir::Block out{make(tile_ir::Alloc{own, DType::f32, {4, 1}, tile_ir::Space::reg})};
  tile_ir::JoinMatrix join{name, DType::f32, own, {}};
  const Expr row = floordiv(place.lane, kQuarter);
  const Expr k = mod(place.lane, kQuarter);
  for (int64_t matrix = 0; matrix < 4; ++matrix) {
    // Rows go down before they go on along k, columns the other way.
    const int64_t next = tile.of_rows ? matrix % 2 : matrix / 2;
    const int64_t deeper = tile.of_rows ? matrix / 2 : matrix % 2;
    const std::string number = names.fresh("x");
    const Expr at = place.begin + (place.depth + deeper * kQuarter + k) * tile.line + place.first + next * 8 + row;
    out.push_back(make(tile_ir::Load{number, DType::f32, tile.tile, {at}, {}, {}}));
    out.push_back(make(tile_ir::Store{own, {matrix, 0}, number, {}, Combiner::set}));
    join.places.push_back({matrix, 0});
  }
  out.push_back(make(std::move(join)));
  return out;
}

}  // namespace deplo::loop_to_tile
