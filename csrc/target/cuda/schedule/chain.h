#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "analysis/product_chain.h"
#include "base/context.h"
#include "target/cuda/schedule/warp_rows.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_chain: sums of products one of whose factors follows from other sums of products (`analysis/product_chain.h`) on matrix
/// units, where all other operands are of bf16 or f16. A block makes some rows, each warp 16 or 32 of them; what moves along the keys comes by
/// asynchronous copies, blocks of keys ahead. The first sums of a block of keys stay in registers; what is computed of them, rounded, is an operand
/// of the second products there. An operand of both, the keys of attention in the gradient of its queries, lies in shared memory once.
///
/// All others are numbers of float32, which threads multiply one by one; weights then pass through shared memory, as those of `gpu_online` do.
///
/// Blocks of keys outside of the limits of all of a block's rows are left out.
class GpuChain : private WarpRows {
 public:
  explicit GpuChain(const loop_ir::Kernel& kernel);

  bool fits(const SizeHints& hints, const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  tile_ir::Block apply(const Schedule& schedule);

 private:
  struct Inner {
    MatrixTile rows, moving;
    std::vector<loop_ir::Axis> depth_axes;
    int64_t depth = 0;  ///< up to whole matrices, as widths are
    std::string sums;
    std::vector<std::vector<std::string>> kept;  ///< matrices of the rows
  };
  struct Outer {
    MatrixTile tile;
    std::optional<size_t> shares;  ///< the tile of that inner product
    std::vector<loop_ir::Axis> key_axes, column_axes;
    int64_t width = 0;
    std::string weights, sums;
    MatrixTile shared_weights;  ///< by numbers: for the threads of other columns
  };

  bool recognize();
  bool find_row();
  bool find_products(bool numbers);
  bool find_inner(const analysis::ProductChain::Inner& inner);
  bool find_outer(const analysis::ProductChain::Outer& outer);
  std::optional<size_t> find_shared(const analysis::ProductChain::Outer& outer, const MatrixTile& tile, int64_t width) const;
  bool find_points();
  bool is_exact_enough(const analysis::ProductChain::Outer& outer) const;
  bool reads_inputs_alone() const;
  std::set<std::string> varying() const;
  void read(const Schedule& schedule);
  Schedule propose_numbers(double rows, double batch, const std::string& arch) const;
  /// Columns of a result that each thread holds.
  Columns columns(const Outer& outer) const;
  Columns columns_of_numbers(const Outer& outer, int64_t wide) const;
  int64_t width_of_numbers(const Outer& outer, int64_t wide) const;
  int64_t sums_of(int64_t units, int64_t keys) const;
  int64_t sums_of_numbers(int64_t per_row, int64_t keys, int64_t wide) const;
  int64_t kept_of(int64_t units) const;
  /// `wide`: threads beside one another along the columns, of numbers.
  int64_t shared_bytes(int64_t rows, int64_t keys, int64_t stages, int64_t wide = 4) const;
  void set_shapes(int64_t rows, int64_t keys);

  tile_ir::Block body();
  void find_bounds(tile_ir::Block& into);
  tile_ir::Block load_row_values();
  tile_ir::Block fetch_rows();
  tile_ir::Block fetch(Expr turn, Expr stage);
  tile_ir::Block main_loop();
  tile_ir::Block weigh(Expr turn);
  tile_ir::Block put_weights();
  tile_ir::Block finish();

  Expr block_of(Expr turn) const { return first_block_ + (has_outer_keys() ? mod(turn, span_) : turn); }
  bool has_outer_keys() const { return chain_.keys.size() > 1; }
  Substitution at_turn(Expr turn) const;

  analysis::ProductChain chain_;
  std::vector<Inner> inner_;
  std::vector<Outer> outer_;
  loop_ir::Block points_;                          ///< what is computed at each row and key
  std::map<std::string, std::string> row_values_;  ///< that they take of the row, and the arrays that hold them
  bool reads_memory_ = false;
  bool numbers_ = false;  ///< of float32
  bool possible_ = false;

  bool keeps_ = false;  ///< rows in registers
  Expr span_, turns_;   ///< blocks of keys; turns of the main loop
};

}  // namespace deplo::loop_to_tile
