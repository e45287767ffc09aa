#include "lower/loop_to_tile/cpu_nest.h"

#include <algorithm>
#include <map>

#include "analysis/cost.h"
#include "base/error.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using tile_ir::LoopKind;
using tile_ir::Space;

constexpr int64_t kChunkOperations = 32768;  // work that pays for waking a thread
constexpr int64_t kLaneBlock = 4096;         // points of a long vector axis that one parallel iteration takes
constexpr int64_t kColumnBlock = 64;         // columns that one parallel iteration reduces side by side
constexpr int64_t kStackBytes = 16 << 10;
constexpr int64_t kUnknownExtent = 256;  // an axis without a hint

class NestScheduler {
 public:
  NestScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), ctx_(ctx), nest_(outer_nest(kernel)) {
    for (const auto& p : kernel.params) strides_[p.name] = p.strides;
    colliding_ = colliding_stores(kernel);
    collect_accesses();
  }

  tile_ir::Kernel run() {
    tile_ir::Kernel out;
    out.name = kernel_.name;
    out.params = kernel_.params;
    out.symbols = kernel_.symbols;
    out.provenance = kernel_.provenance;
    std::vector<loop_ir::Axis> free;
    std::vector<loop_ir::Axis> ordered;  // serial, inside the parallel ones
    for (const auto& a : nest_.axes) (colliding_.empty() || separates(a.name, colliding_) ? free : ordered).push_back(a);
    if (ordered.empty()) merge(free);
    bool straight = is_straight(*nest_.inner);
    std::string lanes = straight || columns() ? best_lane_axis(free) : "";
    if (straight && lanes.empty() && !free.empty() && ordered.empty()) lanes = free.back().name;
    out.body = nest(free, ordered, lanes, straight);
    out.chunks = chunks();
    out.schedule = describe(free, ordered, lanes);
    return out;
  }

 private:
  // ---- what the accesses look like -------------------------------------------------------------------------------

  struct Access {
    Expr offset;  ///< in elements
    int weight;
  };

  void collect_accesses() {
    visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
      if (const auto* local = std::get_if<loop_ir::Local>(&stmt.node)) strides_[local->name] = contiguous_strides(local->shape);
      if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) accesses_.push_back({offset(load->buffer, load->index), 1});
      if (const auto* store = std::get_if<loop_ir::Store>(&stmt.node)) accesses_.push_back({offset(store->buffer, store->index), 2});
    });
  }

  Expr offset(const std::string& buffer, const std::vector<Expr>& index) const {
    const auto& strides = strides_.at(buffer);
    Expr sum = 0;
    for (size_t d = 0; d < index.size(); ++d) sum = sum + index[d] * strides[d];
    return sum;
  }

  int64_t hint(Expr e) const {
    std::map<std::string, int64_t> values;
    for (const std::string& s : symbols_of(e)) {
      auto it = ctx_.hints.find(s);
      values[s] = it == ctx_.hints.end() ? kUnknownExtent : it->second;
    }
    return evaluate(e, values);
  }

  /// How much an axis gains by vectors: contiguous accesses count for it, strided ones against it.
  double lane_score(const loop_ir::Axis& a) const {
    double score = 0;
    for (const Access& access : accesses_) {
      if (!uses(access.offset, a.name)) continue;
      auto c = linear_coefficient(access.offset, a.name);
      score += c && c->is(1) ? 2.0 * access.weight : -0.5 * access.weight;
    }
    // Very short axes leave most lanes empty.
    int64_t extent = hint(a.extent);
    return extent < 4 ? score * 0.1 : score;
  }

  std::string best_lane_axis(const std::vector<loop_ir::Axis>& free) const {
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

  static bool is_straight(const loop_ir::Block& block) {
    return std::all_of(block.begin(), block.end(), [](const auto& s) {
      return !std::holds_alternative<loop_ir::For>(s->node) && !std::holds_alternative<loop_ir::Reduce>(s->node) &&
             !std::holds_alternative<loop_ir::Scan>(s->node) && !std::holds_alternative<loop_ir::Local>(s->node);
    });
  }

  /// Reductions whose memory runs along an outer axis: that axis gets the lanes and each lane reduces its own column.
  bool columns() const {
    double outer = 0;
    double inner = 0;
    for (const auto& stmt : *nest_.inner)
      if (std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Scan>(stmt->node) ||
          std::holds_alternative<loop_ir::Local>(stmt->node))
        return false;
    for (const auto& a : nest_.axes) outer = std::max(outer, lane_score(a));
    visit_all(*nest_.inner, [&](const loop_ir::Stmt& stmt) {
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node))
        for (const auto& a : reduce->axes) inner = std::max(inner, lane_score(a));
    });
    return outer > inner;
  }

  // ---- merging ---------------------------------------------------------------------------------------------------

  /// Merges neighbours (i, j) into one axis of extent I*J where every access moves along i by J times its step along j.
  void merge(std::vector<loop_ir::Axis>& axes) {
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

  bool mergeable(const loop_ir::Axis& outer, const loop_ir::Axis& inner) const {
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

  bool mentions_merged(Expr e, const loop_ir::Axis& outer, const loop_ir::Axis& inner) const {
    Expr now = substitute(e, map_);
    return uses(now, outer.name) || uses(now, inner.name);
  }

  // ---- building --------------------------------------------------------------------------------------------------

  tile_ir::Block nest(std::vector<loop_ir::Axis> free, const std::vector<loop_ir::Axis>& ordered, const std::string& lanes, bool straight) {
    auto at = std::find_if(free.begin(), free.end(), [&](const auto& a) { return a.name == lanes; });
    bool has_lanes = at != free.end();
    loop_ir::Axis lane_axis;
    if (has_lanes) {
      lane_axis = *at;
      free.erase(at);
    }
    // A long vector axis is cut into blocks, which join the parallel axes.
    int64_t block = straight ? kLaneBlock : kColumnBlock;
    bool cut = has_lanes && ordered.empty() && hint(lane_axis.extent) > block;
    if (cut) free.push_back({lane_axis.name + "_block", ceildiv(lane_axis.extent, block)});
    Substitution outer;
    if (free.size() == 1)
      outer[free[0].name] = sym("par");
    else
      outer = unflatten(free, sym("par"));
    for (auto& [name, value] : map_) value = substitute(value, outer);
    for (const auto& [name, value] : outer) map_.emplace(name, value);

    tile_ir::Block body = convert(*nest_.inner, !has_lanes);
    if (has_lanes) {
      Expr lo = cut ? outer.at(lane_axis.name + "_block") * block : Expr(0);
      Expr hi = cut ? min(lane_axis.extent, lo + block) : lane_axis.extent;
      body = {make(tile_ir::For{axis(lane_axis.name, lo, hi, LoopKind::lanes), std::move(body)})};
    }
    for (size_t i = ordered.size(); i-- > 0;) body = {make(tile_ir::For{axis(ordered[i].name, 0, ordered[i].extent), std::move(body)})};
    parallel_extent_ = count(free);
    return {make(tile_ir::For{axis("par", 0, parallel_extent_, LoopKind::parallel), std::move(body)})};
  }

  /// `vectorize`: inner loops and reductions may take the lanes.
  tile_ir::Block convert(const loop_ir::Block& block, bool vectorize) {
    tile_ir::Block out;
    for (const auto& stmt : block) std::visit([&](const auto& s) { lower(s, vectorize, out); }, stmt->node);
    return out;
  }

  void lower(const loop_ir::Let& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }
  void lower(const loop_ir::Load& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }
  void lower(const loop_ir::Store& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }
  void lower(const loop_ir::Check& s, bool /*vectorize*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

  void lower(const loop_ir::Local& s, bool /*vectorize*/, tile_ir::Block& out) {
    std::vector<Expr> shape = substituted(s.shape, map_);
    Expr n = product(shape);
    bool small = n.is_constant() && n.value() * size_of(s.dtype) <= kStackBytes;
    out.push_back(make(tile_ir::Alloc{s.name, s.dtype, std::move(shape), small ? Space::stack : Space::scratch}));
  }

  void lower(const loop_ir::For& s, bool vectorize, tile_ir::Block& out) {
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

  bool inner_columns(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body) const {
    double own = 0;
    double inner = 0;
    for (const auto& a : axes) own = std::max(own, lane_score(a));
    bool plain = true;
    for (const auto& stmt : body) {
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) {
        for (const auto& a : reduce->axes) inner = std::max(inner, lane_score(a));
        plain = plain && is_straight(reduce->body);
      } else {
        plain = plain && is_straight({stmt});
      }
    }
    return plain && own > inner;
  }

  void lower(const loop_ir::Reduce& s, bool vectorize, tile_ir::Block& out) {
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

  void lower(const loop_ir::Scan& s, bool /*vectorize*/, tile_ir::Block& out) {
    out.push_back(make(tile_ir::Scan{s.results, s.dtypes, s.combiner, s.operands, axis(s.axis.name, 0, substitute(s.axis.extent, map_)),
                                     convert(s.body, false), convert(s.then, false)}));
  }

  /// From shapes alone: as many pieces as there is work for, at most one per parallel iteration.
  Expr chunks() const {
    Expr work = analysis::cost_of(kernel_).operations + count(nest_.axes);
    // Loops whose length varies with an outer axis (the last piece of a split reduction) count by their longest run.
    std::set<std::string> axes;
    Ranges ranges = kernel_.symbols;
    visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
      if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) {
        axes.insert(loop->axis);
        ranges[loop->axis] = axis_range(loop->extent);
      }
    });
    work = upper_bound(simplify(work, ranges), axes, ranges).value_or(count(nest_.axes));
    for (const std::string& name : symbols_of(work))
      if (!kernel_.symbols.count(name)) work = count(nest_.axes);
    return max(1, min(parallel_extent_, ceildiv(work, kChunkOperations)));
  }

  static std::string describe(const std::vector<loop_ir::Axis>& free, const std::vector<loop_ir::Axis>& ordered, const std::string& lanes) {
    std::string text;
    auto add = [&](const std::string& word) { text += (text.empty() ? "" : "; ") + word; };
    for (const auto& a : free)
      if (a.name != lanes) add("parallel " + a.name);
    for (const auto& a : ordered) add("serial " + a.name);
    if (!lanes.empty()) add("vectorize " + lanes);
    return text;
  }

  const loop_ir::Kernel& kernel_;
  const PassContext& ctx_;
  OuterNest nest_;
  std::map<std::string, std::vector<Expr>> strides_;
  std::vector<Access> accesses_;
  std::vector<const loop_ir::Store*> colliding_;
  Substitution map_;
  Expr parallel_extent_ = 1;
};

}  // namespace

tile_ir::Kernel schedule_cpu_nest(const loop_ir::Kernel& kernel, const PassContext& ctx) { return NestScheduler(kernel, ctx).run(); }

}  // namespace deplo
