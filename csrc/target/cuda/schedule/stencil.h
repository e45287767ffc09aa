#pragma once

#include <string>
#include <vector>

#include "base/context.h"
#include "loop_ir/build.h"
#include "target/cuda/devices.h"
#include "target/cuda/schedule/window.h"

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
  tile_ir::Block apply(const Schedule& schedule);

 private:
  /// Decisions of a schedule, by position of the axis.
  struct Tile {
    std::vector<int64_t> points;
    size_t blocked = 0;  ///< axis of which a thread has `block` points side by side
    int64_t block = 1;
    int64_t threads(int64_t lanes) const;
  };

  bool match();
  bool match_body();
  void find_lanes();
  bool stages(const Reach& window) const;
  Tile least_tile() const;
  std::vector<size_t> tiled_axes() const;
  std::vector<size_t> blocked_axes() const;
  double cost(const Tile& tile, const std::vector<double>& extents, const CudaModel& model, double ways = 1) const;
  static std::vector<int64_t> choices(double extent, int64_t multiple);
  size_t axis_at(const std::string& name) const;
  PointTile named(const std::vector<int64_t>& points) const;

  void read(const Schedule& schedule);
  std::vector<Region> lay_out(const Tile& tile) const;
  double bank_ways(const Region& region, const Tile& tile) const;
  tile_ir::Block reduce(const loop_ir::Reduce& s);
  tile_ir::Block finish();
  tile_ir::Block convert(const loop_ir::Block& block, bool guarded) const;
  Ref<tile_ir::Stmt> per_point(tile_ir::Block body) const;
  loop_ir::Block slice_for(const loop_ir::Reduce& reduce) const;
  std::vector<Cond> in_range(const std::set<std::string>& axes) const;

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

  Tile tile_;
  int64_t lanes_ = 1, threads_ = 0;
  std::vector<Region> regions_;
  std::string block_, thread_, piece_, vector_;  ///< names of indices: piece_ and vector_ of a thread's points
  Substitution first_, map_;                     ///< axes at the tile's first point, and at the thread's
  std::vector<Expr> in_tile_;                    ///< each axis, relative to the tile's first point
  std::map<std::string, std::string> sums_;      ///< register arrays by result
};

}  // namespace deplo::loop_to_tile
