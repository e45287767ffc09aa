#pragma once

#include <string>
#include <vector>

#include "target/cuda/schedule/matrix_tile.h"

namespace deplo::loop_to_tile {

/// What schedules share whose warps each make some rows of a block: a block of four threads holds a row of 8 columns of each matrix. Sums lie in
/// arrays [unit of 16 rows][half][group of 8 columns][2].
class WarpRows {
 protected:
  /// for unit, half, group, lane: body, over the thread's own places.
  Ref<tile_ir::Stmt> per_thread(int64_t groups, tile_ir::Block body) const;
  Ref<tile_ir::Stmt> per_row(tile_ir::Block body) const;
  Ref<tile_ir::Stmt> over_groups(int64_t groups, tile_ir::Block body) const;
  std::vector<Expr> place() const { return {sym("u"), sym("h"), sym("g"), sym("c")}; }
  std::string let(tile_ir::Block& into, Fn fn, std::vector<std::string> operands, DType dtype = DType::f32);
  std::string number(tile_ir::Block& into, double value);
  std::string load(tile_ir::Block& into, const std::string& array, std::vector<Expr> index);
  Ref<tile_ir::Stmt> clear(const std::string& array, int64_t groups);
  /// Matrices of the warp's rows of a tile that begins at 0, each unit of one 16 of k; their names.
  std::vector<std::string> load_rows(tile_ir::Block& into, const MatrixTile& rows, Expr depth);
  /// Adds to `sums` the products of the warp's rows of `rows`, which begin at 0, with all columns of `columns`, over `depth` of k. `loaded`: such
  /// matrices of all k, where they are there already.
  tile_ir::Block multiply(const std::string& sums, const MatrixTile& rows, const MatrixTile& columns, Expr begin, int64_t groups, int64_t depth,
                          const std::vector<std::vector<std::string>>& loaded = {});
  /// The same of rows that a thread holds as numbers: those of 16 columns are what it holds of a matrix.
  tile_ir::Block multiply_numbers(const std::string& sums, const std::string& numbers, const MatrixTile& columns, Expr begin, int64_t groups,
                                  int64_t depth);
  tile_ir::Block multiply_step(const std::string& sums, const std::vector<std::string>& rows, const MatrixTile& columns, Expr begin, int64_t groups,
                               Expr depth);
  Ref<tile_ir::Stmt> on_grid(const std::string& block, Expr blocks, tile_ir::Block body) const;

  Expr lane() const { return mod(sym(thread_y_), 8) * 4 + sym(thread_x_); }
  Expr warp() const { return floordiv(sym(thread_y_), 8); }
  Expr thread() const { return sym(thread_y_) * 4 + sym(thread_x_); }
  int64_t warp_rows() const { return rows_ / warps_; }
  int64_t units() const { return warp_rows() / kMatrixRows; }
  Expr row() const { return first_row_ + warp() * warp_rows() + sym("u") * kMatrixRows + sym("h") * 8 + mod(sym(thread_y_), 8); }
  Expr column() const { return sym("g") * kMatrixColumns + sym(thread_x_) * 2 + sym("c"); }
  static bool whole(Expr extent, int64_t tile) { return extent.is_constant() && extent.value() % tile == 0; }

  loop_ir::Names names_;
  int64_t rows_ = 0, warps_ = 0;  ///< of a block
  std::string thread_x_, thread_y_;
  Expr first_row_;
};

void append(tile_ir::Block& to, tile_ir::Block from);
Ref<tile_ir::Stmt> unroll(const std::string& name, int64_t trips, tile_ir::Block body);
Ref<tile_ir::Stmt> store_at(const std::string& array, std::vector<Expr> index, const std::string& value);

}  // namespace deplo::loop_to_tile
