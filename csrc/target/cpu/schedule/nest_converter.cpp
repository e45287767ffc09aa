#include "target/cpu/schedule/nest_converter.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kNestStackBytes = 16 << 10;
constexpr int64_t kUnknownNestExtent = 256;  // an axis without a hint
constexpr int64_t kReduceVectors = 4;        // in flight
constexpr double kCombineVectors = 2;        // vectors of terms that take as long as combining the lanes
constexpr int64_t kRegistersPerColumn = 2;
constexpr int64_t kMostVectors = 32;

/// The perfect nest of loops under s, and its body.
std::pair<std::vector<loop_ir::Axis>, const loop_ir::Block*> loop_chain(const loop_ir::For& s) {
  std::vector<loop_ir::Axis> axes{{s.axis, s.extent}};
  const loop_ir::Block* body = &s.body;
  while (body->size() == 1) {
    const auto* loop = std::get_if<loop_ir::For>(&body->front()->node);
    if (!loop) break;
    axes.push_back({loop->axis, loop->extent});
    body = &loop->body;
  }
  return {axes, body};
}

/// Straight-line statements and reductions of such: what the lanes of one loop can run side by side.
bool runs_in_lanes(const loop_ir::Block& body) {
  return std::all_of(body.begin(), body.end(), [](const auto& stmt) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    return NestConverter::is_straight(reduce ? reduce->body : loop_ir::Block{stmt});
  });
}

}  // namespace

// ---- lanes of inner loops --------------------------------------------------------------------------------------

std::vector<Directive> InnerLanes::describe() const {
  std::vector<Directive> out;
  for (const auto& [where, choice] : choices) {
    Directive d{"vectorize", {{where.first, {}}}};
    if (where.second != 0) d.arguments.push_back({"nth", where.second});
    if (choice.by != 1) d.arguments.push_back({"by", choice.by});
    out.push_back(std::move(d));
  }
  return out;
}

InnerLanes InnerLanes::read(ScheduleReader& reader, const std::string& outer) {
  InnerLanes lanes;
  lanes.reader = &reader;
  for (const Directive* d : reader.all("vectorize")) {
    std::vector<std::string> names = reader.names(*d);
    if (names.size() != 1) reader.fail(*d, "it takes one axis, and by= and nth=");
    if (names[0] == outer) continue;
    reader.only(*d, {names[0], "by", "nth"});
    Choice choice{reader.number(*d, "by", 1, kMostVectors, 1), d};
    if (!lanes.choices.emplace(std::pair{names[0], reader.number(*d, "nth", 0, 1 << 20, 0)}, choice).second)
      reader.fail(*d, "a second 'vectorize' for the same loop");
  }
  return lanes;
}

void InnerLanes::finish() const {
  for (const auto& [where, choice] : choices)
    if (choice.from && !choice.applied) {
      auto count = seen.find(where.first);
      int64_t loops = count == seen.end() ? 0 : count->second;
      reader->fail(*choice.from, fmt::format("there are {} inner loops and reductions over {}", loops, where.first) +
                                     (loops > 0 ? fmt::format("; nth is allowed to be up to {}", loops - 1) : ""));
    }
}

std::string InnerLanes::take(const std::vector<loop_ir::Axis>& axes, bool allowed, const std::string& why, int64_t& by) {
  std::string lanes;
  for (const auto& a : axes) {
    auto found = choices.find({a.name, seen[a.name]++});
    if (found == choices.end()) continue;
    Choice& choice = found->second;
    if (!allowed) reader->fail(*choice.from, why);
    if (!lanes.empty()) reader->fail(*choice.from, fmt::format("{}, of the same loops, has the lanes already", lanes));
    lanes = a.name;
    by = choice.by;
    choice.applied = true;
  }
  return lanes;
}

void InnerLanes::add(const std::vector<loop_ir::Axis>& axes, const std::string& lanes, int64_t by) {
  for (const auto& a : axes) {
    int64_t nth = seen[a.name]++;
    if (a.name == lanes) choices[{lanes, nth}] = {by};
  }
}

void InnerLanes::set_vectors(int64_t by) {
  for (auto& [where, choice] : choices) choice.by = by;
}

int64_t column_vectors(const PassContext& ctx) { return ctx.target.vector_registers / kRegistersPerColumn; }

NestConverter::NestConverter(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), ctx_(ctx) {
  for (const auto& p : kernel.params) strides_[p.name] = p.strides;
  ranges_ = kernel.symbols;
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) ranges_[loop->axis] = axis_range(loop->extent);
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node))
      for (const auto& a : reduce->axes) ranges_[a.name] = axis_range(a.extent);
  });
  colliding_ = colliding_stores(kernel);
  collect_accesses(kernel.body, false);
}

// ---- what the accesses look like -------------------------------------------------------------------------------

void NestConverter::collect_accesses(const loop_ir::Block& block, bool reduced) {
  for (const auto& stmt : block) {
    std::visit(Overloaded{[&](const loop_ir::Local& s) { strides_[s.name] = contiguous_strides(s.shape); },
                          [&](const loop_ir::Load& s) { accesses_.push_back({offset(s.buffer, s.index), 1, s.guard.empty(), reduced}); },
                          [&](const loop_ir::Store& s) { accesses_.push_back({offset(s.buffer, s.index), 2, false, reduced}); },
                          [&](const loop_ir::For& s) { collect_accesses(s.body, reduced); },
                          [&](const loop_ir::Reduce& s) { collect_accesses(s.body, true); },
                          [&](const loop_ir::Scan& s) {
                            collect_accesses(s.body, true);
                            collect_accesses(s.then, true);
                          },
                          [](const auto&) {}},
               stmt->node);
  }
}

Expr NestConverter::offset(const std::string& buffer, const std::vector<Expr>& index) const {
  const auto& strides = strides_.at(buffer);
  Expr sum = 0;
  for (size_t d = 0; d < index.size(); ++d) sum = sum + index[d] * strides[d];
  return simplify(sum, ranges_);
}

Expr NestConverter::merged_offset(const std::string& buffer, const std::vector<Expr>& index) const {
  Ranges ranges = ranges_;
  for (const auto& [name, extent] : merged_axes_) ranges[name] = axis_range(extent);
  return simplify(substitute(offset(buffer, index), merged_), ranges);
}

int64_t NestConverter::hint(Expr e) const {
  std::map<std::string, int64_t> values;
  for (const std::string& s : symbols_of(e)) {
    const auto known = ctx_.hints.find(s);
    const auto axis = ranges_.find(s);
    if (known != ctx_.hints.end())
      values[s] = known->second;
    else if (kernel_.symbols.count(s) == 0 && axis != ranges_.end() && axis->second.hi)
      values[s] = hint(*axis->second.hi) / 2;  // what a loop inside runs over may depend on it
    else
      values[s] = kUnknownNestExtent;
  }
  return evaluate(e, values);
}

double NestConverter::lane_score(const loop_ir::Axis& a, bool reduced) const {
  double score = 0;
  for (const Access& access : accesses_) {
    if (!uses(access.offset, a.name) || (reduced && !access.reduced)) continue;
    auto c = linear_coefficient(access.offset, a.name);
    score += c && c->is(1) ? 2.0 * access.weight : -0.5 * access.weight;
  }
  // Short axes leave lanes empty.
  const int64_t vector = ctx_.target.vector_bytes / 4;
  auto extent = static_cast<double>(std::max<int64_t>(hint(a.extent), 1));
  return score * extent / (std::ceil(extent / static_cast<double>(vector)) * static_cast<double>(vector));
}

double NestConverter::reduce_score(const loop_ir::Reduce& reduce) const {
  double best = 0;
  for (const auto& a : reduce.axes) best = std::max(best, lane_score(a, true));
  // In the end the lanes are combined: as long as some steps of the reduction.
  auto terms = static_cast<double>(hint(count(reduce.axes)));
  const int64_t vector = ctx_.target.vector_bytes / 4;
  return best * terms / (terms + kCombineVectors * static_cast<double>(vector));
}

std::string NestConverter::best_lane_axis(const std::vector<loop_ir::Axis>& free) const {
  std::string best;
  double most = 0;
  for (const auto& a : free) {
    double score = lane_score(a);
    if (score >= most && score > 0) {
      most = score;
      best = a.name;
    }
  }
  return best;
}

const loop_ir::Axis* NestConverter::transposed_axis(const std::vector<loop_ir::Axis>& free, const std::string& lanes) const {
  for (const Access& access : accesses_) {
    auto step = linear_coefficient(access.offset, lanes);
    if (!access.plain_load || !step || step->is(0) || step->is(1)) continue;
    for (const auto& a : free) {
      auto along = linear_coefficient(access.offset, a.name);
      if (a.name != lanes && along && along->is(1)) return &a;
    }
  }
  return nullptr;
}

bool NestConverter::is_straight(const loop_ir::Block& block) {
  return std::all_of(block.begin(), block.end(), [](const auto& s) {
    return !std::holds_alternative<loop_ir::For>(s->node) && !std::holds_alternative<loop_ir::Reduce>(s->node) &&
           !std::holds_alternative<loop_ir::Scan>(s->node) && !std::holds_alternative<loop_ir::Local>(s->node);
  });
}

// ---- merging ---------------------------------------------------------------------------------------------------

void NestConverter::merge(std::vector<loop_ir::Axis>& axes) {
  for (size_t i = axes.size(); i-- > 1;) {
    const loop_ir::Axis outer = axes[i - 1];
    const loop_ir::Axis inner = axes[i];
    if (!mergeable(outer, inner)) continue;
    std::string name = outer.name + "_" + inner.name;
    Expr p = sym(name);
    map_[outer.name] = floordiv(p, inner.extent);
    map_[inner.name] = mod(p, inner.extent);
    axes[i - 1] = {name, outer.extent * inner.extent};
    merged_axes_[name] = axes[i - 1].extent;
    axes.erase(axes.begin() + static_cast<long>(i));
    for (auto& [axis_name, value] : map_) value = substitute(value, map_);
    Ranges ranges = kernel_.symbols;
    ranges[name] = axis_range(axes[i - 1].extent);
    for (Access& a : accesses_) a.offset = simplify(substitute(a.offset, map_), ranges);
  }
  merged_ = map_;
}

bool NestConverter::mergeable(const loop_ir::Axis& outer, const loop_ir::Axis& inner) const {
  for (const Access& a : accesses_) {
    auto c = linear_coefficient(a.offset, inner.name);
    auto d = linear_coefficient(a.offset, outer.name);
    if (!c || !d || *d != *c * inner.extent) return false;
  }
  // Guards and index values would turn into divisions.
  bool used = false;
  visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
    auto check = [&](Expr e) { used = used || uses(e, outer.name) || uses(e, inner.name) || mentions_merged(e, outer, inner); };
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node))
      for (const Cond& c : load->guard) check(c.expr);
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt.node))
      for (const Cond& c : store->guard) check(c.expr);
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node); let && let->fn == Fn::index) check(let->index);
    if (const auto* c = std::get_if<loop_ir::Check>(&stmt.node)) check(c->cond.expr);
  });
  return !used;
}

bool NestConverter::mentions_merged(Expr e, const loop_ir::Axis& outer, const loop_ir::Axis& inner) const {
  Expr now = substitute(e, map_);
  return uses(now, outer.name) || uses(now, inner.name);
}

void NestConverter::propose_lanes(const loop_ir::Block& block, InnerLanes& lanes) const {
  for (const auto& stmt : block) {
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt->node)) {
      auto [axes, body] = loop_chain(*loop);
      std::string best;
      if (!orders(axes) && (is_straight(*body) || inner_columns(axes, *body))) {
        best = best_lane_axis(axes);
        if (best.empty() && is_straight(*body)) best = axes.back().name;
      }
      int64_t by = 1;
      for (const auto& a : axes)
        if (a.name == best && !is_straight(*body))
          by = std::clamp<int64_t>(hint(ceildiv(a.extent, ctx_.target.vector_bytes / 4)), 1, column_vectors(ctx_));
      lanes.add(axes, best, by);
      if (best.empty()) propose_lanes(*body, lanes);
    } else if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
      std::string best;
      if (is_straight(reduce->body)) {
        best = best_lane_axis(reduce->axes);
        if (best.empty()) best = reduce->axes.back().name;
      }
      lanes.add(reduce->axes, best, kReduceVectors);
      if (best.empty()) propose_lanes(reduce->body, lanes);
    }
  }
}

tile_ir::Block NestConverter::convert(const loop_ir::Block& block, bool vectorize, InnerLanes& lanes) {
  lanes_ = &lanes;
  return convert(block, vectorize);
}

tile_ir::Block NestConverter::convert(const loop_ir::Block& block, bool vectorize) {
  tile_ir::Block out;
  for (const auto& stmt : block) std::visit([&](const auto& s) { lower(s, vectorize, out); }, stmt->node);
  return out;
}

void NestConverter::lower(const loop_ir::Let& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

void NestConverter::lower(const loop_ir::Load& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

void NestConverter::lower(const loop_ir::Store& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

void NestConverter::lower(const loop_ir::Check& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

void NestConverter::lower(const loop_ir::Local& s, bool /*vectorize*/, tile_ir::Block& out) {
  std::vector<Expr> shape = substituted(s.shape, map_);
  Expr n = product(shape);
  bool small = n.is_constant() && n.value() * size_of(s.dtype) <= kNestStackBytes;
  out.push_back(make(tile_ir::Alloc{s.name, s.dtype, std::move(shape), small ? Space::stack : Space::scratch}));
}

bool NestConverter::orders(const std::vector<loop_ir::Axis>& axes) const {
  return std::any_of(axes.begin(), axes.end(), [&](const auto& a) { return !colliding_.empty() && !separates(a.name, colliding_); });
}

void NestConverter::lower(const loop_ir::For& s, bool vectorize, tile_ir::Block& out) {
  auto [axes, body] = loop_chain(s);
  int64_t by = 1;
  std::string lanes = lanes_->take(axes, vectorize && !orders(axes) && runs_in_lanes(*body),
                                   "the loop runs inside of other lanes, in order, or holds more than reductions of straight-line statements", by);
  std::stable_partition(axes.begin(), axes.end(), [&](const auto& a) { return a.name != lanes; });
  tile_ir::Block inside = convert(*body, vectorize && lanes.empty());
  for (size_t i = axes.size(); i-- > 0;) {
    bool is_lanes = axes[i].name == lanes;
    LoopKind kind = is_lanes ? LoopKind::lanes : LoopKind::serial;
    tile_ir::For loop{axis(axes[i].name, 0, substitute(axes[i].extent, map_), kind, 1, is_lanes ? by : 1), std::move(inside)};
    inside = {make(std::move(loop))};
  }
  out.push_back(inside.front());
}

bool NestConverter::inner_columns(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) const {
  double own = 0;
  double inner = 0;
  for (const auto& a : axes) own = std::max(own, lane_score(a, true));
  for (const auto& stmt : body)
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) inner = std::max(inner, reduce_score(*reduce));
  return runs_in_lanes(body) && (own > inner || short_windows(axes, body));
}

bool NestConverter::short_windows(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) const {
  const int64_t vector = ctx_.target.vector_bytes / 4;
  const std::string lanes = best_lane_axis(axes);
  if (std::none_of(axes.begin(), axes.end(), [&](const auto& a) { return a.name == lanes && hint(a.extent) >= vector; })) return false;
  return std::all_of(body.begin(), body.end(), [&](const auto& stmt) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    return !reduce || std::all_of(reduce->axes.begin(), reduce->axes.end(), [&](const auto& a) { return hint(a.extent) * 2 < vector; });
  });
}

void NestConverter::lower(const loop_ir::Reduce& s, bool vectorize, tile_ir::Block& out) {
  std::vector<loop_ir::Axis> axes = s.axes;
  int64_t by = 1;
  std::string lanes = lanes_->take(axes, vectorize && is_straight(s.body), "the reduction runs inside of other lanes, or holds loops", by);
  if (!lanes.empty()) std::stable_partition(axes.begin(), axes.end(), [&](const auto& a) { return a.name != lanes; });
  tile_ir::Reduce reduce{s.results, s.dtypes, s.combiner, s.operands, {}, convert(s.body, vectorize && lanes.empty())};
  for (const auto& a : axes) {
    bool is_lanes = a.name == lanes;
    reduce.axes.push_back(axis(a.name, 0, substitute(a.extent, map_), is_lanes ? LoopKind::lanes : LoopKind::serial, 1, is_lanes ? by : 1));
  }
  out.push_back(make(std::move(reduce)));
}

void NestConverter::lower(const loop_ir::Scan& s, bool /*vectorize*/, tile_ir::Block& out) {
  out.push_back(make(tile_ir::Scan{s.results,
                                   s.dtypes,
                                   s.combiner,
                                   s.operands,
                                   {axis(s.axis.name, 0, substitute(s.axis.extent, map_))},
                                   convert(s.body, false),
                                   convert(s.then, false)}));
}

}  // namespace deplo::loop_to_tile
