#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "target/cuda/schedule/codes.h"
#include "target/cuda/schedule/four_bits.h"
#include "target/cuda/schedule/matrix_tile.h"
#include "target/cuda/schedule/products.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_matrix: contractions of bf16 or f16 operands, of float32 rounded to tf32, or of bytes with sums of int32, on matrix units. A
/// block makes a tile of outputs, each warp a part of it, from tiles of the operands that a pipeline of asynchronous copies puts into shared memory,
/// several stages of k ahead.
///
/// Sums side by side in a thread are `lanes_` columns side by side where the columns' operand lies along k.
class GpuMatrix : public GpuProducts {
 public:
  explicit GpuMatrix(const loop_ir::Kernel& kernel);

  /// `hints`: example sizes; `arch`: of the device, which must have the instructions.
  bool fits(const std::string& arch) const;
  /// Whether operands are made of bytes, in registers or as the numbers that are multiplied.
  bool has_bytes() const { return fits_ && possible_ && (has_codes() || sum_type() == DType::i32); }
  /// Codes of the columns, a byte each.
  std::vector<Codes> codes() const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  struct Product {
    MatrixTile rows, columns;
  };
  struct Tiles {
    int64_t rows = 0, columns = 0, warp_rows = 0, warp_columns = 0, step = 0, stages = 0;
    int64_t split = 1;
  };

  void read(const Schedule& schedule);
  DType sum_type() const { return items_[0].reduce->dtypes[0]; }
  int64_t depth_of_step() const { return 2 * chunk_of(products_[0].rows.element()); }  ///< k that one instruction multiplies
  /// k that lie in as many bytes as so many elements of 16 bits: matrix units multiply as many bytes of k of any type.
  int64_t depth_of(int64_t step) const { return step * depth_of_step() / kMatrixDepth; }
  bool has_codes() const;
  bool has_halves() const;
  /// Steps of k that a stage of codes may have.
  bool takes_step(int64_t step) const;
  /// Of a thread, that factors of a stage's codes take.
  int64_t registers_of_factors(int64_t warp_columns, int64_t step) const;
  /// Whether so many parts of k are equal, and of whole steps.
  bool takes_split(int64_t split, int64_t step) const;
  /// Of the tiles of a stage.
  int64_t bytes_of(int64_t rows, int64_t columns, int64_t step) const;
  int64_t bytes_of_parts(int64_t split, int64_t rows, int64_t columns) const;
  double cost(const Tiles& tiles, double rows, double columns, double batch, double depth, const std::string& arch) const;

  tile_ir::Block stage(size_t product);
  TileCopy copy_of(size_t product, const MatrixTile& tile, Expr stage) const;
  bool is_pipelined(const MatrixTile& tile) const;
  tile_ir::Block multiply(size_t product, Expr stage, Expr steps);
  tile_ir::Block multiply_step(size_t product, Expr stage, Expr step);
  CodesAt codes_at(size_t product, const MatrixTile& tile, Expr stage, Expr first, int64_t step) const;
  tile_ir::Block load_factors_of(size_t product, Expr stage);
  tile_ir::Block combine();
  tile_ir::Block finish();
  Ref<tile_ir::Stmt> clear(const std::string& array);
  Ref<tile_ir::Stmt> per_thread(tile_ir::Block body) const;
  Expr thread_row() const;
  Expr thread_column() const;
  Expr lane() const { return mod(sym(thread_), kWarp); }
  /// Which part of k the thread's warp adds up, and the thread's number among those of the same part.
  Expr part() const { return split_ > 1 ? floordiv(sym(thread_), threads_ / split_) : Expr(0); }
  Expr thread_of_part() const { return split_ > 1 ? mod(sym(thread_), threads_ / split_) : sym(thread_); }
  Expr warp_row() const { return floordiv(floordiv(thread_of_part(), kWarp), warps_across_); }
  Expr warp_column() const { return mod(floordiv(thread_of_part(), kWarp), warps_across_); }
  /// Steps of k of a part.
  Expr steps_of(size_t product) const { return ceildiv(ceildiv(count(items_[product].k), step_), split_); }
  /// Where the part's stage lies in its operand's array, and in k.
  Expr begin_of(const MatrixTile& tile, Expr stage) const { return (part() * stages_ + mod(stage, stages_)) * tile.elements(); }
  Expr depth_of(size_t product, Expr stage) const { return (part() * steps_of(product) + stage) * step_; }
  int64_t wanted_lanes() const;
  static int64_t lanes_for(int64_t wanted, int64_t columns_of_warp);

  std::vector<Product> products_;  ///< of items_
  bool possible_ = false;

  std::string block_, thread_, row_, half_, group_, column_;  ///< names of the block's, the thread's and its sums' indices
  int64_t tile_rows_ = 0, tile_columns_ = 0, step_ = 0, stages_ = 0, raster_ = 0;
  int64_t warps_down_ = 0, warps_across_ = 0, threads_ = 0;
  int64_t split_ = 1;  ///< parts of k that warps of their own add up
  int64_t lanes_ = 2;
  Expr first_row_, first_column_;
  Substitution batch_map_;
};

}  // namespace deplo::loop_to_tile
