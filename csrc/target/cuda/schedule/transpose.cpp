#include "target/cuda/schedule/transpose.h"

#include <algorithm>

#include "base/error.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kSide = 32;  ///< of a tile: a warp along it
constexpr int64_t kRows = 8;   ///< of the tile that a block's threads take at once
constexpr int64_t kPad = 1;    ///< puts a tile's columns in banks of their own
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
  auto is_long = [](Expr extent) { return !extent.is_constant() || extent.value() >= kSide / 2; };
  return !turned_.empty() && turned_.size() <= kMostTiles && is_long(stored_.extent) && is_long(loaded_.extent);
}

Schedule GpuTranspose::propose() const {
  return {"gpu_transpose", {{"tile", {{stored_.name, kSide}, {loaded_.name, kSide}}}, {"threads", {{"", kSide * kRows}}}}};
}

void GpuTranspose::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!fits_) reader.fail("the kernel loads nothing along another axis than it stores along");
  const Directive& tile = reader.one("tile");
  reader.only(tile, {stored_.name, loaded_.name});
  for (const loop_ir::Axis* axis : {&stored_, &loaded_}) reader.number(tile, axis->name, kSide, kSide);
  const Directive& threads = reader.one("threads");
  reader.only(threads, {""});
  reader.number(threads, "", kSide * kRows, kSide * kRows);
  reader.finish("tile and threads");
}

tile_ir::Block GpuTranspose::apply(const Schedule& schedule) {
  read(schedule);
  const std::string block = names_.fresh("b");
  thread_ = names_.fresh("t");
  row_ = names_.fresh("y");
  step_ = names_.fresh("u");
  const Expr across = ceildiv(stored_.extent, kSide);
  const Expr down = ceildiv(loaded_.extent, kSide);
  first_stored_ = mod(sym(block), across) * kSide;
  first_loaded_ = mod(floordiv(sym(block), across), down) * kSide;
  Substitution map = unflatten(others_, floordiv(sym(block), across * down));
  const Expr along = sym(thread_);
  const Expr beside = sym(row_) + sym(step_) * kRows;

  tile_ir::Block body;
  tile_ir::Block fill;
  std::map<std::string, std::string> tiles;
  Substitution at_load = map;
  at_load[stored_.name] = first_stored_ + beside;
  at_load[loaded_.name] = first_loaded_ + along;
  for (const auto& stmt : *inner_) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (!load || !turned_.count(load->name)) continue;
    const std::string& tile = tiles[load->name] = names_.fresh("turned");
    body.push_back(make(tile_ir::Alloc{tile, load->dtype, {kSide, kSide + kPad}, Space::shared}));
    loop_ir::Load first = substituted(*load, at_load);
    first.name = names_.fresh(load->name);
    fill.push_back(make(first));
    fill.push_back(make(tile_ir::Store{tile, {beside, along}, first.name, {}, Combiner::set}));
  }
  for (auto& s : over_tile(first_stored_ + beside, first_loaded_ + along, std::move(fill))) body.push_back(s);
  body.push_back(make(tile_ir::Barrier{}));

  tile_ir::Block rest;
  Substitution at_store = map;
  at_store[stored_.name] = first_stored_ + along;
  at_store[loaded_.name] = first_loaded_ + beside;
  for (const auto& stmt : *inner_)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { rest.push_back(make(substituted(s, at_store))); },
                          [&](const loop_ir::Load& s) {
                            auto tile = tiles.find(s.name);
                            if (tile == tiles.end())
                              rest.push_back(make(substituted(s, at_store)));
                            else
                              rest.push_back(make(tile_ir::Load{s.name, s.dtype, tile->second, {along, beside}, {}, {}}));
                          },
                          [&](const loop_ir::Store& s) { rest.push_back(make(substituted(s, at_store))); },
                          [&](const loop_ir::Check& s) { rest.push_back(make(substituted(s, at_store))); }, [](const auto&) {}},
               stmt->node);
  for (auto& s : over_tile(first_stored_ + along, first_loaded_ + beside, std::move(rest))) body.push_back(s);
  tile_ir::Block threads{make(tile_ir::For{axis(thread_, 0, kSide, LoopKind::thread_x), std::move(body)})};
  threads = {make(tile_ir::For{axis(row_, 0, kRows, LoopKind::thread_y), std::move(threads)})};
  return {make(tile_ir::For{axis(block, 0, count(others_) * down * across, LoopKind::block_x), std::move(threads)})};
}

/// body for each of a thread's elements of the tile, where they lie in the kernel's axes.
tile_ir::Block GpuTranspose::over_tile(Expr along_stores, Expr along_loads, tile_ir::Block body) const {
  tile_ir::Block inside{make(tile_ir::If{{less(along_stores, stored_.extent), less(along_loads, loaded_.extent)}, std::move(body)})};
  return {make(tile_ir::For{axis(step_, 0, kSide / kRows, LoopKind::unroll), std::move(inside)})};
}

}  // namespace deplo::loop_to_tile
