#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "analysis/contraction.h"
#include "base/context.h"
#include "loop_ir/build.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_contraction: a block of threads makes a tile of outputs, each thread a register block of it. All axes of class m
/// are one index of rows, all of class n one of columns, so that convolutions and batches come along; operands are staged through shared
/// memory, prologues included, and several contractions of one nest follow each other.
class GpuContraction {
 public:
  explicit GpuContraction(const loop_ir::Kernel& kernel);

  /// Whether the kernel is nothing but contractions of the same classes of axes, with what is computed from their sums.
  bool fits() const { return fits_; }
  /// `hints`: example sizes.
  Schedule propose(const SizeHints& hints) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  struct Operand {
    loop_ir::Block slice;  ///< statements that compute it
    std::string value;
    bool along_k = false;    ///< memory runs along k
    int64_t lanes = 1;       ///< that a thread loads at once
    int64_t row_length = 0;  ///< of its tile, [2][step][row_length]
    std::string tile, next;  ///< in shared memory, and in registers
  };
  struct Item {
    const loop_ir::Reduce* reduce = nullptr;
    Operand rows;
    Operand columns;
    std::string depth_name;  ///< "r0.k0"
    int64_t step = 0;        ///< of k per stage
    std::string sums;
  };

  bool match();
  bool add_item(const analysis::Contraction& contraction, const loop_ir::Block& before);
  bool classify(const analysis::Contraction& contraction);
  void read(const Schedule& schedule);

  tile_ir::Block stage(const Item& item);
  Ref<tile_ir::Stmt> fetch(const Item& item, bool of_rows, Expr stage);
  Ref<tile_ir::Stmt> put(const Item& item, bool of_rows, Expr buffer);
  std::pair<Expr, Expr> place(const Item& item, const Operand& operand, const std::string& q, const std::string& v) const;
  Ref<tile_ir::Stmt> over_vectors(const Item& item, const Operand& operand, const std::string& q, const std::string& v, tile_ir::Block body) const;
  tile_ir::Block multiply(const Item& item, Expr buffer, const std::string& k);
  tile_ir::Block finish();
  tile_ir::Block convert(const loop_ir::Block& block, const Substitution& map) const;
  Ref<tile_ir::Stmt> clear(const std::string& array, DType dtype);
  Ref<tile_ir::Stmt> per_thread(tile_ir::Block body) const;
  Expr thread_row() const;
  Expr thread_column() const;
  std::vector<Expr> sum_index() const;
  static int64_t group_size(int64_t per_thread);

  const loop_ir::Kernel& kernel_;
  loop_ir::Names names_;
  const loop_ir::Block* inner_ = nullptr;
  std::vector<loop_ir::Axis> batch_, rows_, columns_;
  std::vector<Item> items_;
  bool fits_ = false;

  std::string block_, thread_, row_, column_, row_group_, column_group_;  ///< names of the block's, the thread's and the register block's indices
  int64_t threads_ = kGpuThreads;
  int64_t tile_rows_ = 0, tile_columns_ = 0;
  int64_t per_row_ = 0, per_column_ = 0;
  Expr first_row_, first_column_;
  Substitution batch_map_;
};

}  // namespace deplo::loop_to_tile
