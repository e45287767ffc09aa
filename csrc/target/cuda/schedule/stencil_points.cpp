#include "target/cuda/schedule/stencil_points.h"

#include <algorithm>
#include <cstdlib>

#include "loop_ir/places.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kWarp = 32;
constexpr int64_t kBanks = 32, kBankBytes = 4;
constexpr double kMostTaps = 256;   ///< of a point
constexpr int64_t kUnrolled = 512;  ///< products that a thread's loop over taps has at once
constexpr int64_t kMostPad = 32;    ///< words behind a line of a region

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

bool is_simple(Combiner combiner, DType dtype) {
  if (dtype == DType::boolean || (combiner == Combiner::prod && dtype == DType::f64)) return false;
  return combiner == Combiner::sum || combiner == Combiner::prod || combiner == Combiner::min || combiner == Combiner::max;
}

bool meet(const std::set<std::string>& a, const std::set<std::string>& b) {
  return std::any_of(a.begin(), a.end(), [&](const std::string& name) { return b.count(name) > 0; });
}

}  // namespace

std::optional<double> taps_of(const loop_ir::Block& body) {
  double taps = 0;
  std::set<std::string> results;
  for (const auto& stmt : body) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    std::set<std::string> used;
    if (!reduce) {
      if (!is_scalar(*stmt) || tells(*stmt)) return std::nullopt;
      // What follows from sums is no operand of others, and no place in memory.
      collect_uses(*stmt, used);
      if (meet(used, results) && !name_of(*stmt).empty()) results.insert(name_of(*stmt));
      continue;
    }
    const Expr n = loop_to_tile::count(reduce->axes);
    if (!n.is_constant() || n.is(0) || reduce->results.size() != 1 || !is_simple(reduce->combiner, reduce->dtypes[0])) return std::nullopt;
    taps += static_cast<double>(n.value());
    for (const auto& s : reduce->body) {
      if (!is_straight(*s) || tells(*s)) return std::nullopt;
      collect_uses(*s, used);
    }
    if (meet(used, results)) return std::nullopt;
    results.insert(reduce->results[0]);
  }
  return taps <= kMostTaps ? std::optional(taps) : std::nullopt;
}

bool is_staged(const Reach& window, const std::string& lane) {
  if (!window.overlaps().empty()) return true;
  const auto run = window.run();
  if (!run || !window.moves_along(lane) || window.step(*run, lane) != 0) return false;
  return !window.steps[*run].empty() || window.most[*run] > window.least[*run];
}

int64_t shared_bytes(const std::vector<Region>& regions) {
  int64_t bytes = 0;
  for (const Region& r : regions) bytes += (r.bytes() + kAccessBytes - 1) / kAccessBytes * kAccessBytes;
  return bytes;
}

// ---- threads -------------------------------------------------------------------------------------------------------

int64_t PointThreads::count() const {
  int64_t n = 1;
  for (int64_t p : points) n *= p;
  return n / (lanes * block);
}

std::vector<size_t> PointThreads::order() const {
  std::vector<size_t> found;
  for (size_t a = 0; a < axes->size(); ++a)
    if (a != lane) found.push_back(a);
  found.push_back(lane);
  return found;
}

PointTile PointThreads::named() const {
  PointTile tile;
  for (size_t a = 0; a < axes->size(); ++a) tile[(*axes)[a].name] = points[a];
  return tile;
}

Substitution PointThreads::places(Expr number) const {
  std::vector<loop_ir::Axis> threads;
  for (size_t a : order()) threads.push_back({(*axes)[a].name, points[a] / each(a)});
  Substitution found = unflatten(threads, number);
  for (size_t a = 0; a < axes->size(); ++a) {
    Expr& at = found.at((*axes)[a].name);
    at = points[a] == each(a) ? Expr(0) : at * each(a);
  }
  return found;
}

double bank_ways(const Region& region, const PointThreads& threads) {
  const Reach& w = *region.window;
  const bool moves = w.moves_along((*threads.axes)[threads.lane].name);
  const int64_t together = std::min(kWarp, kBanks * kBankBytes / std::max(kBankBytes, threads.lanes * w.bytes()));
  const int64_t all = threads.count();
  const std::vector<size_t> order = threads.order();
  double ways = 0;
  double requests = 0;
  for (int64_t begin = 0; begin < all; begin += together) {
    std::map<int64_t, std::set<int64_t>> words;
    for (int64_t t = begin; t < std::min(all, begin + together); ++t) {
      std::vector<int64_t> at(w.steps.size(), 0);
      int64_t rest = t;
      for (size_t k = order.size(); k-- > 0;) {
        const size_t a = order[k];
        const int64_t each = threads.each(a);
        const int64_t n = threads.points[a] / each;
        for (size_t d = 0; d < at.size(); ++d) at[d] += rest % n * each * std::abs(w.step(d, (*threads.axes)[a].name));
        rest /= n;
      }
      int64_t place = 0;
      for (size_t d = 0; d < at.size(); ++d) {
        if (region.phases > 1 && d == region.order.back())
          place += at[d] % region.phases * (region.extents[d] / region.phases) + at[d] / region.phases;
        else
          place += at[d] * region.pitch[d];
      }
      const int64_t bytes = std::max(kBankBytes, moves ? threads.lanes * w.bytes() : w.bytes());
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

Region lay_out_region(const Reach& window, const PointThreads& threads) {
  const PointTile points = threads.named();
  const std::string& lane = (*threads.axes)[threads.lane].name;
  Region best = make_region(window, points, lane, threads.lanes, *threads.axes, 0, threads.starts);
  double least = bank_ways(best, threads);
  const int64_t step = std::max({best.lanes, window.moves_along(lane) ? threads.lanes : 1, kBankBytes / std::min(kBankBytes, window.bytes())});
  for (int64_t pad = step; pad * window.bytes() <= kMostPad * kBankBytes && least > 1; pad += step) {
    Region other = make_region(window, points, lane, threads.lanes, *threads.axes, pad, threads.starts);
    if (const double ways = bank_ways(other, threads); ways < least) {
      least = ways;
      best = std::move(other);
    }
  }
  return best;
}

// ---- the text ------------------------------------------------------------------------------------------------------

Ref<tile_ir::Stmt> StencilPoints::per_point(tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(own_.vector, 0, own_.lanes, LoopKind::lanes), std::move(body)})};
  return make(tile_ir::For{axis(own_.piece, 0, own_.pieces, LoopKind::unroll), std::move(inner)});
}

std::vector<Cond> StencilPoints::exist() const {
  std::vector<Cond> out;
  for (const auto& [axis, cond] : exists_) out.push_back(cond);
  return out;
}

/// What is computed before a reduction, and used in it.
loop_ir::Block StencilPoints::slice_for(const loop_ir::Reduce& reduce) const {
  std::set<std::string> needed;
  for (const auto& s : reduce.body) collect_uses(*s, needed);
  loop_ir::Block slice;
  bool before = false;
  for (size_t i = body_.size(); i-- > 0;) {
    const loop_ir::Stmt& stmt = *body_[i];
    if (std::get_if<loop_ir::Reduce>(&stmt.node) == &reduce) before = true;
    if (!before || name_of(stmt).empty() || needed.count(name_of(stmt)) == 0) continue;
    collect_uses(stmt, needed);
    slice.insert(slice.begin(), body_[i]);
  }
  return slice;
}

/// Statements at a thread's point; what was copied is read where it lies. A guarded load whose place was computed may lie anywhere where the point
/// does not exist.
tile_ir::Block StencilPoints::convert(const loop_ir::Block& block, bool guarded) const {
  tile_ir::Block out;
  std::set<std::string> computed;
  for (const auto& stmt : body_)
    if (!name_of(*stmt).empty()) computed.insert(name_of(*stmt));
  const auto load = [&](const loop_ir::Load& s) {
    for (const Region& region : regions_) {
      const auto& loads = region.window->loads;
      if (std::find(loads.begin(), loads.end(), &s) == loads.end()) continue;
      std::vector<Expr> at = substituted(s.index, place_);
      for (size_t d = 0; d < at.size(); ++d) at[d] = at[d] - region.origin[d];
      out.push_back(make(tile_ir::Load{s.name, s.dtype, region.array, {region.place(at)}, {}, {}}));
      return;
    }
    loop_ir::Load moved = substituted(s, place_);
    if (guarded) {
      std::set<std::string> used;
      collect_uses(loop_ir::Stmt{s}, used);
      const bool is_anywhere =
          std::any_of(used.begin(), used.end(), [&](const std::string& name) { return name != s.name && computed.count(name) > 0; });
      if (moved.guard.empty()) moved.fill = loop_ir::zero_of(s.dtype);
      for (const auto& [axis, cond] : exists_)
        if (is_anywhere || axis.empty() || used.count(axis) > 0) moved.guard.push_back(cond);
      if (moved.guard.empty()) moved.fill = {};
    }
    out.push_back(make(std::move(moved)));
  };
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { out.push_back(make(substituted(s, place_))); }, load,
                          [&](const loop_ir::Store& s) { out.push_back(make(substituted(s, place_))); },
                          [&](const loop_ir::Check& s) { out.push_back(make(substituted(s, place_))); },
                          [&](const loop_ir::Reduce& s) {
                            const std::vector<Expr> own{sym(own_.piece), sym(own_.vector)};
                            out.push_back(make(tile_ir::Load{s.results[0], s.dtypes[0], sums_.at(s.results[0]), own, {}, {}}));
                          },
                          [](const auto&) {}},
               stmt->node);
  return out;
}

tile_ir::Block StencilPoints::sums() {
  tile_ir::Block out;
  for (const auto& stmt : body_)
    if (const auto* s = std::get_if<loop_ir::Reduce>(&stmt->node))
      for (auto& made : reduce(*s)) out.push_back(std::move(made));
  return out;
}

/// A sum of each of a thread's points, tap by tap: those that several points share are side by side in the text, where their loads are one.
tile_ir::Block StencilPoints::reduce(const loop_ir::Reduce& s) {
  const std::string& sums = sums_[s.results[0]] = names_.fresh("acc0");
  const std::vector<Expr> own{sym(own_.piece), sym(own_.vector)};
  const std::string none = names_.fresh("none");
  const DType dtype = s.dtypes[0];
  tile_ir::Block out{make(tile_ir::Alloc{sums, dtype, {own_.pieces, own_.lanes}, Space::reg}),
                     per_point({make(tile_ir::Let{none, dtype, Fn::constant, {}, identity(s.combiner, dtype), 0}),
                                make(tile_ir::Store{sums, own, none, {}, Combiner::set})})};
  loop_ir::Block whole = slice_for(s);
  whole.insert(whole.end(), s.body.begin(), s.body.end());
  tile_ir::Block body = convert(whole, true);
  body.push_back(make(tile_ir::Store{sums, own, s.operands[0], {}, s.combiner}));
  body = {per_point(std::move(body))};
  // Taps that points of one thread share are unrolled, others as far as the text stays short.
  std::set<std::string> shared;
  if (own_.pieces > 1)
    for (const Region& region : regions_)
      for (const loop_ir::Load* load : region.window->loads)
        for (size_t d = 0; d < load->index.size(); ++d)
          if (region.window->step(d, own_.blocked) != 0)
            for (const std::string& name : symbols_of(load->index[d])) shared.insert(name);
  int64_t products = own_.pieces * own_.lanes;
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

}  // namespace deplo::loop_to_tile
