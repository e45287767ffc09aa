#pragma once

#include <string>
#include <vector>

#include "base/context.h"
#include "loop_ir/build.h"
#include "target/cuda/schedule/stencil_cost.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_stencil: points that reach neighbours of theirs in memory (depthwise convolutions, pooling, blurs), or memory that runs
/// along another axis than their stores do. A block makes a tile of points; the part of each such buffer that its tile reaches is copied to shared
/// memory once, and read there. A thread has vectors of points along the axis on which stores run, and several along another one, which share what
/// they load.
class GpuStencil {
 public:
  explicit GpuStencil(const loop_ir::Kernel& kernel);

  bool fits() const { return fits_; }
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// Of a device, by the cost of what is proposed.
  double clocks(const SizeHints& hints, const std::string& arch) const;
  tile_ir::Block apply(const Schedule& schedule);

 private:
  bool match();
  void find_lanes();
  PointThreads single() const;
  PointThreads least_tile() const;
  std::vector<size_t> tiled_axes() const;
  std::vector<size_t> blocked_axes() const;
  double cost(const PointThreads& tile, const std::vector<double>& extents, const CudaModel& model, double ways = 1) const;
  std::pair<PointThreads, double> choose(const SizeHints& hints, const CudaModel& model) const;
  size_t axis_at(const std::string& name) const;

  void read(const Schedule& schedule);
  std::vector<Region> lay_out(const PointThreads& tile) const;

  const loop_ir::Kernel& kernel_;
  loop_ir::Names names_;
  std::vector<loop_ir::Axis> axes_;
  const loop_ir::Block* inner_ = nullptr;
  std::vector<Reach> windows_;
  std::vector<GlobalAccess> stores_;
  size_t lane_ = 0;     ///< the axis along which stores run
  int64_t widest_ = 1;  ///< points of a thread's vector along it
  double taps_ = 0;     ///< of all reductions
  bool possible_ = false, fits_ = false;

  PointThreads tile_;
  int64_t lanes_ = 1, threads_ = 0;
  std::vector<Region> regions_;
};

}  // namespace deplo::loop_to_tile
