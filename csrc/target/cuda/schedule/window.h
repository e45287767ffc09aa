#pragma once

#include <map>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

constexpr int64_t kWidestWindow = 64;  ///< elements by which loads of one window differ along a dimension

/// Elements of a parameter that loads reach from one point, at places which are sums of multiples of axes: `2 i + k - 1`. Loads that differ by
/// constants alone are one window.
struct Reach {
  const loop_ir::Param* param = nullptr;
  std::vector<const loop_ir::Load*> loads;
  std::vector<Expr> base;                             ///< of each dimension, at the point where all axes are 0: of the first load
  std::vector<std::map<std::string, int64_t>> steps;  ///< of each dimension, by axis of the points
  std::vector<int64_t> least, most;                   ///< what reductions' axes, and other loads, add to the base
  std::vector<Cond> inside;                           ///< of guards, in terms of coordinates
  Scalar fill;
  double taps = 0;      ///< loads of one point
  bool beyond = false;  ///< it has been widened along its run: elements may lie beyond the buffer

  /// Stands for the coordinate along a dimension in `inside`.
  static std::string coordinate(size_t dimension) { return "$" + std::to_string(dimension); }
  const std::string& name() const { return loads[0]->name; }
  int64_t bytes() const { return size_of(param->dtype); }
  int64_t step(size_t dimension, const std::string& axis) const;
  bool moves_along(const std::string& axis) const;
  /// The dimension along which memory runs; nothing if there is none.
  std::optional<size_t> run() const;
  /// Whether points side by side along some axis reach side by side elements, or the same ones: dimensions with a step and several taps.
  std::vector<size_t> overlaps() const;
};

/// Those of all loads of parameters that are only read, in the body of a nest over `points`.
std::vector<Reach> find_windows(const loop_ir::Kernel& kernel, const loop_ir::Block& body, const std::vector<loop_ir::Axis>& points);

/// The part of a window that a block's tile of points needs, in shared memory.
struct Region {
  const Reach* window = nullptr;
  std::string array;
  std::vector<int64_t> extents;  ///< of each dimension
  std::vector<int64_t> pitch;    ///< elements from one coordinate to the next
  std::vector<size_t> order;     ///< dimensions, outer first, as threads copy them
  int64_t lanes = 1;             ///< elements of a copy
  int64_t shift = 0;             ///< elements before the first one needed, so that copies begin at multiples of their size
  int64_t phases = 1;            ///< along the innermost dimension: every so manieth coordinate lies side by side
  int64_t elements = 0;
  bool is_async = false;
  std::vector<Expr> origin;  ///< coordinates of its first element
  std::vector<bool> ragged;  ///< dimensions along which it may leave the buffer where no guard says so

  /// Where a coordinate, relative to the origin, lies.
  Expr place(const std::vector<Expr>& at) const;
  int64_t bytes() const { return elements * window->bytes(); }
};

/// Conditions under which an element of it exists, in terms of coordinates.
std::vector<Cond> conditions(const Region& region);

/// How many points of each axis a block has; 1 where it is not named.
using PointTile = std::map<std::string, int64_t>;

/// Where a tile's points begin along an axis: at a multiple of a number, and how far behind it; at that place alone where the number is 0. Such
/// tiles may leave the axis on either side.
struct TileStart {
  int64_t multiple = 0, offset = 0;
};
using TileStarts = std::map<std::string, TileStart>;

/// The region of a tile, which threads side by side along `lane` read `lanes` points at a time. `points`: the extents of the axes. `starts`: of axes
/// along which tiles begin elsewhere than at multiples of their length.
Region make_region(const Reach& window, const PointTile& tile, const std::string& lane, int64_t lanes, const std::vector<loop_ir::Axis>& points,
                   int64_t pad = 0, const TileStarts& starts = {});

/// Copies it: all threads of a block, each several vectors.
tile_ir::Block copy_region(const Region& region, Expr thread, int64_t threads, loop_ir::Names& names);

/// The coordinates of the region's first element, where the axes have these values at the tile's first point.
std::vector<Expr> origin_of(const Region& region, const PointTile& tile, const Substitution& first);

}  // namespace deplo::loop_to_tile
