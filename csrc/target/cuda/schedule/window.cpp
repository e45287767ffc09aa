#include "target/cuda/schedule/window.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "analysis/neighbours.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;

namespace {

constexpr int64_t kMostPhases = 4;
constexpr int64_t kUnrolledTurns = 8;  ///< of a thread that copies
constexpr int kTurnsAtOnce = 4;

/// Axes of a load's place: those of the points, and those of the reduction around it with their extents.
struct Scope {
  const std::vector<loop_ir::Axis>& points;
  const std::vector<loop_ir::Axis>* reduced;
  const Ranges& symbols;

  bool is_point(const std::string& name) const {
    return std::any_of(points.begin(), points.end(), [&](const auto& a) { return a.name == name; });
  }
  const loop_ir::Axis* reduced_axis(const std::string& name) const {
    if (!reduced) return nullptr;
    const auto found = std::find_if(reduced->begin(), reduced->end(), [&](const auto& a) { return a.name == name; });
    return found == reduced->end() ? nullptr : &*found;
  }
  bool is_fixed(Expr e) const {
    const auto names = symbols_of(e);
    return std::all_of(names.begin(), names.end(), [&](const std::string& s) { return symbols.count(s) > 0; });
  }
};

/// A guard's condition as one of a coordinate of the load; nothing where it is none.
std::optional<Cond> of_coordinate(const Cond& cond, const std::vector<Expr>& index, const Scope& scope) {
  if (scope.is_fixed(cond.expr)) return cond;
  for (size_t d = 0; d < index.size(); ++d)
    for (const std::string& name : symbols_of(index[d])) {
      if (!scope.is_point(name) && !scope.reduced_axis(name)) continue;
      const auto whole = linear_coefficient(cond.expr, name);
      const auto part = linear_coefficient(index[d], name);
      if (!whole || !part || !whole->is_constant() || !part->is_constant() || part->is(0) || whole->value() % part->value() != 0) continue;
      const int64_t times = whole->value() / part->value();
      const Expr rest = cond.expr - index[d] * times;
      if (times != 0 && scope.is_fixed(rest)) return Cond{cond.kind, Expr::symbol(Reach::coordinate(d)) * times + rest};
    }
  return std::nullopt;
}

std::optional<Reach> read_window(const loop_ir::Load& load, const loop_ir::Param& param, const Scope& scope) {
  Reach w;
  w.param = &param;
  w.loads = {&load};
  w.taps = 1;
  std::set<std::string> counted;
  for (Expr index : load.index) {
    w.steps.emplace_back();
    w.least.push_back(0);
    w.most.push_back(0);
    Substitution zero;
    for (const std::string& name : symbols_of(index)) {
      const loop_ir::Axis* reduced = scope.reduced_axis(name);
      if (!reduced && !scope.is_point(name)) {
        if (scope.symbols.count(name) == 0) return std::nullopt;
        continue;
      }
      const auto step = linear_coefficient(index, name);
      if (!step || !step->is_constant()) return std::nullopt;
      zero[name] = 0;
      if (!reduced) {
        w.steps.back()[name] = step->value();
        continue;
      }
      if (!reduced->extent.is_constant()) return std::nullopt;
      const int64_t reach = step->value() * (reduced->extent.value() - 1);
      w.least.back() += std::min<int64_t>(reach, 0);
      w.most.back() += std::max<int64_t>(reach, 0);
      if (counted.insert(name).second) w.taps *= static_cast<double>(reduced->extent.value());
    }
    w.base.push_back(substitute(index, zero));
    if (!scope.is_fixed(w.base.back())) return std::nullopt;
  }
  for (const Cond& cond : load.guard) {
    const auto found = of_coordinate(cond, load.index, scope);
    if (!found) return std::nullopt;
    w.inside.push_back(*found);
  }
  w.fill = load.guard.empty() ? loop_ir::zero_of(load.dtype) : load.fill;
  return w;
}

/// Adds a load's window to one that differs from it by constants alone.
bool joins(Reach& window, const Reach& other) {
  if (window.param != other.param || window.steps != other.steps || window.inside != other.inside || !(window.fill == other.fill)) return false;
  Reach joined = window;
  for (size_t d = 0; d < window.base.size(); ++d) {
    const Expr apart = other.base[d] - window.base[d];
    if (!apart.is_constant() || std::abs(apart.value()) > kWidestWindow) return false;
    joined.least[d] = std::min(window.least[d], other.least[d] + apart.value());
    joined.most[d] = std::max(window.most[d], other.most[d] + apart.value());
  }
  joined.loads.insert(joined.loads.end(), other.loads.begin(), other.loads.end());
  joined.taps += other.taps;
  window = std::move(joined);
  return true;
}

/// Whether a condition holds for all or none of `lanes` elements side by side from a multiple of them on.
bool is_uniform(const Cond& cond, const std::string& coordinate, int64_t lanes) {
  if (lanes == 1 || !uses(cond.expr, coordinate)) return true;
  const auto step = linear_coefficient(cond.expr, coordinate);
  if (cond.kind != Cond::Kind::ge0 || !step || !step->is_constant() || std::abs(step->value()) != 1) return false;
  const auto rest = (cond.expr - *step * Expr::symbol(coordinate)).as_constant();
  if (!rest) return false;
  return step->value() == 1 ? *rest % lanes == 0 : (*rest + 1) % lanes == 0;
}

bool is_zero(const Scalar& s) { return is_float(s.dtype) ? s.f == 0 : s.i == 0; }

/// Rounded up to a number of elements that puts lines side by side into banks of their own.
int64_t odd_words(int64_t elements, int64_t bytes) {
  const int64_t word = std::max<int64_t>(1, 4 / bytes);
  int64_t words = (elements + word - 1) / word;
  if (words % 2 == 0) ++words;
  return words * word;
}

}  // namespace

int64_t Reach::step(size_t dimension, const std::string& axis) const {
  const auto found = steps[dimension].find(axis);
  return found == steps[dimension].end() ? 0 : found->second;
}

bool Reach::moves_along(const std::string& axis) const {
  return std::any_of(steps.begin(), steps.end(), [&](const auto& s) { return s.count(axis) > 0; });
}

std::optional<size_t> Reach::run() const {
  for (size_t d = param->strides.size(); d-- > 0;)
    if (param->strides[d].is(1) && !param->shape[d].is(1)) return d;
  return std::nullopt;
}

std::vector<size_t> Reach::overlaps() const {
  std::vector<size_t> found;
  for (size_t d = 0; d < steps.size(); ++d)
    if (most[d] > least[d] &&
        std::any_of(steps[d].begin(), steps[d].end(), [&](const auto& s) { return analysis::overlaps(s.second, most[d] - least[d] + 1); }))
      found.push_back(d);
  return found;
}

std::vector<Reach> find_windows(const loop_ir::Kernel& kernel, const loop_ir::Block& body, const std::vector<loop_ir::Axis>& points) {
  std::set<std::string> stored;
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt.node)) stored.insert(store->buffer);
  });
  std::vector<Reach> windows;
  const auto add = [&](const loop_ir::Stmt& stmt, const std::vector<loop_ir::Axis>* reduced) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
    const loop_ir::Param* param = load ? kernel.find_param(load->buffer) : nullptr;
    if (!param || param->kind != loop_ir::ParamKind::in || stored.count(load->buffer) > 0) return;
    const auto window = read_window(*load, *param, {points, reduced, kernel.symbols});
    if (window && std::none_of(windows.begin(), windows.end(), [&](Reach& w) { return joins(w, *window); })) windows.push_back(*window);
  };
  for (const auto& stmt : body) {
    add(*stmt, nullptr);
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node))
      for (const auto& s : reduce->body) add(*s, &reduce->axes);
  }
  return windows;
}

Expr Region::place(const std::vector<Expr>& at) const {
  Expr sum = 0;
  for (size_t d = 0; d < at.size(); ++d) {
    if (phases > 1 && d == order.back())
      sum = sum + mod(at[d], phases) * (extents[d] / phases) + floordiv(at[d], phases);
    else if (extents[d] > 1)
      sum = sum + at[d] * pitch[d];
  }
  return sum;
}

std::vector<Cond> conditions(const Region& region) {
  const Reach& w = *region.window;
  std::vector<Cond> out = w.inside;
  const auto add = [&](const Cond& cond) {
    if (std::find(out.begin(), out.end(), cond) == out.end()) out.push_back(cond);
  };
  for (size_t d = 0; d < region.ragged.size(); ++d) {
    if (!region.ragged[d]) continue;
    const Expr at = Expr::symbol(Reach::coordinate(d));
    add({Cond::Kind::ge0, at});
    add(less(at, w.param->shape[d]));
  }
  return out;
}

Region make_region(const Reach& window, const PointTile& tile, const std::string& lane, int64_t lanes, const std::vector<loop_ir::Axis>& points,
                   int64_t pad, const TileStarts& starts) {
  Region r;
  r.window = &window;
  const size_t rank = window.base.size();
  const auto points_of = [&](const std::string& axis) {
    const auto found = tile.find(axis);
    return found == tile.end() ? 1 : found->second;
  };
  const auto extent_of = [&](const std::string& axis) {
    return std::find_if(points.begin(), points.end(), [&](const auto& a) { return a.name == axis; })->extent;
  };
  std::vector<int64_t> first;  // what is added to the base at the tile's first point
  for (size_t d = 0; d < rank; ++d) {
    int64_t extent = window.most[d] - window.least[d] + 1;
    int64_t begin = window.least[d];
    bool ragged = window.beyond && window.run() == d;
    for (const auto& [axis, step] : window.steps[d]) {
      const int64_t n = points_of(axis);
      extent += std::abs(step) * (n - 1);
      begin += std::min<int64_t>(step * (n - 1), 0);
      const Expr all = extent_of(axis);
      ragged = ragged || !all.is_constant() || all.value() % n != 0 || starts.count(axis) > 0;
    }
    first.push_back(begin);
    r.extents.push_back(extent);
    r.ragged.push_back(ragged);
    r.order.push_back(d);
  }
  const auto& strides = window.param->strides;
  std::stable_sort(r.order.begin(), r.order.end(), [&](size_t a, size_t b) {
    return strides[a].is_constant() && strides[b].is_constant() && strides[a].value() > strides[b].value();
  });
  const std::optional<size_t> run = window.run();
  if (run) {
    r.order.erase(std::find(r.order.begin(), r.order.end(), *run));
    r.order.push_back(*run);
  }
  std::optional<size_t> across;  // the dimension along which threads side by side read
  for (size_t d = 0; d < rank && !across; ++d)
    if (window.step(d, lane) != 0) across = d;
  const size_t last = r.order.back();
  const bool turned = across && *across != last;

  // Copies of 16 bytes where they begin at multiples of that, and are inside of the buffer as a whole or not at all.
  const auto fits = [&](int64_t by) {
    Region wide = r;
    if (!run || turned || r.extents[last] < by) return false;
    const auto base = window.base[last].as_constant();
    if (!base) return false;
    int64_t offset = 0;
    for (const auto& [axis, step] : window.steps[last]) {
      if (const auto start = starts.find(axis); start != starts.end()) {
        if (step * start->second.multiple % by != 0) return false;
        offset += step * start->second.offset;
        continue;
      }
      const Expr all = extent_of(axis);
      const bool single = all.is_constant() && all.value() <= points_of(axis);
      if (!single && step * points_of(axis) % by != 0) return false;
    }
    for (size_t d = 0; d < rank; ++d)
      if (d != last && strides[d].is_constant() && strides[d].value() % by != 0 && !window.param->shape[d].is(1)) return false;
    wide.shift = floor_mod(*base + first[last] + offset, by);
    if ((r.extents[last] + wide.shift) % by != 0 || wide.shift != 0) wide.ragged[last] = true;
    wide.extents[last] = (r.extents[last] + wide.shift + by - 1) / by * by;
    wide.lanes = by;
    const std::vector<Cond> conds = conditions(wide);
    if (!std::all_of(conds.begin(), conds.end(), [&](const Cond& c) { return is_uniform(c, Reach::coordinate(last), by); })) return false;
    r = wide;
    return true;
  };
  for (int64_t by = kAccessBytes / window.bytes(); by > 1 && !fits(by);) by /= 2;

  const int64_t step = across ? std::abs(window.step(*across, lane)) : 1;
  if (!turned && across && lanes == 1 && step > 1 && step <= kMostPhases) {
    r.phases = step;
    const int64_t unit = std::lcm(step, r.lanes);
    const int64_t rounded = (r.extents[last] + unit - 1) / unit * unit;
    r.ragged[last] = r.ragged[last] || rounded != r.extents[last];
    r.extents[last] = rounded;
  }
  r.pitch.assign(rank, 0);
  std::vector<size_t> inner = r.order;
  if (turned) inner.erase(std::find(inner.begin(), inner.end(), *across));
  int64_t size = 1;
  for (size_t k = inner.size(); k-- > 0;) {
    r.pitch[inner[k]] = size;
    size *= r.extents[inner[k]];
    if (k + 1 == inner.size()) size += pad;
  }
  if (turned) {
    size = odd_words(size, window.bytes());
    r.pitch[*across] = size;
    size *= r.extents[*across];
  }
  r.elements = size;
  r.is_async = r.lanes * window.bytes() == kAccessBytes && r.phases == 1 && pad % r.lanes == 0 && is_zero(window.fill);
  return r;
}

std::vector<Expr> origin_of(const Region& region, const PointTile& tile, const Substitution& first) {
  const Reach& w = *region.window;
  std::vector<Expr> origin;
  for (size_t d = 0; d < w.base.size(); ++d) {
    Expr at = w.base[d] + w.least[d];
    for (const auto& [axis, step] : w.steps[d]) {
      const auto n = tile.find(axis);
      at = at + first.at(axis) * step + std::min<int64_t>(step * ((n == tile.end() ? 1 : n->second) - 1), 0);
    }
    if (d == region.order.back()) at = at - region.shift;
    origin.push_back(at);
  }
  return origin;
}

tile_ir::Block copy_region(const Region& region, Expr thread, int64_t threads, loop_ir::Names& names) {
  const Reach& w = *region.window;
  const size_t last = region.order.back();
  const std::string q = names.fresh("q");
  const std::string v = names.fresh("v");
  const Expr number = thread + sym(q) * threads;
  std::vector<loop_ir::Axis> pieces;
  int64_t copies = 1;
  for (size_t d : region.order) {
    pieces.push_back({Reach::coordinate(d), d == last ? region.extents[d] / region.lanes : region.extents[d]});
    copies *= pieces.back().extent.value();
  }
  const Substitution piece = unflatten(pieces, number);
  std::vector<Expr> at;
  std::vector<Expr> index;
  Substitution coordinates;
  for (size_t d = 0; d < region.extents.size(); ++d) {
    const Expr along = piece.at(Reach::coordinate(d));
    at.push_back(d == last ? along * region.lanes : along);
    index.push_back(region.origin[d] + at.back());
    coordinates[Reach::coordinate(d)] = index.back();
  }
  const std::vector<Cond> guard = substituted(conditions(region), coordinates);
  tile_ir::Block body;
  if (region.is_async) {
    body.push_back(make(
        tile_ir::CopyAsync{region.array, {region.place(at)}, w.param->name, index, static_cast<int64_t>(last), region.lanes, region.lanes, guard}));
  } else {
    const std::string value = names.fresh("w");
    if (region.lanes > 1) {
      at[last] = at[last] + sym(v);
      index[last] = index[last] + sym(v);
    }
    body = {make(tile_ir::Load{value, w.param->dtype, w.param->name, index, guard, w.fill}),
            make(tile_ir::Store{region.array, {region.place(at)}, value, {}, Combiner::set})};
    if (region.lanes > 1) body = {make(tile_ir::For{axis(v, 0, region.lanes, LoopKind::lanes), std::move(body)})};
  }
  if (copies % threads != 0) body = {make(tile_ir::If{{less(number, copies)}, std::move(body)})};
  const int64_t turns = (copies + threads - 1) / threads;
  if (turns <= kUnrolledTurns) return {make(tile_ir::For{axis(q, 0, turns, LoopKind::unroll), std::move(body)})};
  return {make(tile_ir::For{axis(q, 0, turns, LoopKind::serial, 1, kTurnsAtOnce), std::move(body)})};
}

}  // namespace deplo::loop_to_tile
