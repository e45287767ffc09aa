#include "target/cuda/schedule/transpose.h"

#include <algorithm>

#include "base/error.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kLeastSide = 32;  ///< of a tile: a warp along it
constexpr int64_t kThreads = 256;
constexpr int64_t kBankWidth = 4;
constexpr size_t kMostTiles = 4;

bool runs_along(Expr offset, const std::string& axis) {
  auto step = linear_coefficient(offset, axis);
  return step && step->is(1);
}

}  // namespace

GpuTranspose::GpuTranspose(const loop_ir::Kernel& kernel) : kernel_(merge_outer_axes(kernel)) {
  names_.reserve(kernel_);
  fits_ = match();
}

bool GpuTranspose::match() {
  OuterNest nest = outer_nest(kernel_);
  inner_ = nest.inner;
  if (nest.axes.size() < 2 || !colliding_stores(kernel_).empty()) return false;
  std::set<std::string> axes;
  for (const auto& a : nest.axes) axes.insert(a.name);
  for (const auto& [symbol, range] : kernel_.symbols) axes.insert(symbol);
  std::set<std::string> stored_buffers;
  for (const auto& stmt : *inner_) {
    const bool scalar = std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node) ||
                        std::holds_alternative<loop_ir::Store>(stmt->node) || std::holds_alternative<loop_ir::Check>(stmt->node);
    if (!scalar) return false;
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) stored_buffers.insert(store->buffer);
  }
  // The axis of all stores, and the one of most bytes that are loaded along another axis.
  const auto axis_of = [&](Expr offset) {
    return std::find_if(nest.axes.begin(), nest.axes.end(), [&](const auto& a) { return runs_along(offset, a.name); });
  };
  for (const auto& stmt : *inner_) {
    const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
    if (!store) continue;
    auto found = axis_of(global_accesses(kernel_, {stmt})[0].offset);
    if (found == nest.axes.end() || (!stored_.name.empty() && found->name != stored_.name)) return false;
    stored_ = *found;
  }
  for (const auto& stmt : *inner_) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (!load || stored_buffers.count(load->buffer)) continue;
    const Expr offset = global_accesses(kernel_, {stmt})[0].offset;
    std::set<std::string> used = symbols_of(offset);
    for (const Cond& c : load->guard) collect_symbols(c.expr, used);
    auto found = axis_of(offset);
    if (found == nest.axes.end() || found->name == stored_.name || !used.count(stored_.name)) continue;
    if (!std::all_of(used.begin(), used.end(), [&](const std::string& s) { return axes.count(s) > 0; })) continue;
    if (!loaded_.name.empty() && found->name != loaded_.name) continue;
    loaded_ = *found;
    turned_.insert(load->name);
  }
  for (const auto& a : nest.axes)
    if (a.name != stored_.name && a.name != loaded_.name) others_.push_back(a);
  auto is_long = [](Expr extent) { return !extent.is_constant() || extent.value() >= kLeastSide / 2; };
  set_vectors();
  return !turned_.empty() && turned_.size() <= kMostTiles && is_long(stored_.extent) && is_long(loaded_.extent);
}

/// As wide as all that runs along an axis allows.
void GpuTranspose::set_vectors() {
  std::vector<GlobalAccess> of_stores;
  std::vector<GlobalAccess> of_loads;
  for (const auto& stmt : *inner_) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    for (GlobalAccess& access : global_accesses(kernel_, {stmt}))
      (load && turned_.count(load->name) ? of_loads : of_stores).push_back(std::move(access));
  }
  auto lanes_of = [&](const std::vector<GlobalAccess>& accesses, const loop_ir::Axis& axis) {
    const int64_t lanes = lanes_along(accesses, axis.name, axis.extent);
    const bool whole = std::all_of(accesses.begin(), accesses.end(), [&](const GlobalAccess& access) {
      return !runs_along(access.offset, axis.name) || lies_whole(access, axis.name, lanes, kernel_.symbols);
    });
    return whole ? lanes : 1;
  };
  most_stored_ = lanes_of(of_stores, stored_);
  most_loaded_ = lanes_of(of_loads, loaded_);
}

Schedule GpuTranspose::propose() const {
  const int64_t side = std::max(kLeastSide, std::max(most_stored_, most_loaded_) * kLeastSide / kBankWidth);
  Schedule s{"gpu_transpose", {{"tile", {{stored_.name, side}, {loaded_.name, side}}}, {"threads", {{"", kThreads}}}}};
  if (most_stored_ > 1) s.directives.push_back({"vectorize", {{stored_.name, {}}, {"by", most_stored_}}});
  if (most_loaded_ > 1) s.directives.push_back({"vectorize", {{loaded_.name, {}}, {"by", most_loaded_}}});
  return s;
}

void GpuTranspose::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!fits_) reader.fail("the kernel loads nothing along another axis than it stores along");
  const Directive& tile = reader.one("tile");
  reader.only(tile, {stored_.name, loaded_.name});
  side_ = reader.number(tile, stored_.name, kLeastSide, 2 * kLeastSide);
  if ((side_ & (side_ - 1)) != 0) reader.fail(tile, "allowed: powers of two");
  reader.number(tile, loaded_.name, side_, side_);
  const Directive& threads = reader.one("threads");
  reader.only(threads, {""});
  reader.number(threads, "", kThreads, kThreads);
  auto lanes = [&](const loop_ir::Axis& axis, int64_t most) -> int64_t {
    const Directive* vectorize = reader.find("vectorize", axis.name);
    if (!vectorize) return 1;
    reader.only(*vectorize, {axis.name, "by"});
    const int64_t by = reader.number(*vectorize, "by", 1, kMostLanes);
    if (by > most || (by & (by - 1)) != 0) reader.fail(*vectorize, fmt::format("allowed: powers of two up to {}", most));
    return by;
  };
  lanes_stored_ = lanes(stored_, most_stored_);
  lanes_loaded_ = lanes(loaded_, most_loaded_);
  if (side_ * side_ / std::max(lanes_stored_, lanes_loaded_) < kThreads)
    reader.fail(tile, fmt::format("{} threads with such vectors need {} at least", kThreads, 2 * kLeastSide));
  reader.finish("tile, threads and vectorize");
}

tile_ir::Block GpuTranspose::apply(const Schedule& schedule) {
  read(schedule);
  const std::string block = names_.fresh("b");
  thread_ = names_.fresh("t");
  const Expr across = ceildiv(stored_.extent, side_);
  const Expr down = ceildiv(loaded_.extent, side_);
  first_stored_ = mod(sym(block), across) * side_;
  first_loaded_ = mod(floordiv(sym(block), across), down) * side_;
  Substitution map = unflatten(others_, floordiv(sym(block), across * down));

  tile_ir::Block body;
  tile_ir::Block fill;
  std::map<std::string, std::string> tiles;
  const Places filled = places(lanes_loaded_);
  Substitution at_load = map;
  at_load[stored_.name] = first_stored_ + filled.beside;
  at_load[loaded_.name] = first_loaded_ + filled.element;
  for (const auto& stmt : *inner_) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (!load || !turned_.count(load->name)) continue;
    const std::string& tile = tiles[load->name] = names_.fresh("turned");
    // An odd number of banks from line to line: what threads read across lines lies in different ones.
    const int64_t pad = std::max<int64_t>(1, kBankWidth / size_of(load->dtype));
    body.push_back(make(tile_ir::Alloc{tile, load->dtype, {side_, side_ + pad}, Space::shared}));
    loop_ir::Load first = substituted(*load, at_load);
    first.name = names_.fresh(load->name);
    fill.push_back(make(first));
    fill.push_back(make(tile_ir::Store{tile, {filled.beside, filled.element}, first.name, {}, Combiner::set}));
  }
  for (auto& s : over_tile(filled, false, std::move(fill))) body.push_back(s);
  body.push_back(make(tile_ir::Barrier{}));

  tile_ir::Block rest;
  const Places stored = places(lanes_stored_);
  Substitution at_store = map;
  at_store[stored_.name] = first_stored_ + stored.element;
  at_store[loaded_.name] = first_loaded_ + stored.beside;
  for (const auto& stmt : *inner_)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { rest.push_back(make(substituted(s, at_store))); },
                          [&](const loop_ir::Load& s) {
                            auto tile = tiles.find(s.name);
                            if (tile == tiles.end())
                              rest.push_back(make(substituted(s, at_store)));
                            else
                              rest.push_back(make(tile_ir::Load{s.name, s.dtype, tile->second, {stored.element, stored.beside}, {}, {}}));
                          },
                          [&](const loop_ir::Store& s) { rest.push_back(make(substituted(s, at_store))); },
                          [&](const loop_ir::Check& s) { rest.push_back(make(substituted(s, at_store))); }, [](const auto&) {}},
               stmt->node);
  for (auto& s : over_tile(stored, true, std::move(rest))) body.push_back(s);
  return gpu_grid(block, count(others_) * down * across, thread_, kThreads, std::move(body));
}

GpuTranspose::Places GpuTranspose::places(int64_t lanes) {
  Places at{names_.fresh("u"), "", lanes, 0, 0, 0};
  const Expr vector = sym(at.step) * kThreads + sym(thread_);
  at.along = mod(vector, side_ / lanes) * lanes;
  at.beside = floordiv(vector, side_ / lanes);
  at.element = at.along;
  if (lanes == 1) return at;
  at.lane = names_.fresh("v");
  at.element = at.along + sym(at.lane);
  return at;
}

/// body for each of a thread's vectors of the tile that lie within the kernel's axes.
tile_ir::Block GpuTranspose::over_tile(const Places& at, bool stores, tile_ir::Block body) const {
  const loop_ir::Axis& axis_along = stores ? stored_ : loaded_;
  const loop_ir::Axis& axis_beside = stores ? loaded_ : stored_;
  const Expr first = (stores ? first_stored_ : first_loaded_) + at.along;
  const Expr line = (stores ? first_loaded_ : first_stored_) + at.beside;
  if (at.lanes > 1) {
    const bool whole = axis_along.extent.is_constant() && axis_along.extent.value() % at.lanes == 0;
    const Expr end = whole ? Expr(at.lanes) : min(at.lanes, axis_along.extent - first);
    body = {make(tile_ir::For{axis(at.lane, 0, end, LoopKind::lanes), std::move(body)})};
  }
  tile_ir::Block inside{make(tile_ir::If{{less(first, axis_along.extent), less(line, axis_beside.extent)}, std::move(body)})};
  return {make(tile_ir::For{axis(at.step, 0, side_ * side_ / at.lanes / kThreads, LoopKind::unroll), std::move(inside)})};
}

}  // namespace deplo::loop_to_tile
