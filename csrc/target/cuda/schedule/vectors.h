#pragma once

#include <optional>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/block.h"
#include "target/cuda/schedule/last_stores.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_points with `vectorize`: a thread makes one or more vectors of points along the axis on which memory runs, which is the
/// fastest one of the grid as well, so that a warp's accesses are 16 bytes a thread side by side. With `split`, the points are sums of columns, or
/// running sums along them, whose rows that many threads of a block share.
class GpuVectors {
 public:
  explicit GpuVectors(const loop_ir::Kernel& kernel);

  /// Whether an axis has accesses that are worth it.
  bool fits() const { return fits_; }
  /// Whether its points reduce so much, across the direction in which memory runs, that threads share it.
  bool is_columns() const { return fits_ && wide_; }
  Schedule propose() const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  void read(const Schedule& schedule);
  bool is_possible() const;
  bool prefers_neighbours() const;
  tile_ir::Block convert(const loop_ir::Block& block);
  Ref<tile_ir::Stmt> convert(const loop_ir::Reduce& s);
  Ref<tile_ir::Stmt> convert(const loop_ir::Scan& s);
  Ref<tile_ir::Stmt> convert(const loop_ir::For& s);
  tile_ir::Block with_last_alone(tile_ir::Block vector);

  loop_ir::Kernel kernel_;  ///< with its outer axes merged
  loop_ir::Names names_;
  std::vector<loop_ir::Axis> outer_;  ///< the vectors' axis is the last one
  const loop_ir::Block* inner_ = nullptr;
  bool fits_ = false;
  bool wide_ = false;  ///< its reductions are long
  int64_t proposed_lanes_ = 1, proposed_vectors_ = 1;
  int64_t proposed_threads_ = kGpuThreads, proposed_split_ = 1;

  int64_t threads_ = kGpuThreads;
  int64_t lanes_ = 1;
  int64_t vectors_ = 1;  ///< of a thread
  int64_t split_ = 1;    ///< threads that share a point's reductions
  std::string row_;
  std::optional<LastStores> last_;  ///< stores that may meet
  std::vector<Cond> in_range_;      ///< that the points exist; empty: they do
  std::vector<Cond> stores_;        ///< under which a thread stores
  Substitution map_;
};

}  // namespace deplo::loop_to_tile
