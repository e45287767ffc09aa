#pragma once

#include <set>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_transpose: what is stored along one axis and loaded along another one passes through a tile of shared memory, so that a warp
/// reads and writes global memory side by side, in vectors of both axes.
class GpuTranspose {
 public:
  explicit GpuTranspose(const loop_ir::Kernel& kernel);

  bool fits() const { return fits_; }
  Schedule propose() const;
  tile_ir::Block apply(const Schedule& schedule);

 private:
  bool match();
  void set_vectors();
  void read(const Schedule& schedule);
  /// A thread's places of the tile, of vectors along one of its sides.
  struct Places {
    std::string step, lane;
    int64_t lanes = 1;
    Expr along;  ///< of the vector's first element
    Expr element;
    Expr beside;
  };
  Places places(int64_t lanes);
  tile_ir::Block over_tile(const Places& at, bool stores, tile_ir::Block body) const;

  loop_ir::Kernel kernel_;  ///< with its outer axes merged
  loop_ir::Names names_;
  std::vector<loop_ir::Axis> others_;
  loop_ir::Axis stored_, loaded_;  ///< axes along which memory runs in stores, and in the loads that are turned
  const loop_ir::Block* inner_ = nullptr;
  std::set<std::string> turned_;  ///< names of those loads
  bool fits_ = false;
  int64_t most_stored_ = 1, most_loaded_ = 1;  ///< elements of vectors along both axes

  int64_t side_ = 32, lanes_stored_ = 1, lanes_loaded_ = 1;
  std::string thread_;
  Expr first_stored_, first_loaded_;
};

}  // namespace deplo::loop_to_tile
