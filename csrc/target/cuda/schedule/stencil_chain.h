#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/context.h"
#include "target/cuda/schedule/stencil_cost.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_stencils: points that reach neighbours in arrays which the same kernel makes, point by point, of neighbours in others (a
/// blur of a blur, pooling of pooling, depthwise convolutions in a row). A block makes a tile of the last points; what that reaches of each array
/// before it, and what this reaches, is computed into shared memory, border and all, so that blocks share nothing: some of the arrays' points are
/// computed by several of them.
///
/// Such a kernel is a nest of shared axes around local arrays and a nest for each of them and for the results, in order. Which points a tile reaches
/// follows from the indices alone.
class GpuStencilChain {
 public:
  explicit GpuStencilChain(const loop_ir::Kernel& kernel);

  bool fits() const { return fits_; }
  /// Whether it takes less time than its first nest as a kernel of its own and the others as another one.
  bool is_worth(const SizeHints& hints, const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  tile_ir::Block apply(const Schedule& schedule);

 private:
  static constexpr size_t kMemory = static_cast<size_t>(-1);

  /// A nest as a kernel of its own, over all axes: arrays are parameters with the shared axes as their first dimensions.
  struct Stage {
    loop_ir::Kernel kernel;
    std::vector<loop_ir::Axis> axes;
    loop_ir::Block body;  ///< without the store of its array
    std::vector<Reach> windows;
    std::vector<size_t> makers;  ///< of each window: the stage that makes its array, or kMemory
    size_t lane = 0;             ///< axis along which threads lie side by side
    double taps = 0;
    const loop_ir::Store* made = nullptr;  ///< its array; null of the last one
    std::vector<size_t> dims;              ///< axis of each dimension of it
  };
  /// What a block does of a stage.
  struct Plan {
    PointThreads tile;
    std::deque<Reach> windows;  ///< those with regions
    std::vector<Region> regions;
    std::vector<size_t> makers;
  };
  struct Choice {
    PointThreads tile;
    int64_t threads = 0;
    double clocks = 0;
  };

  explicit GpuStencilChain(std::vector<loop_ir::Kernel> stages);
  static std::vector<loop_ir::Kernel> stages_of(const loop_ir::Kernel& kernel);
  bool match(std::vector<loop_ir::Kernel> kernels);
  bool find_arrays();
  bool find_lane();
  bool read_windows(Stage& stage);
  void find_vectors();
  std::vector<size_t> tiled_axes() const;
  std::vector<size_t> blocked_axes() const;
  PointThreads single() const;
  PointThreads least_tile() const;
  void reach(const Stage& stage, const PointThreads& from, const Reach& window, const std::vector<int64_t>& extents, PointThreads& maker) const;
  TileStarts starts_of(const Stage& stage, const PointThreads& tile, size_t window) const;
  bool is_shared(const Stage& stage, size_t window) const;
  static bool multiplies(const Stage& stage, const Reach& window);
  double cost(const PointThreads& tile, int64_t threads, const std::vector<double>& extents, const CudaModel& model, double ways) const;
  std::vector<Plan> lay_out(const PointThreads& tile) const;
  std::optional<Choice> choose(const SizeHints& hints, const std::string& arch) const;
  static double alone(const loop_ir::Kernel& kernel, const SizeHints& hints, const std::string& arch);

  void read(const Schedule& schedule);
  tile_ir::Block compute(const Stage& stage, const Plan& plan, const Region* into, const Substitution& first, const Ranges& ranges);

  std::string name_;
  Ranges symbols_;
  loop_ir::Names names_;
  std::deque<loop_ir::Param> arrays_;
  std::vector<Stage> stages_;
  std::vector<GlobalAccess> stores_;
  int64_t widest_ = 1;
  bool fits_ = false;

  PointThreads tile_;
  int64_t threads_ = 0;
  std::string block_, thread_, turn_, piece_, vector_;
};

}  // namespace deplo::loop_to_tile
