#include "target/cuda/schedule/vectors.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/scan_readers.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;

namespace {

/// Loaded by one thread before it waits: with all threads of an SM, what covers the memory's latency.
constexpr int64_t kBytesInFlight = 32;
constexpr int64_t kMostVectors = 8;
constexpr int64_t kMostSplit = 32;
constexpr int64_t kWideReduction = 32;  ///< that threads share
constexpr int64_t kShortRun = 8;        ///< elements that lie side by side and fill no sector: the taps of a window
// Threads along columns and rows of a block that sums columns: with many columns, and with few.
constexpr int64_t kManyColumns[] = {32, 8};
constexpr int64_t kFewColumns[] = {8, 32};
constexpr int64_t kFillingBlocks = 132;
constexpr int64_t kFewVectors = 4;                        ///< of a row, of which one in part is no gain
constexpr double kUnknownReaders = 64;                    ///< points along an axis of unknown length
constexpr int64_t kScanned = 16;                          ///< elements that a thread scans before threads combine
constexpr int64_t kSearched = 8;                          ///< places that a thread compares with its own at once
constexpr int64_t kAhead = 4;                             ///< of those that a thread scans alone, loaded together
constexpr int64_t kEnoughThreads = kFillingBlocks * 512;  ///< which scan columns of their own

// What a warp's request costs: the instruction, and each of the lines of 128 bytes that it touches.
constexpr double kRequestCost = 0.5;
constexpr double kSectorCost = 0.25;

/// Of one access, for 32 points side by side along the axis, if a thread makes `lanes` of them.
double cost_of_access(const GlobalAccess& access, const std::string& axis, int64_t lanes, const Ranges& sizes) {
  if (!symbols_of(access.offset).count(axis)) return kRequestCost / static_cast<double>(lanes);
  const auto bytes = static_cast<double>(access.bytes);
  if (lies_whole(access, axis, lanes, sizes)) return kRequestCost / static_cast<double>(lanes) + kSectorCost * bytes;
  const auto step = linear_coefficient(access.offset, axis);
  const double apart = bytes * static_cast<double>(lanes) * (step && step->is_constant() ? static_cast<double>(std::abs(step->value())) : 1.0);
  return kRequestCost + kSectorCost * std::min(32.0, apart);
}

bool has_loops(const loop_ir::Block& body) {
  return std::any_of(body.begin(), body.end(), [](const auto& stmt) { return std::holds_alternative<loop_ir::For>(stmt->node); });
}

/// Whether rows of plain points are no whole number of vectors.
bool ends_in_parts(const loop_ir::Kernel& kernel) {
  const OuterNest nest = outer_nest(kernel);
  const auto plain = [](const auto& stmt) {
    return std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node) ||
           std::holds_alternative<loop_ir::Store>(stmt->node);
  };
  if (nest.axes.empty() || !std::all_of(nest.inner->begin(), nest.inner->end(), plain)) return false;
  const loop_ir::Axis& last = nest.axes.back();
  const std::vector<GlobalAccess> accesses = global_accesses(kernel, *nest.inner);
  return lanes_along(accesses, last.name, last.extent) < lanes_along(accesses, last.name, sym(last.name));
}

/// Whether no thread reads what another one stores.
bool stores_apart(const loop_ir::Kernel& kernel) {
  const std::vector<GlobalAccess> accesses = global_accesses(kernel, kernel.body);
  return std::none_of(accesses.begin(), accesses.end(), [&](const GlobalAccess& a) {
    return a.stores && std::any_of(accesses.begin(), accesses.end(), [&](const GlobalAccess& b) { return !b.stores && b.buffer == a.buffer; });
  });
}

/// Statements of a point, with reductions, scans and loops over values alone.
bool is_simple(const loop_ir::Block& body, bool inside) {
  return std::all_of(body.begin(), body.end(), [&](const auto& stmt) {
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt->node)) return !inside && is_simple(loop->body, true);
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) return !inside && is_simple(reduce->body, true);
    if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node)) return !inside && is_simple(scan->body, true) && is_simple(scan->then, true);
    return std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node) ||
           std::holds_alternative<loop_ir::Store>(stmt->node) || std::holds_alternative<loop_ir::Check>(stmt->node);
  });
}

}  // namespace

GpuVectors::GpuVectors(const loop_ir::Kernel& kernel) : kernel_(merge_outer_axes(kernel)) {
  if (has_loops(*outer_nest(kernel_).inner)) kernel_ = merge_inner_axes(kernel_);
  if (ends_in_parts(kernel_)) kernel_ = join_rows(kernel_);
  OuterNest nest = outer_nest(kernel_);
  outer_ = nest.axes;
  inner_ = nest.inner;
  names_.reserve(kernel_);
  if (!colliding_stores(kernel_).empty()) last_ = find_last_stores(outer_, *inner_, names_);
  if (!is_possible()) return;
  const std::vector<GlobalAccess> accesses = global_accesses(kernel_, *inner_);
  double terms = 1;  // of a sum, before its result is stored
  for (const auto& stmt : *inner_)
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
      const Expr n = count(reduce->axes);
      terms = std::max(terms, n.is_constant() ? static_cast<double>(n.value()) : kUnknownReaders);
    }
  // Along the axis where most bytes lie side by side, of those that come from memory: what many points read alike does once. Stores cost most.
  size_t best = outer_.size();
  double most = 0;
  for (size_t a = outer_.size(); a-- > 0;) {
    if (last_ && outer_[a].name == last_->axis) continue;  // points side by side share the search
    double weight = 0;
    for (const GlobalAccess& access : accesses) {
      auto step = linear_coefficient(access.offset, outer_[a].name);
      if (!step || !step->is(1)) continue;
      double bytes = static_cast<double>(access.bytes) * (access.stores ? 2 / terms : 1);
      for (const auto& other : outer_)
        if (!uses(access.offset, other.name)) bytes /= other.extent.is_constant() ? std::max<double>(1, other.extent.value()) : kUnknownReaders;
      weight += bytes;
    }
    if (weight <= most) continue;
    most = weight;
    best = a;
  }
  if (best == outer_.size()) return;
  std::rotate(outer_.begin() + static_cast<int64_t>(best), outer_.begin() + static_cast<int64_t>(best) + 1, outer_.end());
  int64_t along_reductions = 0;
  int64_t along_points = 0;  // of what reductions load
  int64_t narrowest = kAccessBytes;
  bool scans = false;
  auto look = [&](const loop_ir::Block& body, const Expr& n, const loop_ir::Axis& innermost) {
    const std::string& last = innermost.name;
    const bool is_long = !innermost.extent.is_constant() || innermost.extent.value() >= kShortRun;
    wide_ = wide_ || !n.is_constant() || n.value() >= kWideReduction;
    for (const GlobalAccess& access : global_accesses(kernel_, body)) {
      // What neighbours read alike comes from the caches.
      const bool moves = uses(access.offset, outer_.back().name);
      if (auto step = linear_coefficient(access.offset, last); is_long && moves && step && step->is(1)) along_reductions += access.bytes;
      if (auto step = linear_coefficient(access.offset, outer_.back().name); step && step->is(1)) {
        along_points += access.bytes;
        narrowest = std::min(narrowest, access.bytes);
      }
    }
  };
  for (const auto& stmt : *inner_) {
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) look(reduce->body, count(reduce->axes), reduce->axes.back());
    const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node);
    if (!scan) continue;
    scans = true;
    look(scan->body, scan->axis.extent, scan->axis);
    look(scan->then, scan->axis.extent, scan->axis);
  }
  if (wide_ ? along_reductions >= along_points : has_loops(*inner_)) return;
  proposed_lanes_ = lanes_along(accesses, outer_.back().name, outer_.back().extent);
  // Where no row but the last one of all ends with a part of a vector.
  const int64_t whole = lanes_along(accesses, outer_.back().name, sym(outer_.back().name));
  const bool begins_whole = std::all_of(accesses.begin(), accesses.end(), [&](const GlobalAccess& access) {
    auto step = linear_coefficient(access.offset, outer_.back().name);
    return !step || !step->is(1) || lies_whole(access, outer_.back().name, whole, {});
  });
  const Expr extent = outer_.back().extent;
  if (begins_whole && (!extent.is_constant() || extent.value() >= kFewVectors * whole)) proposed_lanes_ = whole;
  const bool sided = proposed_lanes_ > 1 && prefers_neighbours();
  if (sided) proposed_lanes_ = 1;
  int64_t bytes = 0;
  for (const GlobalAccess& access : accesses)
    if (auto step = linear_coefficient(access.offset, outer_.back().name); !access.stores && step && step->is(1))
      bytes += access.bytes * proposed_lanes_;
  const bool reduces =
      scans || std::any_of(inner_->begin(), inner_->end(), [](const auto& s) { return std::holds_alternative<loop_ir::Reduce>(s->node); });
  while (!reduces && bytes > 0 && proposed_vectors_ < 2 && bytes * proposed_vectors_ < kBytesInFlight) proposed_vectors_ *= 2;
  // Few points keep all threads busy alone.
  const Expr n = count(outer_);
  if (n.is_constant() && n.value() < int64_t{1} << 20) proposed_vectors_ = 1;
  if (last_) proposed_vectors_ = 1;
  fits_ = proposed_lanes_ > 1 || wide_ || sided || last_;
  if (!wide_) return;
  if (along_points > 0) proposed_lanes_ = std::min(proposed_lanes_, kAccessBytes / narrowest);  // sums of more would not fit in registers
  if (scans && n.is_constant() && n.value() / proposed_lanes_ >= kEnoughThreads) return;
  const Expr columns = ceildiv(n, proposed_lanes_ * kManyColumns[0]);
  const bool many = !columns.is_constant() || columns.value() >= kFillingBlocks;
  proposed_threads_ = many ? kManyColumns[0] : kFewColumns[0];
  proposed_split_ = many ? kManyColumns[1] : kFewColumns[1];
  // What threads of a column tell one another: those of a scan at each piece, those of a sum at its end.
  int64_t told = 0;
  for (const auto& stmt : *inner_) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node);
    for (DType dtype : reduce ? reduce->dtypes : scan ? scan->dtypes : std::vector<DType>{}) told = std::max(told, size_of(dtype));
  }
  while (proposed_lanes_ > 1 && proposed_lanes_ * told > (scans ? kAccessBytes : 2 * kAccessBytes)) proposed_lanes_ /= 2;
}

bool GpuVectors::is_possible() const {
  if (outer_.empty() || (!colliding_stores(kernel_).empty() && !last_) || !is_simple(*inner_, false)) return false;
  const bool scans = std::any_of(inner_->begin(), inner_->end(), [](const auto& s) { return std::holds_alternative<loop_ir::Scan>(s->node); });
  if (std::any_of(inner_->begin(), inner_->end(), [](const auto& s) { return is_product_of_doubles(*s); })) return false;
  return (!has_loops(*inner_) && !scans) || stores_apart(kernel_);
}

/// Whether threads do better with points side by side than with a vector each: windows and strides leave most vectors in pieces.
bool GpuVectors::prefers_neighbours() const {
  const std::string& axis = outer_.back().name;
  double vectors = 0;
  double points = 0;
  const auto add = [&](const loop_ir::Block& body, double times) {
    for (const GlobalAccess& access : global_accesses(kernel_, body)) {
      vectors += times * cost_of_access(access, axis, proposed_lanes_, kernel_.symbols);
      points += times * cost_of_access(access, axis, 1, kernel_.symbols);
    }
  };
  for (const auto& stmt : *inner_) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    const Expr n = reduce ? count(reduce->axes) : Expr(1);
    if (reduce)
      add(reduce->body, n.is_constant() ? static_cast<double>(n.value()) : static_cast<double>(kWideReduction));
    else
      add({stmt}, 1);
  }
  return points < vectors;
}

Schedule GpuVectors::propose() const {
  Schedule s{"gpu_points", {{"threads", {{"", proposed_threads_}}}, {"vectorize", {{outer_.back().name, {}}, {"by", proposed_lanes_}}}}};
  if (proposed_split_ > 1) s.directives.push_back({"split", {{"", proposed_split_}}});
  if (proposed_vectors_ > 1) s.directives.push_back({"unroll", {{"", proposed_vectors_}}});
  if (last_) s.directives.push_back({"last", {{last_->axis, {}}}});
  return s;
}

void GpuVectors::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!is_possible()) reader.fail("only points without locals, loops in loops and stores that may meet have vectors");
  threads_ = read_threads(reader);
  const Directive& vectorize = reader.one("vectorize");
  const std::vector<std::string> axes = reader.names(vectorize);
  auto axis = std::find_if(outer_.begin(), outer_.end(), [&](const auto& a) { return axes.size() == 1 && a.name == axes[0]; });
  std::vector<std::string> known;
  for (const auto& a : outer_) known.push_back(a.name);
  if (axis == outer_.end()) reader.fail(vectorize, "allowed: one of the axes " + joined(known));
  reader.only(vectorize, {axes[0], "by"});
  lanes_ = reader.number(vectorize, "by", 1, kMostLanes);
  if ((lanes_ & (lanes_ - 1)) != 0) reader.fail(vectorize, "allowed: powers of two");
  std::rotate(axis, axis + 1, outer_.end());
  if (const auto all = reader.all("unroll"); !all.empty()) {
    const Directive& unroll = reader.one("unroll");
    reader.only(unroll, {""});
    vectors_ = reader.number(unroll, "", 1, kMostVectors);
  }
  if (const auto all = reader.all("split"); !all.empty()) {
    const Directive& split = reader.one("split");
    reader.only(split, {""});
    split_ = reader.number(split, "", 1, std::min(kMostSplit, kMostGpuThreads / threads_));
    if ((split_ & (split_ - 1)) != 0) reader.fail(split, "allowed: powers of two");
    if (split_ * threads_ % 32 != 0) reader.fail(split, "allowed: what makes whole warps of the block's threads");
    if (vectors_ > 1) reader.fail(split, "allowed without unroll");
    if (last_) reader.fail(split, "allowed where stores do not meet");
    for (const auto& stmt : *inner_) {
      const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
      if (!reduce) continue;
      if (reduce->combiner == Combiner::online_softmax) reader.fail(split, "online_softmax is not shared");
    }
  }
  if (last_) {
    const Directive& last = reader.one("last");
    reader.only(last, {last_->axis});
    if (axes[0] == last_->axis) reader.fail(vectorize, "allowed: axes along which stores do not meet");
  }
  reader.finish("threads, vectorize, split, unroll and last");
}

tile_ir::Block GpuVectors::apply(const Schedule& schedule) {
  read(schedule);
  const std::string block = names_.fresh("b");
  const std::string thread = names_.fresh("t");
  const std::string piece = names_.fresh("u");
  const std::string lane = names_.fresh("v");
  const loop_ir::Axis along = outer_.back();
  const std::vector<loop_ir::Axis> others(outer_.begin(), outer_.end() - 1);
  const Expr in_row = ceildiv(along.extent, lanes_);
  const Expr n = count(others) * in_row;
  Expr linear = (sym(block) * vectors_ + (vectors_ > 1 ? sym(piece) : Expr(0))) * threads_ + sym(thread);
  const bool exact = n.is_constant() && n.value() % threads_ == 0;
  if (split_ > 1) {
    // Threads beyond the last point do its work once more, for all must be there when they combine, and store nothing.
    row_ = names_.fresh("y");
    stores_ = {equal(sym(row_), 0)};
    if (!exact) in_range_ = {less(linear, n)};
    stores_.insert(stores_.end(), in_range_.begin(), in_range_.end());
    if (!exact) linear = min(linear, n - 1);
  }
  const Expr first = (others.empty() ? linear : mod(linear, in_row)) * lanes_;
  map_ = unflatten(others, others.empty() ? Expr(0) : floordiv(linear, in_row));
  map_[along.name] = first + sym(lane);
  const bool whole = along.extent.is_constant() && along.extent.value() % lanes_ == 0;
  tile_ir::Block vector{
      make(tile_ir::For{axis(lane, 0, whole ? Expr(lanes_) : min(lanes_, along.extent - first), LoopKind::lanes), convert(*inner_)})};
  if (split_ > 1) {
    tile_ir::Block threads{make(tile_ir::For{axis(thread, 0, threads_, LoopKind::thread_x), std::move(vector)})};
    threads = {make(tile_ir::For{axis(row_, 0, split_, LoopKind::thread_y), std::move(threads)})};
    return {make(tile_ir::For{axis(block, 0, ceildiv(n, threads_), LoopKind::block_x), std::move(threads)})};
  }
  if (last_) vector = with_last_alone(std::move(vector));
  tile_ir::Block body{make(tile_ir::If{{less(linear, n)}, std::move(vector)})};
  if (vectors_ > 1) body = {make(tile_ir::For{axis(piece, 0, vectors_, LoopKind::unroll), std::move(body)})};
  return gpu_grid(block, ceildiv(n, threads_ * vectors_), thread, threads_, std::move(body));
}

/// The vector, if no later iteration of the axis along which stores meet has the same place.
tile_ir::Block GpuVectors::with_last_alone(tile_ir::Block vector) {
  const std::string piece = names_.fresh("p");
  const std::string own = names_.fresh("e");
  const std::string last = names_.fresh("last");
  const Expr element = sym(piece) * kSearched + sym(own);
  const bool whole = last_->extent.value() % kSearched == 0;
  map_[last_->other] = whole ? element : min(element, last_->extent - 1);
  tile_ir::Block out = convert(last_->own);
  tile_ir::Reduce reduce{{last}, {DType::i64}, Combiner::max, {last_->found}, {}, convert(last_->search)};
  reduce.axes = {axis(piece, 0, ceildiv(last_->extent, kSearched)), axis(own, 0, kSearched, LoopKind::unroll)};
  out.push_back(make(std::move(reduce)));
  out.push_back(make(tile_ir::If{{equal(sym(last), map_.at(last_->axis))}, std::move(vector)}));
  return out;
}

Ref<tile_ir::Stmt> GpuVectors::convert(const loop_ir::Reduce& s) {
  tile_ir::Reduce reduce{s.results, s.dtypes, s.combiner, s.operands, {}, convert(s.body)};
  if (split_ > 1) reduce.axes.push_back(axis(row_, 0, split_, LoopKind::thread_y));
  for (const auto& a : s.axes) reduce.axes.push_back(axis(a.name, 0, substitute(a.extent, map_)));
  if (split_ == 1) return make(std::move(reduce));
  // The longest axis is shared.
  size_t longest = 0;
  for (size_t k = 0; k < s.axes.size(); ++k) {
    const Expr n = s.axes[k].extent;
    const Expr most = s.axes[longest].extent;
    if (most.is_constant() && (!n.is_constant() || n.value() > most.value())) longest = k;
  }
  tile_ir::Axis& shared = reduce.axes[1 + longest];
  shared.lo = sym(row_);
  shared.step = split_;
  return make(std::move(reduce));
}

Ref<tile_ir::Stmt> GpuVectors::convert(const loop_ir::For& s) {
  const std::vector<Cond> stores = std::exchange(stores_, in_range_);
  tile_ir::Axis own = axis(s.axis, split_ > 1 ? sym(row_) : Expr(0), substitute(s.extent, map_), LoopKind::serial, split_, kAhead);
  auto loop = make(tile_ir::For{std::move(own), convert(s.body)});
  stores_ = stores;
  return loop;
}

/// Threads that share a column have some elements each, side by side, piece by piece.
Ref<tile_ir::Stmt> GpuVectors::convert(const loop_ir::Scan& s) {
  const Expr extent = substitute(s.axis.extent, map_);
  tile_ir::Scan scan{s.results, s.dtypes, s.combiner, s.operands, {}, {}, {}};
  if (split_ == 1) {
    scan.axes = {axis(s.axis.name, 0, extent, LoopKind::serial, 1, kAhead)};
    scan.body = convert(s.body);
    scan.then = convert(s.then);
    return make(std::move(scan));
  }
  const int64_t each = std::max<int64_t>(1, kScanned / lanes_);
  const std::string piece = names_.fresh("p");
  const std::string own = names_.fresh("e");
  scan.axes = {axis(piece, 0, ceildiv(extent, split_ * each)), axis(row_, 0, split_, LoopKind::thread_y), axis(own, 0, each, LoopKind::unroll)};
  const Expr element = (sym(piece) * split_ + sym(row_)) * each + sym(own);
  const bool whole = extent.is_constant() && extent.value() % (split_ * each) == 0;
  // What lies behind the end is the last element again: nothing that counts follows it.
  map_[s.axis.name] = whole ? element : min(element, extent - 1);
  scan.body = convert(s.body);
  map_[s.axis.name] = element;
  const std::vector<Cond> stores = std::exchange(stores_, in_range_);
  scan.then = convert(s.then);
  stores_ = stores;
  if (!whole) scan.then = {make(tile_ir::If{{less(element, extent)}, std::move(scan.then)})};
  map_.erase(s.axis.name);
  return make(std::move(scan));
}

tile_ir::Block GpuVectors::convert(const loop_ir::Block& block) {
  tile_ir::Block out;
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { out.push_back(make(substituted(s, map_))); },
                          [&](const loop_ir::Load& s) { out.push_back(make(substituted(s, map_))); },
                          [&](const loop_ir::Store& s) {
                            auto store = make(substituted(s, map_));
                            out.push_back(stores_.empty() ? store : make(tile_ir::If{stores_, {store}}));
                          },
                          [&](const loop_ir::Check& s) { out.push_back(make(substituted(s, map_))); },
                          [&](const loop_ir::Reduce& s) { out.push_back(convert(s)); }, [&](const loop_ir::Scan& s) { out.push_back(convert(s)); },
                          [&](const loop_ir::For& s) { out.push_back(convert(s)); }, [](const auto&) {}},
               stmt->node);
  return out;
}

}  // namespace deplo::loop_to_tile
