#include "lower/loop_to_tile/nest_converter.h"

#include <algorithm>

#include "base/error.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kStackBytes = 16 << 10;
constexpr int64_t kUnknownExtent = 256;  // an axis without a hint

}  // namespace

NestConverter::NestConverter(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), ctx_(ctx) {
  for (const auto& p : kernel.params) strides_[p.name] = p.strides;
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
  return sum;
}

int64_t NestConverter::hint(Expr e) const {
  std::map<std::string, int64_t> values;
  for (const std::string& s : symbols_of(e)) {
    auto it = ctx_.hints.find(s);
    values[s] = it == ctx_.hints.end() ? kUnknownExtent : it->second;
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
  // Very short axes leave most lanes empty.
  int64_t extent = hint(a.extent);
  return extent < 4 ? score * 0.1 : score;
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
    axes.erase(axes.begin() + static_cast<long>(i));
    for (auto& [axis_name, value] : map_) value = substitute(value, map_);
    Ranges ranges = kernel_.symbols;
    ranges[name] = axis_range(axes[i - 1].extent);
    for (Access& a : accesses_) a.offset = simplify(substitute(a.offset, map_), ranges);
  }
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
  bool small = n.is_constant() && n.value() * size_of(s.dtype) <= kStackBytes;
  out.push_back(make(tile_ir::Alloc{s.name, s.dtype, std::move(shape), small ? Space::stack : Space::scratch}));
}

void NestConverter::lower(const loop_ir::For& s, bool vectorize, tile_ir::Block& out) {
  // The perfect nest under s, so that its best axis can be innermost.
  std::vector<loop_ir::Axis> axes{{s.axis, s.extent}};
  const loop_ir::Block* body = &s.body;
  while (body->size() == 1) {
    const auto* loop = std::get_if<loop_ir::For>(&body->front()->node);
    if (!loop) break;
    axes.push_back({loop->axis, loop->extent});
    body = &loop->body;
  }
  bool orders = std::any_of(axes.begin(), axes.end(), [&](const auto& a) { return !colliding_.empty() && !separates(a.name, colliding_); });
  std::string lanes;
  if (vectorize && !orders && (is_straight(*body) || inner_columns(axes, *body))) {
    lanes = best_lane_axis(axes);
    if (lanes.empty() && is_straight(*body)) lanes = axes.back().name;
  }
  std::stable_partition(axes.begin(), axes.end(), [&](const auto& a) { return a.name != lanes; });
  tile_ir::Block inside = convert(*body, vectorize && lanes.empty());
  for (size_t i = axes.size(); i-- > 0;) {
    bool is_lanes = axes[i].name == lanes;
    tile_ir::For loop{axis(axes[i].name, 0, substitute(axes[i].extent, map_), is_lanes ? LoopKind::lanes : LoopKind::serial), std::move(inside)};
    inside = {make(std::move(loop))};
  }
  out.push_back(inside.front());
}

bool NestConverter::inner_columns(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) const {
  double own = 0;
  double inner = 0;
  for (const auto& a : axes) own = std::max(own, lane_score(a, true));
  bool plain = true;
  for (const auto& stmt : body) {
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
      for (const auto& a : reduce->axes) inner = std::max(inner, lane_score(a, true));
      plain = plain && is_straight(reduce->body);
    } else {
      plain = plain && is_straight({stmt});
    }
  }
  return plain && own > inner;
}

void NestConverter::lower(const loop_ir::Reduce& s, bool vectorize, tile_ir::Block& out) {
  std::vector<loop_ir::Axis> axes = s.axes;
  std::string lanes;
  if (vectorize && is_straight(s.body)) {
    lanes = best_lane_axis(axes);
    if (lanes.empty()) lanes = axes.back().name;
    std::stable_partition(axes.begin(), axes.end(), [&](const auto& a) { return a.name != lanes; });
  }
  tile_ir::Reduce reduce{s.results, s.dtypes, s.combiner, s.operands, {}, convert(s.body, vectorize && lanes.empty())};
  for (const auto& a : axes) {
    bool is_lanes = a.name == lanes;
    reduce.axes.push_back(axis(a.name, 0, substitute(a.extent, map_), is_lanes ? LoopKind::lanes : LoopKind::serial, 1, is_lanes ? 4 : 1));
  }
  out.push_back(make(std::move(reduce)));
}

void NestConverter::lower(const loop_ir::Scan& s, bool /*vectorize*/, tile_ir::Block& out) {
  out.push_back(make(tile_ir::Scan{s.results, s.dtypes, s.combiner, s.operands, axis(s.axis.name, 0, substitute(s.axis.extent, map_)),
                                   convert(s.body, false), convert(s.then, false)}));
}

}  // namespace deplo::loop_to_tile
