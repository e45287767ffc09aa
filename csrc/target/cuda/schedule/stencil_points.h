#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/window.h"

namespace deplo::loop_to_tile {

// Points that sum over few neighbours: what kinds gpu_stencil and gpu_stencils share.

/// Loads of all sums of one point; nothing where the body does more than to compute points from sums over few neighbours, whose operands need no
/// other sums.
std::optional<double> taps_of(const loop_ir::Block& body);

/// Whether a window is copied: several points reach the same elements, or memory runs along another axis than the points' vectors, `lane`.
bool is_staged(const Reach& window, const std::string& lane);

int64_t shared_bytes(const std::vector<Region>& regions);

/// Which points the threads of a block have: the axis of the vectors comes last, the others in their order.
struct PointThreads {
  const std::vector<loop_ir::Axis>* axes = nullptr;
  std::vector<int64_t> points;  ///< of each axis
  size_t lane = 0;              ///< axis of which a thread has `lanes` points, a vector
  int64_t lanes = 1;
  size_t blocked = 0;  ///< axis of which a thread has `block` points side by side
  int64_t block = 1;
  TileStarts starts{};

  int64_t each(size_t axis) const { return axis == lane ? lanes : axis == blocked ? block : 1; }
  int64_t count() const;
  /// Axes in the order of threads, the last one fastest.
  std::vector<size_t> order() const;
  PointTile named() const;
  /// The first of the points of thread `number`, relative to the tile.
  Substitution places(Expr number) const;
};

/// Turns of the banks for each request of a warp that reads the window of its points' first tap.
double bank_ways(const Region& region, const PointThreads& threads);

/// The region of a tile, with as many elements behind each line as keep threads side by side out of each other's banks.
Region lay_out_region(const Reach& window, const PointThreads& threads);

/// The text of a thread's points, which read windows where they lie in shared memory.
class StencilPoints {
 public:
  /// What a thread has of them: `pieces` vectors of `lanes`, counted by these names.
  struct Own {
    std::string piece, vector;
    int64_t pieces = 1, lanes = 1;
    std::string blocked;  ///< axis along which pieces lie
  };
  /// That points exist, as far as an axis is concerned.
  using Exists = std::vector<std::pair<std::string, Cond>>;

  StencilPoints(const loop_ir::Block& body, const std::vector<Region>& regions, Substitution place, Own own, Exists exists, loop_ir::Names& names)
      : body_(body), regions_(regions), place_(std::move(place)), own_(std::move(own)), exists_(std::move(exists)), names_(names) {}

  /// All sums, into registers.
  tile_ir::Block sums();
  /// What else the body computes and stores, of one point. `guarded`: other loads only where the point exists.
  tile_ir::Block values(bool guarded) const { return convert(body_, guarded); }
  /// body for each of a thread's points.
  Ref<tile_ir::Stmt> per_point(tile_ir::Block body) const;
  std::vector<Cond> exist() const;

 private:
  tile_ir::Block reduce(const loop_ir::Reduce& s);
  tile_ir::Block convert(const loop_ir::Block& block, bool guarded) const;
  loop_ir::Block slice_for(const loop_ir::Reduce& reduce) const;

  const loop_ir::Block& body_;
  const std::vector<Region>& regions_;
  Substitution place_;  ///< axes at the thread's point
  Own own_;
  Exists exists_;
  loop_ir::Names& names_;
  std::map<std::string, std::string> sums_;  ///< register arrays by result
};

}  // namespace deplo::loop_to_tile
