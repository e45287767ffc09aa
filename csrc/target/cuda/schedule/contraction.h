#pragma once

#include <string>
#include <utility>
#include <vector>

#include "target/cuda/schedule/products.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_contraction: a block of threads makes a tile of outputs, each thread a register block of it. Operands are
/// staged through shared memory, prologues included, and several contractions of one nest follow each other.
class GpuContraction : public GpuProducts {
 public:
  using GpuProducts::GpuProducts;

  /// Sums of floats.
  bool fits() const;
  /// `hints`: example sizes.
  Schedule propose(const SizeHints& hints) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  void read(const Schedule& schedule);

  tile_ir::Block stage(const Item& item);
  Ref<tile_ir::Stmt> fetch(const Item& item, bool of_rows, Expr stage);
  Ref<tile_ir::Stmt> put(const Item& item, bool of_rows, Expr buffer);
  std::pair<Expr, Expr> place(const Item& item, const Operand& operand, const std::string& q, const std::string& v) const;
  Ref<tile_ir::Stmt> over_vectors(const Item& item, const Operand& operand, const std::string& q, const std::string& v, tile_ir::Block body) const;
  tile_ir::Block multiply(const Item& item, Expr buffer, const std::string& k);
  tile_ir::Block finish();
  Ref<tile_ir::Stmt> clear(const std::string& array, DType dtype);
  Ref<tile_ir::Stmt> per_thread(tile_ir::Block body) const;
  Expr thread_row() const;
  Expr thread_column() const;
  std::vector<Expr> sum_index() const;
  static int64_t group_size(int64_t per_thread);

  std::string block_, thread_, row_, column_, row_group_, column_group_;  ///< names of the block's, the thread's and the register block's indices
  int64_t threads_ = kGpuThreads;
  int64_t tile_rows_ = 0, tile_columns_ = 0;
  int64_t per_row_ = 0, per_column_ = 0;
  Expr first_row_, first_column_;
  Substitution batch_map_;
};

}  // namespace deplo::loop_to_tile
