#pragma once

#include <cstdint>
#include <vector>

#include "target/cuda/devices.h"
#include "target/cuda/schedule/stencil_points.h"

namespace deplo::loop_to_tile {

constexpr int64_t kMostSums = 32;   ///< of a thread
constexpr int64_t kMostTile = 256;  ///< points of an axis
constexpr int64_t kLeastThreads = 64, kMostThreads = 512;
constexpr double kLaunchSeconds = 2.5e-6;

/// What a block does that makes a tile of points from windows in shared memory.
struct StencilWork {
  double copied = 0;    ///< bytes, whole sectors, from the L2 to shared memory
  double copies = 0;    ///< vectors of a thread
  double held = 0;      ///< bytes of shared memory
  double lines = 0;     ///< of shared memory that its warps read
  double issued = 0;    ///< instructions of its warps
  double stored = 0;    ///< bytes, whole sectors, to memory
  double warps = 1;     ///< of the block
  double sums = 1;      ///< of a thread
  double waited = 0;    ///< clocks of a thread, for what long loops load from memory
  double barriers = 1;  ///< behind which its warps go on

  /// Elements that the tile reaches, of which memory gives whole sectors.
  static double elements(const Reach& window, const PointThreads& tile, bool sectors);
  /// A window is copied from memory.
  void copy(const Reach& window, const PointThreads& tile);
  /// Its points read it, `turns` times as many as the block has warps; gives the loads of a thread for its points.
  double read(const Reach& window, const PointThreads& tile, double turns, double ways);

  /// Its points load what is not copied, tap by tap.
  void wait(const Reach& window, double turns);

  /// Clocks of an SM's for all blocks: rounds of as many as an SM holds, each bound by its copies, shared memory or instructions.
  double clocks(double blocks, const CudaModel& model) const;
};

/// Bytes of whole sectors that a block stores.
double stored_bytes(const std::vector<GlobalAccess>& stores, const PointThreads& tile);

/// Tiles' points along an axis that are worth a try.
std::vector<int64_t> tile_choices(double extent, int64_t multiple);

}  // namespace deplo::loop_to_tile
