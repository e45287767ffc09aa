#include <string>

#include "base/error.h"
#include "lower/torch_to_tensor/resample.h"

// grid_sampler in two and three dimensions: coordinates computed pointwise, then read through indirect coordinates.

namespace deplo::rules {
namespace {

enum SampleMode { kLinear = 0, kNearest = 1, kCubic = 2 };
enum Padding { kZeros = 0, kBorder = 1, kReflection = 2 };

struct Sampler {
  Builder& b;
  Value x;       ///< in its compute type
  Shape points;  ///< [N, out...]
  int spatial;
  int64_t mode, padding;
  bool align;
  bool leaves_out_nan = false;  ///< eager mode's gradient of three dimensions: a place that is NaN is none

  Value number(const Value& like, double v) const { return constant_like(b, like, v); }
  Expr extent(int k) const { return x.type.shape[2 + k]; }
  Value extent_value(int k, int64_t less_by) const { return size_value(b, x.type.dtype, extent(k) - less_by); }

  // [-1, 1] to element positions.
  Value unnormalized(const Value& g, int k) const {
    Value shifted = b.apply(Fn::add, g, 1);
    if (spatial == 2) {  // in the order of GridSamplerKernel.cpp's vectors
      Value scaled = b.apply(Fn::mul, {shifted, b.apply(Fn::div, extent_value(k, align ? 1 : 0), 2)});
      return align ? scaled : b.apply(Fn::sub, scaled, 0.5);
    }
    if (align) return b.apply(Fn::mul, {b.apply(Fn::div, shifted, 2), extent_value(k, 1)});
    return b.apply(Fn::div, b.apply(Fn::sub, b.apply(Fn::mul, {shifted, extent_value(k, 0)}), 1), 2);
  }

  // How fast a position moves with the grid's coordinate, as GridSampler.h has it: not at all once it is clipped, backward where reflected.
  Value slope(const Value& g, int k) const {
    Value steady = b.apply(Fn::div, {align ? extent_value(k, 1) : extent_value(k, 0), number(x, 2)});
    Value speed = b.broadcast(steady, g.type.shape);
    if (mode == kCubic || padding == kZeros) return speed;
    Value position = unnormalized(g, k);
    if (padding == kReflection) {
      if (align && extent(k).is(1)) return number(g, 0);
      Value offset = b.apply(Fn::sub, position, align ? 0 : -0.5);
      Value span = align ? extent_value(k, 1) : extent_value(k, 0);
      Value flips = b.apply(Fn::floor, {b.apply(Fn::div, {b.apply(Fn::abs, {offset}), span})});
      Value backward = b.apply(Fn::ne, {b.apply(Fn::lt, offset, 0), b.apply(Fn::ne, b.apply(Fn::fmod, flips, 2), 0)});
      speed = b.apply(Fn::where, {backward, b.apply(Fn::neg, {speed}), speed});
      position = reflected(position, k);
    }
    Value moves = b.apply(Fn::bit_and, {b.apply(Fn::gt, position, 0), b.apply(Fn::lt, {position, extent_value(k, 1)})});
    return b.apply(Fn::where, {moves, speed, number(speed, 0)});
  }

  struct Place {
    Value index;   ///< i64, inside the input
    Value inside;  ///< bool; only zeros padding can be outside
  };

  // NaN goes to the lower end in two dimensions and to the upper one in three, as in eager mode's kernels.
  Value clipped(const Value& v, int k) const {
    Value kept = b.apply(Fn::min, {b.apply(Fn::max, v, 0), extent_value(k, 1)});
    if (leaves_out_nan) return kept;
    Value end = spatial == 2 ? number(kept, 0) : b.broadcast(extent_value(k, 1), kept.type.shape);
    return b.apply(Fn::where, {b.apply(Fn::eq, {kept, kept}), kept, end});
  }

  // Eager mode's kernel of three dimensions leaves out what lies outside, that of two multiplies it by 0.
  Value counted(const std::vector<Place>& places, const Value& factor) const {
    if (spatial == 2 || (padding != kZeros && !leaves_out_nan)) return factor;
    Value inside = places[0].inside;
    for (int k = 1; k < spatial; ++k) inside = b.apply(Fn::bit_and, {inside, places[k].inside});
    return b.apply(Fn::where, {inside, factor, number(factor, 0)});
  }

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
  Value slope;   ///< of the weight, by the grid's coordinate
};

// The neighbours of each point along dimension k.
std::vector<Neighbour> neighbours(const Sampler& s, const Value& g, int k) {
  Builder& b = s.b;
  Value position = s.unnormalized(g, k);
  Value speed = s.slope(g, k);
  if (s.mode == kCubic) {
    // Each of the four neighbours is bounded on its own.
    Value first = b.apply(Fn::floor, {position});
    Value fraction = b.apply(Fn::sub, {position, first});
    std::vector<Value> weights = cubic_weights(b, fraction);
    std::vector<Value> slopes = cubic_slopes(b, fraction);
    std::vector<Neighbour> out;
    for (int i = 0; i < 4; ++i) out.push_back({s.bounded(b.apply(Fn::add, first, i - 1), k), weights[i], b.apply(Fn::mul, {slopes[i], speed})});
    return out;
  }
  position = s.bounded(position, k);
  if (s.mode == kNearest) return {{b.apply(Fn::round, {position}), s.number(position, 1), s.number(position, 0)}};
  Value first = b.apply(Fn::floor, {position});
  Value second = b.apply(Fn::add, first, 1);
  return {{first, b.apply(Fn::sub, {second, position}), b.apply(Fn::neg, {speed})}, {second, b.apply(Fn::sub, {position, first}), speed}};
}

struct Sampling {
  Sampler sampler;
  std::vector<std::vector<Neighbour>> along;  ///< per spatial dimension

  // Calls visit(places, neighbours) with one neighbour along each dimension, for every combination.
  template <class Visit>
  void for_each(const Visit& visit) const {
    size_t combinations = 1;
    for (const auto& n : along) combinations *= n.size();
    for (size_t c = 0; c < combinations; ++c) {
      size_t rest = c;
      std::vector<Sampler::Place> places;
      std::vector<const Neighbour*> chosen;
      for (size_t k = 0; k < along.size(); ++k) {
        chosen.push_back(&along[k][rest % along[k].size()]);
        rest /= along[k].size();
        places.push_back(sampler.place(chosen.back()->whole, static_cast<int>(k)));
      }
      visit(places, chosen);
    }
  }
};

// `out` is the shape of the sampled points, [N, C, out...].
Sampling sampling_of(Builder& b, const Call& call, int spatial, const Shape& out, bool backward) {
  Value input = call.tensor("input");
  Value grid = call.tensor("grid");
  DEPLO_SUPPORT(is_float(input.type.dtype) && rank_of(input) == spatial + 2, "grid_sampler of {} dimensions", rank_of(input));
  Shape points = {out[0]};
  points.insert(points.end(), out.begin() + 2, out.end());
  Sampler s{b,
            as_compute(b, input),
            points,
            spatial,
            call.integer("interpolation_mode"),
            call.integer("padding_mode"),
            call.boolean("align_corners"),
            backward && spatial == 3};
  DEPLO_SUPPORT(s.mode != kCubic || spatial == 2, "cubic interpolation in {} dimensions", spatial);
  std::vector<std::vector<Neighbour>> along;
  for (int k = 0; k < spatial; ++k) {
    std::vector<Expr> index = axes_from(0, spatial + 1);
    index.emplace_back(spatial - 1 - k);  // the grid lists x before y before z
    along.push_back(neighbours(s, b.remap(b.cast(grid, s.x.type.dtype), points, index), k));
  }
  return {s, std::move(along)};
}

Value weight_of(Builder& b, const std::vector<const Neighbour*>& chosen) {
  Value weight = chosen[0]->weight;
  for (size_t k = 1; k < chosen.size(); ++k) weight = b.apply(Fn::mul, {weight, chosen[k]->weight});
  return weight;
}

// The points' axes among those of [N, C, out...].
std::vector<Expr> point_axes(int spatial) {
  std::vector<Expr> at = {axis(0)};
  for (int d = 0; d < spatial; ++d) at.push_back(axis(2 + d));
  return at;
}

template <int spatial>
std::vector<Value> grid_sampler(Builder& b, const Call& call) {
  const Shape out = call.result().shape;
  refuse_empty(call.tensor("input"), spatial);
  Sampling sampling = sampling_of(b, call, spatial, out, false);
  const Sampler& s = sampling.sampler;
  std::optional<Value> sum;
  sampling.for_each([&](const std::vector<Sampler::Place>& places, const std::vector<const Neighbour*>& chosen) {
    Value term = s.read(places, out);
    if (s.mode != kNearest) {
      term = b.apply(Fn::mul, {term, b.remap(s.counted(places, weight_of(b, chosen)), out, point_axes(spatial))});
    }
    sum = sum ? b.apply(Fn::add, {*sum, term}) : term;
  });
  return {conform(b, *sum, call.result())};
}

// The incoming gradient spread over the neighbours, and the slopes of their weights times what they held.
template <int spatial>
std::vector<Value> grid_sampler_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  const Shape out = grad.type.shape;
  call.ignore("output_mask");  // a result that nobody wants is typed none
  Sampling sampling = sampling_of(b, call, spatial, out, true);
  const Sampler& s = sampling.sampler;
  std::vector<Expr> at = point_axes(spatial);
  Value to_input = b.constant(s.x.type.dtype, s.x.type.shape, 0);
  std::vector<std::optional<Value>> to_grid(spatial);
  sampling.for_each([&](const std::vector<Sampler::Place>& places, const std::vector<const Neighbour*>& chosen) {
    Value inside = places[0].inside;
    for (int k = 1; k < spatial; ++k) inside = b.apply(Fn::bit_and, {inside, places[k].inside});
    if (call.result_used(0)) {
      Value share = s.mode == kNearest ? grad : b.apply(Fn::mul, {grad, b.remap(weight_of(b, chosen), out, at)});
      share = b.apply(Fn::where, {b.remap(inside, out, at), share, s.number(share, 0)});
      tensor_ir::Scatter scatter;
      scatter.combiner = Combiner::sum;
      scatter.updates = share.name;
      scatter.axes = axis_names(out.size());
      scatter.index = {axis(0), axis(1)};
      for (int k = 0; k < spatial; ++k) {
        std::string name = "j" + std::to_string(k);
        scatter.indirects.push_back({name, places[k].index.name, at, s.extent(k), false});
        scatter.index.push_back(Expr::symbol(name));
      }
      to_input = b.scatter(std::move(scatter), to_input);
    }
    if (!call.result_used(1) || s.mode == kNearest) return;
    // Over the channels: what the neighbour contributes to each point for a weight of 1.
    Value held = b.reduce(Combiner::sum, b.apply(Fn::mul, {s.read(places, out), grad}), {1}, false);
    for (int k = 0; k < spatial; ++k) {
      Value slope = chosen[k]->slope;
      for (int other = 0; other < spatial; ++other)
        if (other != k) slope = b.apply(Fn::mul, {slope, chosen[other]->weight});
      Value term = b.apply(Fn::mul, {held, s.counted(places, slope)});
      to_grid[k] = to_grid[k] ? b.apply(Fn::add, {*to_grid[k], term}) : term;
    }
  });
  std::vector<Value> results;
  results.push_back(call.result_used(0) ? conform(b, to_input, call.result(0)) : to_input);
  if (!call.result_used(1)) return results;
  if (s.mode == kNearest) {
    results.push_back(b.constant(call.result(1).dtype, call.result(1).shape, 0));
    return results;
  }
  std::vector<Value> parts;
  for (int k = spatial - 1; k >= 0; --k)  // x before y before z
    parts.push_back(b.unsqueeze(*to_grid[k], spatial + 1));
  results.push_back(conform(b, b.concatenate(parts, spatial + 1), call.result(1)));
  return results;
}

}  // namespace

const std::vector<Row>& grid_sampler_rows() {
  static const std::vector<Row> rows = {
      {"aten.grid_sampler_2d.default", grid_sampler<2>},
      {"aten.grid_sampler_2d_backward.default", grid_sampler_backward<2>},
      {"aten.grid_sampler_3d.default", grid_sampler<3>},
      {"aten.grid_sampler_3d_backward.default", grid_sampler_backward<3>},
  };
  return rows;
}

}  // namespace deplo::rules
