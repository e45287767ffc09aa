#include <cmath>

#include "base/error.h"
#include "lower/torch_to_tensor/formula.h"
#include "lower/torch_to_tensor/resample.h"

// Antialiased upsampling (UpSampleKernel.cpp, compute_indices_weights_aa): along each dimension a window of the input, as wide as the
// filter scaled to it, with normalized weights. The windows are computed in float64.

namespace deplo::rules {
namespace {

enum class Filter { triangle, cubic, lanczos };

double radius(Filter filter) { return filter == Filter::triangle ? 1 : filter == Filter::cubic ? 2 : 3; }

Formula sinc(const Formula& x) {
  Formula angle = x * M_PI;
  return select(equals(x, 0), x.literal(1), angle.with(Fn::sin) / angle);
}

Formula weight_of(Filter filter, const Formula& x) {
  Formula a = x.with(Fn::abs);
  Formula zero = x.literal(0);
  switch (filter) {
    case Filter::triangle: return select(less(a, 1), 1.0 - a, zero);
    case Filter::cubic: {
      constexpr double kA = -0.5;
      Formula near = ((kA + 2) * a - (kA + 3)) * a * a + 1.0;
      Formula far = (((a - 5.0) * a + 8.0) * a - 4.0) * kA;
      return select(less(a, 1), near, select(less(a, 2), far, zero));
    }
    case Filter::lanczos: return select(less(a, 3), sinc(x) * sinc(x / 3.0), zero);
  }
  throw InternalError("no such filter");
}

/// What each output position reads: input positions first + 0, 1, ... below `last`, with weights [out, taps].
struct TapWindow {
  Value first, last;  ///< i64 [out]
  Value weights;
  Expr in;
  int64_t taps;
};

TapWindow window_of(Builder& b, Filter filter, const Resample& r, DType dtype) {
  auto in = r.in.as_constant();
  auto out = r.out.as_constant();
  DEPLO_SUPPORT(in && out && *out > 0, "antialiased sizes {} from {}", print(r.out), print(r.in));
  auto wide_in = static_cast<double>(*in);
  auto wide_out = static_cast<double>(*out);
  double scale = r.align_corners ? (*out > 1 ? (wide_in - 1) / (wide_out - 1) : 0) : r.scale ? 1 / *r.scale : wide_in / wide_out;
  // Eager computes the scale in float32 for float32, which decides where a window ends.
  if (dtype == DType::f32) scale = static_cast<float>(scale);
  double support = radius(filter) * std::max(scale, 1.0);
  TapWindow w;
  w.in = r.in;
  w.taps = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  auto number = [&](double v) { return b.constant(DType::f64, {}, v); };
  auto whole = [&](int64_t v) { return b.constant_int(DType::i64, {}, v); };
  Formula center{&b, b.apply(Fn::mul, {b.apply(Fn::add, b.index(DType::f64, {r.out}, axis(0)), 0.5), number(scale)})};
  w.first = b.apply(Fn::max, {b.cast((center - support + 0.5).value, DType::i64), whole(0)});
  w.last = b.apply(Fn::min, {b.cast((center + support + 0.5).value, DType::i64), whole(*in)});
  w.last = b.apply(Fn::min, {w.last, b.apply(Fn::add, {w.first, whole(w.taps)})});
  Shape shape = {r.out, w.taps};
  auto spread = [&](const Value& v) { return b.remap(v, shape, {axis(0)}); };
  Value position = b.apply(Fn::add, {b.index(DType::i64, shape, axis(1)), spread(w.first)});
  Formula distance{&b, b.cast(position, DType::f64)};
  distance = (distance - Formula{&b, spread(center.value)} + 0.5) * (1 / std::max(scale, 1.0));
  Value inside = b.apply(Fn::lt, {position, spread(w.last)});
  Value raw = b.apply(Fn::where, {inside, weight_of(filter, distance).value, number(0)});
  Value total = b.reduce(Combiner::sum, raw, {1}, false);
  total = b.apply(Fn::where, {b.apply(Fn::eq, total, 0), number(1), total});
  w.weights = b.cast(b.apply(Fn::div, {raw, spread(total)}), dtype);
  return w;
}

// Over x's axes and, last, the taps.
Shape with_taps(Shape shape, const TapWindow& w) {
  shape.emplace_back(w.taps);
  return shape;
}

tensor_ir::Indirect first_of(const TapWindow& w, int64_t d) { return {"j", w.first.name, {axis(d)}, w.in + 1, false}; }

std::vector<Cond> inside(const TapWindow& w, int64_t taps_axis) { return {less(Expr::symbol("j") + axis(taps_axis), w.in)}; }

// Where the tap is inside of the window, so that what lies beside it is not multiplied by 0.
Value in_window(Builder& b, const TapWindow& w, const Value& v, int64_t d) {
  int64_t taps_axis = rank_of(v) - 1;
  Shape shape = {v.type.shape[static_cast<size_t>(d)], w.taps};
  Value position = b.apply(Fn::add, {b.index(DType::i64, shape, axis(1)), b.remap(w.first, shape, {axis(0)})});
  Value mask = b.apply(Fn::lt, {position, b.remap(w.last, shape, {axis(0)})});
  return b.apply(Fn::where, {b.remap(mask, v.type.shape, {axis(d), axis(taps_axis)}), v, constant_like(b, v, 0)});
}

Value weights_over(Builder& b, const TapWindow& w, const Shape& shape, int64_t d) {
  return b.remap(w.weights, shape, {axis(d), axis(static_cast<int64_t>(shape.size()) - 1)});
}

Value resampled(Builder& b, const Value& x, const TapWindow& w, int64_t d) {
  Shape out = x.type.shape;
  out[static_cast<size_t>(d)] = w.first.type.shape[0];
  Shape shape = with_taps(out, w);
  int64_t taps_axis = rank_of(x);
  tensor_ir::IndexMap map;
  map.axes = axis_names(shape.size());
  map.indirects.push_back(first_of(w, d));
  std::vector<Expr> at = axes_from(0, rank_of(x));
  at[static_cast<size_t>(d)] = Expr::symbol("j") + axis(taps_axis);
  map.sources.push_back({x.name, at, inside(w, taps_axis)});
  map.fill.dtype = x.type.dtype;
  Value read = b.map({x.type.dtype, shape}, std::move(map));
  Value product = in_window(b, w, b.apply(Fn::mul, {read, weights_over(b, w, shape, d)}), d);
  return b.reduce(Combiner::sum, product, {taps_axis}, false);
}

// The transposed sum: each output's share goes back to its window.
Value spread_back(Builder& b, const Value& grad, const TapWindow& w, int64_t d) {
  Shape shape = with_taps(grad.type.shape, w);
  int64_t taps_axis = rank_of(grad);
  Value share = b.apply(Fn::mul, {b.remap(grad, shape, axes_from(0, taps_axis)), weights_over(b, w, shape, d)});
  share = in_window(b, w, share, d);
  Shape in = grad.type.shape;
  in[static_cast<size_t>(d)] = w.in;
  tensor_ir::Scatter scatter;
  scatter.combiner = Combiner::sum;
  scatter.updates = share.name;
  scatter.axes = axis_names(shape.size());
  scatter.indirects.push_back(first_of(w, d));
  scatter.index = axes_from(0, taps_axis);
  scatter.index[static_cast<size_t>(d)] = Expr::symbol("j") + axis(taps_axis);
  scatter.guard = inside(w, taps_axis);
  return b.scatter(std::move(scatter), b.constant(grad.type.dtype, in, 0));
}

TapWindow window_along(Builder& b, const Call& call, Filter filter, Expr in, Expr out, size_t k, DType dtype) {
  return window_of(b, filter, {in, out, scales_of(call, 2)[k], call.boolean("align_corners")}, dtype);
}

template <Filter filter>
std::vector<Value> upsample(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  DEPLO_SUPPORT(is_float(x.type.dtype) && rank_of(x) == 4, "antialiasing of {}", to_string(x.type.dtype));
  call.ignore("output_size");
  const Shape out = call.result().shape;
  // A dimension that keeps its size keeps its values, whatever its scale; eager mode's gradient follows the scale.
  for (int64_t d : {3, 2})
    if (!(x.type.shape[d] == out[d])) x = resampled(b, x, window_along(b, call, filter, x.type.shape[d], out[d], d - 2, x.type.dtype), d);
  for (const char* name : {"align_corners", "scale_factors", "scales_h", "scales_w"}) call.ignore(name);
  return {conform(b, x, call.result())};
}

template <Filter filter>
std::vector<Value> upsample_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  call.ignore("output_size");
  Shape in = call.sizes("input_size");
  for (int64_t d : {2, 3}) grad = spread_back(b, grad, window_along(b, call, filter, in[d], grad.type.shape[d], d - 2, grad.type.dtype), d);
  return {conform(b, grad, call.result())};
}

}  // namespace

const std::vector<Row>& antialias_rows() {
  static const std::vector<Row> rows = {
      {"aten._upsample_bicubic2d_aa.default", upsample<Filter::cubic>},
      {"aten._upsample_bicubic2d_aa_backward.default", upsample_backward<Filter::cubic>},
      {"aten._upsample_bilinear2d_aa.default", upsample<Filter::triangle>},
      {"aten._upsample_bilinear2d_aa_backward.default", upsample_backward<Filter::triangle>},
      {"aten._upsample_lanczos2d_aa.default", upsample<Filter::lanczos>},
      {"aten._upsample_lanczos2d_aa_backward.default", upsample_backward<Filter::lanczos>},
  };
  return rows;
}

}  // namespace deplo::rules
