#include "passes/tensor/sum_taps.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "analysis/cost.h"
#include "passes/tensor/eliminate_dead_code.h"
#include "tensor_ir/rewrite.h"

namespace deplo {

using namespace tensor_ir;

namespace {

constexpr double kGain = 0.8;  // of the products before: what is left, with the sums of weights, must be less

/// A point's axis and a tap's, of which x knows only (point + tap + shift) // factor.
struct Pair {
  size_t point = 0, tap = 0;  ///< axes of the product
  int64_t factor = 1;
  int64_t shift = 0;
  int64_t taps = 0;    ///< before
  int64_t groups = 0;  ///< of taps that meet one point
  Expr count;          ///< of q
};

/// Writes what uses a point and a tap by q and t.
class Rewriter {
 public:
  Rewriter(std::string point, std::string tap, const Pair& pair, Expr q, Expr t)
      : point_(std::move(point)), tap_(std::move(tap)), pair_(pair), place_(q + t) {}

  bool uses_either(Expr e) const { return uses(e, point_) || uses(e, tap_); }

  std::optional<Expr> index(Expr e) const {
    if (!uses_either(e)) return e;
    if (e.kind() == ExprKind::floordiv && e.operands()[1].is(pair_.factor))
      if (const auto rest = beside(e.operands()[0], 1)) return floor_of(*rest);
    if (e.kind() != ExprKind::add && e.kind() != ExprKind::mul) return std::nullopt;
    std::optional<Expr> out;
    for (Expr operand : e.operands()) {
      const auto part = index(operand);
      if (!part) return std::nullopt;
      out = !out ? *part : e.kind() == ExprKind::add ? *out + *part : *out * *part;
    }
    return out;
  }

  std::optional<Cond> condition(const Cond& cond) const {
    if (!uses_either(cond.expr)) return cond;
    if (const auto whole = index(cond.expr)) return Cond{cond.kind, *whole};
    if (cond.kind != Cond::Kind::ge0) return std::nullopt;
    // Whole groups are inside or outside: floor((s*q + p + k + r) / s) >= 0, or h - (s*q + p + k) >= 0 where h + 1 is a multiple of s.
    if (const auto rest = beside(cond.expr, 1))
      if (const auto floor = floor_of(*rest)) return Cond{Cond::Kind::ge0, *floor};
    if (const auto rest = beside(cond.expr, -1))
      if (const auto lines = exact_quotient(*rest + pair_.shift + 1, pair_.factor)) return less(place_, *lines);
    return std::nullopt;
  }

 private:
  /// What stands beside sign * (point + tap).
  std::optional<Expr> beside(Expr e, int64_t sign) const {
    for (const std::string& name : {point_, tap_}) {
      const auto by = linear_coefficient(e, name);
      if (!by || !by->is(sign)) return std::nullopt;
    }
    const Expr rest = substitute(e, {{point_, 0}, {tap_, 0}});
    return rest;
  }

  /// (point + tap + rest) // factor, where rest is the pair's shift and whole groups.
  std::optional<Expr> floor_of(Expr rest) const {
    const auto groups = exact_quotient(rest - pair_.shift, pair_.factor);
    if (!groups) return std::nullopt;
    return place_ + *groups;
  }

  std::string point_, tap_;
  const Pair& pair_;
  Expr place_;
};

/// A quotient of point + tap + a constant, in an expression.
void find_shift(Expr e, const std::string& point, const std::string& tap, std::optional<std::pair<int64_t, int64_t>>& found) {
  if (e.kind() == ExprKind::floordiv && e.operands()[1].is_constant() && e.operands()[1].value() > 1) {
    const Expr over = e.operands()[0];
    const auto a = linear_coefficient(over, point);
    const auto b = linear_coefficient(over, tap);
    const Expr rest = substitute(over, {{point, 0}, {tap, 0}});
    if (a && b && a->is(1) && b->is(1) && rest.is_constant()) found = {e.operands()[1].value(), rest.value()};
  }
  if (found || e.is_constant() || e.is_symbol()) return;
  for (Expr operand : e.operands()) find_shift(operand, point, tap, found);
}

/// One sum of products, of an image and of weights.
class Sum {
 public:
  Sum(const Editor& editor, const Op& op, const PassContext& context) : editor_(editor), op_(op), context_(context) {
    const auto* reduction = std::get_if<Reduction>(&op.node);
    if (!reduction || reduction->combiner != Combiner::sum) return;
    dtype_ = op.results[0].type.dtype;
    if (dtype_ != DType::f32 && dtype_ != DType::f64) return;
    reduced_.insert(reduction->axes.begin(), reduction->axes.end());
    const Op* product = editor.definition(reduction->operands[0]);
    const auto* mul = product ? std::get_if<Elementwise>(&product->node) : nullptr;
    if (!mul || mul->fn != Fn::mul) return;
    shape_ = product->results[0].type.shape;
    for (int which : {0, 1})
      if (read(mul->operands[static_cast<size_t>(which)], mul->operands[static_cast<size_t>(1 - which)])) return;
  }

  bool pays() const {
    if (pairs_.empty()) return false;
    double points = 1, before = 1, after = 1, weights = 1;
    for (size_t d = 0; d < shape_.size(); ++d)
      if (!reduced_.count(static_cast<int>(d)) && !used_by_weights(d)) points *= size(shape_[d]);
    for (const Pair& pair : pairs_) {
      const auto taps = static_cast<double>(pair.taps);
      const auto groups = static_cast<double>(pair.groups);
      const auto phases = static_cast<double>(pair.factor);
      before *= taps;
      after *= groups * phases * size(pair.count) / std::max(1.0, size(shape_[pair.point]));
      weights *= phases * groups * taps;
    }
    return points * after + weights < kGain * points * before;
  }

  void emit(Editor& editor) const {
    // Phases and q lie side by side, in the place of the first axis of points: q of all of them are the points of one small image.
    std::map<size_t, const Pair*> by_point, by_tap;
    for (const Pair& pair : pairs_) {
      by_point[pair.point] = &pair;
      by_tap[pair.tap] = &pair;
    }
    Space space;
    std::map<const Pair*, Expr> phase, q, group;
    std::map<size_t, Expr> kept;
    const auto add_free = [&](size_t d) {
      const auto at = by_point.find(d);
      if (at == by_point.end()) {
        kept[d] = space.add(shape_[d]);
        return;
      }
      if (phase.empty())
        for (const auto& [point, pair] : by_point) phase[pair] = space.add(pair->factor);
      q[at->second] = space.add(at->second->count);
    };
    for (size_t d = 0; d < shape_.size(); ++d)
      if (!reduced_.count(static_cast<int>(d))) add_free(d);
    const size_t free_axes = space.shape.size();
    for (size_t d = 0; d < shape_.size(); ++d) {
      if (!reduced_.count(static_cast<int>(d))) continue;
      if (const auto at = by_tap.find(d); at != by_tap.end())
        group[at->second] = space.add(at->second->groups);
      else
        kept[d] = space.add(shape_[d]);
    }
    const Value image = emit_image(editor, space, kept, q, group);
    const Value weights = emit_weights(editor, space, kept, phase, group);
    const Value product = editor.emit(make_elementwise(editor.fresh(), Fn::mul, dtype_, {image, weights}, op_.provenance));
    std::vector<int> axes;
    for (size_t d = free_axes; d < space.shape.size(); ++d) axes.push_back(static_cast<int>(d));
    const Value sums = editor.emit(make_reduction({editor.fresh()}, Combiner::sum, {product}, axes, op_.provenance));
    // Back to points: each phase takes every factor-th.
    IndexMap back;
    Source source{sums.name, {}, {}};
    std::map<size_t, Expr> axis;
    for (size_t d = 0; d < shape_.size(); ++d)
      if (!reduced_.count(static_cast<int>(d))) {
        back.axes.push_back("i" + std::to_string(back.axes.size()));
        axis[d] = Expr::symbol(back.axes.back());
      }
    bool first = true;
    for (const auto& [d, i] : axis) {
      const auto at = by_point.find(d);
      if (at == by_point.end()) {
        source.index.push_back(i);
        continue;
      }
      if (first)
        for (const auto& [point, pair] : by_point) source.index.push_back(mod(axis.at(point) + pair->shift, pair->factor));
      first = false;
      source.index.push_back(floordiv(i + at->second->shift, at->second->factor));
    }
    back.sources = {std::move(source)};
    back.fill = Scalar::of_float(dtype_, 0);
    editor.emit(make_map(op_.results[0], std::move(back), op_.provenance));
  }

 private:
  struct Space {
    std::vector<std::string> axes;
    std::vector<Expr> shape;
    Expr add(Expr extent) {
      axes.push_back("i" + std::to_string(axes.size()));
      shape.push_back(extent);
      return Expr::symbol(axes.back());
    }
  };
  using Places = std::map<const Pair*, Expr>;

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context_.hints, editor_.symbols())); }

  const IndexMap* map_of(const std::string& name) const {
    const Op* op = editor_.definition(name);
    const auto* map = op ? std::get_if<IndexMap>(&op->node) : nullptr;
    return map && map->sources.size() == 1 && map->indirects.empty() && map->fill.as_double() == 0 ? map : nullptr;
  }

  /// Whether an element is a number of 16 bits.
  bool is_narrow(const std::string& name) const {
    const Op* op = editor_.definition(name);
    const auto* cast = op ? std::get_if<Elementwise>(&op->node) : nullptr;
    return cast && cast->fn == Fn::cast && size_of(editor_.value(cast->operands[0]).type.dtype) < size_of(dtype_);
  }

  bool read(const std::string& image, const std::string& weights) {
    image_ = map_of(image);
    weights_ = map_of(weights);
    if (!image_ || !weights_ || is_narrow(image_->sources[0].operand) || is_narrow(weights_->sources[0].operand)) return false;
    pairs_.clear();
    std::set<size_t> taken;
    for (size_t tap = 0; tap < shape_.size(); ++tap) {
      if (!reduced_.count(static_cast<int>(tap)) || !shape_[tap].is_constant() || shape_[tap].value() < 2) continue;
      for (size_t point = 0; point < shape_.size(); ++point) {
        if (reduced_.count(static_cast<int>(point)) || taken.count(point) || used_by_weights(point)) continue;
        if (auto pair = pair_of(point, tap)) {
          taken.insert(point);
          pairs_.push_back(*pair);
          break;
        }
      }
    }
    return !pairs_.empty();
  }

  std::optional<Pair> pair_of(size_t point, size_t tap) const {
    std::optional<std::pair<int64_t, int64_t>> found;
    for (Expr e : image_->sources[0].index) find_shift(e, image_->axes[point], image_->axes[tap], found);
    if (!found) return std::nullopt;
    Pair pair{point, tap, found->first, floor_mod(found->second, found->first), shape_[tap].value(), 0, 0};
    pair.groups = (pair.factor + pair.taps - 2) / pair.factor + 1;
    if (pair.groups >= pair.taps) return std::nullopt;
    pair.count = floordiv(shape_[point] - 1 + pair.shift, pair.factor) + 1;
    const Rewriter rewriter(image_->axes[point], image_->axes[tap], pair, Expr::symbol("q"), Expr::symbol("t"));
    for (Expr e : image_->sources[0].index)
      if (!rewriter.index(e)) return std::nullopt;
    for (const Cond& c : image_->sources[0].guard)
      if (!rewriter.condition(c)) return std::nullopt;
    return pair;
  }

  bool used_by_weights(size_t axis) const {
    const std::string& name = weights_->axes[axis];
    const Source& source = weights_->sources[0];
    return std::any_of(source.index.begin(), source.index.end(), [&](Expr e) { return uses(e, name); }) ||
           std::any_of(source.guard.begin(), source.guard.end(), [&](const Cond& c) { return uses(c.expr, name); });
  }

  Value emit_image(Editor& editor, const Space& space, const std::map<size_t, Expr>& kept, const Places& q, const Places& group) const {
    Source source = image_->sources[0];
    Substitution names;
    for (const auto& [d, to] : kept) names[image_->axes[d]] = to;
    // Names of the old axes and of the new ones may be the same: all change at once, at the end.
    for (const Pair& pair : pairs_) {
      const std::string n = std::to_string(pair.point);
      names["q " + n] = q.at(&pair);
      names["t " + n] = group.at(&pair);
      const Rewriter rewriter(image_->axes[pair.point], image_->axes[pair.tap], pair, Expr::symbol("q " + n), Expr::symbol("t " + n));
      for (Expr& e : source.index) e = *rewriter.index(e);
      for (Cond& c : source.guard) c = *rewriter.condition(c);
    }
    for (Expr& e : source.index) e = substitute(e, names);
    for (Cond& c : source.guard) c = substitute(c, names);
    // Points that no result is made of, before the first one and behind the last one, may lie outside of the image.
    Ranges ranges = editor.symbols();
    for (size_t d = 0; d < space.shape.size(); ++d) ranges[space.axes[d]] = axis_range(space.shape[d]);
    const TensorType& type = editor.value(source.operand).type;
    for (size_t d = 0; d < source.index.size(); ++d)
      for (const Cond& inside : {Cond{Cond::Kind::ge0, source.index[d]}, less(source.index[d], type.shape[d])}) {
        const bool known = std::find(source.guard.begin(), source.guard.end(), inside) != source.guard.end();
        if (!known && !provably_nonnegative(inside.expr, ranges)) source.guard.push_back(inside);
      }
    IndexMap map;
    map.axes = space.axes;
    map.sources = {std::move(source)};
    map.fill = image_->fill;
    return editor.emit(make_map({editor.fresh(), {dtype_, space.shape}}, std::move(map), op_.provenance));
  }

  /// Sums over the taps of each group, by phase, spread over all points.
  Value emit_weights(Editor& editor, const Space& space, const std::map<size_t, Expr>& kept, const Places& phase, const Places& group) const {
    Space own;
    Substitution names;
    std::vector<Expr> at;  // of the sums, in the product
    for (const auto& [d, to] : kept)
      if (used_by_weights(d)) {
        names[weights_->axes[d]] = own.add(shape_[d]);
        at.push_back(to);
      }
    Source source = weights_->sources[0];
    std::vector<std::pair<Expr, Expr>> own_places;
    for (const Pair& pair : pairs_) {
      const Expr p = own.add(pair.factor);
      const Expr t = own.add(pair.groups);
      own_places.emplace_back(p, t);
      at.push_back(phase.at(&pair));
      at.push_back(group.at(&pair));
    }
    const size_t free_axes = own.shape.size();
    std::vector<Cond> belongs;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      const Expr k = own.add(pairs_[i].taps);
      names[weights_->axes[pairs_[i].tap]] = k;
      const Expr from = own_places[i].first + k - own_places[i].second * pairs_[i].factor;
      belongs.push_back({Cond::Kind::ge0, from});
      belongs.push_back(less(from, pairs_[i].factor));
    }
    for (Expr& e : source.index) e = substitute(e, names);
    for (Cond& c : source.guard) c = substitute(c, names);
    source.guard.insert(source.guard.end(), belongs.begin(), belongs.end());
    IndexMap map;
    map.axes = own.axes;
    map.sources = {std::move(source)};
    map.fill = weights_->fill;
    const Value taps = editor.emit(make_map({editor.fresh(), {dtype_, own.shape}}, std::move(map), op_.provenance));
    std::vector<int> axes;
    for (size_t d = free_axes; d < own.shape.size(); ++d) axes.push_back(static_cast<int>(d));
    const Value sums = editor.emit(make_reduction({editor.fresh()}, Combiner::sum, {taps}, axes, op_.provenance));
    IndexMap spread;
    spread.axes = space.axes;
    spread.sources = {Source{sums.name, std::move(at), {}}};
    spread.fill = weights_->fill;
    return editor.emit(make_map({editor.fresh(), {dtype_, space.shape}}, std::move(spread), op_.provenance));
  }

  const Editor& editor_;
  const Op& op_;
  const PassContext& context_;
  DType dtype_ = DType::f32;
  std::set<int> reduced_;
  std::vector<Expr> shape_;
  const IndexMap* image_ = nullptr;
  const IndexMap* weights_ = nullptr;
  std::vector<Pair> pairs_;
};

}  // namespace

Graph sum_taps(Graph graph, const PassContext& context) {
  bool any = false;
  graph = Editor(std::move(graph)).run([&](Editor& editor, const Ref<Op>& op) {
    const Sum sum(editor, *op, context);
    if (!sum.pays()) {
      editor.emit(op);
      return;
    }
    sum.emit(editor);
    any = true;
  });
  return any ? eliminate_dead_code(std::move(graph), context) : graph;
}

}  // namespace deplo
