#pragma once

#include <optional>
#include <string>
#include <vector>

#include "analysis/weighted_sum.h"
#include "base/context.h"
#include "target/cuda/schedule/warp_rows.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_online: sums of values weighted by the softmax of scores (`analysis/weighted_sum.h`) on matrix units, where queries, keys
/// and values are of bf16 or f16. A block makes some rows, each warp 16 or 32 of them; keys and values come by asynchronous copies, block by block of
/// keys. The scores of a block of keys are sums in registers; as weights, relative to the maximum so far, they become an operand of the second
/// product there, so that no score is ever in memory. What was summed before is scaled when the maximum grows, and divided at the end.
///
/// All others are numbers of float32, which threads multiply one by one: weights then pass through shared memory, from the threads that have their
/// keys to those that have columns of the values.
///
/// Blocks of keys outside of the limits of all of a block's rows are left out, with what they hold; guards are applied in those blocks of keys that
/// they cut.
class GpuOnline : private WarpRows {
 public:
  explicit GpuOnline(const loop_ir::Kernel& kernel);

  bool fits(const SizeHints& hints, const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// Into how many parts the keys are worth cutting, each of which a block sums for itself; 1: none.
  int64_t parts(const SizeHints& hints, const std::string& arch) const;
  tile_ir::Block apply(const Schedule& schedule);

 private:
  bool recognize();
  bool find_row();
  bool find_tiles(bool numbers);
  bool find_operands();
  void find_scale();
  bool only_shifts() const;
  bool is_early(const loop_ir::Block& block) const;
  bool reads_inputs_alone() const;
  void read(const Schedule& schedule);
  int64_t shared_bytes(int64_t rows, int64_t keys, int64_t stages, bool in_groups) const;
  Schedule propose_numbers(double rows, double length, double batch, const std::string& arch) const;
  std::optional<Schedule> propose_groups(double rows, double length, double batch, const std::string& arch) const;

  tile_ir::Block body();
  tile_ir::Block start_rows();
  void find_bounds(tile_ir::Block& into);
  Ref<tile_ir::Stmt> fetch(const MatrixTile& tile, Expr begin, Expr key_block);
  tile_ir::Block main_loop();
  tile_ir::Block finish_scores(Expr first_key);
  std::optional<Ref<tile_ir::Stmt>> mask_scores(Expr first_key);
  std::optional<Expr> least_of(const Cond& cond, Expr first_key) const;
  tile_ir::Block weigh();
  std::string exponential(tile_ir::Block& into, const std::string& past);
  Ref<tile_ir::Stmt> put_weights();
  tile_ir::Block finish();

  tile_ir::Block converted(const loop_ir::Block& block, const Substitution& map) const;
  Substitution at(Expr row, Expr key) const;
  /// Of numbers, as many side by side as waste few columns.
  Columns columns() const;
  /// From one block of keys to the next one that counts.
  int64_t stride() const { return part_ ? part_->axis.extent.value() : 1; }

  analysis::WeightedSum sum_;
  std::optional<analysis::KeyPart> part_;  ///< which blocks of keys count
  std::vector<loop_ir::Axis> depth_axes_, column_axes_;
  MatrixTile queries_, keys_tile_, values_;
  MatrixTile weights_;    ///< by numbers
  loop_ir::Block score_;  ///< what makes a score of a sum of products
  loop_ir::Block read_;   ///< what the softmax reads of it
  bool guarded_ = false;  ///< and that is the score, or -inf where a guard fails
  bool reads_memory_ = false;
  bool is_scaled_ = false;  ///< scores are sums of products times scale_
  double scale_ = 1;
  bool exact_most_ = false;  ///< the greatest score itself is used
  bool numbers_ = false;     ///< of float32
  bool possible_ = false;
  int64_t depth_ = 0, width_ = 0;  ///< of scores and columns, up to whole matrices

  std::string scores_, sums_, base_, most_, total_;
};

}  // namespace deplo::loop_to_tile
