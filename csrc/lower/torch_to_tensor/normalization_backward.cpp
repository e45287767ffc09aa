#include "base/error.h"
#include "lower/torch_to_tensor/normalization.h"

// Gradients of softmax and of the norms. With xhat = (x - mean) * rstd and g = grad * weight, each norm over n elements gives
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)).

namespace deplo::rules {
namespace {

struct SoftmaxSaved {
  Value grad, output;
  int64_t dim;
};

SoftmaxSaved softmax_saved(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  Value output = b.cast(call.tensor("output"), grad.type.dtype);
  call.ignore("input_dtype");
  int64_t dim = wrapped_dim(call.integer("dim"), rank_of(grad));
  if (rank_of(grad) == 0) return {b.unsqueeze(grad, 0), b.unsqueeze(output, 0), 0};
  return {grad, output, dim};
}

std::vector<Value> softmax_backward(Builder& b, const Call& call) {
  SoftmaxSaved s = softmax_saved(b, call);
  Value total = b.reduce(Combiner::sum, b.apply(Fn::mul, {s.grad, s.output}), {s.dim}, true);
  return {conform(b, b.apply(Fn::mul, {b.apply(Fn::sub, {s.grad, total}), s.output}), call.result())};
}

std::vector<Value> log_softmax_backward(Builder& b, const Call& call) {
  SoftmaxSaved s = softmax_saved(b, call);
  Value total = b.reduce(Combiner::sum, s.grad, {s.dim}, true);
  return {conform(b, b.apply(Fn::sub, {s.grad, b.apply(Fn::mul, {b.apply(Fn::exp, {s.output}), total})}), call.result())};
}

// rstd * (g - mean(g) - xhat * mean(g * xhat)) over dims.
Value norm_input_gradient(Builder& b, const Value& g, const Value& xhat, const Value& rstd, const std::vector<int64_t>& dims) {
  Value along = mean_dims(b, b.apply(Fn::mul, {g, xhat}), dims, true);
  Value inner = b.apply(Fn::sub, {b.apply(Fn::sub, {g, mean_dims(b, g, dims, true)}), b.apply(Fn::mul, {xhat, along})});
  return b.apply(Fn::mul, {inner, rstd});
}

// The sum over dims, which may be none.
Value summed(Builder& b, const Value& v, const std::vector<int64_t>& dims) { return dims.empty() ? v : b.reduce(Combiner::sum, v, dims, false); }

std::vector<Value> layer_norm_backward(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("input"));
  DType dtype = x.type.dtype;
  Value grad = b.cast(call.tensor("grad_out"), dtype);
  Value rstd = b.cast(call.tensor("rstd"), dtype);
  Value xhat = b.apply(Fn::mul, {b.apply(Fn::sub, {x, b.cast(call.tensor("mean"), dtype)}), rstd});
  int64_t outer = rank_of(x) - static_cast<int64_t>(call.sizes("normalized_shape").size());
  call.ignore("bias");
  call.ignore("output_mask");
  auto weight = call.optional_tensor("weight");
  std::vector<Value> results(3);
  if (call.result_used(0)) {
    Value g = weight ? b.apply(Fn::mul, {grad, b.cast(*weight, dtype)}) : grad;
    results[0] = conform(b, norm_input_gradient(b, g, xhat, rstd, dim_range(outer, rank_of(x))), call.result(0));
  }
  if (call.result_used(1)) results[1] = conform(b, summed(b, b.apply(Fn::mul, {grad, xhat}), dim_range(0, outer)), call.result(1));
  if (call.result_used(2)) results[2] = conform(b, summed(b, grad, dim_range(0, outer)), call.result(2));
  return results;
}

std::vector<Value> rms_norm_backward(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("input"));
  DType dtype = x.type.dtype;
  Value grad = b.cast(call.tensor("grad_out"), dtype);
  Value rstd = b.cast(call.tensor("rstd"), dtype);
  Value xhat = b.apply(Fn::mul, {x, rstd});
  int64_t outer = rank_of(x) - static_cast<int64_t>(call.sizes("normalized_shape").size());
  call.ignore("output_mask");
  auto weight = call.optional_tensor("weight");
  std::vector<Value> results(2);
  if (call.result_used(0)) {
    Value g = weight ? b.apply(Fn::mul, {grad, b.cast(*weight, dtype)}) : grad;
    Value along = mean_dims(b, b.apply(Fn::mul, {g, xhat}), dim_range(outer, rank_of(x)), true);
    Value inner = b.apply(Fn::sub, {g, b.apply(Fn::mul, {xhat, along})});
    results[0] = conform(b, b.apply(Fn::mul, {inner, rstd}), call.result(0));
  }
  if (call.result_used(1)) results[1] = conform(b, summed(b, b.apply(Fn::mul, {grad, xhat}), dim_range(0, outer)), call.result(1));
  return results;
}

std::vector<Value> group_norm_backward(Builder& b, const Call& call) {
  Value input = call.tensor("input");
  Expr groups = call.size("group");
  for (const char* name : {"N", "C", "HxW", "output_mask"}) call.ignore(name);
  Value x = split_channels(b, as_compute(b, input), groups);
  DType dtype = x.type.dtype;
  Value grad = split_channels(b, b.cast(call.tensor("grad_out"), dtype), groups);
  const Shape& shape = x.type.shape;
  auto per_group = [&](const Value& v) {
    Shape keep = shape;
    for (size_t d = 2; d < keep.size(); ++d) keep[d] = 1;
    return b.reshape(b.cast(v, dtype), keep);
  };
  Value rstd = per_group(call.tensor("rstd"));
  Value xhat = b.apply(Fn::mul, {b.apply(Fn::sub, {x, per_group(call.tensor("mean"))}), rstd});
  auto weight = call.optional_tensor("weight");
  std::vector<Value> results(3);
  if (call.result_used(0)) {
    Value g = grad;
    if (weight) {
      Value w = b.cast(b.reshape(*weight, {input.type.shape[1]}), dtype);
      g = b.apply(Fn::mul, {grad, b.remap(w, shape, {axis(1) * shape[2] + axis(2)})});
    }
    results[0] = conform(b, merge_channels(b, norm_input_gradient(b, g, xhat, rstd, dim_range(2, rank_of(x)))), call.result(0));
  }
  std::vector<int64_t> dims = dim_range(3, rank_of(x));
  dims.insert(dims.begin(), 0);
  if (call.result_used(1)) results[1] = conform(b, b.reduce(Combiner::sum, b.apply(Fn::mul, {grad, xhat}), dims, false), call.result(1));
  if (call.result_used(2)) results[2] = conform(b, b.reduce(Combiner::sum, grad, dims, false), call.result(2));
  return results;
}

// Sums over the batch in float64, as eager.
std::vector<Value> batch_norm_backward_with(Builder& b, const Call& call, bool train, const std::string& mean_name, const std::string& rstd_name) {
  Value x = as_compute(b, call.tensor("input"));
  DType dtype = x.type.dtype;
  const Shape& shape = x.type.shape;
  Value grad = b.cast(call.tensor("grad_out"), dtype);
  Value mean, rstd;
  if (train) {
    mean = b.cast(call.tensor(mean_name), DType::f64);
    rstd = b.cast(call.tensor(rstd_name), DType::f64);
  } else {
    mean = b.cast(call.tensor("running_mean"), DType::f64);
    rstd = inverse_sqrt(b, b.apply(Fn::add, b.cast(call.tensor("running_var"), DType::f64), call.real("eps")));
  }
  std::vector<int64_t> dims = dim_range(2, rank_of(x));
  dims.push_back(0);
  Value difference = b.apply(Fn::sub, {x, per_channel(b, b.cast(mean, dtype), shape)});
  Value grad_wide = b.cast(grad, DType::f64);
  Value total = reduce_dims(b, Combiner::sum, grad_wide, dims, false);
  Value along = reduce_dims(b, Combiner::sum, b.apply(Fn::mul, {grad_wide, b.cast(difference, DType::f64)}), dims, false);
  std::vector<Value> results(3);
  if (call.result_used(0)) {
    Value scale = rstd;
    if (auto weight = call.optional_tensor("weight")) scale = b.apply(Fn::mul, {rstd, b.cast(*weight, DType::f64)});
    Value g = grad;
    if (train) {
      Expr count = reduced_count(x, dims);
      Value slope = divide_by_size(b, b.apply(Fn::mul, {along, square(b, rstd)}), count);
      Value offset = divide_by_size(b, total, count);
      Value tilt = b.apply(Fn::mul, {difference, per_channel(b, b.cast(slope, dtype), shape)});
      g = b.apply(Fn::sub, {b.apply(Fn::sub, {grad, per_channel(b, b.cast(offset, dtype), shape)}), tilt});
    }
    results[0] = conform(b, b.apply(Fn::mul, {g, per_channel(b, b.cast(scale, dtype), shape)}), call.result(0));
  }
  call.ignore("weight");
  if (call.result_used(1)) results[1] = conform(b, b.apply(Fn::mul, {along, rstd}), call.result(1));
  if (call.result_used(2)) results[2] = conform(b, total, call.result(2));
  return results;
}

std::vector<Value> native_batch_norm_backward(Builder& b, const Call& call) {
  for (const char* name : {"running_mean", "running_var", "save_mean", "save_invstd", "eps", "output_mask"}) call.ignore(name);
  return batch_norm_backward_with(b, call, call.boolean("train"), "save_mean", "save_invstd");
}

std::vector<Value> batch_norm_backward(Builder& b, const Call& call) {
  for (const char* name : {"running_mean", "running_var", "save_mean", "save_var", "eps", "output_mask", "reserve"}) call.ignore(name);
  return batch_norm_backward_with(b, call, call.boolean("update"), "save_mean", "save_var");
}

// w = v * g / |v|: dg = sum(dw * v) / |v|, dv = (g / |v|) * (dw - v * sum(dw * v) / |v|^2).
std::vector<Value> weight_norm_backward(Builder& b, const Call& call) {
  Value v = as_compute(b, call.tensor("saved_v"));
  DType dtype = v.type.dtype;
  Value grad = b.cast(call.tensor("grad_w"), dtype);
  Value g = b.cast(call.tensor("saved_g"), dtype);
  Value norm = b.cast(call.tensor("saved_norms"), dtype);
  int64_t kept = wrapped_dim(call.integer("dim"), rank_of(v));
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < rank_of(v); ++d) {
    if (d != kept) dims.push_back(d);
  }
  Value along = b.apply(Fn::mul, {grad, v});
  if (!dims.empty()) along = b.reduce(Combiner::sum, along, dims, true);
  Value dg = b.apply(Fn::div, {along, norm});
  Value radial = b.apply(Fn::mul, {v, b.apply(Fn::div, {dg, norm})});
  Value dv = b.apply(Fn::mul, {b.apply(Fn::div, {g, norm}), b.apply(Fn::sub, {grad, radial})});
  return {conform(b, dv, call.result(0)), conform(b, dg, call.result(1))};
}

}  // namespace

const std::vector<Row>& normalization_backward_rows() {
  static const std::vector<Row> rows = {
      {"aten._softmax_backward_data.default", softmax_backward},        {"aten._log_softmax_backward_data.default", log_softmax_backward},
      {"aten.native_layer_norm_backward.default", layer_norm_backward}, {"aten._fused_rms_norm_backward.default", rms_norm_backward},
      {"aten.native_group_norm_backward.default", group_norm_backward}, {"aten.native_batch_norm_backward.default", native_batch_norm_backward},
      {"aten.batch_norm_backward.default", batch_norm_backward},        {"aten._weight_norm_interface_backward.default", weight_norm_backward},
  };
  return rows;
}

}  // namespace deplo::rules
