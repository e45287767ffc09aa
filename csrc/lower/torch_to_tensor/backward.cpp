#include <cmath>
#include <limits>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"
#include "lower/torch_to_tensor/gelu.h"

// Gradients of activations: pointwise formulas of the incoming gradient and the saved tensor, in float32 at least.

namespace deplo::rules {
namespace {

struct Saved {
  Builder& b;
  const Call& call;
  Value grad;  ///< of the output
  Value x;     ///< the saved input or output

  Value number(double v) const { return constant_like(b, x, v); }
  Value add(const Value& a, const Value& c) const { return b.apply(Fn::add, {a, c}); }
  Value sub(const Value& a, const Value& c) const { return b.apply(Fn::sub, {a, c}); }
  Value mul(const Value& a, const Value& c) const { return b.apply(Fn::mul, {a, c}); }
  Value select(const Value& c, const Value& yes, const Value& no) const { return b.apply(Fn::where, {c, yes, no}); }
  std::vector<Value> done(const Value& v) const { return {conform(b, b.broadcast(v, call.result().shape), call.result())}; }
};

Saved saved(Builder& b, const Call& call, std::string_view name = "self", std::string_view grad = "grad_output") {
  DType dtype = call.result().dtype;
  DEPLO_SUPPORT(is_float(dtype), "a gradient in {}", to_string(dtype));
  dtype = compute_type(dtype);
  return {b, call, b.cast(call.tensor(grad), dtype), b.cast(call.tensor(name), dtype)};
}

// sigmoid(y) and 1 - sigmoid(y), of which neither cancels.
struct Gates {
  Value open;
  Value closed;
};

Gates gates(const Saved& s, const Value& y) {
  Value e = s.b.apply(Fn::exp, {s.b.apply(Fn::neg, {s.b.apply(Fn::abs, {y})})});
  Value both = s.add(e, s.number(1));
  Value small = s.b.apply(Fn::div, {e, both});
  Value great = s.b.apply(Fn::div, {s.number(1), both});
  Value negative = s.b.apply(Fn::lt, y, 0);
  return {s.select(negative, small, great), s.select(negative, great, small)};
}

std::vector<Value> gelu_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  std::string approximate = call.word("approximate", "none");
  Value one = s.number(1);
  if (approximate == "none") return s.done(s.mul(s.grad, gelu_slope({&b, s.x}).value));
  DEPLO_SUPPORT(approximate == "tanh", "gelu approximated by {}", approximate);
  // x s(y) with y = 2 beta (x + kappa x^3), s the sigmoid, whose slope is s (1 - s).
  constexpr double kBeta = M_SQRT2 * M_2_SQRTPI;
  constexpr double kKappa = 0.044715;
  Value x2 = s.mul(s.x, s.x);
  const Gates g = gates(s, b.apply(Fn::mul, s.add(s.x, b.apply(Fn::mul, s.mul(x2, s.x), kKappa)), kBeta));
  Value inner_slope = b.apply(Fn::mul, s.add(one, b.apply(Fn::mul, x2, 3 * kKappa)), kBeta);
  // The gates before the slope, which may be infinite where they are closed.
  return s.done(s.mul(s.grad, s.add(g.open, s.mul(s.mul(s.mul(s.x, g.open), g.closed), inner_slope))));
}

std::vector<Value> silu_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  const Gates g = gates(s, s.x);
  return s.done(s.mul(s.mul(s.grad, g.open), s.add(s.number(1), s.mul(s.x, g.closed))));
}

std::vector<Value> sigmoid_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call, "output");
  return s.done(s.mul(s.grad, s.mul(s.sub(s.number(1), s.x), s.x)));
}

std::vector<Value> tanh_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call, "output");
  return s.done(s.mul(s.grad, s.sub(s.number(1), s.mul(s.x, s.x))));
}

// Unlike the others this one also serves integers.
std::vector<Value> threshold_backward(Builder& b, const Call& call) {
  DType dtype = call.result().dtype;
  Value x = compute_as(b, call.tensor("self"), dtype);
  Value grad = compute_as(b, call.tensor("grad_output"), dtype);
  Value below = apply_number(b, Fn::le, x, call.number("threshold"));
  Value zero = is_float(x.type.dtype) ? constant_like(b, x, 0) : b.constant_int(x.type.dtype, {}, 0);
  return {conform(b, b.apply(Fn::where, {below, zero, grad}), call.result())};
}

std::vector<Value> hardtanh_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  Value low = b.apply(Fn::le, s.x, call.real("min_val"));
  Value high = b.apply(Fn::ge, s.x, call.real("max_val"));
  return s.done(s.select(b.apply(Fn::bit_or, {low, high}), s.number(0), s.grad));
}

std::vector<Value> hardsigmoid_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  Value inside = b.apply(Fn::bit_and, {b.apply(Fn::gt, s.x, -3), b.apply(Fn::lt, s.x, 3)});
  return s.done(s.select(inside, b.apply(Fn::mul, s.grad, 1.0 / 6), s.number(0)));
}

std::vector<Value> hardswish_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  Value middle = s.mul(s.grad, s.add(b.apply(Fn::div, s.x, 3), s.number(0.5)));
  Value upper = s.select(b.apply(Fn::lt, s.x, 3), middle, s.grad);
  return s.done(s.select(b.apply(Fn::le, s.x, -3), s.number(0), upper));
}

std::vector<Value> elu_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call, "self_or_result");
  double negative = call.real("alpha") * call.real("scale");
  double inner = call.real("input_scale");
  Value slope;
  if (call.boolean("is_result")) {
    slope = b.apply(Fn::mul, b.apply(Fn::add, s.x, negative), inner);
  } else {
    slope = b.apply(Fn::mul, b.apply(Fn::exp, {b.apply(Fn::mul, s.x, inner)}), inner * negative);
  }
  Value positive = b.apply(Fn::mul, s.grad, call.real("scale"));
  return s.done(s.select(b.apply(Fn::le, s.x, 0), s.mul(s.grad, slope), positive));
}

std::vector<Value> leaky_relu_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  call.ignore("self_is_result");
  return s.done(s.select(b.apply(Fn::gt, s.x, 0), s.grad, b.apply(Fn::mul, s.grad, call.real("negative_slope"))));
}

std::vector<Value> softplus_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  Value scaled_x = b.apply(Fn::mul, s.x, call.real("beta"));
  Value z = b.apply(Fn::exp, {scaled_x});
  Value curved = b.apply(Fn::div, {s.mul(s.grad, z), s.add(z, s.number(1))});
  return s.done(s.select(b.apply(Fn::gt, scaled_x, call.real("threshold")), s.grad, curved));
}

std::vector<Value> log_sigmoid_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  call.ignore("buffer");  // exp(-|x|), which some devices save
  Value negative = b.apply(Fn::lt, s.x, 0);
  Value z = b.apply(Fn::exp, {b.apply(Fn::neg, {b.apply(Fn::abs, {s.x})})});
  Value part = b.apply(Fn::div, {z, s.add(s.number(1), z)});
  Value slope = s.select(negative, s.sub(s.number(1), part), part);
  return s.done(s.mul(s.grad, slope));
}

std::vector<Value> mish_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  Value one = s.number(1);
  Value t = b.apply(Fn::tanh, {b.apply(Fn::log1p, {b.apply(Fn::exp, {s.x})})});
  Value slope = s.add(t, s.mul(s.mul(s.x, b.apply(Fn::sigmoid, {s.x})), s.sub(one, s.mul(t, t))));
  return s.done(s.mul(s.grad, slope));
}

Value inside_lambda(const Saved& s) {
  double lambda = s.call.real("lambd");
  return s.b.apply(Fn::bit_and, {s.b.apply(Fn::ge, s.x, -lambda), s.b.apply(Fn::le, s.x, lambda)});
}

std::vector<Value> hardshrink_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call, "self", "grad_out");
  return s.done(s.select(inside_lambda(s), s.number(0), s.grad));
}

std::vector<Value> softshrink_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  return s.done(s.select(inside_lambda(s), s.number(0), s.grad));
}

std::vector<Value> logit_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  double eps = call.has("eps") ? call.real("eps") : -1;
  double low = eps < 0 ? 0 : eps;
  double high = eps < 0 ? 1 : 1 - eps;
  Value outside = b.apply(Fn::bit_or, {b.apply(Fn::lt, s.x, low), b.apply(Fn::gt, s.x, high)});
  Value inside = b.apply(Fn::div, {s.grad, s.mul(s.x, s.sub(s.number(1), s.x))});
  return s.done(s.select(outside, s.number(eps < 0 ? std::numeric_limits<double>::quiet_NaN() : 0), inside));
}

std::vector<Value> glu_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  int64_t dim = wrapped_dim(call.integer("dim"), rank_of(s.x));
  Expr half = s.grad.type.shape[dim];
  Value a = b.slice(s.x, dim, 0, half, 1);
  Value gate = b.apply(Fn::sigmoid, {b.slice(s.x, dim, half, half, 1)});
  Value da = s.mul(s.grad, gate);
  Value db = s.mul(s.mul(da, s.sub(s.number(1), gate)), a);
  return {conform(b, b.concatenate({da, db}, dim), call.result())};
}

std::vector<Value> prelu_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call);
  Value positive = b.apply(Fn::gt, s.x, 0);
  Value weight = b.cast(call.tensor("weight"), s.x.type.dtype);
  Value dx = s.select(positive, s.grad, s.mul(weight, s.grad));
  Value dw = s.select(positive, s.number(0), s.mul(s.x, s.grad));
  return {conform(b, dx, call.result(0)), conform(b, b.broadcast(dw, call.result(1).shape), call.result(1))};
}

std::vector<Value> dropout_backward(Builder& b, const Call& call) {
  Saved s = saved(b, call, "mask");
  return s.done(b.apply(Fn::mul, s.mul(s.grad, s.x), call.real("scale")));
}

}  // namespace

const std::vector<Row>& normalization_backward_rows();
const std::vector<Row>& pooling_backward_rows();
const std::vector<Row>& structure_backward_rows();
const std::vector<Row>& loss_rows();
const std::vector<Row>& distance_backward_rows();

const std::vector<Row>& backward_rules() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten.gelu_backward.default", gelu_backward},
        {"aten.silu_backward.default", silu_backward},
        {"aten.sigmoid_backward.default", sigmoid_backward},
        {"aten.tanh_backward.default", tanh_backward},
        {"aten.threshold_backward.default", threshold_backward},
        {"aten.hardtanh_backward.default", hardtanh_backward},
        {"aten.hardsigmoid_backward.default", hardsigmoid_backward},
        {"aten.hardswish_backward.default", hardswish_backward},
        {"aten.elu_backward.default", elu_backward},
        {"aten.leaky_relu_backward.default", leaky_relu_backward},
        {"aten.softplus_backward.default", softplus_backward},
        {"aten.log_sigmoid_backward.default", log_sigmoid_backward},
        {"aten.mish_backward.default", mish_backward},
        {"aten.hardshrink_backward.default", hardshrink_backward},
        {"aten.softshrink_backward.default", softshrink_backward},
        {"aten.logit_backward.default", logit_backward},
        {"aten.glu_backward.default", glu_backward},
        {"aten._prelu_kernel_backward.default", prelu_backward},
        {"aten.native_dropout_backward.default", dropout_backward},
    };
    for (const auto* more :
         {&normalization_backward_rows(), &pooling_backward_rows(), &structure_backward_rows(), &loss_rows(), &distance_backward_rows()})
      all.insert(all.end(), more->begin(), more->end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
