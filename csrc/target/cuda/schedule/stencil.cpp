#include "target/cuda/schedule/stencil.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "analysis/cost.h"
#include "base/error.h"
#include "base/text.h"
#include "loop_ir/places.h"
#include "schedule/reader.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kWarp = 32;
constexpr int64_t kBanks = 32, kBankBytes = 4;
constexpr double kMostTaps = 256;   ///< of a point
constexpr double kLeastTaps = 3;    ///< that are worth a copy
constexpr int64_t kMostSums = 32;   ///< of a thread
constexpr int64_t kMostTile = 256;  ///< points of an axis
constexpr int64_t kUnrolled = 512;  ///< products that a thread's loop over taps has at once
constexpr int64_t kMostPad = 32;    ///< words behind a line of a region
constexpr int64_t kLeastThreads = 64, kMostThreads = 512;

// Of the costs below, in clocks of an SM.
constexpr double kL2BytesPerClock = 40;
constexpr double kSharedBytesPerClock = 128;
constexpr double kSectorBytes = 32;
constexpr double kCopyInstructions = 30;  ///< of a warp that copies a vector a thread
constexpr double kOverlap = 0.3;          ///< of what runs beside the slowest part and is not hidden
constexpr double kLatency = 1500;         ///< of a block: its copies, a barrier, its stores
constexpr int64_t kOtherRegisters = 48;
constexpr int64_t kRegisters = 64 << 10;  ///< of an SM
constexpr double kEnoughWarps = 16;       ///< that hide each other's waits

bool is_scalar(const loop_ir::Stmt& stmt) {
  return std::holds_alternative<loop_ir::Let>(stmt.node) || std::holds_alternative<loop_ir::Load>(stmt.node) ||
         std::holds_alternative<loop_ir::Store>(stmt.node) || std::holds_alternative<loop_ir::Check>(stmt.node);
}

/// Integer divisions tell of a divisor of 0, which points that do not exist may have.
bool tells(const loop_ir::Stmt& stmt) {
  const auto* let = std::get_if<loop_ir::Let>(&stmt.node);
  if (!let || is_float(let->dtype)) return false;
  return let->fn == Fn::trunc_div || let->fn == Fn::floor_div || let->fn == Fn::fmod || let->fn == Fn::remainder;
}

int64_t shared_bytes(const std::vector<Region>& regions) {
  int64_t bytes = 0;
  for (const Region& r : regions) bytes += (r.bytes() + kAccessBytes - 1) / kAccessBytes * kAccessBytes;
  return bytes;
}

bool is_simple(Combiner combiner, DType dtype) {
  if (dtype == DType::boolean || (combiner == Combiner::prod && dtype == DType::f64)) return false;
  return combiner == Combiner::sum || combiner == Combiner::prod || combiner == Combiner::min || combiner == Combiner::max;
}

}  // namespace

int64_t GpuStencil::Tile::threads(int64_t lanes) const {
  int64_t n = 1;
  for (int64_t p : points) n *= p;
  return n / (lanes * block);
}

GpuStencil::GpuStencil(const loop_ir::Kernel& kernel) : kernel_(kernel) {
  names_.reserve(kernel);
  fits_ = match();
}

// ---- what fits -----------------------------------------------------------------------------------------------------

bool GpuStencil::match() {
  OuterNest nest = outer_nest(kernel_);
  axes_ = nest.axes;
  inner_ = nest.inner;
  if (axes_.empty() || !colliding_stores(kernel_).empty() || !match_body()) return false;
  windows_ = find_windows(kernel_, *inner_, axes_);
  // Along the axis on which most bytes are stored side by side.
  std::vector<int64_t> stored(axes_.size(), 0);
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_))
    if (access.stores) stores_.push_back(access);
  for (const GlobalAccess& access : stores_)
    for (size_t a = 0; a < axes_.size(); ++a)
      if (auto step = linear_coefficient(access.offset, axes_[a].name); step && step->is(1)) stored[a] += access.bytes;
  const auto most = std::max_element(stored.begin(), stored.end());
  if (*most == 0) return false;
  lane_ = static_cast<size_t>(most - stored.begin());
  find_lanes();
  lanes_ = widest_;
  possible_ = std::any_of(windows_.begin(), windows_.end(), [&](const Reach& w) { return stages(w); });
  // What reaches no neighbours, or two of them, does as well with loads of its own.
  double reached = 0;
  for (const Reach& w : windows_)
    if (!w.overlaps().empty()) reached += w.taps;
  // Taps far apart reach more than a block can hold.
  return possible_ && reached >= kLeastTaps && shared_bytes(lay_out(least_tile())) <= kSharedBytes;
}

/// The smallest tile that keeps a block's warps busy, a point or a vector each.
GpuStencil::Tile GpuStencil::least_tile() const {
  Tile tile;
  tile.points.assign(axes_.size(), 1);
  const auto at_most = [&](size_t axis, int64_t n) {
    const Expr extent = axes_[axis].extent;
    return extent.is_constant() ? std::min(n, std::max<int64_t>(1, extent.value())) : n;
  };
  tile.points[lane_] = (at_most(lane_, kLeastThreads * lanes_) + lanes_ - 1) / lanes_ * lanes_;
  tile.blocked = lane_;
  for (size_t axis : tiled_axes())
    if (const int64_t threads = tile.threads(lanes_); axis != lane_ && threads < kLeastThreads)
      tile.points[axis] = at_most(axis, kLeastThreads / threads);
  return tile;
}

/// Points with sums over few neighbours, whose operands need no other sums.
bool GpuStencil::match_body() {
  std::set<std::string> results;
  for (const auto& stmt : *inner_) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    if (!reduce) {
      if (!is_scalar(*stmt) || tells(*stmt)) return false;
      // What follows from sums is no operand of others, and no place in memory.
      std::set<std::string> used;
      collect_uses(*stmt, used);
      if (std::any_of(used.begin(), used.end(), [&](const auto& name) { return results.count(name) > 0; }) && !name_of(*stmt).empty())
        results.insert(name_of(*stmt));
      continue;
    }
    const Expr n = loop_to_tile::count(reduce->axes);
    if (!n.is_constant() || n.is(0) || reduce->results.size() != 1 || !is_simple(reduce->combiner, reduce->dtypes[0])) return false;
    taps_ += static_cast<double>(n.value());
    std::set<std::string> used;
    for (const auto& s : reduce->body) {
      if (!is_straight(*s) || tells(*s)) return false;
      collect_uses(*s, used);
    }
    if (std::any_of(used.begin(), used.end(), [&](const auto& name) { return results.count(name) > 0; })) return false;
    results.insert(reduce->results[0]);
  }
  return taps_ <= kMostTaps;
}

/// Vectors of points, where nothing is copied whose neighbours lie along them, or that lies otherwise.
void GpuStencil::find_lanes() {
  const loop_ir::Axis& lane = axes_[lane_];
  widest_ = lanes_along(global_accesses(kernel_, *inner_), lane.name, lane.extent);
  if (!lane.extent.is_constant()) widest_ = 1;
  for (const Reach& w : windows_) {
    if (!w.moves_along(lane.name) || !stages(w)) continue;
    for (size_t d = 0; d < w.steps.size(); ++d)
      if (w.step(d, lane.name) != 0 && (w.run() != d || w.step(d, lane.name) != 1 || w.least[d] != w.most[d])) widest_ = 1;
  }
}

/// Whether a window is copied: several points reach the same elements, or memory runs along another axis than stores do.
bool GpuStencil::stages(const Reach& w) const {
  if (!w.overlaps().empty()) return true;
  const std::string& lane = axes_[lane_].name;
  const auto run = w.run();
  if (!run || !w.moves_along(lane) || w.step(*run, lane) != 0) return false;
  return !w.steps[*run].empty() || w.most[*run] > w.least[*run];
}

size_t GpuStencil::axis_at(const std::string& name) const {
  const auto found = std::find_if(axes_.begin(), axes_.end(), [&](const auto& a) { return a.name == name; });
  return static_cast<size_t>(found - axes_.begin());
}

PointTile GpuStencil::named(const std::vector<int64_t>& points) const {
  PointTile tile;
  for (size_t a = 0; a < axes_.size(); ++a) tile[axes_[a].name] = points[a];
  return tile;
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

/// Axes that blocks may have several points of: along which windows overlap or copies run, and one more where those are short. The vectors' comes
/// last.
std::vector<size_t> GpuStencil::tiled_axes() const {
  std::set<size_t> found;
  for (const Reach& w : windows_) {
    if (!stages(w)) continue;
    for (size_t d : w.overlaps())
      for (const auto& [axis, step] : w.steps[d]) found.insert(axis_at(axis));
    if (const auto run = w.run())
      for (const auto& [axis, step] : w.steps[*run]) found.insert(axis_at(axis));
  }
  found.erase(lane_);
  std::vector<size_t> out(found.begin(), found.end());
  for (size_t a = axes_.size(); a-- > 0;)
    if (a != lane_ && found.count(a) == 0) {
      out.insert(out.begin(), a);
      break;
    }
  out.push_back(lane_);
  return out;
}

/// Axes of which a thread may have several points, which then share loads.
std::vector<size_t> GpuStencil::blocked_axes() const {
  std::set<size_t> found;
  for (const Reach& w : windows_)
    for (size_t d : w.overlaps())
      for (const auto& [axis, step] : w.steps[d])
        if (axis_at(axis) != lane_) found.insert(axis_at(axis));
  return {found.begin(), found.end()};
}

std::vector<int64_t> GpuStencil::choices(double extent, int64_t multiple) {
  std::set<int64_t> found;
  const auto all = static_cast<int64_t>(extent);
  for (int64_t n = multiple; n <= std::min(kMostTile, std::max(all, multiple)); n *= 2) found.insert(n);
  for (int64_t parts = 1; parts <= 8; ++parts) {
    const int64_t n = (all + parts - 1) / parts;
    if (n % multiple == 0 && n > 0 && n <= kMostTile) found.insert(n);
  }
  return {found.begin(), found.end()};
}

/// Clocks of a device for all blocks: rounds of as many as an SM holds, each bound by its copies, shared memory or instructions.
double GpuStencil::cost(const Tile& tile, const std::vector<double>& extents, const CudaModel& model, double ways) const {
  const int64_t threads = tile.threads(lanes_);
  const int64_t whole_warps = (threads + kWarp - 1) / kWarp;
  const auto warps = static_cast<double>(whole_warps);
  const double points = static_cast<double>(tile.block * lanes_);
  double bytes = 0;
  double copies = 0;
  double lines = 0;  // of shared memory that a warp reads
  double loads = 0;
  for (const Reach& w : windows_) {
    if (!stages(w)) continue;
    double elements = 1;
    double taps = w.taps;
    const auto run = w.run();
    for (size_t d = 0; d < w.steps.size(); ++d) {
      double extent = static_cast<double>(w.most[d] - w.least[d] + 1);
      for (const auto& [axis, step] : w.steps[d]) {
        const size_t a = axis_at(axis);
        if (a == tile.blocked && tile.block > 1) {
          const auto own = static_cast<double>((tile.block - 1) * std::abs(step)) + extent;
          taps *= std::min(own, static_cast<double>(tile.block) * extent) / extent;
        }
        extent += static_cast<double>(std::abs(step) * (tile.points[a] - 1));
      }
      // Memory gives whole sectors.
      if (run && d == *run)
        extent = std::ceil(extent * static_cast<double>(w.bytes()) / kSectorBytes) * kSectorBytes / static_cast<double>(w.bytes());
      elements *= extent;
    }
    const bool wide = run && (w.step(*run, axes_[lane_].name) != 0 || !w.moves_along(axes_[lane_].name));
    bytes += elements * static_cast<double>(w.bytes());
    const int64_t by = wide ? kAccessBytes / w.bytes() : 1;
    copies += elements / static_cast<double>(by);
    const double each = w.moves_along(axes_[lane_].name) ? static_cast<double>(lanes_) : 1;
    loads += taps;
    lines += taps * std::max(1.0, std::ceil(each * static_cast<double>(w.bytes() * kWarp) / kSharedBytesPerClock));
  }
  if (bytes > static_cast<double>(kSharedBytes)) return HUGE_VAL;
  const double copy = std::max(bytes / kL2BytesPerClock, copies / kWarp * kCopyInstructions / 4);
  const double shared = warps * lines * ways + bytes / kSharedBytesPerClock;
  double stored = 0;
  for (const GlobalAccess& access : stores_) {
    const auto along = static_cast<double>(tile.points[lane_] * access.bytes);
    stored += static_cast<double>(threads) * points * static_cast<double>(access.bytes) * std::ceil(along / kSectorBytes) * kSectorBytes / along;
  }
  const double store = stored * model.sms * model.boost_ghz / model.dram_gb_s;
  const double issue = warps * (taps_ * points + loads + 8 * points) / 4;
  const double resident = std::max(
      1.0,
      std::floor(std::min({static_cast<double>(model.warps_sm) / warps, static_cast<double>(model.shared_kb_sm << 10) / (bytes + 1024),
                           static_cast<double>(kRegisters) / (static_cast<double>(kOtherRegisters + 2 * tile.block * lanes_) * warps * kWarp)})));
  double blocks = 1;
  for (size_t a = 0; a < axes_.size(); ++a) blocks *= std::ceil(extents[a] / static_cast<double>(tile.points[a]));
  const double work = std::max({copy + store, shared, issue}) + kOverlap * (copy + store + shared + issue);
  const double thin = std::max(1.0, kEnoughWarps / (resident * warps));
  const double each = std::ceil(blocks / model.sms);
  return each * work + std::ceil(each / resident) * kLatency * std::sqrt(thin);
}

Schedule GpuStencil::propose(const SizeHints& hints, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  std::vector<double> extents;
  for (const loop_ir::Axis& a : axes_) extents.push_back(std::max(1.0, analysis::estimate(a.extent, hints, kernel_.symbols)));
  const std::vector<size_t> tiled = tiled_axes();
  std::vector<size_t> blocked = blocked_axes();
  double whole = 1;
  for (double e : extents) whole *= e;
  Tile best;
  double least = HUGE_VAL;
  Tile tile;
  tile.points.assign(axes_.size(), 1);
  const auto look = [&] {
    const auto consider = [&](size_t axis, int64_t block) {
      tile.blocked = axis;
      tile.block = block;
      const int64_t threads = tile.threads(lanes_);
      if (threads > kMostThreads || (threads < kLeastThreads && static_cast<double>(threads * block * lanes_) * 2 < whole)) return;
      if (cost(tile, extents, model) >= least) return;
      const std::vector<Region> regions = lay_out(tile);
      if (shared_bytes(regions) > kSharedBytes) return;
      double ways = 0;
      for (const Region& r : regions) ways += bank_ways(r, tile) / static_cast<double>(regions.size());
      const double clocks = cost(tile, extents, model, ways);
      if (clocks >= least) return;
      least = clocks;
      best = tile;
    };
    consider(lane_, 1);
    for (size_t axis : blocked)
      for (int64_t block : {2, 4, 8})
        if (tile.points[axis] % block == 0 && block * lanes_ <= kMostSums) consider(axis, block);
  };
  const std::function<void(size_t)> choose = [&](size_t at) {
    if (at == tiled.size()) return look();
    const size_t axis = tiled[at];
    int64_t points = 1;
    for (int64_t p : tile.points) points *= p;
    for (int64_t n : choices(extents[axis], axis == lane_ ? lanes_ : 1)) {
      if (points * n > kMostThreads * kMostSums) continue;
      tile.points[axis] = n;
      choose(at + 1);
    }
    tile.points[axis] = 1;
  };
  choose(0);
  if (best.points.empty()) best = least_tile();  // points of any number
  Schedule s{"gpu_stencil", {}};
  for (size_t a = 0; a < axes_.size(); ++a)
    if (best.points[a] > 1 || a == lane_) s.directives.push_back({"tile", {{axes_[a].name, best.points[a]}}});
  s.directives.push_back({"vectorize", {{axes_[lane_].name, {}}, {"by", lanes_}}});
  if (best.block > 1) s.directives.push_back({"register_block", {{axes_[best.blocked].name, best.block}}});
  s.directives.push_back({"stage", {}});
  for (const Reach& w : windows_)
    if (stages(w)) s.directives.back().arguments.push_back({w.name(), {}});
  return s;
}

void GpuStencil::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("its points reach no neighbours, or do more than to sum them");
  tile_.points.assign(axes_.size(), 1);
  for (const Directive* d : reader.all("tile")) {
    const auto axis =
        std::find_if(axes_.begin(), axes_.end(), [&](const auto& a) { return !d->arguments.empty() && d->arguments[0].name == a.name; });
    if (axis == axes_.end()) reader.fail(*d, "allowed: axes of the points");
    reader.only(*d, {axis->name});
    tile_.points[static_cast<size_t>(axis - axes_.begin())] = reader.number(*d, axis->name, 1, kMostTile);
  }
  const Directive& vectorize = reader.one("vectorize");
  reader.only(vectorize, {axes_[lane_].name, "by"});
  lanes_ = reader.number(vectorize, "by", 1, kMostLanes);
  if (lanes_ > widest_ || (lanes_ & (lanes_ - 1)) != 0) reader.fail(vectorize, fmt::format("allowed: powers of two up to {}", widest_));
  if (tile_.points[lane_] % lanes_ != 0) reader.fail(vectorize, "allowed: what divides the tile");
  tile_.blocked = lane_;
  tile_.block = 1;
  if (!reader.all("register_block").empty()) {
    const Directive& block = reader.one("register_block");
    const auto axis =
        std::find_if(axes_.begin(), axes_.end(), [&](const auto& a) { return !block.arguments.empty() && block.arguments[0].name == a.name; });
    if (axis == axes_.end() || axis->name == axes_[lane_].name) reader.fail(block, "allowed: an axis of the points without vectors");
    reader.only(block, {axis->name});
    tile_.blocked = static_cast<size_t>(axis - axes_.begin());
    tile_.block = reader.number(block, axis->name, 1, kMostSums / lanes_);
    if (tile_.points[tile_.blocked] % tile_.block != 0) reader.fail(block, "allowed: what divides the tile");
  }
  const Directive& stage = reader.one("stage");
  std::set<std::string> names;
  for (const Argument& a : stage.arguments) names.insert(a.name);
  std::vector<std::string> known;
  for (const Reach& w : windows_)
    if (stages(w)) known.push_back(w.name());
  for (const std::string& name : names)
    if (std::find(known.begin(), known.end(), name) == known.end()) reader.fail(stage, "allowed: " + joined(known));
  std::erase_if(windows_, [&](const Reach& w) { return names.count(w.name()) == 0; });
  threads_ = tile_.threads(lanes_);
  if (threads_ > kMostGpuThreads) reader.fail(fmt::format("its blocks have {} threads, allowed: up to {}", threads_, kMostGpuThreads));
  regions_ = lay_out(tile_);
  const int64_t bytes = shared_bytes(regions_);
  if (bytes > kSharedBytes)
    reader.fail(stage, fmt::format("what its tile reaches takes {} bytes of shared memory, a block has {}", bytes, kSharedBytes));
  reader.finish("tile, vectorize, register_block and stage");
}

/// Regions of what is copied, with as many elements behind each line as keep threads side by side out of each other's banks.
std::vector<Region> GpuStencil::lay_out(const Tile& tile) const {
  const PointTile points = named(tile.points);
  std::vector<Region> regions;
  for (const Reach& w : windows_) {
    if (!stages(w)) continue;
    Region best = make_region(w, points, axes_[lane_].name, lanes_, axes_);
    double least = bank_ways(best, tile);
    const int64_t step = std::max(best.lanes, kBankBytes / std::min(kBankBytes, w.bytes()));
    for (int64_t pad = step; pad * w.bytes() <= kMostPad * kBankBytes && least > 1; pad += step) {
      Region other = make_region(w, points, axes_[lane_].name, lanes_, axes_, pad);
      if (const double ways = bank_ways(other, tile); ways < least) {
        least = ways;
        best = std::move(other);
      }
    }
    regions.push_back(std::move(best));
  }
  return regions;
}

/// Turns of the banks for each request of a warp that reads the window of its points' first tap.
double GpuStencil::bank_ways(const Region& region, const Tile& tile) const {
  const Reach& w = *region.window;
  const int64_t together = std::min(kWarp, kBanks * kBankBytes / std::max(kBankBytes, lanes_ * w.bytes()));
  const int64_t threads = tile.threads(lanes_);
  double ways = 0;
  double requests = 0;
  for (int64_t begin = 0; begin < threads; begin += together) {
    std::map<int64_t, std::set<int64_t>> words;
    for (int64_t t = begin; t < std::min(threads, begin + together); ++t) {
      std::vector<int64_t> at(w.steps.size(), 0);
      int64_t rest = t;
      for (size_t k = axes_.size(); k-- > 0;) {
        // The vectors' axis first, then the others from the last one on.
        const size_t a = k + 1 == axes_.size() ? lane_ : k < lane_ ? k : k + 1;
        const int64_t each = a == lane_ ? lanes_ : a == tile.blocked ? tile.block : 1;
        const int64_t n = tile.points[a] / each;
        for (size_t d = 0; d < at.size(); ++d) at[d] += rest % n * each * std::abs(w.step(d, axes_[a].name));
        rest /= n;
      }
      int64_t place = 0;
      for (size_t d = 0; d < at.size(); ++d) {
        if (region.phases > 1 && d == region.order.back())
          place += at[d] % region.phases * (region.extents[d] / region.phases) + at[d] / region.phases;
        else
          place += at[d] * region.pitch[d];
      }
      const int64_t bytes = std::max(kBankBytes, w.moves_along(axes_[lane_].name) ? lanes_ * w.bytes() : w.bytes());
      for (int64_t b = 0; b < bytes; b += kBankBytes) {
        const int64_t word = (place * w.bytes() + b) / kBankBytes;
        words[word % kBanks].insert(word);
      }
    }
    size_t most = 1;
    for (const auto& [bank, distinct] : words) most = std::max(most, distinct.size());
    ways += static_cast<double>(most);
    ++requests;
  }
  return ways / requests;
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuStencil::apply(const Schedule& schedule) {
  read(schedule);
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
  piece_ = names_.fresh("u");
  vector_ = names_.fresh("v");
  std::vector<loop_ir::Axis> blocks;
  std::vector<loop_ir::Axis> threads;
  const auto add = [&](size_t a) {
    blocks.push_back({axes_[a].name, ceildiv(axes_[a].extent, tile_.points[a])});
    threads.push_back({axes_[a].name, tile_.points[a] / (a == lane_ ? lanes_ : a == tile_.blocked ? tile_.block : 1)});
  };
  for (size_t a = 0; a < axes_.size(); ++a)
    if (a != lane_) add(a);
  add(lane_);
  first_ = unflatten(blocks, sym(block_));
  const Substitution place = unflatten(threads, sym(thread_));
  for (size_t a = 0; a < axes_.size(); ++a) {
    const std::string& name = axes_[a].name;
    first_[name] = first_.at(name) * tile_.points[a];
    Expr at = place.at(name);
    if (a == lane_)
      at = at * lanes_ + (lanes_ > 1 ? sym(vector_) : Expr(0));
    else if (a == tile_.blocked && tile_.block > 1)
      at = at * tile_.block + sym(piece_);
    in_tile_.push_back(at);
    map_[name] = first_.at(name) + at;
  }
  tile_ir::Block body;
  bool waits = false;
  for (Region& region : regions_) {
    region.array = names_.fresh("window0");
    region.origin = origin_of(region, named(tile_.points), first_);
    body.push_back(make(tile_ir::Alloc{region.array, region.window->param->dtype, {region.elements}, Space::shared}));
    waits = waits || region.is_async;
  }
  for (const Region& region : regions_)
    for (auto& s : copy_region(region, sym(thread_), threads_, names_)) body.push_back(std::move(s));
  if (waits) {
    body.push_back(make(tile_ir::CopyGroup{}));
    body.push_back(make(tile_ir::CopyGroup{0}));
  }
  body.push_back(make(tile_ir::Barrier{}));
  for (const auto& stmt : *inner_)
    if (const auto* s = std::get_if<loop_ir::Reduce>(&stmt->node))
      for (auto& made : reduce(*s)) body.push_back(std::move(made));
  for (auto& s : finish()) body.push_back(std::move(s));
  return gpu_grid(block_, count(blocks), thread_, threads_, std::move(body));
}

/// body for each of a thread's points.
Ref<tile_ir::Stmt> GpuStencil::per_point(tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(vector_, 0, lanes_, LoopKind::lanes), std::move(body)})};
  return make(tile_ir::For{axis(piece_, 0, tile_.block, LoopKind::unroll), std::move(inner)});
}

/// That points exist, as far as these axes are concerned.
std::vector<Cond> GpuStencil::in_range(const std::set<std::string>& axes) const {
  std::vector<Cond> out;
  for (size_t a = 0; a < axes_.size(); ++a) {
    const Expr extent = axes_[a].extent;
    const bool whole = extent.is_constant() && extent.value() % tile_.points[a] == 0;
    if (!whole && axes.count(axes_[a].name) > 0) out.push_back(less(map_.at(axes_[a].name), extent));
  }
  return out;
}

/// What is computed before a reduction, and used in it.
loop_ir::Block GpuStencil::slice_for(const loop_ir::Reduce& reduce) const {
  std::set<std::string> needed;
  for (const auto& s : reduce.body) collect_uses(*s, needed);
  loop_ir::Block slice;
  bool before = false;
  for (size_t i = inner_->size(); i-- > 0;) {
    const loop_ir::Stmt& stmt = *(*inner_)[i];
    if (std::get_if<loop_ir::Reduce>(&stmt.node) == &reduce) before = true;
    if (!before || name_of(stmt).empty() || needed.count(name_of(stmt)) == 0) continue;
    collect_uses(stmt, needed);
    slice.insert(slice.begin(), (*inner_)[i]);
  }
  return slice;
}

/// Statements at a thread's point; what was copied is read where it lies. `guarded`: other loads only where the point exists.
tile_ir::Block GpuStencil::convert(const loop_ir::Block& block, bool guarded) const {
  tile_ir::Block out;
  const auto load = [&](const loop_ir::Load& s) {
    for (const Region& region : regions_) {
      const auto& loads = region.window->loads;
      if (std::find(loads.begin(), loads.end(), &s) == loads.end()) continue;
      std::vector<Expr> at = substituted(s.index, map_);
      for (size_t d = 0; d < at.size(); ++d) at[d] = at[d] - region.origin[d];
      out.push_back(make(tile_ir::Load{s.name, s.dtype, region.array, {region.place(at)}, {}, {}}));
      return;
    }
    loop_ir::Load moved = substituted(s, map_);
    if (guarded) {
      std::set<std::string> used;
      collect_uses(loop_ir::Stmt{s}, used);
      if (moved.guard.empty()) moved.fill = loop_ir::zero_of(s.dtype);
      for (const Cond& c : in_range(used)) moved.guard.push_back(c);
      if (moved.guard.empty()) moved.fill = {};
    }
    out.push_back(make(std::move(moved)));
  };
  for (const auto& stmt : block)
    std::visit(
        Overloaded{[&](const loop_ir::Let& s) { out.push_back(make(substituted(s, map_))); }, load,
                   [&](const loop_ir::Store& s) { out.push_back(make(substituted(s, map_))); },
                   [&](const loop_ir::Check& s) { out.push_back(make(substituted(s, map_))); },
                   [&](const loop_ir::Reduce& s) {
                     out.push_back(make(tile_ir::Load{s.results[0], s.dtypes[0], sums_.at(s.results[0]), {sym(piece_), sym(vector_)}, {}, {}}));
                   },
                   [](const auto&) {}},
        stmt->node);
  return out;
}

/// A sum of each of a thread's points, tap by tap: those that several points share are side by side in the text, where their loads are one.
tile_ir::Block GpuStencil::reduce(const loop_ir::Reduce& s) {
  const std::string& sums = sums_[s.results[0]] = names_.fresh("acc0");
  const std::vector<Expr> own{sym(piece_), sym(vector_)};
  const std::string none = names_.fresh("none");
  const DType dtype = s.dtypes[0];
  tile_ir::Block out{make(tile_ir::Alloc{sums, dtype, {tile_.block, lanes_}, Space::reg}),
                     per_point({make(tile_ir::Let{none, dtype, Fn::constant, {}, identity(s.combiner, dtype), 0}),
                                make(tile_ir::Store{sums, own, none, {}, Combiner::set})})};
  loop_ir::Block whole = slice_for(s);
  whole.insert(whole.end(), s.body.begin(), s.body.end());
  tile_ir::Block body = convert(whole, true);
  body.push_back(make(tile_ir::Store{sums, own, s.operands[0], {}, s.combiner}));
  body = {per_point(std::move(body))};
  // Taps that points of one thread share are unrolled, others as far as the text stays short.
  std::set<std::string> shared;
  if (tile_.block > 1)
    for (const Region& region : regions_)
      for (const loop_ir::Load* load : region.window->loads)
        for (size_t d = 0; d < load->index.size(); ++d)
          if (region.window->step(d, axes_[tile_.blocked].name) != 0)
            for (const std::string& name : symbols_of(load->index[d])) shared.insert(name);
  int64_t products = tile_.block * lanes_;
  std::vector<loop_ir::Axis> inside;
  std::vector<loop_ir::Axis> outside;
  for (bool first : {true, false})
    for (size_t k = s.axes.size(); k-- > 0;) {
      if ((shared.count(s.axes[k].name) > 0) != first) continue;
      const int64_t n = s.axes[k].extent.value();
      const bool unrolls = outside.empty() && products * n <= kUnrolled;
      if (unrolls) products *= n;
      (unrolls ? inside : outside).push_back(s.axes[k]);
    }
  for (const loop_ir::Axis& a : inside) body = {make(tile_ir::For{axis(a.name, 0, a.extent, LoopKind::unroll), std::move(body)})};
  for (const loop_ir::Axis& a : outside) body = {make(tile_ir::For{axis(a.name, 0, a.extent), std::move(body)})};
  out.push_back(body[0]);
  return out;
}

/// What the kernel computes from the sums, for each point that exists.
tile_ir::Block GpuStencil::finish() {
  std::set<std::string> all;
  for (const loop_ir::Axis& a : axes_) all.insert(a.name);
  const std::vector<Cond> exists = in_range(all);
  tile_ir::Block body = convert(*inner_, false);
  if (!exists.empty()) body = {make(tile_ir::If{exists, std::move(body)})};
  return {per_point(std::move(body))};
}

}  // namespace deplo::loop_to_tile
