#include "base/error.h"
#include "lower/torch_to_tensor/normalization.h"

// Batch norm with given or with batch statistics. Eager gathers statistics in float64, and so do these rules.

namespace deplo::rules {
namespace {

std::vector<int64_t> all_but_channels(const Value& x) {
  std::vector<int64_t> dims = dim_range(2, rank_of(x));
  dims.push_back(0);
  return dims;
}

struct Statistics {
  Value mean;      ///< [C]
  Value variance;  ///< [C], biased
};

Statistics batch_statistics(Builder& b, const Value& x) {
  Value wide = b.cast(x, DType::f64);
  std::vector<int64_t> dims = all_but_channels(x);
  const Shape channels = {x.type.shape[1]};
  if (x.type.dtype == DType::f64) {  // sums of others are exact enough
    auto [mean, variance] = moments(b, x, dims, 1);
    return {b.reshape(mean, channels), b.reshape(variance, channels)};
  }
  Value mean = mean_dims(b, wide, dims, true);
  Value variance = mean_dims(b, square(b, b.apply(Fn::sub, {wide, mean})), dims, false);
  return {b.reshape(mean, channels), variance};
}

// (x - mean) * (rstd * weight) + bias per channel, in x's dtype.
Value normalized(Builder& b, const Call& call, const Value& x, const Value& mean, const Value& rstd) {
  DType dtype = x.type.dtype;
  const Shape& shape = x.type.shape;
  Value scale = b.cast(rstd, dtype);
  if (auto weight = call.optional_tensor("weight")) scale = b.apply(Fn::mul, {scale, b.cast(*weight, dtype)});
  Value y = b.apply(Fn::mul, {b.apply(Fn::sub, {x, per_channel(b, b.cast(mean, dtype), shape)}), per_channel(b, scale, shape)});
  if (auto bias = call.optional_tensor("bias")) y = b.apply(Fn::add, {y, per_channel(b, b.cast(*bias, dtype), shape)});
  return y;
}

Value input_of(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("input"));
  DEPLO_SUPPORT(rank_of(x) >= 2 && is_float(x.type.dtype), "batch norm of {} dimensions of {}", rank_of(x), to_string(x.type.dtype));
  return x;
}

// A result that eager leaves empty, or the given value where it does not.
Value saved(Builder& b, const Call& call, int k, const Value& v) {
  TensorType type = call.result(k);
  if (type.shape.size() == 1 && type.shape[0].is(0)) return b.constant(type.dtype, type.shape, 0);
  return conform(b, v, type);
}

std::vector<Value> with_given_statistics(Builder& b, const Call& call) {
  Value x = input_of(b, call);
  call.ignore("momentum");
  Value mean = as_compute(b, call.tensor("running_mean"));
  Value rstd = inverse_sqrt(b, b.apply(Fn::add, as_compute(b, call.tensor("running_var")), call.real("eps")));
  Value y = normalized(b, call, x, mean, rstd);
  return {conform(b, y, call.result(0)), saved(b, call, 1, mean), saved(b, call, 2, rstd)};
}

// result = (1 - momentum) * running + momentum * observed
Value updated(Builder& b, const Value& running, const Value& observed, double momentum, const TensorType& type) {
  Value old = as_compute(b, running);
  Value step = b.apply(Fn::mul, b.cast(observed, old.type.dtype), momentum);
  return conform(b, b.apply(Fn::add, {b.apply(Fn::mul, old, 1 - momentum), step}), type);
}

struct Trained {
  std::vector<Value> results;  ///< output, saved mean, saved rstd
  Statistics statistics;
  Value unbiased;  ///< variance * n / (n - 1)
};

Trained with_batch_statistics(Builder& b, const Call& call) {
  Value x = input_of(b, call);
  Statistics s = batch_statistics(b, x);
  Value rstd = inverse_sqrt(b, b.apply(Fn::add, s.variance, call.real("eps")));
  Value y = normalized(b, call, x, s.mean, rstd);
  Expr count = reduced_count(x, all_but_channels(x));
  Value unbiased = b.apply(Fn::div, {b.apply(Fn::mul, {s.variance, size_value(b, DType::f64, count)}), size_value(b, DType::f64, count - 1)});
  return {{conform(b, y, call.result(0)), saved(b, call, 1, s.mean), saved(b, call, 2, rstd)}, s, unbiased};
}

// The functional forms return the new running statistics as their last two results.
std::vector<Value> functional(Builder& b, const Call& call) {
  int last = call.result_count() - 1;
  bool has_reserve = call.op() == "aten._batch_norm_with_update_functional.default";
  if (!has_reserve && !call.boolean("training")) {
    std::vector<Value> results = with_given_statistics(b, call);
    // PyTorch gives them back in the dtype of the saved statistics.
    results.push_back(conform(b, call.tensor("running_mean"), call.result(last - 1)));
    results.push_back(conform(b, call.tensor("running_var"), call.result(last)));
    return results;
  }
  double momentum = call.real("momentum");
  Trained t = with_batch_statistics(b, call);
  if (has_reserve) t.results.push_back(b.constant_int(call.result(3).dtype, call.result(3).shape, 0));
  t.results.push_back(updated(b, call.tensor("running_mean"), t.statistics.mean, momentum, call.result(last - 1)));
  t.results.push_back(updated(b, call.tensor("running_var"), t.unbiased, momentum, call.result(last)));
  return t.results;
}

// Forms that would update running statistics in place are functional only without them.
std::vector<Value> native(Builder& b, const Call& call) {
  bool running = call.has("running_mean") || call.has("running_var");
  if (!call.boolean("training")) return with_given_statistics(b, call);
  DEPLO_SUPPORT(!running, "running statistics updated in place");
  call.ignore("momentum");
  return with_batch_statistics(b, call).results;
}

std::vector<Value> no_update(Builder& b, const Call& call) {
  std::vector<Value> results = with_given_statistics(b, call);
  results.push_back(b.constant_int(call.result(3).dtype, call.result(3).shape, 0));
  return results;
}

}  // namespace

const std::vector<Row>& batch_norm_rows() {
  static const std::vector<Row> rows = {
      {"aten._native_batch_norm_legit_no_training.default", with_given_statistics},
      {"aten._native_batch_norm_legit_functional.default", functional},
      {"aten._batch_norm_with_update_functional.default", functional},
      {"aten._batch_norm_no_update.default", no_update},
      {"aten._native_batch_norm_legit.no_stats", native},
      {"aten.native_batch_norm.default", native},
  };
  return rows;
}

}  // namespace deplo::rules
