#include "target/cuda/schedule/stencil.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "analysis/cost.h"
#include "base/error.h"
#include "base/text.h"
#include "schedule/reader.h"

namespace deplo::loop_to_tile {

using tile_ir::Space;

namespace {

constexpr int64_t kWarp = 32;
constexpr double kLeastTaps = 3;  ///< that are worth a copy

}  // namespace

GpuStencil::GpuStencil(const loop_ir::Kernel& kernel) : kernel_(kernel) {
  names_.reserve(kernel);
  fits_ = match();
}

// ---- what fits -----------------------------------------------------------------------------------------------------

bool GpuStencil::match() {
  OuterNest nest = outer_nest(kernel_);
  axes_ = nest.axes;
  inner_ = nest.inner;
  if (axes_.empty() || !colliding_stores(kernel_).empty()) return false;
  const auto taps = taps_of(*inner_);
  if (!taps) return false;
  taps_ = *taps;
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
  possible_ = std::any_of(windows_.begin(), windows_.end(), [&](const Reach& w) { return is_staged(w, axes_[lane_].name); });
  // What reaches no neighbours, or two of them, does as well with loads of its own.
  double reached = 0;
  for (const Reach& w : windows_)
    if (!w.overlaps().empty()) reached += w.taps;
  // Taps far apart reach more than a block can hold.
  return possible_ && reached >= kLeastTaps && shared_bytes(lay_out(least_tile())) <= kSharedBytes;
}

/// The smallest tile that keeps a block's warps busy, a point or a vector each.
PointThreads GpuStencil::least_tile() const {
  PointThreads tile = single();
  const auto at_most = [&](size_t axis, int64_t n) {
    const Expr extent = axes_[axis].extent;
    return extent.is_constant() ? std::min(n, std::max<int64_t>(1, extent.value())) : n;
  };
  tile.points[lane_] = (at_most(lane_, kLeastThreads * lanes_) + lanes_ - 1) / lanes_ * lanes_;
  for (size_t axis : tiled_axes())
    if (const int64_t threads = tile.count(); axis != lane_ && threads < kLeastThreads) tile.points[axis] = at_most(axis, kLeastThreads / threads);
  return tile;
}

/// Vectors of points, where nothing is copied whose neighbours lie along them, or that lies otherwise.
void GpuStencil::find_lanes() {
  const loop_ir::Axis& lane = axes_[lane_];
  widest_ = lanes_along(global_accesses(kernel_, *inner_), lane.name, lane.extent);
  if (!lane.extent.is_constant()) widest_ = 1;
  for (const Reach& w : windows_) {
    if (!w.moves_along(lane.name) || !is_staged(w, axes_[lane_].name)) continue;
    for (size_t d = 0; d < w.steps.size(); ++d)
      if (w.step(d, lane.name) != 0 && (w.run() != d || w.step(d, lane.name) != 1 || w.least[d] != w.most[d])) widest_ = 1;
  }
}

size_t GpuStencil::axis_at(const std::string& name) const {
  const auto found = std::find_if(axes_.begin(), axes_.end(), [&](const auto& a) { return a.name == name; });
  return static_cast<size_t>(found - axes_.begin());
}

/// Blocks of one point, or one vector of them.
PointThreads GpuStencil::single() const { return {&axes_, std::vector<int64_t>(axes_.size(), 1), lane_, lanes_, lane_, 1}; }

// ---- the schedule as data ------------------------------------------------------------------------------------------

/// Axes that blocks may have several points of: along which windows overlap or copies run, and one more where those are short. The vectors' comes
/// last.
std::vector<size_t> GpuStencil::tiled_axes() const {
  std::set<size_t> found;
  for (const Reach& w : windows_) {
    if (!is_staged(w, axes_[lane_].name)) continue;
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

/// Clocks of a device for all blocks.
double GpuStencil::cost(const PointThreads& tile, const std::vector<double>& extents, const CudaModel& model, double ways) const {
  const double points = static_cast<double>(tile.block * lanes_);
  StencilWork work;
  const int64_t warps = (tile.count() + kWarp - 1) / kWarp;
  work.warps = static_cast<double>(warps);
  work.sums = points;
  double loads = 0;
  for (const Reach& w : windows_) {
    if (!is_staged(w, axes_[lane_].name)) continue;
    work.copy(w, tile);
    loads += work.read(w, tile, 1, ways);
  }
  if (work.held > static_cast<double>(kSharedBytes)) return HUGE_VAL;
  work.issued = work.warps * (taps_ * points + loads + 8 * points);
  work.stored = stored_bytes(stores_, tile);
  double blocks = 1;
  for (size_t a = 0; a < axes_.size(); ++a) blocks *= std::ceil(extents[a] / static_cast<double>(tile.points[a]));
  return work.clocks(blocks, model);
}

/// The tile that takes the fewest clocks, and those.
std::pair<PointThreads, double> GpuStencil::choose(const SizeHints& hints, const CudaModel& model) const {
  std::vector<double> extents;
  for (const loop_ir::Axis& a : axes_) extents.push_back(std::max(1.0, analysis::estimate(a.extent, hints, kernel_.symbols)));
  const std::vector<size_t> tiled = tiled_axes();
  std::vector<size_t> blocked = blocked_axes();
  double whole = 1;
  for (double e : extents) whole *= e;
  PointThreads best;
  double least = HUGE_VAL;
  PointThreads tile = single();
  const auto look = [&] {
    const auto consider = [&](size_t axis, int64_t block) {
      tile.blocked = axis;
      tile.block = block;
      const int64_t threads = tile.count();
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
  const std::function<void(size_t)> run_through = [&](size_t at) {
    if (at == tiled.size()) return look();
    const size_t axis = tiled[at];
    int64_t points = 1;
    for (int64_t p : tile.points) points *= p;
    for (int64_t n : tile_choices(extents[axis], axis == lane_ ? lanes_ : 1)) {
      if (points * n > kMostThreads * kMostSums) continue;
      tile.points[axis] = n;
      run_through(at + 1);
    }
    tile.points[axis] = 1;
  };
  run_through(0);
  if (best.points.empty()) best = least_tile();  // points of any number
  return {best, least};
}

double GpuStencil::clocks(const SizeHints& hints, const std::string& arch) const { return choose(hints, cuda_model(arch)).second; }

Schedule GpuStencil::propose(const SizeHints& hints, const std::string& arch) const {
  const PointThreads best = choose(hints, cuda_model(arch)).first;
  Schedule s{"gpu_stencil", {}};
  for (size_t a = 0; a < axes_.size(); ++a)
    if (best.points[a] > 1 || a == lane_) s.directives.push_back({"tile", {{axes_[a].name, best.points[a]}}});
  s.directives.push_back({"vectorize", {{axes_[lane_].name, {}}, {"by", lanes_}}});
  if (best.block > 1) s.directives.push_back({"register_block", {{axes_[best.blocked].name, best.block}}});
  s.directives.push_back({"stage", {}});
  for (const Reach& w : windows_)
    if (is_staged(w, axes_[lane_].name)) s.directives.back().arguments.push_back({w.name(), {}});
  return s;
}

void GpuStencil::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("its points reach no neighbours, or do more than to sum them");
  tile_ = single();
  for (const Directive* d : reader.all("tile")) {
    const auto axis =
        std::find_if(axes_.begin(), axes_.end(), [&](const auto& a) { return !d->arguments.empty() && d->arguments[0].name == a.name; });
    if (axis == axes_.end()) reader.fail(*d, "allowed: axes of the points");
    reader.only(*d, {axis->name});
    tile_.points[static_cast<size_t>(axis - axes_.begin())] = reader.number(*d, axis->name, 1, kMostTile);
  }
  const Directive& vectorize = reader.one("vectorize");
  reader.only(vectorize, {axes_[lane_].name, "by"});
  lanes_ = tile_.lanes = reader.number(vectorize, "by", 1, kMostLanes);
  if (lanes_ > widest_ || (lanes_ & (lanes_ - 1)) != 0) reader.fail(vectorize, fmt::format("allowed: powers of two up to {}", widest_));
  if (tile_.points[lane_] % lanes_ != 0) reader.fail(vectorize, "allowed: what divides the tile");
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
    if (is_staged(w, axes_[lane_].name)) known.push_back(w.name());
  for (const std::string& name : names)
    if (std::find(known.begin(), known.end(), name) == known.end()) reader.fail(stage, "allowed: " + joined(known));
  std::erase_if(windows_, [&](const Reach& w) { return names.count(w.name()) == 0; });
  threads_ = tile_.count();
  if (threads_ > kMostGpuThreads) reader.fail(fmt::format("its blocks have {} threads, allowed: up to {}", threads_, kMostGpuThreads));
  regions_ = lay_out(tile_);
  const int64_t bytes = shared_bytes(regions_);
  if (bytes > kSharedBytes)
    reader.fail(stage, fmt::format("what its tile reaches takes {} bytes of shared memory, a block has {}", bytes, kSharedBytes));
  reader.finish("tile, vectorize, register_block and stage");
}

// ---- the block -----------------------------------------------------------------------------------------------------

/// Regions of what is copied.
std::vector<Region> GpuStencil::lay_out(const PointThreads& tile) const {
  std::vector<Region> regions;
  for (const Reach& w : windows_)
    if (is_staged(w, axes_[lane_].name)) regions.push_back(lay_out_region(w, tile));
  return regions;
}

tile_ir::Block GpuStencil::apply(const Schedule& schedule) {
  read(schedule);
  const std::string block = names_.fresh("b");
  const std::string thread = names_.fresh("t");
  const StencilPoints::Own own{names_.fresh("u"), names_.fresh("v"), tile_.block, lanes_, axes_[tile_.blocked].name};
  std::vector<loop_ir::Axis> blocks;
  for (size_t a : tile_.order()) blocks.push_back({axes_[a].name, ceildiv(axes_[a].extent, tile_.points[a])});
  Substitution first = unflatten(blocks, sym(block));
  Substitution place = tile_.places(sym(thread));
  StencilPoints::Exists exists;
  for (size_t a = 0; a < axes_.size(); ++a) {
    const auto& [name, extent] = axes_[a];
    first[name] = first.at(name) * tile_.points[a];
    Expr at = place.at(name);
    if (a == lane_ && lanes_ > 1) at = at + sym(own.vector);
    if (a == tile_.blocked && tile_.block > 1) at = at + sym(own.piece);
    place[name] = first.at(name) + at;
    const bool whole = extent.is_constant() && extent.value() % tile_.points[a] == 0;
    if (!whole) exists.emplace_back(name, less(place.at(name), extent));
  }
  tile_ir::Block body;
  bool waits = false;
  for (Region& region : regions_) {
    region.array = names_.fresh("window0");
    region.origin = origin_of(region, tile_.named(), first);
    body.push_back(make(tile_ir::Alloc{region.array, region.window->param->dtype, {region.elements}, Space::shared}));
    waits = waits || region.is_async;
  }
  for (const Region& region : regions_)
    for (auto& s : copy_region(region, sym(thread), threads_, names_)) body.push_back(std::move(s));
  if (waits) {
    body.push_back(make(tile_ir::CopyGroup{}));
    body.push_back(make(tile_ir::CopyGroup{0}));
  }
  body.push_back(make(tile_ir::Barrier{}));
  StencilPoints points(*inner_, regions_, std::move(place), own, std::move(exists), names_);
  for (auto& s : points.sums()) body.push_back(std::move(s));
  // What the kernel computes from the sums, for each point that exists.
  tile_ir::Block values = points.values(false);
  if (const std::vector<Cond> exist = points.exist(); !exist.empty()) values = {make(tile_ir::If{exist, std::move(values)})};
  body.push_back(points.per_point(std::move(values)));
  return gpu_grid(block, count(blocks), thread, threads_, std::move(body));
}

}  // namespace deplo::loop_to_tile
