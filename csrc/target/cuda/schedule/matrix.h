#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "target/cuda/schedule/products.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_matrix: contractions of bf16 or f16 operands on matrix units. A block makes a tile of outputs, each warp a part of it, from
/// tiles of the operands that a pipeline of asynchronous copies puts into shared memory, several stages of k ahead.
///
/// A line of a tile is `step` elements of k, or, of an operand along whose rows or columns memory runs, the tile's rows or columns at one k. Its
/// chunks of 16 bytes are rotated by the line, so that eight lines at one chunk, which are what a matrix is loaded from, lie in different banks. Sums
/// side by side in a thread are `lanes_` columns side by side where the columns' operand lies along k: the lines of its tile are then given to the
/// matrix unit in that order.
class GpuMatrix : public GpuProducts {
 public:
  explicit GpuMatrix(const loop_ir::Kernel& kernel);

  /// `hints`: example sizes; `arch`: of the device, which must have the instructions.
  bool fits(const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  /// What becomes of an operand.
  struct Source {
    DType dtype = DType::f32;               ///< of its elements before they were widened for the product
    std::string value;                      ///< the name of such an element
    loop_ir::Block slice;                   ///< statements that compute it
    const loop_ir::Load* copied = nullptr;  ///< the only statement, if it can be copied 16 bytes at a time
    size_t dimension = 0;                   ///< of its buffer along which memory runs
    bool along_k = true;
    bool of_rows = true;
    std::string tile, next;
    int64_t line = 0, lines = 0;  ///< elements of a line of the tile, and lines
  };
  struct Product {
    Source rows, columns;
  };
  struct Tiles {
    int64_t rows = 0, columns = 0, warp_rows = 0, warp_columns = 0;
  };

  std::optional<Source> find_source(const Item& item, const Operand& operand, bool of_rows) const;
  void read(const Schedule& schedule);
  double cost(const Tiles& tiles, double rows, double columns, double batch, double depth, const std::string& arch) const;

  tile_ir::Block stage(size_t product);
  tile_ir::Block fetch(size_t product, const Source& source, Expr stage);
  tile_ir::Block multiply(size_t product, Expr buffer);
  tile_ir::Block finish();
  Ref<tile_ir::Stmt> clear(const std::string& array);
  Ref<tile_ir::Stmt> per_thread(tile_ir::Block body) const;
  void place_block(Expr block);
  Expr rotated(const Source& source, Expr line, Expr chunk) const;
  std::vector<Expr> row_of_matrix(const Source& source, Expr buffer, Expr first, Expr depth) const;
  Expr thread_row() const;
  Expr thread_column() const;
  Expr lane() const { return mod(sym(thread_), kWarp); }
  Expr warp_row() const { return floordiv(floordiv(sym(thread_), kWarp), warps_across_); }
  Expr warp_column() const { return mod(floordiv(sym(thread_), kWarp), warps_across_); }
  int64_t wanted_lanes() const;
  static int64_t lanes_for(int64_t wanted, int64_t columns_of_warp);

  static constexpr int64_t kWarp = 32;

  std::vector<Product> products_;  ///< of items_
  bool possible_ = false;

  std::string block_, thread_, row_, half_, group_, column_;  ///< names of the block's, the thread's and its sums' indices
  int64_t tile_rows_ = 0, tile_columns_ = 0, step_ = 0, stages_ = 0, raster_ = 0;
  int64_t warps_down_ = 0, warps_across_ = 0, threads_ = 0;
  int64_t lanes_ = 2;
  Expr first_row_, first_column_;
  Substitution batch_map_;
};

}  // namespace deplo::loop_to_tile
