#include "target/cuda/schedule/warp_rows.h"

#include <iterator>

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;

void append(tile_ir::Block& to, tile_ir::Block from) { std::move(from.begin(), from.end(), std::back_inserter(to)); }

Ref<tile_ir::Stmt> unroll(const std::string& name, int64_t trips, tile_ir::Block body) {
  return make(tile_ir::For{axis(name, 0, trips, LoopKind::unroll), std::move(body)});
}

Ref<tile_ir::Stmt> store_at(const std::string& array, std::vector<Expr> index, const std::string& value) {
  return make(tile_ir::Store{array, std::move(index), value, {}, Combiner::set});
}

std::string WarpRows::let(tile_ir::Block& into, Fn fn, std::vector<std::string> operands, DType dtype) {
  const std::string name = names_.fresh("w");
  into.push_back(make(tile_ir::Let{name, dtype, fn, std::move(operands), {}, 0}));
  return name;
}

std::string WarpRows::number(tile_ir::Block& into, double value) {
  const std::string name = names_.fresh("n");
  into.push_back(make(tile_ir::Let{name, DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, value), 0}));
  return name;
}

std::string WarpRows::load(tile_ir::Block& into, const std::string& array, std::vector<Expr> index) {
  const std::string name = names_.fresh("x");
  into.push_back(make(tile_ir::Load{name, DType::f32, array, std::move(index), {}, {}}));
  return name;
}

Ref<tile_ir::Stmt> WarpRows::over_groups(int64_t groups, tile_ir::Block body) const {
  return unroll("g", groups, {make(tile_ir::For{axis("c", 0, 2, LoopKind::lanes), std::move(body)})});
}

Ref<tile_ir::Stmt> WarpRows::per_row(tile_ir::Block body) const { return unroll("u", units(), {unroll("h", 2, std::move(body))}); }

Ref<tile_ir::Stmt> WarpRows::per_thread(int64_t groups, tile_ir::Block body) const { return per_row({over_groups(groups, std::move(body))}); }

Ref<tile_ir::Stmt> WarpRows::clear(const std::string& array, int64_t groups) {
  tile_ir::Block zero;
  const std::string none = number(zero, 0);
  zero.push_back(store_at(array, place(), none));
  return per_thread(groups, std::move(zero));
}

Ref<tile_ir::Stmt> WarpRows::on_grid(const std::string& block, Expr blocks, tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(thread_x_, 0, 4, LoopKind::thread_x), std::move(body)})};
  inner = {make(tile_ir::For{axis(thread_y_, 0, warps_ * 8, LoopKind::thread_y), std::move(inner)})};
  return make(tile_ir::For{axis(block, 0, blocks, LoopKind::block_x), std::move(inner)});
}

std::vector<std::string> WarpRows::load_rows(tile_ir::Block& into, const MatrixTile& rows, Expr depth) {
  std::vector<std::string> matrices;
  for (int64_t unit = 0; unit < units(); ++unit) {
    matrices.push_back(names_.fresh("qm"));
    const Expr row = rows.row_of_matrix(lane(), 0, warp() * warp_rows() + unit * kMatrixRows, depth);
    into.push_back(make(tile_ir::LoadMatrix{matrices.back(), rows.dtype, rows.tile, {row}, 4, !rows.along_k}));
  }
  return matrices;
}

tile_ir::Block WarpRows::multiply(const std::string& sums, const MatrixTile& rows, const MatrixTile& columns, Expr begin, int64_t groups,
                                  int64_t depth, const std::vector<std::vector<std::string>>& loaded) {
  tile_ir::Block body;
  if (!loaded.empty()) {
    for (size_t step = 0; step < loaded.size(); ++step)
      append(body, multiply_step(sums, loaded[step], columns, begin, groups, static_cast<int64_t>(step) * kMatrixDepth));
    return body;
  }
  const std::string k = names_.fresh("kk");
  const Expr at = sym(k) * kMatrixDepth;
  const std::vector<std::string> matrices = load_rows(body, rows, at);
  append(body, multiply_step(sums, matrices, columns, begin, groups, at));
  return {unroll(k, depth / kMatrixDepth, std::move(body))};
}

tile_ir::Block WarpRows::multiply_numbers(const std::string& sums, const std::string& numbers, const MatrixTile& columns, Expr begin, int64_t groups,
                                          int64_t depth) {
  const std::string k = names_.fresh("kv");
  tile_ir::Block body;
  std::vector<std::string> rows;
  for (int64_t unit = 0; unit < units(); ++unit) {
    rows.push_back(names_.fresh("wm"));
    tile_ir::JoinMatrix join{rows.back(), columns.dtype, numbers, {}};
    for (int64_t deeper : {0, 1})
      for (int64_t half : {0, 1}) join.places.push_back({unit, half, sym(k) * 2 + deeper, 0});
    body.push_back(make(std::move(join)));
  }
  append(body, multiply_step(sums, rows, columns, begin, groups, sym(k) * kMatrixDepth));
  return {unroll(k, depth / kMatrixDepth, std::move(body))};
}

/// 16 of k.
tile_ir::Block WarpRows::multiply_step(const std::string& sums, const std::vector<std::string>& rows, const MatrixTile& columns, Expr begin,
                                       int64_t groups, Expr depth) {
  tile_ir::Block body;
  for (int64_t pair = 0; pair < groups / 2; ++pair) {
    const std::string loaded = names_.fresh(columns.along_k ? "km" : "vm");
    const Expr row = columns.row_of_matrix(lane(), begin, pair * 2 * kMatrixColumns, depth);
    body.push_back(make(tile_ir::LoadMatrix{loaded, columns.dtype, columns.tile, {row}, 4, !columns.along_k}));
    for (int64_t unit = 0; unit < units(); ++unit)
      for (int64_t half : {0, 1})
        body.push_back(make(tile_ir::Mma{
            sums, {unit, 0, pair * 2 + half, 0}, {unit, 1, pair * 2 + half, 0}, rows[static_cast<size_t>(unit)], loaded, static_cast<int>(half)}));
  }
  return body;
}

}  // namespace deplo::loop_to_tile
