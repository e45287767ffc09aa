#include "target/cuda/schedule/row_vectors.h"

#include <algorithm>

#include "base/error.h"
#include "loop_ir/places.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/kept_rows.h"
#include "target/cuda/schedule/scan_readers.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kFewElements = 32;        ///< shorter rows are a thread's own
constexpr int64_t kMostElements = 32;       ///< of a row in a thread's registers, if each is of 4 bytes
constexpr int64_t kMostSteps = 4;           ///< of the threads along a row, where there are threads enough
constexpr int64_t kMostWarpSteps = 8;       ///< of a warp along a row of its own
constexpr int64_t kLongestUnshifted = 128;  ///< rows of odd size so long whose vectors begin where memory's do
constexpr int64_t kMostRowThreads = 1024;
constexpr int64_t kLongRowThreads = 512;  ///< for rows that do not stay in registers
constexpr int64_t kIdlingRows = 132;      ///< that leave most of a device idle

bool is_scalar(const loop_ir::Stmt& stmt) {
  return std::holds_alternative<loop_ir::Let>(stmt.node) || std::holds_alternative<loop_ir::Load>(stmt.node) ||
         std::holds_alternative<loop_ir::Store>(stmt.node) || std::holds_alternative<loop_ir::Check>(stmt.node);
}

}  // namespace

GpuRowVectors::GpuRowVectors(const loop_ir::Kernel& kernel) : kernel_(merge_inner_axes(merge_outer_axes(kernel))) {
  look();
  if (fits_) return;
  const loop_ir::Kernel kept = with_kept_stores(kernel);
  if (kept != kernel) {
    kernel_ = merge_inner_axes(merge_outer_axes(kept));
    look();
    if (fits_) return;
  }
  if (locals_.empty()) return;
  // What does not stay in registers is computed again by each loop.
  const loop_ir::Kernel again = without_kept_rows(kept);
  if (again == kept) return;
  kernel_ = merge_inner_axes(merge_outer_axes(again));
  look();
}

void GpuRowVectors::look() {
  OuterNest nest = outer_nest(kernel_);
  outer_ = nest.axes;
  inner_ = nest.inner;
  names_.reserve(kernel_);
  extent_ = 0;
  least_lanes_ = whole_lanes_ = 0;
  locals_.clear();
  starts_.clear();
  fits_ = match();
}

bool GpuRowVectors::match() {
  if (outer_.empty() || !colliding_stores(kernel_).empty()) return false;
  std::set<std::string> stored;
  std::set<std::string> loaded;
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_)) (access.stores ? stored : loaded).insert(access.buffer);
  // A row that is stored and read again lies with other threads.
  for (const std::string& buffer : stored)
    if (loaded.count(buffer) && !is_updated_alone(buffer)) return false;
  for (const auto& stmt : *inner_)
    if (const auto* local = std::get_if<loop_ir::Local>(&stmt->node)) locals_[local->name] = local;
  bool reduces = false;
  for (const auto& stmt : *inner_) {
    if (is_scalar(*stmt)) {
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      if (load && locals_.count(load->buffer)) return false;
      const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
      if (store && locals_.count(store->buffer)) return false;
      continue;
    }
    if (std::holds_alternative<loop_ir::Local>(stmt->node)) continue;
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt->node)) {
      const Flat flat = flatten(*loop);
      if (!match_loop(flat.axes, flat.body)) return false;
      continue;
    }
    if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node)) {
      loop_ir::Block both = scan->body;
      both.insert(both.end(), scan->then.begin(), scan->then.end());
      if (!match_loop({scan->axis}, both) || scan->dtypes[0] == DType::boolean || is_product_of_doubles(*stmt)) return false;
      reduces = true;
      continue;
    }
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    if (!reduce || !match_loop(reduce->axes, reduce->body)) return false;
    if (reduce->dtypes[0] == DType::boolean) return false;
    if (reduce->combiner == Combiner::online_softmax && !(extent_.is_constant() && extent_.value() > 0)) return false;
    reduces = true;
  }
  if (!reduces || (extent_.is_constant() && extent_.value() < kFewElements)) return false;
  for (const auto& [name, local] : locals_)
    if (product(local->shape) != extent_ || !extent_.is_constant()) return false;
  threads_ = kWarpThreads;
  shifts_ = is_shifted();
  if (shifts_) least_lanes_ = whole_lanes_;
  lanes_ = least_lanes_;
  if (extent_.is_constant()) {
    while (lanes_ > 1 && extent_.value() / lanes_ < kWarpThreads) lanes_ /= 2;
    const int64_t vectors = (extent_.value() + lanes_ - 1) / lanes_;
    const int64_t most = std::max<int64_t>(1, kMostElements / (lanes_ * registers_of_element()));  // vectors of a thread
    if (vectors > kWarpThreads * std::min(kMostWarpSteps, most))
      while (threads_ < kMostRowThreads && vectors > threads_ * std::min(kMostSteps, most)) threads_ *= 2;
    keeps_ = vectors <= threads_ * most;
  } else {
    threads_ = kGpuThreads;
  }
  const Expr all = count(outer_);
  if (extent_.is_constant() && !keeps_) threads_ = all.is_constant() && all.value() < kIdlingRows ? kMostRowThreads : kLongRowThreads;
  if (!keeps_ && !locals_.empty()) return false;
  rows_ = std::max<int64_t>(1, kGpuThreads / threads_);
  while (rows_ > 1 && all.is_constant() && all.value() < rows_) rows_ /= 2;
  return true;
}

/// Whether a row's loops and checks neither touch a buffer nor take what is made of it (running statistics): one thread loads, and then stores, what
/// counts.
bool GpuRowVectors::is_updated_alone(const std::string& buffer) const {
  std::set<std::string> made;
  for (const auto& stmt : *inner_) {
    std::set<std::string> used;
    bool touches = false;
    visit_all({stmt}, [&](const loop_ir::Stmt& inner) {
      loop_ir::collect_uses(inner, used);
      if (const auto* check = std::get_if<loop_ir::Check>(&inner.node)) collect_symbols(check->cond.expr, used);
      const auto* load = std::get_if<loop_ir::Load>(&inner.node);
      const auto* store = std::get_if<loop_ir::Store>(&inner.node);
      touches = touches || (load && load->buffer == buffer) || (store && store->buffer == buffer);
    });
    const bool takes = touches || std::any_of(used.begin(), used.end(), [&](const std::string& name) { return made.count(name) > 0; });
    if (!takes) continue;
    if (!is_scalar(*stmt) || std::holds_alternative<loop_ir::Check>(stmt->node)) return false;
    if (loop_ir::is_straight(*stmt)) made.insert(loop_ir::name_of(*stmt));
  }
  return true;
}

/// Whether rows of odd size have vectors that begin where memory's do, all accesses of a row in the same places.
bool GpuRowVectors::is_shifted() const {
  if (!extent_.is_constant() || extent_.value() < kLongestUnshifted || whole_lanes_ <= least_lanes_ || starts_.empty()) return false;
  std::set<std::string> axes;
  for (const loop_ir::Axis& a : outer_) axes.insert(a.name);
  for (const std::string& name : symbols_of(starts_[0]))
    if (axes.count(name) == 0) return false;
  return std::all_of(starts_.begin(), starts_.end(), [&](Expr start) { return multiples_of(start - starts_[0], whole_lanes_); });
}

/// What an element takes of a thread's registers between two loops: what was loaded, and the same in 8 bytes where that is what is computed with.
int64_t GpuRowVectors::registers_of_element() const {
  int64_t widest = 4;
  const auto look = [&](DType dtype) { widest = std::max(widest, size_of(dtype)); };
  visit_all(*inner_, [&](const loop_ir::Stmt& stmt) {
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node)) look(reduce->dtypes[0]);
    if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt.node)) look(scan->dtypes[0]);
    if (const auto* local = std::get_if<loop_ir::Local>(&stmt.node)) look(local->dtype);
  });
  return widest > 4 ? 3 : 1;
}

bool GpuRowVectors::match_loop(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) {
  const Expr n = count(axes);
  if (axes.size() > 1)
    for (const loop_ir::Axis& a : outer_)
      if (symbols_of(n).count(a.name) > 0) return false;
  if (extent_ == Expr(0))
    extent_ = n;
  else if (extent_ != n)
    return false;
  if (!std::all_of(body.begin(), body.end(), [](const auto& s) { return is_scalar(*s); })) return false;
  // Of a local, the loop has the elements in their order: a thread keeps those that it comes to.
  Ranges ranges = kernel_.symbols;
  for (const loop_ir::Axis& a : axes) ranges[a.name] = axis_range(a.extent);
  const auto is_element = [&](const std::string& local, const std::vector<Expr>& index) {
    Expr place = 0;
    for (const loop_ir::Axis& a : axes) place = place * a.extent + sym(a.name);
    const std::vector<Expr>& shape = locals_.at(local)->shape;
    Expr at = 0;
    for (size_t d = 0; d < shape.size(); ++d) at = at * shape[d] + index[d];
    return simplify(at - place, ranges).is(0);
  };
  for (const auto& stmt : body) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (load && locals_.count(load->buffer) && !is_element(load->buffer, load->index)) return false;
    const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
    if (!store || !locals_.count(store->buffer)) continue;
    if (store->combiner != Combiner::set || !is_element(store->buffer, store->index)) return false;
  }
  const loop_ir::Axis& last = axes.back();
  int64_t lanes = lanes_along(global_accesses(kernel_, body), last.name, last.extent);
  // A loop over locals alone goes along with the others.
  if (global_accesses(kernel_, body).empty()) {
    lanes = kMostLanes;
    while (last.extent.is_constant() && lanes > 1 && last.extent.value() % lanes != 0) lanes /= 2;
  }
  if (axes.size() > 1 && !last.extent.is_constant()) lanes = 1;
  int64_t whole = axes.size() > 1 ? lanes : kMostLanes;
  if (axes.size() == 1)
    for (const GlobalAccess& access : global_accesses(kernel_, body)) {
      auto step = linear_coefficient(access.offset, last.name);
      if (step && step->is(-1)) whole = lanes;
      if (!step || !step->is(1)) continue;
      whole = std::min(whole, kAccessBytes / access.bytes);
      starts_.push_back(access.offset - sym(last.name));
    }
  whole_lanes_ = whole_lanes_ == 0 ? whole : std::min(whole_lanes_, whole);
  least_lanes_ = least_lanes_ == 0 ? lanes : std::min(least_lanes_, lanes);
  return true;
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

Schedule GpuRowVectors::propose() const {
  Schedule s{"gpu_rows", {{"threads", {{"", threads_}}}, {"vectorize", {{"by", lanes_}}}, {"rows", {{"", rows_}}}}};
  if (keeps_) s.directives.push_back({"keep", {{"registers", {}}}});
  return s;
}

void GpuRowVectors::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!fits_) reader.fail("vectors need rows whose loops all run over the same elements, without loops inside");
  const Directive& threads = reader.one("threads");
  threads_ = read_threads(reader);
  if (threads_ < kWarpThreads) reader.fail(threads, fmt::format("allowed with vectorize: {} and more", kWarpThreads));
  const Directive& vectorize = reader.one("vectorize");
  reader.only(vectorize, {"by"});
  lanes_ = reader.number(vectorize, "by", 1, kMostLanes);
  if (lanes_ > least_lanes_ || (lanes_ & (lanes_ - 1)) != 0) reader.fail(vectorize, fmt::format("allowed: powers of two up to {}", least_lanes_));
  if (shifts_ && lanes_ > 1 && extent_.value() % lanes_ != 0) shift_ = 0;
  const Directive& rows = reader.one("rows");
  reader.only(rows, {""});
  rows_ = reader.number(rows, "", 1, kMostGpuThreads / threads_);
  keeps_ = false;
  if (!reader.all("keep").empty()) {
    const Directive& keep = reader.one("keep");
    reader.only(keep, {"registers"});
    keeps_ = true;
    if (!extent_.is_constant()) reader.fail(keep, "the row has no constant size");
    if (steps() * lanes_ > 4 * kMostElements) reader.fail(keep, fmt::format("a thread would keep {} elements", steps() * lanes_));
  }
  if (!keeps_ && !locals_.empty()) reader.fail("its locals need 'keep(registers)'");
  reader.finish("threads, vectorize, rows and keep");
}

int64_t GpuRowVectors::steps() const {
  const int64_t before = shift_ ? lanes_ - 1 : 0;  // of a first vector that begins before the row
  return (extent_.value() + before + threads_ * lanes_ - 1) / (threads_ * lanes_);
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuRowVectors::apply(const Schedule& schedule) {
  read(schedule);
  const std::string block = names_.fresh("b");
  thread_ = names_.fresh("t");
  row_ = names_.fresh("row");
  const Expr all = count(outer_);
  Expr row = rows_ > 1 ? sym(block) * rows_ + sym(row_) : sym(block);
  if (rows_ > 1 && !(all.is_constant() && all.value() % rows_ == 0)) {
    // Threads without a row do the last one's work, which all must do who exchange values, and store nothing.
    in_range_ = {less(row, all)};
    row = min(row, all - 1);
  }
  row_map_ = unflatten(outer_, row);
  if (shift_) {
    const Expr start = substitute(starts_[0], row_map_);
    shift_ = start - floordiv(start, lanes_) * lanes_;
    before_ = mod(start, lanes_);
  }
  tile_ir::Block body;
  for (const auto& stmt : *inner_) lower(*stmt, body);
  tile_ir::Block threads{make(tile_ir::For{axis(thread_, 0, threads_, LoopKind::thread_x), std::move(body)})};
  if (rows_ > 1) threads = {make(tile_ir::For{axis(row_, 0, rows_, LoopKind::thread_y), std::move(threads)})};
  return {make(tile_ir::For{axis(block, 0, ceildiv(all, rows_), LoopKind::block_x), std::move(threads)})};
}

GpuRowVectors::Pieces GpuRowVectors::pieces(const std::vector<loop_ir::Axis>& axes, bool in_order) {
  Pieces out;
  piece_ = names_.fresh("c");
  lane_ = names_.fresh("v");
  const bool whole = !shift_ && extent_.is_constant() && extent_.value() % (threads_ * lanes_) == 0;
  const Expr extent = substitute(extent_, row_map_) + before_;  // the last chunk of a long reduction is shorter
  // Quotients of elements, by which several axes are told, show that a vector lies in one line if its number is what runs.
  const bool numbered = in_order || keeps_ || (axes.size() > 1 && extent_.is_constant());
  Expr first = numbered ? (sym(piece_) * threads_ + sym(thread_)) * lanes_ : sym(piece_);
  if (numbered)
    out.axes.push_back(axis(piece_, 0, shift_ ? Expr(steps()) : ceildiv(extent, threads_ * lanes_), keeps_ ? LoopKind::unroll : LoopKind::serial));
  else
    out.axes.push_back(axis(piece_, sym(thread_) * lanes_, extent, LoopKind::serial, threads_ * lanes_));
  const Expr from = shift_ ? max(0, before_ - first) : Expr(0);
  out.axes.push_back(axis(lane_, from, whole ? Expr(lanes_) : min(lanes_, extent - first), LoopKind::lanes));
  out.map = row_map_;
  const Expr element = first + sym(lane_) - shift_.value_or(0);
  Substitution map = axes.size() == 1 ? Substitution{{axes[0].name, element}} : unflatten(axes, element);
  // What all lanes load is loaded behind the row's end, too.
  if (axes.size() > 1 && !whole) map[axes[0].name] = min(map[axes[0].name], axes[0].extent - 1);
  out.map.merge(map);
  return out;
}

tile_ir::Block GpuRowVectors::convert(const loop_ir::Block& block, const Substitution& map, bool in_loop) const {
  tile_ir::Block out;
  // Of a local, each thread keeps its own elements.
  auto own = [&](std::vector<Expr>& index) { index = {sym(piece_), sym(lane_)}; };
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Load& s) {
                            loop_ir::Load load = substituted(s, map);
                            if (locals_.count(s.buffer)) own(load.index);
                            out.push_back(make(std::move(load)));
                          },
                          [&](const loop_ir::Store& s) {
                            loop_ir::Store store = substituted(s, map);
                            if (locals_.count(s.buffer))
                              own(store.index);
                            else
                              store.guard.insert(store.guard.end(), in_range_.begin(), in_range_.end());
                            if (!in_loop)
                              out.push_back(make(tile_ir::If{{equal(sym(thread_), 0)}, {make(std::move(store))}}));
                            else
                              out.push_back(make(std::move(store)));
                          },
                          [&](const loop_ir::Check& s) { out.push_back(make(substituted(s, map))); }, [](const auto&) {}},
               stmt->node);
  return out;
}

void GpuRowVectors::lower(const loop_ir::Scan& s, tile_ir::Block& out) {
  Pieces p = pieces({s.axis}, true);
  const Expr extent = substitute(extent_, row_map_);
  const Expr element = p.map.at(s.axis.name);
  tile_ir::Block then = convert(s.then, p.map, true);
  // Single elements behind the end are the last one again: nothing that counts follows them.
  if (lanes_ == 1 && !(extent_.is_constant() && extent_.value() % threads_ == 0)) {
    p.axes.back().hi = 1;
    p.map[s.axis.name] = min(element, extent - 1);
    then = {make(tile_ir::If{{less(element, extent)}, std::move(then)})};
  }
  tile_ir::Scan scan{s.results, s.dtypes, s.combiner, s.operands, {}, convert(s.body, p.map, true), std::move(then)};
  scan.axes = {p.axes[0], axis(thread_, 0, threads_, LoopKind::thread_x), p.axes[1]};
  out.push_back(make(std::move(scan)));
}

void GpuRowVectors::lower(const loop_ir::Stmt& stmt, tile_ir::Block& out) {
  if (const auto* local = std::get_if<loop_ir::Local>(&stmt.node)) {
    out.push_back(make(tile_ir::Alloc{local->name, local->dtype, {steps(), lanes_}, Space::reg}));
  } else if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) {
    const Flat flat = flatten(*loop);
    Pieces p = pieces(flat.axes, false);
    tile_ir::Block body = convert(flat.body, p.map, true);
    for (size_t k = p.axes.size(); k-- > 0;) body = {make(tile_ir::For{p.axes[k], std::move(body)})};
    out.push_back(body[0]);
  } else if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt.node)) {
    lower(*scan, out);
  } else if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node)) {
    Pieces p = pieces(reduce->axes, false);
    tile_ir::Reduce made{reduce->results, reduce->dtypes, reduce->combiner, reduce->operands, {}, convert(reduce->body, p.map, true)};
    made.axes.push_back(axis(thread_, 0, threads_, LoopKind::thread_x));
    made.axes.insert(made.axes.end(), p.axes.begin(), p.axes.end());
    out.push_back(make(std::move(made)));
  } else {
    for (auto& s : convert({std::make_shared<loop_ir::Stmt>(stmt)}, row_map_, false)) out.push_back(std::move(s));
  }
}

}  // namespace deplo::loop_to_tile
