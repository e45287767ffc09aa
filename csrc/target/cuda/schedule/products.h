#pragma once

#include <set>
#include <string>
#include <vector>

#include "analysis/contraction.h"
#include "base/context.h"
#include "loop_ir/build.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

/// A kernel that is nothing but contractions of the same classes of axes, with what is computed from their sums: all axes of class m are one index of
/// rows, all of class n one of columns, and all that are summed one of k, so that convolutions and batches come along. Columns are what memory runs
/// along in the results; within a class the axis along which memory runs in an operand comes last.
class GpuProducts {
 public:
  explicit GpuProducts(const loop_ir::Kernel& kernel);

 protected:
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
    std::vector<loop_ir::Axis> k;  ///< summed axes, the one along which memory runs last
    std::string depth_name;        ///< "r0.k0"
    int64_t step = 0;              ///< of k per stage
    std::string sums;
  };

  static std::string group_of(const std::vector<loop_ir::Axis>& axes);
  static const std::string& name_of(const loop_ir::Stmt& stmt);
  /// Statements in terms of the block's indices; sums are read at `sum_index` of their arrays.
  tile_ir::Block convert(const loop_ir::Block& block, const Substitution& map, const std::vector<Expr>& sum_index) const;

  const loop_ir::Kernel& kernel_;
  loop_ir::Names names_;
  const loop_ir::Block* inner_ = nullptr;
  std::vector<loop_ir::Axis> batch_, rows_, columns_;
  std::vector<Item> items_;
  bool fits_ = false;

 private:
  bool match();
  bool add_item(const analysis::Contraction& contraction, const loop_ir::Block& before);
  bool classify(const analysis::Contraction& contraction);
  std::string stored_along(const std::vector<std::string>& axes) const;
  std::vector<GlobalAccess> loads_of(const analysis::Contraction& contraction) const;
  static void move_last_what_runs(std::vector<loop_ir::Axis>& axes, const std::vector<GlobalAccess>& accesses);
};

}  // namespace deplo::loop_to_tile
