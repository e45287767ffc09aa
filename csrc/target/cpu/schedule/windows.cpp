#include "target/cpu/schedule/windows.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "target/cpu/schedule/reductions.h"

namespace deplo::loop_to_tile {

using loop_ir::Load;
using loop_ir::Reduce;
using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kMostTaps = 64;         // of one window
constexpr int64_t kMostStatements = 640;  // that the taps of one block of points become
constexpr int64_t kFarthest = 32;         // steps between taps, or between windows, of one that neighbours share
constexpr int64_t kLargestStride = 4;     // between lanes: all that lies between is read, and picked from
constexpr double kScatteredCost = 16;     // of an access that is no vector, in loads of one
constexpr int64_t kFewLines = 8;          // that threads share out badly: channels instead
constexpr int64_t kLaneTiles = 16;        // of channels
constexpr int64_t kParallelBlocks = 14;   // keep a few threads busy
constexpr int64_t kWholeImage = 8;        // points of an axis that lie in one block, borders included
constexpr int64_t kShortVectors = 2;      // of a masked row at once

const loop_ir::Axis* find(const std::vector<loop_ir::Axis>& axes, const std::string& name) {
  for (const auto& a : axes)
    if (a.name == name) return &a;
  return nullptr;
}

int64_t taps_of(const Reduce& reduce) {
  int64_t taps = 1;
  for (const auto& a : reduce.axes) {
    auto extent = a.extent.as_constant();
    if (!extent || *extent < 1 || *extent > kMostTaps) return kMostTaps + 1;
    taps *= *extent;
  }
  return taps;
}

std::vector<const Reduce*> reductions_of(const loop_ir::Block& block) {
  std::vector<const Reduce*> found;
  for (const auto& stmt : block)
    if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) found.push_back(reduce);
  return found;
}

/// How far windows and their taps lie apart along memory, in steps that both have: neighbours whose windows overlap, or touch.
struct Steps {
  int64_t window = 0;
  int64_t tap = 0;
};

std::optional<Steps> common_steps(Expr window, Expr tap) {
  if (window.is(0) || tap.is(0)) return std::nullopt;
  Steps steps;
  if (window.is_constant() && tap.is_constant()) {
    const int64_t g = std::gcd(window.value(), tap.value());
    steps = {window.value() / g, tap.value() / g};
  } else if (auto q = exact_quotient(window, tap); q && q->is_constant()) {
    steps = {q->value(), 1};
  } else if (q = exact_quotient(tap, window); q && q->is_constant()) {
    steps = {1, q->value()};
  }
  if (steps.window < 1 || steps.tap < 1 || steps.window > kFarthest || steps.tap > kFarthest) return std::nullopt;
  return steps;
}

/// Of loads: where they are, in terms of the axes of the nest.
struct Places {
  const NestConverter& converter;
  const Substitution& map;
  Ranges ranges;

  Expr of(const std::string& buffer, const std::vector<Expr>& index) const {
    return simplify(substitute(converter.offset(buffer, index), map), ranges);
  }
};

Places places(const std::vector<loop_ir::Axis>& axes, const loop_ir::Kernel& kernel, const NestConverter& converter) {
  Places p{converter, converter.merged(), kernel.symbols};
  for (const auto& a : axes) p.ranges[a.name] = axis_range(a.extent);
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* reduce = std::get_if<Reduce>(&stmt.node))
      for (const auto& a : reduce->axes) p.ranges[a.name] = axis_range(a.extent);
  });
  return p;
}

/// The axis of a reduction along which its windows at neighbours on `axis` overlap or touch, and how: that of the nearest taps.
struct Sharing {
  std::string tap;
  int64_t extent = 1;
  Steps steps;
};

std::optional<Sharing> sharing(const Reduce& reduce, const std::string& axis, const Places& places) {
  std::optional<Sharing> nearest;
  for (const auto& stmt : reduce.body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (!load) continue;
    const Expr at = places.of(load->buffer, load->index);
    auto window = linear_coefficient(at, axis);
    for (const auto& k : reduce.axes) {
      auto tap = linear_coefficient(at, k.name);
      if (!window || !tap || k.extent.is(1)) continue;
      auto steps = common_steps(*window, *tap);
      if (!steps || steps->tap * k.extent.value() < steps->window) continue;
      if (nearest && nearest->steps.window * nearest->steps.tap <= steps->window * steps->tap) continue;
      nearest = Sharing{k.name, k.extent.value(), *steps};
    }
  }
  return nearest;
}

// ---- guards ----------------------------------------------------------------------------------------------------------

/// The points of an axis at which some conditions of guards hold for all taps.
struct Interior {
  Expr from = 0;
  Expr to;
};

struct Guards {
  std::map<std::string, Interior> interiors;
  std::map<std::pair<const Load*, size_t>, std::string> axes;  ///< that a condition of a load asks for
};

class GuardReader {
 public:
  GuardReader(const std::vector<loop_ir::Axis>& axes, const loop_ir::Kernel& kernel, const Substitution& map)
      : axes_(axes), kernel_(kernel), map_(map) {}

  Guards read(const loop_ir::Block& block) {
    for (const auto& stmt : block) {
      if (const auto* load = std::get_if<Load>(&stmt->node)) add(*load, {});
      if (const auto* reduce = std::get_if<Reduce>(&stmt->node))
        for (const auto& inner : reduce->body)
          if (const auto* load = std::get_if<Load>(&inner->node)) add(*load, reduce->axes);
    }
    return std::move(guards_);
  }

 private:
  void add(const Load& load, const std::vector<loop_ir::Axis>& taps) {
    for (size_t i = 0; i < load.guard.size(); ++i) add(load, i, taps);
  }

  void add(const Load& load, size_t at, const std::vector<loop_ir::Axis>& taps) {
    if (load.guard[at].kind != Cond::Kind::ge0) return;
    const Expr e = substitute(load.guard[at].expr, map_);
    const loop_ir::Axis* asked = nullptr;
    for (const auto& a : axes_) {
      if (!uses(e, a.name)) continue;
      if (asked) return;
      asked = &a;
    }
    auto step = asked ? linear_coefficient(e, asked->name) : std::nullopt;
    if (!step || !step->is_constant() || step->is(0)) return;
    Expr rest = e - *step * sym(asked->name);
    for (const auto& k : taps) {  // the tap that asks for most
      auto along = linear_coefficient(rest, k.name);
      if (!along || !along->is_constant()) return;
      rest = substitute(rest, {{k.name, along->value() < 0 ? k.extent - 1 : Expr(0)}});
    }
    for (const std::string& symbol : symbols_of(rest))
      if (!kernel_.symbols.contains(symbol)) return;
    Interior& interior = guards_.interiors.try_emplace(asked->name, Interior{0, asked->extent}).first->second;
    if (step->value() > 0)
      interior.from = simplify(max(interior.from, ceildiv(Expr(0) - rest, step->value())), kernel_.symbols);
    else
      interior.to = simplify(min(interior.to, floordiv(rest, -step->value()) + 1), kernel_.symbols);
    guards_.axes[{&load, at}] = asked->name;
  }

  const std::vector<loop_ir::Axis>& axes_;
  const loop_ir::Kernel& kernel_;
  const Substitution& map_;
  Guards guards_;
};

/// A load without the conditions that hold in the interior of these axes.
Ref<loop_ir::Stmt> inside(const Ref<loop_ir::Stmt>& stmt, const std::set<std::string>& interior, const Guards& guards) {
  const auto* load = std::get_if<Load>(&stmt->node);
  if (!load || load->guard.empty()) return stmt;
  Load free = *load;
  free.guard.clear();
  for (size_t i = 0; i < load->guard.size(); ++i) {
    auto asked = guards.axes.find({load, i});
    if (asked == guards.axes.end() || !interior.contains(asked->second)) free.guard.push_back(load->guard[i]);
  }
  if (free.guard.empty()) free.fill = {};
  return std::make_shared<loop_ir::Stmt>(loop_ir::Stmt{std::move(free)});
}

// ---- choice ----------------------------------------------------------------------------------------------------------

/// What vectors along `axis` cost for each point, in loads of one; nothing if windows do not lie along it.
std::optional<double> cost_of_lanes(const loop_ir::Block& block, const loop_ir::Axis& axis, const Places& places, int64_t vector) {
  bool windows = false;
  bool possible = true;
  double cost = 0;
  auto access = [&](const std::string& buffer, const std::vector<Expr>& index, double times, bool tap) {
    auto step = linear_coefficient(places.of(buffer, index), axis.name);
    const bool near = step && step->is_constant() && step->value() >= 0 && step->value() <= kLargestStride;
    if (near && step->is(0)) return;
    if (near && tap) windows = true;
    cost += times * (step && step->is(1) ? 1 : near && tap ? 1 + static_cast<double>(step->value()) : kScatteredCost);
  };
  for (const auto& stmt : block) {
    if (const auto* load = std::get_if<Load>(&stmt->node)) access(load->buffer, load->index, 1, false);
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) access(store->buffer, store->index, 1, false);
    const auto* reduce = std::get_if<Reduce>(&stmt->node);
    if (!reduce) continue;
    std::set<std::string> taps;
    for (const auto& k : reduce->axes) taps.insert(k.name);
    for (const auto& inner : reduce->body) {
      const auto* load = std::get_if<Load>(&inner->node);
      if (!load) continue;
      bool varies = false;
      for (const Expr& e : load->index)
        for (const std::string& symbol : symbols_of(e)) varies = varies || taps.contains(symbol);
      // Weights, which have no index that a point and a tap move together, are held in registers.
      bool moves = false;
      for (const Expr& e : load->index) {
        bool point = false;
        bool tap = false;
        for (const std::string& symbol : symbols_of(e)) (taps.contains(symbol) ? tap : point) = true;
        moves = moves || (point && tap);
      }
      auto step = linear_coefficient(places.of(load->buffer, load->index), axis.name);
      if (moves && (!step || !step->is_constant() || step->value() < 0 || step->value() > kLargestStride)) possible = false;
      access(load->buffer, load->index, varies ? static_cast<double>(taps_of(*reduce)) * (moves ? 1 : 0.25) : 1, moves);
    }
  }
  if (!possible || !windows) return std::nullopt;
  const auto extent = static_cast<double>(std::max<int64_t>(places.converter.hint(axis.extent), 1));
  const auto lanes = static_cast<double>(vector);
  if (extent < lanes / 4) return std::nullopt;
  const double width = extent < lanes ? std::exp2(std::ceil(std::log2(extent))) : lanes;
  return cost * std::ceil(extent / width) * width / extent;
}

/// Points side by side: as few lines of windows as registers allow.
int64_t points_of(const Sharing& shared, Expr interior, const NestConverter& converter, int64_t most) {
  const int64_t extent = std::max<int64_t>(converter.hint(interior), 1);
  auto lines = [&](int64_t points) { return points == 0 ? 0 : shared.steps.window * (points - 1) + shared.extent; };
  int64_t best = 1;
  int64_t fewest = extent * lines(1);
  for (int64_t points = 2; points <= std::min(most, extent); ++points) {
    const int64_t now = extent / points * lines(points) + lines(extent % points);
    if (now > fewest) continue;
    fewest = now;
    best = points;
  }
  return best;
}

}  // namespace

bool has_windows(const loop_ir::Block& block) {
  std::set<std::string> results;
  bool some = false;
  for (const auto& stmt : block) {
    const auto* reduce = std::get_if<Reduce>(&stmt->node);
    if (!reduce) {
      if (!NestConverter::is_straight({stmt}) || std::holds_alternative<loop_ir::Check>(stmt->node)) return false;
      if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) results.insert(store->buffer);
      continue;
    }
    some = true;
    const bool known = reduce->combiner == Combiner::sum || reduce->combiner == Combiner::min || reduce->combiner == Combiner::max;
    if (!known || reduce->dtypes[0] == DType::boolean || reduce->operands.size() != 1 || taps_of(*reduce) > kMostTaps) return false;
    if (!NestConverter::is_straight(reduce->body)) return false;
    for (const auto& inner : reduce->body)
      if (std::holds_alternative<loop_ir::Check>(inner->node) || std::holds_alternative<loop_ir::Store>(inner->node)) return false;
    results.insert(reduce->results.begin(), reduce->results.end());
  }
  for (const Reduce* reduce : reductions_of(block)) {
    std::set<std::string> reads;
    for (const auto& stmt : reduce->body) collect_reads(*stmt, reads);
    for (const auto& stmt : needed_before(block, *reduce)) collect_reads(*stmt, reads);
    if (std::any_of(results.begin(), results.end(), [&](const auto& name) { return reads.count(name) > 0; })) return false;
  }
  return some;
}

std::optional<Windows> propose_windows(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const loop_ir::Kernel& kernel,
                                       const NestConverter& converter, const PassContext& ctx) {
  if (axes.size() < 2 || !has_windows(block)) return std::nullopt;
  const Places where = places(axes, kernel, converter);
  const std::vector<const Reduce*> reductions = reductions_of(block);
  const int64_t vector = ctx.target.vector_bytes / 4;
  bool shares = false;
  int64_t statements = 0;
  for (const Reduce* reduce : reductions) {
    statements += taps_of(*reduce) * static_cast<int64_t>(reduce->body.size());
    for (const auto& a : axes) shares = shares || sharing(*reduce, a.name, where);
  }
  if (!shares || statements > kMostStatements) return std::nullopt;
  Windows windows;
  std::optional<double> least;
  for (const auto& a : axes) {
    auto cost = cost_of_lanes(block, a, where, vector);
    if (!cost || (least && *cost > *least)) continue;
    least = cost;
    windows.lanes = a.name;
  }
  if (!least) return std::nullopt;
  const Guards guards = GuardReader(axes, kernel, converter.merged()).read(block);
  const int64_t most = std::min(ctx.target.vector_registers >= 32 ? int64_t{6} : 4, kMostStatements / statements);
  int64_t others = 1;
  for (const auto& a : axes) {
    if (a.name == windows.lanes) continue;
    others *= std::max<int64_t>(1, converter.hint(a.extent));
    auto shared = sharing(*reductions[0], a.name, where);
    if (!shared && !windows.axis.empty()) continue;
    auto interior = guards.interiors.find(a.name);
    const Expr extent = interior == guards.interiors.end() ? a.extent : interior->second.to - interior->second.from;
    windows.axis = a.name;
    windows.points = shared ? points_of(*shared, extent, converter, most) : 1;
  }
  const int64_t extent = std::max<int64_t>(1, converter.hint(find(axes, windows.axis)->extent));
  const int64_t apart = others / extent;
  const int64_t width = converter.hint(find(axes, windows.lanes)->extent);
  if (apart < kFewLines && width >= kLaneTiles * vector && can_cut_lanes(block, axes, windows.lanes, kernel, converter)) {
    windows.lane_tile = (width / vector + kLaneTiles - 1) / kLaneTiles * vector;
  } else if (apart < kParallelBlocks && extent > windows.points) {
    const int64_t blocks = std::min((kParallelBlocks + apart - 1) / std::max<int64_t>(apart, 1), (extent + windows.points - 1) / windows.points);
    windows.tile = ((extent + blocks - 1) / blocks + windows.points - 1) / windows.points * windows.points;
  }
  return windows;
}

// ---- building ----------------------------------------------------------------------------------------------------------

namespace {

class WindowBuilder {
 public:
  WindowBuilder(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const Windows& windows, const loop_ir::Kernel& kernel,
                const Span& across, const PassContext& ctx, NestConverter& converter, InnerLanes& lanes)
      : block_(block),
        axes_(axes),
        windows_(windows),
        across_(across),
        converter_(converter),
        lanes_(lanes),
        ranges_(kernel.symbols),
        reductions_(reductions_of(block)),
        guards_(GuardReader(axes, kernel, converter.merged()).read(block)),
        vector_(ctx.target.vector_bytes / 4),
        at_(windows.axis + ".at"),
        line_(windows.axis + ".line") {
    const Places where = places(axes, kernel, converter);
    for (const Reduce* reduce : reductions_) shared_.push_back(sharing(*reduce, windows.axis, where));
  }

  tile_ir::Block build(Expr from, Expr to) {
    tile_ir::Block out;
    std::set<std::string> interior;
    outer(0, from, to, interior, out);
    return out;
  }

 private:
  Expr known(Expr e) const { return simplify(e, ranges_); }

  /// The interior of axes outside of both, then what lies before and behind it along each of them.
  void outer(size_t at, Expr from, Expr to, std::set<std::string>& interior, tile_ir::Block& out) {
    if (at == axes_.size()) return points(from, to, interior, out);
    const loop_ir::Axis& axis = axes_[at];
    auto bounds = guards_.interiors.find(axis.name);
    if (axis.name == windows_.axis || axis.name == windows_.lanes || bounds == guards_.interiors.end()) return outer(at + 1, from, to, interior, out);
    const Expr place = substitute(sym(axis.name), converter_.map());
    auto under = [&](std::vector<Cond> guard, bool inside) {
      std::erase_if(guard, [&](const Cond& c) { return decide(substitute(c, {{axis.name, place}}), ranges_) == true; });
      if (inside) interior.insert(axis.name);
      tile_ir::Block body;
      outer(at + 1, from, to, interior, body);
      interior.erase(axis.name);
      if (guard.empty())
        out.insert(out.end(), body.begin(), body.end());
      else
        out.push_back(make(tile_ir::If{substituted(guard, {{axis.name, place}}), std::move(body)}));
    };
    const auto& [first, end] = bounds->second;
    const Expr point = sym(axis.name);
    std::vector<Cond> within;
    if (!first.is(0)) within.push_back(less_equal(first, point));
    if (end != axis.extent) within.push_back(less(point, end));
    under(within, true);
    if (!first.is(0)) under({less(point, first)}, false);
    if (end != axis.extent)
      under(first.is(0) ? std::vector<Cond>{less_equal(end, point)} : std::vector<Cond>{less_equal(first, point), less_equal(end, point)}, false);
  }

  /// The points from .. to of the axis.
  void points(Expr from, Expr to, std::set<std::string>& interior, tile_ir::Block& out) {
    auto bounds = guards_.interiors.find(windows_.axis);
    Expr first = from;
    Expr end = to;
    if (bounds != guards_.interiors.end()) {
      first = known(min(max(bounds->second.from, from), to));
      end = known(max(first, min(bounds->second.to, to)));
    }
    if (const auto all = known(to - from).as_constant(); all && *all <= kWholeImage && at_known_places(from, *all))
      return lanes(from, *all, interior, out);
    const Expr count = known(end - first);
    const Expr blocks = known(floordiv(count, windows_.points));
    const Expr rest = known(first + blocks * windows_.points);
    border(from, first, interior, out);
    interior.insert(windows_.axis);
    const std::string name = windows_.axis + ".block";
    tile_ir::Block body;
    lanes(first + sym(name) * windows_.points, windows_.points, interior, body);
    if (!blocks.is(0)) out.push_back(make(tile_ir::For{axis(name, 0, blocks), std::move(body)}));
    if (auto left = known(end - rest).as_constant()) {
      if (*left > 0) lanes(rest, *left, interior, out);
    } else {
      one_by_one(rest, end, interior, out);
    }
    interior.erase(windows_.axis);
    border(end, to, interior, out);
  }

  /// Guards are decided where places are known, for each point and tap.
  bool at_known_places(Expr from, int64_t count) const {
    int64_t statements = 0;
    for (const Reduce* reduce : reductions_) statements += taps_of(*reduce) * static_cast<int64_t>(reduce->body.size());
    return from.is_constant() && count * statements <= 2 * kMostStatements;
  }

  void border(Expr from, Expr to, const std::set<std::string>& interior, tile_ir::Block& out) {
    const auto count = known(to - from).as_constant();
    if (count && *count > 0 && *count <= windows_.points && at_known_places(from, *count)) return lanes(from, *count, interior, out);
    one_by_one(from, to, interior, out);
  }

  void one_by_one(Expr from, Expr to, const std::set<std::string>& interior, tile_ir::Block& out) {
    const auto count = known(to - from).as_constant();
    if (count && *count <= 0) return;
    if (count == 1) return lanes(from, 1, interior, out);
    const std::string name = windows_.axis + ".row";
    tile_ir::Block body;
    lanes(sym(name), 1, interior, body);
    out.push_back(make(tile_ir::For{axis(name, from, to), std::move(body)}));
  }

  /// Some points side by side, in lanes: the interior in vectors that lie in it, the rest masked.
  void lanes(Expr first, int64_t count, const std::set<std::string>& interior, tile_ir::Block& out) {
    const loop_ir::Axis& axis = *find(axes_, windows_.lanes);
    auto bounds = guards_.interiors.find(axis.name);
    std::set<std::string> free = interior;
    free.insert(axis.name);
    auto vectors = [&](Expr from, Expr to, bool masked) {
      const auto length = known(to - from).as_constant();
      if (length && *length <= 0) return;
      int64_t by = windows_.vectors;
      if (length && masked) by = std::max(by, std::min(kShortVectors, (*length + vector_ - 1) / vector_));
      tile_ir::Block body = block_of(first, count, masked ? interior : free);
      out.push_back(make(tile_ir::For{loop_to_tile::axis(axis.name, from, to, LoopKind::lanes, 1, by), std::move(body)}));
    };
    if (bounds == guards_.interiors.end()) return vectors(across_.from, across_.to, false);
    const Expr left = known(min(axis.extent, ceildiv(bounds->second.from, vector_) * vector_));
    Expr right = axis.extent;
    if (bounds->second.to != axis.extent) right = known(left + max(0, floordiv(bounds->second.to - left, vector_)) * vector_);
    if (known(right - left).is(0)) return vectors(0, axis.extent, true);
    vectors(0, left, true);
    vectors(left, right, false);
    vectors(right, axis.extent, true);
  }

  static std::string number(const char* name, size_t j) { return name + std::to_string(j); }

  static Ref<tile_ir::Stmt> load(const std::string& name, DType dtype, const std::string& buffer, Expr at) {
    return make(Load{name, dtype, buffer, {at}, {}, {}});
  }

  static Ref<tile_ir::Stmt> store(const std::string& buffer, Expr at, const std::string& value) {
    return make(loop_ir::Store{buffer, {at}, value, {}, Combiner::set});
  }

  tile_ir::Block at(Expr point, const loop_ir::Block& stmts, const std::set<std::string>& interior, const Substitution& taps = {}) {
    loop_ir::Block free;
    for (const auto& stmt : stmts) free.push_back(inside(stmt, interior, guards_));
    Substitution& map = converter_.map();
    const Substitution before = map;
    for (auto& [name, value] : map) value = substitute(value, {{windows_.axis, point}});
    map[windows_.axis] = point;
    for (const auto& [name, value] : taps) map[name] = value;
    tile_ir::Block out = converter_.convert(free, false, lanes_);
    map = before;
    return out;
  }

  static Ref<tile_ir::Stmt> unrolled(const std::string& name, int64_t count, tile_ir::Block body) {
    return make(tile_ir::For{axis(name, 0, count, LoopKind::unroll), std::move(body)});
  }

  /// The body of the lanes for `count` points from `first` on.
  tile_ir::Block block_of(Expr first, int64_t count, const std::set<std::string>& interior) {
    tile_ir::Block out;
    tile_ir::Block clear;
    const size_t piece = pieces_++;
    std::vector<std::string> arrays;
    for (size_t j = 0; j < reductions_.size(); ++j) {
      const Reduce& reduce = *reductions_[j];
      const DType dtype = compute_type(reduce.dtypes[0]);
      arrays.push_back(fmt::format("acc{}_{}", j, piece));
      out.push_back(make(tile_ir::Alloc{arrays[j], dtype, {count}, Space::reg}));
      clear.push_back(make(loop_ir::Let{number("none", j), dtype, Fn::constant, {}, identity(reduce.combiner, dtype), 0}));
      clear.push_back(store(arrays[j], sym(at_), number("none", j)));
    }
    out.push_back(unrolled(at_, count, std::move(clear)));
    for (size_t j = 0; j < reductions_.size(); ++j) out.push_back(taps(j, arrays[j], first, count, interior));
    out.push_back(unrolled(at_, count, finish(arrays, first, interior)));
    return out;
  }

  /// A line of memory after the other, for all windows that hold it.
  Ref<tile_ir::Stmt> taps(size_t j, const std::string& array, Expr first, int64_t count, const std::set<std::string>& interior) {
    const Reduce& reduce = *reductions_[j];
    const std::optional<Sharing> shared = count > 1 ? shared_[j] : std::nullopt;
    Substitution places;
    tile_ir::Block body;
    Expr tap = 0;
    if (shared) {
      tap = sym(line_) - sym(at_) * shared->steps.window;
      places[shared->tap] = floordiv(tap, shared->steps.tap);
    }
    for (auto& stmt : at(first + sym(at_), needed_before(block_, reduce), interior)) body.push_back(stmt);
    add(j, array, at(first + sym(at_), reduce.body, interior, places), body);
    const int64_t last = shared ? shared->steps.tap * (shared->extent - 1) : 0;
    if (shared) {
      std::vector<Cond> guard{less_equal(0, tap), less_equal(tap, last)};
      if (shared->steps.tap > 1) guard.push_back(equal(mod(tap, shared->steps.tap), 0));
      body = {make(tile_ir::If{std::move(guard), std::move(body)})};
    }
    body = {unrolled(at_, count, std::move(body))};
    for (size_t k = reduce.axes.size(); k-- > 0;)
      if (!shared || reduce.axes[k].name != shared->tap) body = {unrolled(reduce.axes[k].name, reduce.axes[k].extent.value(), std::move(body))};
    if (shared) body = {unrolled(line_, shared->steps.window * (count - 1) + last + 1, std::move(body))};
    return body.front();
  }

  /// One tap, to what the array holds.
  void add(size_t j, const std::string& array, const tile_ir::Block& tap, tile_ir::Block& body) const {
    const Reduce& reduce = *reductions_[j];
    const DType dtype = compute_type(reduce.dtypes[0]);
    const loop_ir::Let* product = reduce.combiner == Combiner::sum && is_float(dtype) ? product_of(reduce) : nullptr;
    if (product && product->dtype != dtype) product = nullptr;
    std::string operand = reduce.operands[0];
    DType has = dtype;
    for (const auto& stmt : tap) {
      const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
      if (let && product && let->name == product->name) continue;
      if (let && let->name == operand) has = let->dtype;
      if (const auto* made = std::get_if<Load>(&stmt->node); made && made->name == operand) has = made->dtype;
      body.push_back(stmt);
    }
    if (has != dtype) {
      body.push_back(make(loop_ir::Let{number("wide", j), dtype, Fn::cast, {operand}, {}, 0}));
      operand = number("wide", j);
    }
    const std::string old = number("old", j);
    const std::string next = number("new", j);
    const Fn fn = reduce.combiner == Combiner::sum ? Fn::add : reduce.combiner == Combiner::max ? Fn::max : Fn::min;
    body.push_back(load(old, dtype, array, sym(at_)));
    body.push_back(product ? make(loop_ir::Let{next, dtype, Fn::fma, {product->operands[0], product->operands[1], old}, {}, 0})
                           : make(loop_ir::Let{next, dtype, fn, {old, operand}, {}, 0}));
    body.push_back(store(array, sym(at_), next));
  }

  /// All that does not lead to a reduction alone.
  tile_ir::Block finish(const std::vector<std::string>& arrays, Expr first, const std::set<std::string>& interior) {
    std::set<std::string> reads;
    loop_ir::Block kept;
    for (size_t k = block_.size(); k-- > 0;) {
      const auto& stmt = block_[k];
      const std::string defined = defined_by(*stmt);
      if (std::holds_alternative<Reduce>(stmt->node) || (!defined.empty() && !reads.contains(defined))) continue;
      if (const auto* last = std::get_if<loop_ir::Store>(&stmt->node)) {
        reads.insert(last->value);
        for (Expr e : last->index) collect_symbols(e, reads);
        for (const Cond& c : last->guard) collect_symbols(c.expr, reads);
      }
      collect_reads(*stmt, reads);
      kept.insert(kept.begin(), stmt);
    }
    tile_ir::Block out;
    for (size_t j = 0; j < reductions_.size(); ++j) {
      const Reduce& reduce = *reductions_[j];
      const DType dtype = compute_type(reduce.dtypes[0]);
      if (dtype == reduce.dtypes[0]) {
        out.push_back(load(reduce.results[0], dtype, arrays[j], sym(at_)));
        continue;
      }
      out.push_back(load(number("wide", j), dtype, arrays[j], sym(at_)));
      out.push_back(make(loop_ir::Let{reduce.results[0], reduce.dtypes[0], Fn::cast, {number("wide", j)}, {}, 0}));
    }
    for (auto& stmt : at(first + sym(at_), kept, interior)) out.push_back(stmt);
    return out;
  }

  const loop_ir::Block& block_;
  const std::vector<loop_ir::Axis>& axes_;
  const Windows& windows_;
  const Span across_;  ///< of the lanes
  NestConverter& converter_;
  InnerLanes& lanes_;
  Ranges ranges_;
  std::vector<const Reduce*> reductions_;
  std::vector<std::optional<Sharing>> shared_;
  Guards guards_;
  int64_t vector_;
  std::string at_, line_;
  size_t pieces_ = 0;
};

}  // namespace

bool can_cut_lanes(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const std::string& lanes, const loop_ir::Kernel& kernel,
                   const NestConverter& converter) {
  return !GuardReader(axes, kernel, converter.merged()).read(block).interiors.contains(lanes);
}

tile_ir::Block run_windows(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const Windows& windows, const Span& points,
                           const Span& across, const loop_ir::Kernel& kernel, const PassContext& ctx, NestConverter& converter, InnerLanes& lanes) {
  return WindowBuilder(block, axes, windows, kernel, across, ctx, converter, lanes).build(points.from, points.to);
}

}  // namespace deplo::loop_to_tile
