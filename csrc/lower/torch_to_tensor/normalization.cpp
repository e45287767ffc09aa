#include "lower/torch_to_tensor/normalization.h"

#include <cmath>
#include <limits>

#include "base/error.h"

// Layer, group and RMS norm, weight norm, softmax and its kin; batch norm is in batch_norm.cpp.

namespace deplo::rules {

namespace {

constexpr double kSquareScale = 0x1p-24;
constexpr double kScaledEpsilon = 1e-12;

}  // namespace

Moments moments(Builder& b, const Value& x, const std::vector<int64_t>& dims, double scale) {
  Value rough = mean_dims(b, x, dims, true);
  Value small = scale == 1 ? b.apply(Fn::sub, {x, rough})
                           : b.apply(Fn::fma, {x, constant_like(b, x, scale), b.apply(Fn::neg, {b.apply(Fn::mul, rough, scale)})});
  Value squares = mean_dims(b, square(b, small), dims, true);
  Value far = b.apply(Fn::le, {squares, square(b, scale == 1 ? rough : b.apply(Fn::mul, rough, scale))});
  Value rest = b.apply(Fn::where, {far, mean_dims(b, small, dims, true), constant_like(b, squares, 0)});
  Value variance = b.apply(Fn::max, {constant_like(b, squares, 0), b.apply(Fn::sub, {squares, square(b, rest)})});
  return {b.apply(Fn::add, {rough, scale == 1 ? rest : b.apply(Fn::mul, rest, 1 / scale)}), variance};
}

Centered centered(Builder& b, const Value& x, const std::vector<int64_t>& dims, double eps) {
  // Squares of differences from 1.8e19 on pass the largest float32. Those of differences times a power of two, which changes no other bit and costs
  // nothing, do from 3e26 on. An epsilon that is not tiny hides that small ones vanish.
  const double scale = eps >= kScaledEpsilon ? kSquareScale : 1;
  auto [mean, variance] = moments(b, x, dims, scale);
  Value rstd = inverse_sqrt(b, b.apply(Fn::add, variance, eps * scale * scale));
  if (scale != 1) rstd = b.apply(Fn::mul, rstd, scale);
  // Beyond, eager gives NaN or 0: NaN shows what happened.
  Value overflows = b.apply(Fn::eq, variance, std::numeric_limits<double>::infinity());
  return {b.apply(Fn::sub, {x, mean}), mean, b.apply(Fn::where, {overflows, constant_like(b, rstd, std::numeric_limits<double>::quiet_NaN()), rstd})};
}

Value softmax_of(Builder& b, const Value& x, int64_t dim) {
  Value top = b.reduce(Combiner::max, x, {dim}, true);
  Value e = b.apply(Fn::exp, {b.apply(Fn::sub, {x, top})});
  return b.apply(Fn::div, {e, b.reduce(Combiner::sum, e, {dim}, true)});
}

Value safe_softmax_of(Builder& b, const Value& x, int64_t dim) {
  Value top = b.reduce(Combiner::max, x, {dim}, true);
  Value e = b.apply(Fn::exp, {b.apply(Fn::sub, {x, top})});
  Value y = b.apply(Fn::div, {e, b.reduce(Combiner::sum, e, {dim}, true)});
  Value masked = b.apply(Fn::eq, top, -std::numeric_limits<double>::infinity());
  return b.apply(Fn::where, {masked, constant_like(b, y, 0), y});
}

Value split_channels(Builder& b, const Value& x, Expr groups) {
  Expr part = part_of(x.type.shape[1], groups);
  Shape shape = {x.type.shape[0], groups, part};
  std::vector<Expr> index = {axis(0), axis(1) * part + axis(2)};
  for (int64_t d = 2; d < rank_of(x); ++d) {
    shape.push_back(x.type.shape[d]);
    index.push_back(axis(d + 1));
  }
  return b.remap(x, shape, index);
}

Value merge_channels(Builder& b, const Value& x) {
  Expr part = x.type.shape[2];
  Shape shape = {x.type.shape[0], x.type.shape[1] * part};
  std::vector<Expr> index = {axis(0), floordiv(axis(1), divisor_of(b, part)), mod(axis(1), divisor_of(b, part))};
  for (int64_t d = 3; d < rank_of(x); ++d) {
    shape.push_back(x.type.shape[d]);
    index.push_back(axis(d - 1));
  }
  return b.remap(x, shape, index);
}

namespace {

// x as the softmax family takes it (at least one dimension) and the dimension.
struct SoftmaxInput {
  Value x;
  int64_t dim;
};

SoftmaxInput softmax_input(Builder& b, const Call& call) {
  TensorType type = call.result();
  DEPLO_SUPPORT(is_float(type.dtype), "softmax in {}", to_string(type.dtype));
  call.ignore("dtype");
  call.ignore("half_to_float");
  Value x = compute_as(b, call.tensor("self"), type.dtype);
  int64_t dim = wrapped_dim(call.integer("dim"), rank_of(x));
  return {rank_of(x) == 0 ? b.unsqueeze(x, 0) : x, dim};
}

std::vector<Value> softmax(Builder& b, const Call& call) {
  SoftmaxInput in = softmax_input(b, call);
  return {conform(b, softmax_of(b, in.x, in.dim), call.result())};
}

std::vector<Value> safe_softmax(Builder& b, const Call& call) {
  SoftmaxInput in = softmax_input(b, call);
  return {conform(b, safe_softmax_of(b, in.x, in.dim), call.result())};
}

std::vector<Value> log_softmax(Builder& b, const Call& call) {
  SoftmaxInput in = softmax_input(b, call);
  Value top = b.reduce(Combiner::max, in.x, {in.dim}, true);
  Value shifted = b.apply(Fn::sub, {in.x, top});
  Value total = b.reduce(Combiner::sum, b.apply(Fn::exp, {shifted}), {in.dim}, true);
  return {conform(b, b.apply(Fn::sub, {shifted, b.apply(Fn::log, {total})}), call.result())};
}

// y * weight + bias, both optional and broadcast from the right.
Value affine(Builder& b, Value y, const std::optional<Value>& weight, const std::optional<Value>& bias) {
  if (weight) y = b.apply(Fn::mul, {y, b.cast(*weight, y.type.dtype)});
  if (bias) y = b.apply(Fn::add, {y, b.cast(*bias, y.type.dtype)});
  return y;
}

std::vector<Value> layer_norm(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("input"));
  auto normalized = static_cast<int64_t>(call.sizes("normalized_shape").size());
  DEPLO_SUPPORT(is_float(x.type.dtype), "layer norm of {}", to_string(x.type.dtype));
  call.ignore("cudnn_enable");
  Centered c = centered(b, x, dim_range(rank_of(x) - normalized, rank_of(x)), call.real("eps", 1e-5));
  Value y = affine(b, b.apply(Fn::mul, {c.difference, c.rstd}), call.optional_tensor("weight"), call.optional_tensor("bias"));
  std::vector<Value> results = {conform(b, y, call.result(0))};
  if (call.result_count() == 3) {
    results.push_back(conform(b, c.mean, call.result(1)));
    results.push_back(conform(b, c.rstd, call.result(2)));
  }
  return results;
}

std::vector<Value> rms_norm(Builder& b, const Call& call) {
  Value input = call.tensor("input");
  Value x = as_compute(b, input);
  auto normalized = static_cast<int64_t>(call.sizes("normalized_shape").size());
  DEPLO_SUPPORT(is_float(x.type.dtype), "RMS norm of {}", to_string(x.type.dtype));
  // Eager's default is the epsilon of the type it computes in.
  double eps = x.type.dtype == DType::f64 ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  if (call.has("eps")) eps = call.real("eps");
  Value mean = mean_dims(b, square(b, x), dim_range(rank_of(x) - normalized, rank_of(x)), true);
  Value rstd = inverse_sqrt(b, b.apply(Fn::add, mean, eps));
  Value y = affine(b, b.apply(Fn::mul, {x, rstd}), call.optional_tensor("weight"), std::nullopt);
  std::vector<Value> results = {conform(b, y, call.result(0))};
  if (call.result_count() == 2) results.push_back(conform(b, rstd, call.result(1)));
  return results;
}

std::vector<Value> group_norm(Builder& b, const Call& call) {
  Value input = call.tensor("input");
  DEPLO_SUPPORT(rank_of(input) >= 2 && is_float(input.type.dtype), "group norm of {} dimensions of {}", rank_of(input), to_string(input.type.dtype));
  Expr groups = call.size("group");
  for (const char* name : {"N", "C", "HxW"}) call.ignore(name);
  Value x = split_channels(b, as_compute(b, input), groups);
  Expr part = x.type.shape[2];
  Centered c = centered(b, x, dim_range(2, rank_of(x)), call.real("eps"));
  Value y = b.apply(Fn::mul, {c.difference, c.rstd});
  auto channelwise = [&](const Value& v) {
    return b.remap(b.cast(b.reshape(v, {input.type.shape[1]}), x.type.dtype), x.type.shape, {axis(1) * part + axis(2)});
  };
  if (auto weight = call.optional_tensor("weight")) y = b.apply(Fn::mul, {y, channelwise(*weight)});
  if (auto bias = call.optional_tensor("bias")) y = b.apply(Fn::add, {y, channelwise(*bias)});
  return {conform(b, merge_channels(b, y), call.result(0)), conform(b, c.mean, call.result(1)), conform(b, c.rstd, call.result(2))};
}

// v * (g / |v|), the norm being over every dimension but one.
std::vector<Value> weight_norm(Builder& b, const Call& call) {
  Value v = as_compute(b, call.tensor("v"));
  int64_t kept = wrapped_dim(call.integer("dim", 0), rank_of(v));
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < rank_of(v); ++d) {
    if (d != kept) dims.push_back(d);
  }
  Value total = square(b, v);
  if (!dims.empty()) total = b.reduce(Combiner::sum, total, dims, true);
  Value norm = b.apply(Fn::sqrt, {total});
  Value ratio = b.apply(Fn::div, {b.cast(call.tensor("g"), v.type.dtype), norm});
  return {conform(b, b.apply(Fn::mul, {v, ratio}), call.result(0)), conform(b, norm, call.result(1))};
}

}  // namespace

const std::vector<Row>& batch_norm_rows();

const std::vector<Row>& normalization_rules() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten._softmax.default", softmax},
        {"aten.softmax.int", softmax},
        {"aten._safe_softmax.default", safe_softmax},
        {"aten._log_softmax.default", log_softmax},
        {"aten.log_softmax.int", log_softmax},
        {"aten.native_layer_norm.default", layer_norm},
        {"aten.layer_norm.default", layer_norm},
        {"aten.rms_norm.default", rms_norm},
        {"aten._fused_rms_norm.default", rms_norm},
        {"aten.native_group_norm.default", group_norm},
        {"aten._weight_norm_interface.default", weight_norm},
    };
    all.insert(all.end(), batch_norm_rows().begin(), batch_norm_rows().end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
