#include <string>

#include "base/error.h"
#include "lower/torch_to_tensor/resample.h"

// grid_sampler in two and three dimensions: coordinates computed pointwise, then read through indirect coordinates.

namespace deplo::rules {
namespace {

enum Mode { kLinear = 0, kNearest = 1, kCubic = 2 };
enum Padding { kZeros = 0, kBorder = 1, kReflection = 2 };

struct Sampler {
  Builder& b;
  Value x;       ///< in its compute type
  Shape points;  ///< [N, out...]
  int spatial;
  int64_t mode, padding;
  bool align;

  Value number(const Value& like, double v) const { return constant_like(b, like, v); }
  Expr extent(int k) const { return x.type.shape[2 + k]; }
  Value extent_value(int k, int64_t less_by) const { return size_value(b, x.type.dtype, extent(k) - less_by); }

  // [-1, 1] to element positions.
  Value unnormalized(const Value& g, int k) const {
    Value shifted = b.apply(Fn::add, g, 1);
    if (align) return b.apply(Fn::mul, {b.apply(Fn::div, shifted, 2), extent_value(k, 1)});
    return b.apply(Fn::div, b.apply(Fn::sub, b.apply(Fn::mul, {shifted, extent_value(k, 0)}), 1), 2);
  }

  Value clipped(const Value& v, int k) const { return b.apply(Fn::min, {b.apply(Fn::max, v, 0), extent_value(k, 1)}); }

  // Reflection about the borders (low and high are twice their positions), then clipping.
  Value reflected(const Value& v, int k) const {
    double low = align ? 0 : -0.5;
    Value span = align ? extent_value(k, 1) : extent_value(k, 0);
    if (align && extent(k).is(1)) return b.apply(Fn::mul, v, 0);
    Value distance = b.apply(Fn::abs, {b.apply(Fn::sub, v, low)});
    Value extra = b.apply(Fn::fmod, {distance, span});
    Value flips = b.apply(Fn::floor, {b.apply(Fn::div, {distance, span})});
    Value even = b.apply(Fn::eq, b.apply(Fn::fmod, flips, 2), 0);
    Value forward = b.apply(Fn::add, extra, low);
    Value back = b.apply(Fn::add, b.apply(Fn::sub, {span, extra}), low);
    return b.apply(Fn::where, {even, forward, back});
  }

  Value bounded(const Value& v, int k) const {
    if (padding == kBorder) return clipped(v, k);
    if (padding == kReflection) return clipped(reflected(v, k), k);
    return v;
  }

  struct Place {
    Value index;   ///< i64, inside the input
    Value inside;  ///< bool; only zeros padding can be outside
  };

  // `whole` is a float without fraction. Compared as floats, so that huge coordinates do not wrap.
  Place place(const Value& whole, int k) const {
    Value inside = b.apply(Fn::bit_and, {b.apply(Fn::ge, whole, 0), b.apply(Fn::le, {whole, extent_value(k, 1)})});
    Value safe = b.apply(Fn::where, {inside, whole, number(whole, 0)});
    return {b.cast(safe, DType::i64), inside};
  }

  // x at one place per point, 0 outside: [N, C, out...].
  Value read(const std::vector<Place>& places, const Shape& out) const {
    tensor_ir::IndexMap map;
    map.axes = axis_names(out.size());
    map.fill.dtype = x.type.dtype;
    std::vector<Expr> at = {axis(0)};
    for (int d = 0; d < spatial; ++d) at.push_back(axis(2 + d));
    std::vector<Expr> index = {axis(0), axis(1)};
    std::optional<Value> inside;
    for (int k = 0; k < spatial; ++k) {
      std::string name = "j" + std::to_string(k);
      map.indirects.push_back({name, places[k].index.name, at, extent(k), false});
      index.push_back(Expr::symbol(name));
      inside = inside ? b.apply(Fn::bit_and, {*inside, places[k].inside}) : places[k].inside;
    }
    map.sources.push_back({x.name, index, {}});
    Value v = b.map({x.type.dtype, out}, std::move(map));
    return b.apply(Fn::where, {b.remap(*inside, out, at), v, number(v, 0)});
  }
};

struct Neighbour {
  Value whole;   ///< position along one dimension
  Value weight;  ///< per point
};

// The neighbours of each point along dimension k.
std::vector<Neighbour> neighbours(const Sampler& s, const Value& g, int k) {
  Builder& b = s.b;
  Value position = s.unnormalized(g, k);
  if (s.mode == kCubic) {
    // Each of the four neighbours is bounded on its own.
    Value first = b.apply(Fn::floor, {position});
    std::vector<Value> weights = cubic_weights(b, b.apply(Fn::sub, {position, first}));
    std::vector<Neighbour> out;
    for (int i = 0; i < 4; ++i) out.push_back({s.bounded(b.apply(Fn::add, first, i - 1), k), weights[i]});
    return out;
  }
  position = s.bounded(position, k);
  if (s.mode == kNearest) return {{b.apply(Fn::round, {position}), s.number(position, 1)}};
  Value first = b.apply(Fn::floor, {position});
  Value second = b.apply(Fn::add, first, 1);
  return {{first, b.apply(Fn::sub, {second, position})}, {second, b.apply(Fn::sub, {position, first})}};
}

template <int spatial>
std::vector<Value> grid_sampler(Builder& b, const Call& call) {
  Value input = call.tensor("input");
  Value grid = call.tensor("grid");
  DEPLO_SUPPORT(is_float(input.type.dtype) && rank_of(input) == spatial + 2, "grid_sampler of {} dimensions", rank_of(input));
  const Shape out = call.result().shape;
  Shape points = {out[0]};
  points.insert(points.end(), out.begin() + 2, out.end());
  Sampler s{
      b, as_compute(b, input), points, spatial, call.integer("interpolation_mode"), call.integer("padding_mode"), call.boolean("align_corners")};
  DEPLO_SUPPORT(s.mode != kCubic || spatial == 2, "cubic interpolation in {} dimensions", spatial);
  std::vector<std::vector<Neighbour>> along;
  for (int k = 0; k < spatial; ++k) {
    std::vector<Expr> index = axes_from(0, spatial + 1);
    index.emplace_back(spatial - 1 - k);  // the grid lists x before y before z
    along.push_back(neighbours(s, b.remap(b.cast(grid, s.x.type.dtype), points, index), k));
  }
  std::vector<Expr> at = {axis(0)};
  for (int d = 0; d < spatial; ++d) at.push_back(axis(2 + d));
  std::optional<Value> sum;
  size_t combinations = 1;
  for (const auto& n : along) combinations *= n.size();
  for (size_t c = 0; c < combinations; ++c) {
    size_t rest = c;
    std::vector<Sampler::Place> places;
    std::optional<Value> weight;
    for (int k = 0; k < spatial; ++k) {
      const Neighbour& n = along[k][rest % along[k].size()];
      rest /= along[k].size();
      places.push_back(s.place(n.whole, k));
      weight = weight ? b.apply(Fn::mul, {*weight, n.weight}) : n.weight;
    }
    Value term = s.read(places, out);
    if (s.mode != kNearest) term = b.apply(Fn::mul, {term, b.remap(*weight, out, at)});
    sum = sum ? b.apply(Fn::add, {*sum, term}) : term;
  }
  return {conform(b, *sum, call.result())};
}

}  // namespace

const std::vector<Row>& grid_sampler_rows() {
  static const std::vector<Row> rows = {
      {"aten.grid_sampler_2d.default", grid_sampler<2>},
      {"aten.grid_sampler_3d.default", grid_sampler<3>},
  };
  return rows;
}

}  // namespace deplo::rules
