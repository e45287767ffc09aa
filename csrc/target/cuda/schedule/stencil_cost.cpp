#include "target/cuda/schedule/stencil_cost.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace deplo::loop_to_tile {

namespace {

// In clocks of an SM.
constexpr double kWarp = 32;
constexpr double kL2BytesPerClock = 40;
constexpr double kSharedBytesPerClock = 128;
constexpr double kSectorBytes = 32;
constexpr double kCopyInstructions = 30;  ///< of a warp that copies a vector a thread
constexpr double kOverlap = 0.3;          ///< of what runs beside the slowest part and is not hidden
constexpr double kLatency = 1500;         ///< of a block: its copies, a barrier, its stores
constexpr double kStageLatency = 300;     ///< of a further barrier, and the sums between two
constexpr double kLoadLatency = 150;      ///< of one tap's load among those under way in a loop
constexpr double kOtherRegisters = 48;
constexpr double kRegisters = 64 << 10;  ///< of an SM
constexpr double kEnoughWarps = 16;      ///< that hide each other's waits

size_t axis_at(const PointThreads& tile, const std::string& name) {
  const auto found = std::find_if(tile.axes->begin(), tile.axes->end(), [&](const auto& a) { return a.name == name; });
  return static_cast<size_t>(found - tile.axes->begin());
}

const std::string& lane_of(const PointThreads& tile) { return (*tile.axes)[tile.lane].name; }

}  // namespace

double StencilWork::elements(const Reach& w, const PointThreads& tile, bool sectors) {
  double elements = 1;
  const auto run = w.run();
  for (size_t d = 0; d < w.steps.size(); ++d) {
    auto extent = static_cast<double>(w.most[d] - w.least[d] + 1);
    for (const auto& [axis, step] : w.steps[d]) extent += static_cast<double>(std::abs(step) * (tile.points[axis_at(tile, axis)] - 1));
    if (sectors && run && d == *run)
      extent = std::ceil(extent * static_cast<double>(w.bytes()) / kSectorBytes) * kSectorBytes / static_cast<double>(w.bytes());
    elements *= extent;
  }
  return elements;
}

void StencilWork::copy(const Reach& w, const PointThreads& tile) {
  const auto run = w.run();
  const bool wide = run && (w.step(*run, lane_of(tile)) != 0 || !w.moves_along(lane_of(tile)));
  const double all = elements(w, tile, true);
  copied += all * static_cast<double>(w.bytes());
  held += all * static_cast<double>(w.bytes());
  const int64_t by = wide ? kAccessBytes / w.bytes() : 1;
  copies += all / static_cast<double>(by);
}

double StencilWork::read(const Reach& w, const PointThreads& tile, double turns, double ways) {
  double taps = w.taps;
  for (size_t d = 0; d < w.steps.size() && tile.block > 1; ++d) {
    auto extent = static_cast<double>(w.most[d] - w.least[d] + 1);
    for (const auto& [axis, step] : w.steps[d]) {
      const size_t a = axis_at(tile, axis);
      if (a == tile.blocked) {
        const auto own = static_cast<double>((tile.block - 1) * std::abs(step)) + extent;
        taps *= std::min(own, static_cast<double>(tile.block) * extent) / extent;
      }
      extent += static_cast<double>(std::abs(step) * (tile.points[a] - 1));
    }
  }
  const double each = w.moves_along(lane_of(tile)) ? static_cast<double>(tile.lanes) : 1;
  lines += warps * turns * taps * std::max(1.0, std::ceil(each * static_cast<double>(w.bytes()) * kWarp / kSharedBytesPerClock)) * ways;
  return taps;
}

void StencilWork::wait(const Reach& w, double turns) { waited += turns * w.taps * kLoadLatency; }

double StencilWork::clocks(double blocks, const CudaModel& model) const {
  const double copy = std::max(copied / kL2BytesPerClock, copies / kWarp * kCopyInstructions / 4);
  const double shared = lines + held / kSharedBytesPerClock;
  const double store = stored * model.sms * model.boost_ghz / model.dram_gb_s;
  const double issue = issued / 4;
  const double registers = (kOtherRegisters + 2 * sums) * warps * kWarp;
  const double resident = std::max(
      1.0, std::floor(std::min({model.warps_sm / warps, static_cast<double>(model.shared_kb_sm << 10) / (held + 1024), kRegisters / registers})));
  const double work = std::max({copy + store, shared, issue}) + kOverlap * (copy + store + shared + issue);
  const double thin = std::max(1.0, kEnoughWarps / (resident * warps));
  const double each = std::ceil(blocks / model.sms);
  return each * work + std::ceil(each / resident) * ((kLatency + kStageLatency * (barriers - 1)) * std::sqrt(thin) + waited);
}

std::vector<int64_t> tile_choices(double extent, int64_t multiple) {
  std::set<int64_t> found;
  const auto all = static_cast<int64_t>(extent);
  for (int64_t n = multiple; n <= std::min(kMostTile, std::max(all, multiple)); n *= 2) found.insert(n);
  for (int64_t parts = 1; parts <= 8; ++parts) {
    const int64_t n = (all + parts - 1) / parts;
    if (n % multiple == 0 && n > 0 && n <= kMostTile) found.insert(n);
  }
  return {found.begin(), found.end()};
}

double stored_bytes(const std::vector<GlobalAccess>& stores, const PointThreads& tile) {
  double stored = 0;
  for (const GlobalAccess& access : stores) {
    const auto along = static_cast<double>(tile.points[tile.lane] * access.bytes);
    const auto points = static_cast<double>(tile.count() * tile.block * tile.lanes);
    stored += points * static_cast<double>(access.bytes) * std::ceil(along / kSectorBytes) * kSectorBytes / along;
  }
  return stored;
}

}  // namespace deplo::loop_to_tile
