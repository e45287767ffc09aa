#include "target/cuda/schedule/stencil_chain.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "analysis/cost.h"
#include "base/error.h"
#include "base/text.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "schedule/reader.h"
#include "target/cuda/schedule/stencil.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kWarp = 32;
constexpr double kLeastTaps = 3;            ///< that are worth shared memory
constexpr int64_t kReserved = 1 << 10;      ///< bytes of shared memory that devices keep for themselves
constexpr int64_t kMostChainThreads = 256;  ///< that are tried
constexpr int64_t kMostPoints = 16 << 10;   ///< of a block's tile
constexpr double kOtherInstructions = 8;    ///< of a point
constexpr double kSelectInstructions = 12;  ///< of a point of an array: whether it exists

/// Adds the loads of `other`, which differ by constants alone, where all points that one of the two takes without a guard satisfy the other's.
bool merge(Reach& window, const Reach& other) {
  if (window.param != other.param || window.steps != other.steps) return false;
  const auto always = [&](const Reach& w) {
    Ranges ranges;
    for (size_t d = 0; d < w.base.size(); ++d) ranges[Reach::coordinate(d)] = axis_range(w.param->shape[d]);
    return std::all_of(w.inside.begin(), w.inside.end(), [&](const Cond& c) { return decide(c, ranges) == true; });
  };
  const bool same = window.inside == other.inside && window.fill == other.fill;
  if (!same && !(window.inside.empty() && always(other)) && !(other.inside.empty() && always(window))) return false;
  Reach joined = window;
  if (window.inside.empty()) {
    joined.inside = other.inside;
    joined.fill = other.fill;
  }
  for (size_t d = 0; d < window.base.size(); ++d) {
    const auto apart = (other.base[d] - window.base[d]).as_constant();
    if (!apart || std::abs(*apart) > kWidestWindow) return false;
    joined.least[d] = std::min(window.least[d], other.least[d] + *apart);
    joined.most[d] = std::max(window.most[d], other.most[d] + *apart);
  }
  joined.loads.insert(joined.loads.end(), other.loads.begin(), other.loads.end());
  joined.taps += other.taps;
  window = std::move(joined);
  return true;
}

int64_t rounded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Coordinates that a tile of points reaches along a dimension.
int64_t extent_of(const Reach& w, size_t d, const PointThreads& tile) {
  int64_t extent = w.most[d] - w.least[d] + 1;
  for (size_t a = 0; a < tile.points.size(); ++a) extent += std::abs(w.step(d, (*tile.axes)[a].name)) * (tile.points[a] - 1);
  return extent;
}

}  // namespace

// ---- what fits -----------------------------------------------------------------------------------------------------

GpuStencilChain::GpuStencilChain(const loop_ir::Kernel& kernel) : name_(kernel.name), symbols_(kernel.symbols) {
  names_.reserve(kernel);
  fits_ = match(stages_of(kernel));
}

GpuStencilChain::GpuStencilChain(std::vector<loop_ir::Kernel> stages) : name_(stages[0].name), symbols_(stages[0].symbols) {
  fits_ = match(std::move(stages));
}

/// Each nest as a kernel of its own; none where the kernel is made of something else.
std::vector<loop_ir::Kernel> GpuStencilChain::stages_of(const loop_ir::Kernel& kernel) {
  const OuterNest outer = outer_nest(kernel);
  std::vector<Expr> shared;
  std::vector<Expr> extents;
  for (const loop_ir::Axis& a : outer.axes) {
    shared.push_back(sym(a.name));
    extents.push_back(a.extent);
  }
  std::vector<loop_ir::Param> arrays;
  std::vector<loop_ir::Kernel> stages;
  loop_ir::Block before;
  for (const auto& stmt : *outer.inner) {
    if (const auto* local = std::get_if<loop_ir::Local>(&stmt->node)) {
      loop_ir::Param array{local->name, loop_ir::ParamKind::in, local->dtype, extents, {}, false, {}};
      array.shape.insert(array.shape.end(), local->shape.begin(), local->shape.end());
      array.strides = contiguous_strides(array.shape);
      arrays.push_back(std::move(array));
      continue;
    }
    if (is_straight(*stmt)) {
      before.push_back(stmt);
      continue;
    }
    if (!std::holds_alternative<loop_ir::For>(stmt->node)) return {};
    const auto index = [&](const std::string& buffer, const std::vector<Expr>& own) {
      std::vector<Expr> all;
      if (std::any_of(arrays.begin(), arrays.end(), [&](const auto& a) { return a.name == buffer; })) all = shared;
      all.insert(all.end(), own.begin(), own.end());
      return all;
    };
    loop_ir::Nest nest = loop_ir::peel({stmt});
    nest.axes.insert(nest.axes.begin(), outer.axes.begin(), outer.axes.end());
    nest.body.insert(nest.body.begin(), before.begin(), before.end());
    nest.body = loop_ir::rewrite(nest.body, [&](const Ref<loop_ir::Stmt>& s) -> loop_ir::Block {
      if (const auto* load = std::get_if<loop_ir::Load>(&s->node)) {
        loop_ir::Load moved = *load;
        moved.index = index(load->buffer, load->index);
        return {loop_ir::make_stmt(std::move(moved))};
      }
      if (const auto* store = std::get_if<loop_ir::Store>(&s->node)) {
        loop_ir::Store moved = *store;
        moved.index = index(store->buffer, store->index);
        return {loop_ir::make_stmt(std::move(moved))};
      }
      return {s};
    });
    loop_ir::Kernel stage;
    stage.name = kernel.name;
    stage.symbols = kernel.symbols;
    stage.params = kernel.params;
    stage.body = loop_ir::make_nest(nest.axes, std::move(nest.body));
    stages.push_back(std::move(stage));
  }
  if (arrays.empty() || stages.size() != arrays.size() + 1) return {};
  for (loop_ir::Kernel& stage : stages) stage.params.insert(stage.params.end(), arrays.begin(), arrays.end());
  return stages;
}

bool GpuStencilChain::match(std::vector<loop_ir::Kernel> kernels) {
  if (kernels.size() < 2) return false;
  for (loop_ir::Kernel& kernel : kernels) {
    if (!colliding_stores(kernel).empty()) return false;
    stages_.emplace_back().kernel = std::move(kernel);
  }
  for (Stage& stage : stages_) {
    const OuterNest nest = outer_nest(stage.kernel);
    stage.axes = nest.axes;
    stage.body = *nest.inner;
    const auto taps = taps_of(stage.body);
    if (!taps || stage.axes.empty()) return false;
    stage.taps = *taps;
  }
  if (!find_arrays() || !find_lane()) return false;
  for (size_t s = stages_.size(); s-- > 0;)
    if (!read_windows(stages_[s])) return false;
  // Each array is made before, for one stage.
  std::vector<int64_t> readers(stages_.size(), 0);
  double reached = 0;
  for (size_t s = 0; s < stages_.size(); ++s)
    for (size_t k = 0; k < stages_[s].windows.size(); ++k) {
      const size_t maker = stages_[s].makers[k];
      if (maker == kMemory) continue;
      if (maker >= s) return false;
      ++readers[maker];
      if (!stages_[s].windows[k].overlaps().empty()) reached += stages_[s].windows[k].taps;
    }
  readers.pop_back();
  if (reached < kLeastTaps || std::any_of(readers.begin(), readers.end(), [](int64_t n) { return n != 1; })) return false;
  find_vectors();
  int64_t bytes = 0;
  for (const Plan& plan : lay_out(least_tile())) bytes += shared_bytes(plan.regions);
  return bytes <= kSharedBytes;
}

/// The array that each stage but the last makes, once, a point an iteration.
bool GpuStencilChain::find_arrays() {
  std::set<std::string> made;
  for (Stage& stage : stages_) {
    const bool last = &stage == &stages_.back();
    for (const auto& stmt : stage.body) {
      const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
      if (!store) continue;
      const loop_ir::Param* param = stage.kernel.find_param(store->buffer);
      const bool is_array = param->kind == loop_ir::ParamKind::in;
      if (is_array == last) return false;
      if (last) continue;
      if (stage.made || !store->guard.empty() || store->combiner != Combiner::set || !made.insert(store->buffer).second) return false;
      if (!loop_ir::one_place_each(store->index, stage.axes) || store->index.size() != stage.axes.size()) return false;
      stage.made = store;
      for (size_t d = 0; d < store->index.size(); ++d) {
        const auto axis = std::find_if(stage.axes.begin(), stage.axes.end(), [&](const auto& a) { return sym(a.name) == store->index[d]; });
        if (axis == stage.axes.end() || axis->extent != param->shape[d]) return false;
        stage.dims.push_back(static_cast<size_t>(axis - stage.axes.begin()));
      }
    }
    if (last) continue;
    if (!stage.made) return false;
    std::erase_if(stage.body, [&](const auto& stmt) { return std::get_if<loop_ir::Store>(&stmt->node) == stage.made; });
  }
  return true;
}

/// Of the last stage: the axis along which most bytes are stored side by side.
bool GpuStencilChain::find_lane() {
  Stage& last = stages_.back();
  std::vector<int64_t> stored(last.axes.size(), 0);
  for (const GlobalAccess& access : global_accesses(last.kernel, last.body))
    if (access.stores) stores_.push_back(access);
  for (const GlobalAccess& access : stores_)
    for (size_t a = 0; a < last.axes.size(); ++a)
      if (auto step = linear_coefficient(access.offset, last.axes[a].name); step && step->is(1)) stored[a] += access.bytes;
  const auto most = std::max_element(stored.begin(), stored.end());
  last.lane = static_cast<size_t>(most - stored.begin());
  return *most > 0;
}

/// What a stage reads, and along which axis the threads of those lie that make it.
bool GpuStencilChain::read_windows(Stage& stage) {
  // The places of its arrays are read by later stages alone, who know them by the order of their dimensions.
  for (const Reach& found : find_windows(stage.kernel, stage.body, stage.axes)) {
    if (!stage.windows.empty()) {
      const bool merged = std::any_of(stage.windows.begin(), stage.windows.end(), [&](Reach& w) {
        const auto maker = std::find_if(stages_.begin(), stages_.end(), [&](const Stage& s) { return s.made && s.made->buffer == w.param->name; });
        return maker != stages_.end() && merge(w, found);
      });
      if (merged) continue;
    }
    stage.windows.push_back(found);
  }
  std::set<const loop_ir::Load*> known;
  for (Reach& w : stage.windows) {
    const auto maker = std::find_if(stages_.begin(), stages_.end(), [&](const Stage& s) { return s.made && s.made->buffer == w.param->name; });
    stage.makers.push_back(maker == stages_.end() ? kMemory : static_cast<size_t>(maker - stages_.begin()));
    if (maker == stages_.end()) continue;
    known.insert(w.loads.begin(), w.loads.end());
    for (const auto& steps : w.steps)
      if (std::any_of(steps.begin(), steps.end(), [](const auto& s) { return s.second < 0; })) return false;
    size_t lane = w.steps.size() - 1;
    for (size_t d = 0; d < w.steps.size(); ++d)
      if (w.step(d, stage.axes[stage.lane].name) != 0) lane = d;
    maker->lane = maker->dims[lane];
    // Strides say the order of dimensions alone: in shared memory, nothing is copied there.
    loop_ir::Param& array = arrays_.emplace_back(*w.param);
    int64_t stride = 4;
    for (size_t d = array.strides.size(); d-- > 0;) {
      array.strides[d] = d == lane ? 2 : stride;
      stride *= 2;
    }
    w.param = &array;
  }
  bool all = true;
  visit_all(stage.body, [&](const loop_ir::Stmt& stmt) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
    if (load && std::any_of(stages_.begin(), stages_.end(), [&](const Stage& s) { return s.made && s.made->buffer == load->buffer; }))
      all = all && known.count(load) > 0;
  });
  return all;
}

/// Whether a window lies in shared memory.
bool GpuStencilChain::is_shared(const Stage& stage, size_t window) const {
  return stage.makers[window] != kMemory || is_staged(stage.windows[window], stage.axes[stage.lane].name);
}

/// Vectors of points, where all stages have the same axis for them, and none reaches neighbours along it.
void GpuStencilChain::find_vectors() {
  const loop_ir::Axis& lane = stages_.back().axes[stages_.back().lane];
  widest_ = lane.extent.is_constant() ? kMostLanes : 1;
  for (const Stage& stage : stages_) {
    if (stage.axes[stage.lane].name != lane.name) widest_ = 1;
    std::vector<GlobalAccess> accesses = global_accesses(stage.kernel, stage.body);
    std::erase_if(accesses, [&](const GlobalAccess& a) {
      const auto step = linear_coefficient(a.offset, lane.name);
      const bool along = step && (step->is(1) || step->is(-1));
      return !along || std::any_of(stages_.begin(), stages_.end(), [&](const Stage& s) { return s.made && s.made->buffer == a.buffer; });
    });
    if (!accesses.empty()) widest_ = std::min(widest_, lanes_along(accesses, lane.name, lane.extent));
    for (size_t k = 0; k < stage.windows.size(); ++k) {
      const Reach& w = stage.windows[k];
      if (!w.moves_along(lane.name) || !is_shared(stage, k)) continue;
      for (size_t d = 0; d < w.steps.size(); ++d)
        if (w.step(d, lane.name) != 0 && ((stage.makers[k] == kMemory && w.run() != d) || w.step(d, lane.name) != 1 || w.least[d] != w.most[d]))
          widest_ = 1;
    }
  }
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

PointThreads GpuStencilChain::single() const {
  const Stage& last = stages_.back();
  return {&last.axes, std::vector<int64_t>(last.axes.size(), 1), last.lane, widest_, last.lane, 1};
}

/// The smallest tile that keeps a warp busy.
PointThreads GpuStencilChain::least_tile() const {
  PointThreads tile = single();
  const Expr extent = tile.axes->at(tile.lane).extent;
  const int64_t all = extent.is_constant() ? extent.value() : kWarp * widest_;
  tile.points[tile.lane] = rounded(std::min(all, kWarp * widest_), widest_);
  return tile;
}

/// Axes of the last stage that tiles may have several points of: those along which windows overlap, and one more where those are short. The lane's
/// comes last.
std::vector<size_t> GpuStencilChain::tiled_axes() const {
  const Stage& last = stages_.back();
  std::vector<size_t> out = blocked_axes();
  for (size_t a = last.axes.size(); a-- > 0;)
    if (a != last.lane && std::find(out.begin(), out.end(), a) == out.end()) {
      out.insert(out.begin(), a);
      break;
    }
  out.push_back(last.lane);
  return out;
}

/// Those of them of which a thread may have several points, which then share loads.
std::vector<size_t> GpuStencilChain::blocked_axes() const {
  const Stage& last = stages_.back();
  std::set<size_t> found;
  for (const Reach& w : last.windows)
    for (size_t d : w.overlaps())
      for (size_t a = 0; a < last.axes.size(); ++a)
        if (a != last.lane && w.step(d, last.axes[a].name) != 0) found.insert(a);
  return {found.begin(), found.end()};
}

/// The tile of the stage that makes what a tile reaches, `extents` of it.
void GpuStencilChain::reach(const Stage& stage, const PointThreads& from, const Reach& window, const std::vector<int64_t>& extents,
                            PointThreads& maker) const {
  const Stage& making = stages_[stage.makers[static_cast<size_t>(&window - stage.windows.data())]];
  maker = {&making.axes, std::vector<int64_t>(making.axes.size(), 1), making.lane, from.lanes, making.lane, 1};
  for (size_t d = 0; d < extents.size(); ++d) {
    const size_t axis = making.dims[d];
    maker.points[axis] = extents[d];
    if (from.block > 1 && axis != making.lane && window.step(d, (*from.axes)[from.blocked].name) != 0) {
      maker.blocked = axis;
      maker.block = from.block;
    }
  }
  if (maker.block > 1) maker.points[maker.blocked] = rounded(maker.points[maker.blocked], maker.block);
}

/// Where the tile begins that makes a window of this tile.
TileStarts GpuStencilChain::starts_of(const Stage& stage, const PointThreads& tile, size_t window) const {
  const Reach& w = stage.windows[window];
  const Stage& making = stages_[stage.makers[window]];
  TileStarts starts;
  for (size_t d = 0; d < w.base.size(); ++d) {
    const std::string& made = making.axes[making.dims[d]].name;
    // Shared axes have the tiles of the results.
    if (std::any_of(stage.axes.begin(), stage.axes.end(), [&](const auto& a) { return a.name == made; })) continue;
    const auto base = w.base[d].as_constant();
    TileStart& start = starts[made];
    start = {base ? 0 : 1, base.value_or(0) + w.least[d]};
    for (size_t a = 0; a < stage.axes.size(); ++a) {
      const int64_t step = w.step(d, stage.axes[a].name);
      if (step == 0) continue;
      const auto own = tile.starts.find(stage.axes[a].name);
      const Expr extent = stage.axes[a].extent;
      const bool single = extent.is_constant() && extent.value() <= tile.points[a];
      const TileStart from = own != tile.starts.end() ? own->second : TileStart{single ? 0 : tile.points[a], 0};
      start.multiple = std::gcd(start.multiple, step * from.multiple);
      start.offset += step * from.offset;
    }
  }
  return starts;
}

/// Whether it belongs to a product, whose other operand is the same for points along some axis: its loops are as long as there are channels.
bool GpuStencilChain::multiplies(const Stage& stage, const Reach& window) {
  return std::any_of(stage.axes.begin(), stage.axes.end(), [&](const loop_ir::Axis& axis) {
    return window.moves_along(axis.name) &&
           std::any_of(stage.windows.begin(), stage.windows.end(), [&](const Reach& other) { return !other.moves_along(axis.name); });
  });
}

/// Clocks of a device for all blocks.
double GpuStencilChain::cost(const PointThreads& tile, int64_t threads, const std::vector<double>& extents, const CudaModel& model,
                             double ways) const {
  StencilWork work;
  work.warps = std::ceil(static_cast<double>(threads) / kWarp);
  work.barriers = static_cast<double>(stages_.size());
  std::vector<PointThreads> tiles(stages_.size());
  tiles.back() = tile;
  for (size_t s = stages_.size(); s-- > 0;) {
    const Stage& stage = stages_[s];
    const PointThreads& own = tiles[s];
    const auto points = static_cast<double>(own.block * own.lanes);
    work.sums = std::max(work.sums, points);
    const double turns = std::ceil(static_cast<double>(own.count()) / static_cast<double>(threads));
    double loads = 0;
    for (size_t k = 0; k < stage.windows.size(); ++k) {
      const Reach& w = stage.windows[k];
      if (!is_shared(stage, k)) {
        if (multiplies(stage, w)) work.wait(w, turns);
        continue;
      }
      if (stage.makers[k] == kMemory) {
        work.copy(w, own);
      } else {
        std::vector<int64_t> reached;
        for (size_t d = 0; d < w.steps.size(); ++d) reached.push_back(extent_of(w, d, own));
        reach(stage, own, w, reached, tiles[stage.makers[k]]);
        const PointThreads& made = tiles[stage.makers[k]];
        work.held += static_cast<double>(made.count() * made.block * made.lanes * w.bytes());
      }
      loads += work.read(w, own, turns, ways);
    }
    const double other = kOtherInstructions + (stage.made ? kSelectInstructions : 0);
    work.issued += work.warps * turns * (stage.taps * points + loads + other * points);
  }
  if (work.held > static_cast<double>((static_cast<int64_t>(model.shared_kb_block) << 10) - kReserved)) return HUGE_VAL;
  work.stored = stored_bytes(stores_, tile);
  double blocks = 1;
  for (size_t a = 0; a < extents.size(); ++a) blocks *= std::ceil(extents[a] / static_cast<double>(tile.points[a]));
  return work.clocks(blocks, model);
}

/// Regions of all stages, from the last one on.
std::vector<GpuStencilChain::Plan> GpuStencilChain::lay_out(const PointThreads& tile) const {
  std::vector<Plan> plans(stages_.size());
  plans.back().tile = tile;
  for (size_t s = stages_.size(); s-- > 0;) {
    const Stage& stage = stages_[s];
    Plan& plan = plans[s];
    for (size_t k = 0; k < stage.windows.size(); ++k) {
      if (!is_shared(stage, k)) continue;
      Reach& window = plan.windows.emplace_back(stage.windows[k]);
      plan.makers.push_back(stage.makers[k]);
      Region region = lay_out_region(window, plan.tile);
      if (stage.makers[k] == kMemory) {
        plan.regions.push_back(std::move(region));
        continue;
      }
      PointThreads& made = plans[stage.makers[k]].tile;
      const std::vector<int64_t> needed = region.extents;
      reach(stage, plan.tile, stage.windows[k], needed, made);
      made.starts = starts_of(stage, plan.tile, k);
      // As many as its threads make at once.
      const Stage& making = stages_[stage.makers[k]];
      for (size_t d = 0; d < needed.size(); ++d) window.most[d] += made.points[making.dims[d]] - needed[d];
      region = lay_out_region(window, plan.tile);
      for (size_t d = 0; d < needed.size(); ++d) region.ragged[d] = region.ragged[d] || made.points[making.dims[d]] != needed[d];
      plan.regions.push_back(std::move(region));
    }
  }
  return plans;
}

std::optional<GpuStencilChain::Choice> GpuStencilChain::choose(const SizeHints& hints, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const Stage& last = stages_.back();
  std::vector<double> extents;
  double whole = 1;
  for (const loop_ir::Axis& a : last.axes) {
    extents.push_back(std::max(1.0, analysis::estimate(a.extent, hints, symbols_)));
    whole *= extents.back();
  }
  const std::vector<size_t> tiled = tiled_axes();
  const std::vector<size_t> blocked = blocked_axes();
  const int64_t most_bytes = (static_cast<int64_t>(model.shared_kb_block) << 10) - kReserved;
  PointThreads tile = single();
  Choice best{tile, 0, HUGE_VAL};
  const auto look = [&] {
    const auto consider = [&](size_t axis, int64_t block) {
      tile.blocked = axis;
      tile.block = block;
      if (tile.count() < kLeastThreads / 2 && static_cast<double>(tile.count() * block * tile.lanes) * 2 < whole) return;
      for (int64_t threads = kLeastThreads; threads <= kMostChainThreads && threads < 2 * tile.count(); threads *= 2) {
        if (cost(tile, threads, extents, model, 1) >= best.clocks) continue;
        int64_t bytes = 0;
        double ways = 0;
        double regions = 0;
        for (const Plan& plan : lay_out(tile)) {
          bytes += shared_bytes(plan.regions);
          for (const Region& r : plan.regions) ways += bank_ways(r, plan.tile);
          regions += static_cast<double>(plan.regions.size());
        }
        if (bytes > most_bytes) continue;
        if (const double clocks = cost(tile, threads, extents, model, ways / regions); clocks < best.clocks) best = {tile, threads, clocks};
      }
    };
    consider(tile.lane, 1);
    for (size_t axis : blocked)
      for (int64_t block : {2, 4})
        if (tile.points[axis] % block == 0 && block * tile.lanes <= kMostSums) consider(axis, block);
  };
  const std::function<void(size_t)> run_through = [&](size_t at) {
    if (at == tiled.size()) return look();
    const size_t axis = tiled[at];
    int64_t points = 1;
    for (int64_t p : tile.points) points *= p;
    for (int64_t n : tile_choices(extents[axis], axis == tile.lane ? tile.lanes : 1)) {
      if (points * n > kMostPoints) continue;
      tile.points[axis] = n;
      run_through(at + 1);
    }
    tile.points[axis] = 1;
  };
  run_through(0);
  if (best.threads == 0) return std::nullopt;
  return best;
}

/// Clocks of a kernel of its own: as a stencil, or what memory takes for its parameters.
double GpuStencilChain::alone(const loop_ir::Kernel& kernel, const SizeHints& hints, const std::string& arch) {
  const CudaModel& model = cuda_model(arch);
  loop_ir::Kernel used = kernel;
  std::set<std::string> names;
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) names.insert(load->buffer);
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt.node)) names.insert(store->buffer);
  });
  std::erase_if(used.params, [&](const loop_ir::Param& p) { return names.count(p.name) == 0; });
  if (const GpuStencil stencil(used); stencil.fits()) return stencil.clocks(hints, arch);
  double bytes = 0;
  for (const loop_ir::Param& p : used.params)
    bytes += std::max(1.0, analysis::estimate(product(p.shape), hints, kernel.symbols)) * static_cast<double>(size_of(p.dtype));
  return bytes / model.dram_gb_s * model.boost_ghz;
}

bool GpuStencilChain::is_worth(const SizeHints& hints, const std::string& arch) const {
  const auto together = choose(hints, arch);
  if (!together) return false;
  std::vector<loop_ir::Kernel> rest;
  for (size_t s = 1; s < stages_.size(); ++s) rest.push_back(stages_[s].kernel);
  double apart = alone(stages_[0].kernel, hints, arch) + kLaunchSeconds * cuda_model(arch).boost_ghz * 1e9;
  if (rest.size() == 1) {
    apart += alone(rest[0], hints, arch);
  } else {
    const GpuStencilChain chain(std::move(rest));
    const auto others = chain.fits() ? chain.choose(hints, arch) : std::nullopt;
    if (!others) return false;
    apart += others->clocks;
  }
  return together->clocks < apart;
}

Schedule GpuStencilChain::propose(const SizeHints& hints, const std::string& arch) const {
  auto best = choose(hints, arch);
  if (!best) best = Choice{least_tile(), kLeastThreads, 0};
  const PointThreads& tile = best->tile;
  Schedule s{"gpu_stencils", {}};
  for (size_t a = 0; a < tile.points.size(); ++a)
    if (tile.points[a] > 1 || a == tile.lane) s.directives.push_back({"tile", {{(*tile.axes)[a].name, tile.points[a]}}});
  s.directives.push_back({"threads", {{"", best->threads}}});
  s.directives.push_back({"vectorize", {{(*tile.axes)[tile.lane].name, {}}, {"by", tile.lanes}}});
  if (tile.block > 1) s.directives.push_back({"register_block", {{(*tile.axes)[tile.blocked].name, tile.block}}});
  return s;
}

void GpuStencilChain::read(const Schedule& schedule) {
  ScheduleReader reader(name_, schedule);
  if (!fits_) reader.fail("it makes no arrays whose neighbours it sums");
  const std::vector<loop_ir::Axis>& axes = stages_.back().axes;
  const auto axis_of = [&](const Directive& d) {
    const auto axis = std::find_if(axes.begin(), axes.end(), [&](const auto& a) { return !d.arguments.empty() && d.arguments[0].name == a.name; });
    if (axis == axes.end()) reader.fail(d, "allowed: axes of the results");
    reader.only(d, {axis->name});
    return static_cast<size_t>(axis - axes.begin());
  };
  tile_ = single();
  for (const Directive* d : reader.all("tile")) {
    const size_t axis = axis_of(*d);
    tile_.points[axis] = reader.number(*d, axes[axis].name, 1, kMostTile);
  }
  threads_ = read_threads(reader);
  const Directive& vectorize = reader.one("vectorize");
  reader.only(vectorize, {axes[tile_.lane].name, "by"});
  tile_.lanes = reader.number(vectorize, "by", 1, kMostLanes);
  if (tile_.lanes > widest_ || (tile_.lanes & (tile_.lanes - 1)) != 0)
    reader.fail(vectorize, fmt::format("allowed: powers of two up to {}", widest_));
  if (tile_.points[tile_.lane] % tile_.lanes != 0) reader.fail(vectorize, "allowed: what divides the tile");
  if (!reader.all("register_block").empty()) {
    const Directive& block = reader.one("register_block");
    tile_.blocked = axis_of(block);
    if (tile_.blocked == tile_.lane) reader.fail(block, "allowed: an axis without vectors");
    tile_.block = reader.number(block, axes[tile_.blocked].name, 1, kMostSums / tile_.lanes);
    if (tile_.points[tile_.blocked] % tile_.block != 0) reader.fail(block, "allowed: what divides the tile");
  }
  reader.finish("tile, threads, vectorize and register_block");
  int64_t bytes = 0;
  for (const Plan& plan : lay_out(tile_)) bytes += shared_bytes(plan.regions);
  if (bytes > kMostSharedBytes)
    reader.fail(fmt::format("what its tile reaches takes {} bytes of shared memory, a block has {}", bytes, kMostSharedBytes));
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuStencilChain::apply(const Schedule& schedule) {
  read(schedule);
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
  turn_ = names_.fresh("q");
  piece_ = names_.fresh("u");
  vector_ = names_.fresh("v");
  const Stage& last = stages_.back();
  std::vector<loop_ir::Axis> blocks;
  for (size_t a : tile_.order()) blocks.push_back({last.axes[a].name, ceildiv(last.axes[a].extent, tile_.points[a])});
  std::vector<Plan> plans = lay_out(tile_);
  std::vector<Substitution> first(stages_.size());
  first.back() = unflatten(blocks, sym(block_));
  for (size_t a = 0; a < last.axes.size(); ++a) first.back()[last.axes[a].name] = first.back().at(last.axes[a].name) * tile_.points[a];
  tile_ir::Block body;
  tile_ir::Block copies;
  std::vector<const Region*> made(stages_.size(), nullptr);
  bool waits = false;
  for (size_t s = stages_.size(); s-- > 0;)
    for (size_t k = 0; k < plans[s].regions.size(); ++k) {
      Region& region = plans[s].regions[k];
      const size_t maker = plans[s].makers[k];
      region.array = names_.fresh("window0");
      region.origin = origin_of(region, plans[s].tile.named(), first[s]);
      body.push_back(make(tile_ir::Alloc{region.array, region.window->param->dtype, {region.elements}, Space::shared}));
      if (maker == kMemory) {
        waits = waits || region.is_async;
        for (auto& c : copy_region(region, sym(thread_), threads_, names_)) copies.push_back(std::move(c));
        continue;
      }
      made[maker] = &region;
      for (size_t d = 0; d < region.origin.size(); ++d) first[maker][stages_[maker].axes[stages_[maker].dims[d]].name] = region.origin[d];
    }
  for (auto& c : copies) body.push_back(std::move(c));
  if (waits) {
    body.push_back(make(tile_ir::CopyGroup{}));
    body.push_back(make(tile_ir::CopyGroup{0}));
  }
  if (!copies.empty()) body.push_back(make(tile_ir::Barrier{}));
  Ranges ranges = symbols_;
  ranges[block_] = axis_range(count(blocks));
  ranges[thread_] = axis_range(threads_);
  for (size_t s = 0; s < stages_.size(); ++s) {
    for (auto& c : compute(stages_[s], plans[s], made[s], first[s], ranges)) body.push_back(std::move(c));
    if (made[s]) body.push_back(make(tile_ir::Barrier{}));
  }
  return gpu_grid(block_, count(blocks), thread_, threads_, std::move(body));
}

/// All points of a stage's tile: into an array in shared memory, or what the kernel stores.
tile_ir::Block GpuStencilChain::compute(const Stage& stage, const Plan& plan, const Region* into, const Substitution& first, const Ranges& ranges) {
  const PointThreads& tile = plan.tile;
  const int64_t pieces = tile.count();
  const int64_t turns = (pieces + threads_ - 1) / threads_;
  const Expr number = sym(thread_) + (turns > 1 ? sym(turn_) * threads_ : Expr(0));
  Substitution place = tile.places(number);
  std::vector<Expr> in_tile;
  Ranges inner = ranges;
  inner[turn_] = axis_range(turns);
  inner[piece_] = axis_range(tile.block);
  inner[vector_] = axis_range(tile.lanes);
  for (size_t a = 0; a < stage.axes.size(); ++a) {
    const std::string& name = stage.axes[a].name;
    Expr at = place.at(name);
    if (a == tile.lane && tile.lanes > 1) at = at + sym(vector_);
    if (a == tile.blocked && tile.block > 1) at = at + sym(piece_);
    in_tile.push_back(at);
    place[name] = first.at(name) + at;
  }
  StencilPoints::Exists exists;
  std::vector<Expr> array(stage.dims.size(), 0);
  if (into) {
    Substitution coordinates;
    for (size_t d = 0; d < stage.dims.size(); ++d) {
      coordinates[Reach::coordinate(d)] = place.at(stage.axes[stage.dims[d]].name);
      array[d] = in_tile[stage.dims[d]];
    }
    for (const Cond& cond : conditions(*into)) {
      bool moves = false;
      for (size_t d = 0; d < stage.dims.size(); ++d)
        if (uses(cond.expr, Reach::coordinate(d))) {
          exists.emplace_back(stage.axes[stage.dims[d]].name, substitute(cond, coordinates));
          moves = true;
        }
      if (!moves) exists.emplace_back("", cond);  // of sizes alone
    }
  } else {
    for (size_t a = 0; a < stage.axes.size(); ++a) {
      const Expr extent = stage.axes[a].extent;
      const bool whole = extent.is_constant() && extent.value() % tile.points[a] == 0;
      if (!whole) exists.emplace_back(stage.axes[a].name, less(place.at(stage.axes[a].name), extent));
    }
  }
  const StencilPoints::Own own{piece_, vector_, tile.block, tile.lanes, stage.axes[tile.blocked].name};
  StencilPoints points(stage.body, plan.regions, std::move(place), own, std::move(exists), names_);
  tile_ir::Block body = points.sums();
  tile_ir::Block values = points.values(into != nullptr);
  const std::vector<Cond> exist = points.exist();
  if (into) {
    std::string value = stage.made->value;
    if (!exist.empty()) {
      loop_ir::Body chosen(names_);
      const std::string inside = chosen.truth(exist, inner);
      value = chosen.let(Fn::where, into->window->param->dtype, {inside, value, chosen.constant(into->window->fill)});
      for (const auto& stmt : chosen.take()) values.push_back(make(std::get<loop_ir::Let>(stmt->node)));
    }
    values.push_back(make(tile_ir::Store{into->array, {into->place(array)}, value, {}, Combiner::set}));
  } else if (!exist.empty()) {
    values = {make(tile_ir::If{exist, std::move(values)})};
  }
  body.push_back(points.per_point(std::move(values)));
  if (pieces % threads_ != 0) body = {make(tile_ir::If{{less(number, pieces)}, std::move(body)})};
  if (turns == 1) return body;
  return {make(tile_ir::For{axis(turn_, 0, turns), std::move(body)})};
}

}  // namespace deplo::loop_to_tile
