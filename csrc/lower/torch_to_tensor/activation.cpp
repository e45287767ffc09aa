#include <cmath>
#include <limits>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"
#include "lower/torch_to_tensor/formula.h"
#include "lower/torch_to_tensor/pointwise.h"

namespace deplo::rules {
namespace {

using Values = std::vector<Value>;

// A formula of `self` in the compute type, rounded once.
template <Formula (*body)(const Call&, const Formula&)>
Values activation(Builder& b, const Call& call) {
  return finish(b, call, body(call, {&b, operand(b, call, "self", compute_dtype(call))}).value);
}

// A function of the core's table.
template <Fn fn>
Formula function(const Call&, const Formula& x) {
  return x.with(fn);
}

// Square root and quotient each round. What they leave over is known exactly, and one step of Newton's method takes it back:
// with s = sqrt(x) and r = 1 / s, it is r (1 - x r^2) / 2 where x = s^2 + rest. Small numbers are scaled, whose rest would underflow.
Formula rsqrt(const Call&, const Formula& given) {
  const bool wide = given.value.type.dtype == DType::f64;
  const double scale = wide ? 0x1p256 : 0x1p64;
  const Formula small = both(less(given, 1 / scale), greater(given, 0.0));
  const Formula x = select(small, given * scale, given);
  const Formula s = x.with(Fn::sqrt);
  const Formula r = 1.0 / s;
  const Formula rest = fma(-s, s, x);
  const Formula step = fma(rest * r * -0.5, r, fma(-s, r, s.literal(1)));
  // 0, infinity and NaN have no rest.
  const Formula better = select(is_nan(step), r, fma(r, step, r));
  return select(small, better * std::sqrt(scale), better);
}

Formula reciprocal(const Call&, const Formula& x) { return 1.0 / x; }
Formula frac(const Call&, const Formula& x) { return x - x.with(Fn::trunc); }
Formula deg2rad(const Call&, const Formula& x) { return x * (M_PI / 180); }
Formula rad2deg(const Call&, const Formula& x) { return x * (180 / M_PI); }

Formula gelu(const Call& call, const Formula& x) {
  std::string form = call.word("approximate", "none");
  DEPLO_SUPPORT(form == "none" || form == "tanh", "approximate={}", form);
  return x.with(form == "none" ? Fn::gelu : Fn::gelu_tanh);
}

Formula hardsigmoid(const Call&, const Formula& x) { return clamp(x + 3.0, 0, 6) / 6.0; }

// float32 in float64 inside, where six times a large number does not overflow; 16 bits, which round later, and float64 divide first.
Formula hardswish(const Call& call, const Formula& given) {
  if (call.result().dtype != DType::f32) return given * (clamp(given + 3.0, 0, 6) / 6.0);
  const Formula x{given.b, given.b->cast(given.value, DType::f64)};
  return x * (clamp(x + 3.0, 0, 6) * (1.0 / 6));
}

Formula leaky_relu(const Call& call, const Formula& x) { return select(greater(x, 0), x, x * call.real("negative_slope", 0.01)); }

Formula elu(const Call& call, const Formula& x) {
  double alpha = call.real("alpha", 1.0);
  double scale = call.real("scale", 1.0);
  double input_scale = call.real("input_scale", 1.0);
  return select(less_equal(x, 0), (x * input_scale).with(Fn::expm1) * (alpha * scale), x * scale);
}

Formula softplus(const Call& call, const Formula& x) {
  double beta = call.real("beta", 1.0);
  Formula scaled = x * beta;
  const Formula curve = scaled.with(Fn::softplus);
  return select(greater(scaled, call.real("threshold", 20.0)), x, beta == 1 ? curve : curve / beta);
}

// The last product keeps a NaN, which is on neither side.
Formula softshrink(const Call& call, const Formula& x) {
  double lambda = call.real("lambd", 0.5);
  return select(greater(x, lambda), x - lambda, select(less(x, -lambda), x + lambda, x * 0.0));
}

Formula hardshrink(const Call& call, const Formula& x) {
  double lambda = call.real("lambd", 0.5);
  Formula inside = both(x.with(Fn::ge, x.literal(-lambda)), less_equal(x, lambda));
  return select(inside, x.literal(0), x);
}

Formula threshold(const Call& call, const Formula& x) {
  for (const char* name : {"threshold", "value"}) require_fit(call, name, call.result().dtype);
  return select(less_equal(x, call.real("threshold")), x.literal(call.real("value")), x);
}

Formula logit(const Call& call, const Formula& x) {
  const double eps = call.has("eps") ? call.real("eps") : -1;
  call.ignore("eps");
  if (eps < 0) return x.with(Fn::logit);
  // From 1/2 on the lower bound is the larger one, and comes first; one that is NaN bounds nothing.
  return select(less(x, eps), x.literal(eps), select(greater(x, 1 - eps), x.literal(1 - eps), x)).with(Fn::logit);
}

Formula hardtanh(const Call& call, const Formula& x) {
  for (const char* name : {"min_val", "max_val"}) require_fit(call, name, call.result().dtype);
  return clamp(x, call.real("min_val", -1.0), call.real("max_val", 1.0));
}
Formula relu6(const Call&, const Formula& x) { return clamp(x, 0, 6); }

Formula entropy(const Call&, const Formula& x) {
  Formula zero_or_less = select(equals(x, 0), x.literal(0), x.literal(-std::numeric_limits<double>::infinity()));
  return select(is_nan(x), x, select(greater(x, 0), -x.with(Fn::xlogy, x), zero_or_less));
}

// Integers too.
Values relu(Builder& b, const Call& call) {
  Formula x{&b, call.tensor("self")};
  DEPLO_SUPPORT(x.value.type.dtype != DType::boolean, "relu of bool");
  return finish(b, call, max(x, 0).value);
}

Values square(Builder& b, const Call& call) {
  Formula x{&b, operand(b, call, "self", compute_dtype(call))};
  return finish(b, call, (x * x).value);
}

// output = -softplus(-x), 0 and not -0 where that vanishes; the buffer z = exp(-|x|) is what CPU's backward reads.
Values log_sigmoid_forward(Builder& b, const Call& call) {
  Formula x{&b, operand(b, call, "self", compute_dtype(call))};
  Formula z = (-x.with(Fn::abs)).with(Fn::exp);
  Value output = finish(b, call, (0.0 - (-x).with(Fn::softplus)).value)[0];
  bool empty = call.result(1).shape != call.result(0).shape;
  DEPLO_SUPPORT(!empty, "a buffer without elements");
  return {output, b.cast(z.value, call.result(1).dtype)};
}

// The halves of a dimension: first * sigmoid(second).
Values glu(Builder& b, const Call& call) {
  Value v = operand(b, call, "self", compute_dtype(call));
  auto rank = static_cast<int64_t>(v.type.shape.size());
  int64_t dim = call.integer("dim", -1);
  if (dim < 0) dim += rank;
  DEPLO_SUPPORT(dim >= 0 && dim < rank, "dimension {} of {}", dim, rank);
  Expr half = call.result().shape.at(static_cast<size_t>(dim));
  Formula first{&b, b.slice(v, dim, 0, half, 1)};
  Formula second{&b, b.slice(v, dim, half, half, 1)};
  return finish(b, call, (first * second.with(Fn::sigmoid)).value);
}

Values prelu(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  Formula x{&b, b.cast(call.tensor("self"), dtype)};
  Formula weight{&b, b.cast(call.tensor("weight"), dtype)};
  return finish(b, call, select(greater(x, 0), x, weight * x).value);
}

}  // namespace

const std::vector<Row>& activation_rules() {
  static const std::vector<Row> rows{
      {"aten._prelu_kernel.default", prelu},
      {"aten.deg2rad.default", activation<deg2rad>},
      {"aten.elu.default", activation<elu>},
      {"aten.frac.default", activation<frac>},
      {"aten.gelu.default", activation<gelu>},
      {"aten.glu.default", glu},
      {"aten.hardshrink.default", activation<hardshrink>},
      {"aten.hardsigmoid.default", activation<hardsigmoid>},
      {"aten.hardswish.default", activation<hardswish>},
      {"aten.hardtanh.default", activation<hardtanh>},
      {"aten.leaky_relu.default", activation<leaky_relu>},
      {"aten.log_sigmoid_forward.default", log_sigmoid_forward},
      {"aten.logit.default", activation<logit>},
      {"aten.mish.default", activation<function<Fn::mish>>},
      {"aten.rad2deg.default", activation<rad2deg>},
      {"aten.reciprocal.default", activation<reciprocal>},
      {"aten.relu.default", relu},
      {"aten.relu6.default", activation<relu6>},
      {"aten.rsqrt.default", activation<rsqrt>},
      {"aten.sigmoid.default", activation<function<Fn::sigmoid>>},
      {"aten.silu.default", activation<function<Fn::silu>>},
      {"aten.sinc.default", activation<function<Fn::sinc>>},
      {"aten.softplus.default", activation<softplus>},
      {"aten.softshrink.default", activation<softshrink>},
      {"aten.special_entr.default", activation<entropy>},
      {"aten.square.default", square},
      {"aten.threshold.default", activation<threshold>},
  };
  return rows;
}

}  // namespace deplo::rules
