#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Losses and their gradients: a pointwise formula and a reduction.

namespace deplo::rules {
namespace {

enum Reduction { kNone = 0, kMean = 1, kSum = 2 };

struct Loss {
  Builder& b;
  const Call& call;
  Value x, target;
  int64_t reduction;

  DType dtype() const { return x.type.dtype; }
  Expr count() const { return product(x.type.shape); }

  std::vector<Value> reduced(const Value& v) const {
    if (reduction == kNone) return {conform(b, v, call.result())};
    std::vector<int64_t> all;
    return {conform(b, reduction == kMean ? mean_dims(b, v, all, false) : reduce_dims(b, Combiner::sum, v, all, false), call.result())};
  }

  // slope * grad_output, divided by the number of elements for a mean.
  std::vector<Value> gradient(const Value& slope) const {
    Value grad = b.cast(call.tensor("grad_output"), dtype());
    Value g = b.apply(Fn::mul, {slope, grad});
    return {conform(b, b.broadcast(reduction == kMean ? divide_by_size(b, g, count()) : g, call.result().shape), call.result())};
  }
};

Loss loss_of(Builder& b, const Call& call) {
  DType dtype = call.result().dtype;
  DEPLO_SUPPORT(is_float(dtype), "a loss in {}", to_string(dtype));
  dtype = compute_type(dtype);
  Value x = b.cast(call.tensor("self"), dtype);
  Value target = b.cast(call.tensor("target"), dtype);
  // PyTorch broadcasts the two.
  if (x.type.shape != target.type.shape) {
    Shape common = b.apply(Fn::add, {x, target}).type.shape;
    x = b.broadcast(x, common);
    target = b.broadcast(target, common);
  }
  return {b, call, x, target, call.integer("reduction", kMean)};
}

std::vector<Value> mse_loss(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  return l.reduced(square(b, b.apply(Fn::sub, {l.x, l.target})));
}

std::vector<Value> mse_loss_backward(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  // The factor first, as in eager mode: twice a large difference is infinite.
  Value factor = b.constant(l.dtype(), {}, 2.0);
  if (l.reduction == kMean) factor = b.cast(divide_by_size(b, b.constant(DType::f64, {}, 2.0), l.count()), l.dtype());
  Value grad = b.cast(call.tensor("grad_output"), l.dtype());
  Value g = b.apply(Fn::mul, {b.apply(Fn::mul, {b.apply(Fn::sub, {l.x, l.target}), factor}), grad});
  return {conform(b, b.broadcast(g, call.result().shape), call.result())};
}

std::vector<Value> smooth_l1_loss(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  double beta = call.real("beta", 1);
  Value z = b.apply(Fn::abs, {b.apply(Fn::sub, {l.x, l.target})});
  if (beta == 0) return l.reduced(z);
  Value curved = b.apply(Fn::div, b.apply(Fn::mul, {b.apply(Fn::mul, z, 0.5), z}), beta);
  return l.reduced(b.apply(Fn::where, {b.apply(Fn::lt, z, beta), curved, b.apply(Fn::sub, z, 0.5 * beta)}));
}

// The slope is `inner` between -limit and limit, and -outer or outer beyond.
Value bounded_slope(Builder& b, const Value& difference, const Value& inner, double limit, double outer) {
  Value upper = b.apply(Fn::where, {b.apply(Fn::ge, difference, limit), constant_like(b, difference, outer), inner});
  return b.apply(Fn::where, {b.apply(Fn::le, difference, -limit), constant_like(b, difference, -outer), upper});
}

std::vector<Value> smooth_l1_loss_backward(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  double beta = call.real("beta");
  Value difference = b.apply(Fn::sub, {l.x, l.target});
  if (beta == 0) {
    // The sign, and 0 where both are equal.
    Value positive = b.cast(b.apply(Fn::gt, difference, 0), l.dtype());
    return l.gradient(b.apply(Fn::sub, {positive, b.cast(b.apply(Fn::lt, difference, 0), l.dtype())}));
  }
  return l.gradient(bounded_slope(b, difference, b.apply(Fn::div, difference, beta), beta, 1));
}

std::vector<Value> huber_loss(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  double delta = call.real("delta", 1);
  Value z = b.apply(Fn::abs, {b.apply(Fn::sub, {l.x, l.target})});
  Value curved = b.apply(Fn::mul, {b.apply(Fn::mul, z, 0.5), z});
  Value straight = b.apply(Fn::mul, b.apply(Fn::sub, z, 0.5 * delta), delta);
  return l.reduced(b.apply(Fn::where, {b.apply(Fn::lt, z, delta), curved, straight}));
}

std::vector<Value> huber_loss_backward(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  double delta = call.real("delta");
  Value difference = b.apply(Fn::sub, {l.x, l.target});
  return l.gradient(bounded_slope(b, difference, difference, delta, delta));
}

std::vector<Value> soft_margin_loss(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  Value z = b.apply(Fn::exp, {b.apply(Fn::mul, {b.apply(Fn::neg, {l.target}), l.x})});
  return l.reduced(b.apply(Fn::log1p, {z}));
}

std::vector<Value> soft_margin_loss_backward(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  Value z = b.apply(Fn::exp, {b.apply(Fn::mul, {b.apply(Fn::neg, {l.target}), l.x})});
  Value part = b.apply(Fn::div, {z, b.apply(Fn::add, z, 1)});
  return l.gradient(b.apply(Fn::mul, {b.apply(Fn::neg, {l.target}), part}));
}

std::optional<Value> weight_of(Builder& b, const Call& call, DType dtype) {
  auto weight = call.optional_tensor("weight");
  if (weight) weight = b.cast(*weight, dtype);
  return weight;
}

// v, which must lie in [0, 1]: anything else, NaN too, is an error.
Value probability(Builder& b, const Value& v) {
  Value inside = b.apply(Fn::bit_and, {b.apply(Fn::ge, {v, constant_like(b, v, 0)}), b.apply(Fn::le, {v, constant_like(b, v, 1)})});
  Value place = b.apply(Fn::where, {inside, b.constant(DType::i32, {}, 0), b.constant(DType::i32, {}, 1)});
  tensor_ir::IndexMap map;
  std::vector<Expr> at;
  for (int64_t d = 0; d < static_cast<int64_t>(v.type.shape.size()); ++d) {
    at.push_back(axis(d));
    map.axes.push_back(axis(d).name());
  }
  map.indirects.push_back({"k", place.name, at, 1, true, true});
  map.sources.push_back({v.name, at, {}});
  map.fill.dtype = v.type.dtype;
  return b.map(v.type, std::move(map));
}

// Logarithms are bounded below by -100, so that certainty in the wrong class stays finite.
std::vector<Value> binary_cross_entropy(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  l.x = probability(b, l.x);
  l.target = probability(b, l.target);
  Value one = constant_like(b, l.x, 1);
  Value log_x = b.apply(Fn::max, b.apply(Fn::log, {l.x}), -100);
  Value log_rest = b.apply(Fn::max, b.apply(Fn::log1p, {b.apply(Fn::neg, {l.x})}), -100);
  Value rest = b.apply(Fn::mul, {b.apply(Fn::sub, {l.target, one}), log_rest});
  Value v = b.apply(Fn::sub, {rest, b.apply(Fn::mul, {l.target, log_x})});
  if (auto weight = weight_of(b, call, l.dtype())) v = b.apply(Fn::mul, {v, *weight});
  return l.reduced(v);
}

std::vector<Value> binary_cross_entropy_backward(Builder& b, const Call& call) {
  constexpr float kLeast = 1e-12F;  // float32 in every dtype, as in ATen (native/Loss.cpp)
  Loss l = loss_of(b, call);
  Value variance = b.apply(Fn::max, b.apply(Fn::mul, {b.apply(Fn::sub, {constant_like(b, l.x, 1), l.x}), l.x}), kLeast);
  Value slope = b.apply(Fn::div, {b.apply(Fn::sub, {l.x, l.target}), variance});
  if (auto weight = weight_of(b, call, l.dtype())) slope = b.apply(Fn::mul, {slope, *weight});
  return l.gradient(slope);
}

// (1 - t) x + (1 + (w - 1) t) softplus(-x), w being the weight of positive targets.
std::vector<Value> bce_with_logits(Builder& b, const Call& call) {
  Loss l = loss_of(b, call);
  Value one = constant_like(b, l.x, 1);
  Value softplus = b.apply(Fn::softplus, {b.apply(Fn::neg, {l.x})});
  if (auto pos = call.optional_tensor("pos_weight")) {
    Value excess = b.apply(Fn::mul, {b.apply(Fn::sub, b.cast(*pos, l.dtype()), 1), l.target});
    softplus = b.apply(Fn::mul, {b.apply(Fn::add, excess, 1), softplus});
  }
  Value v = b.apply(Fn::add, {b.apply(Fn::mul, {b.apply(Fn::sub, {one, l.target}), l.x}), softplus});
  if (auto weight = weight_of(b, call, l.dtype())) v = b.apply(Fn::mul, {v, *weight});
  return l.reduced(v);
}

// Negative log likelihood: classes are dimension 1 (or 0 of a vector), targets the rest.
struct Likelihood {
  Builder& b;
  Value target;                 ///< class numbers, 0 where ignored
  Value valid;                  ///< bool, the target is not ignored
  std::optional<Value> weight;  ///< [C]
  Expr classes;
  int64_t dim;

  // v[target] through its class axis; `at` builds the index around the class.
  Value pick(const Value& v, const std::vector<Expr>& index) const {
    tensor_ir::IndexMap map;
    map.axes = axis_names(target.type.shape.size());
    map.indirects = {{"j0", target.name, axes_from(0, rank_of(target)), classes, true}};
    map.sources = {{v.name, index, {}}};
    map.fill.dtype = v.type.dtype;
    return b.map({v.type.dtype, target.type.shape}, std::move(map));
  }

  // The weight of each target, 0 where ignored.
  Value target_weight(DType dtype) const {
    if (!weight) return b.cast(valid, dtype);
    Value w = pick(*weight, {Expr::symbol("j0")});
    return b.apply(Fn::where, {valid, w, constant_like(b, w, 0)});
  }
};

Likelihood likelihood_of(Builder& b, const Call& call, const Value& x, DType dtype) {
  Value target = call.tensor("target");
  DEPLO_SUPPORT(rank_of(x) >= 1, "a likelihood without classes");
  int64_t dim = rank_of(x) == 1 ? 0 : 1;
  Expr classes = x.type.shape[dim];
  Shape outer = x.type.shape;
  outer.erase(outer.begin() + dim);
  target = b.cast(target, DType::i64);
  if (target.type.shape != outer) target = b.reshape(target, outer);
  Value valid = b.apply(Fn::ne, {target, b.constant_int(DType::i64, {}, call.integer("ignore_index"))});
  Value zero = b.constant_int(DType::i64, {}, 0);
  // A negative class is as much out of range as a large one: it must not count from the end.
  Value checked = b.apply(Fn::where, {b.apply(Fn::lt, {target, zero}), size_value(b, DType::i64, classes), target});
  return {b, b.apply(Fn::where, {valid, checked, zero}), valid, weight_of(b, call, dtype), classes, dim};
}

std::vector<Value> nll_loss_forward(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  Likelihood l = likelihood_of(b, call, x, x.type.dtype);
  std::vector<Expr> index = axes_from(0, rank_of(l.target));
  index.insert(index.begin() + l.dim, Expr::symbol("j0"));
  Value weight = l.target_weight(x.type.dtype);
  Value picked = b.apply(Fn::neg, {l.pick(x, index)});
  Value zero = constant_like(b, x, 0);
  // A select, so that an ignored infinity stays out.
  Value v = b.apply(Fn::where, {l.valid, b.apply(Fn::mul, {weight, picked}), zero});
  int64_t reduction = call.integer("reduction");
  if (reduction == kNone) return {conform(b, v, call.result(0)), conform(b, zero, call.result(1))};
  Value total = reduce_dims(b, Combiner::sum, v, {}, false);
  Value total_weight = reduce_dims(b, Combiner::sum, weight, {}, false);
  if (reduction == kMean) total = b.apply(Fn::div, {total, total_weight});
  return {conform(b, total, call.result(0)), conform(b, total_weight, call.result(1))};
}

// -weight at the target's class, 0 elsewhere.
std::vector<Value> nll_loss_backward(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  const Shape& shape = x.type.shape;
  Likelihood l = likelihood_of(b, call, x, x.type.dtype);
  Value grad = b.cast(call.tensor("grad_output"), x.type.dtype);
  Value total_weight = b.cast(call.tensor("total_weight"), x.type.dtype);
  int64_t reduction = call.integer("reduction");
  if (reduction == kMean) grad = b.apply(Fn::div, {grad, total_weight});
  std::vector<Expr> index = axes_from(0, rank_of(x));
  index.erase(index.begin() + l.dim);
  auto spread = [&](const Value& v) { return rank_of(v) == 0 ? b.broadcast(v, shape) : b.remap(v, shape, index); };
  if (rank_of(grad) == 1 && rank_of(l.target) == 0) grad = b.reshape(grad, {});
  Value slope = b.apply(Fn::neg, {b.apply(Fn::mul, {l.target_weight(x.type.dtype), grad})});
  Value hit = b.apply(Fn::eq, {spread(l.target), b.index(DType::i64, shape, axis(l.dim))});
  Value chosen = b.apply(Fn::bit_and, {hit, spread(l.valid)});
  return {conform(b, b.apply(Fn::where, {chosen, spread(slope), constant_like(b, x, 0)}), call.result())};
}

}  // namespace

const std::vector<Row>& loss_rows() {
  static const std::vector<Row> rows = {
      {"aten.mse_loss.default", mse_loss},
      {"aten.mse_loss_backward.default", mse_loss_backward},
      {"aten.smooth_l1_loss.default", smooth_l1_loss},
      {"aten.smooth_l1_loss_backward.default", smooth_l1_loss_backward},
      {"aten.huber_loss.default", huber_loss},
      {"aten.huber_loss_backward.default", huber_loss_backward},
      {"aten.soft_margin_loss.default", soft_margin_loss},
      {"aten.soft_margin_loss_backward.default", soft_margin_loss_backward},
      {"aten.binary_cross_entropy.default", binary_cross_entropy},
      {"aten.binary_cross_entropy_backward.default", binary_cross_entropy_backward},
      {"aten.binary_cross_entropy_with_logits.default", bce_with_logits},
      {"aten.nll_loss_forward.default", nll_loss_forward},
      {"aten.nll_loss2d_forward.default", nll_loss_forward},
      {"aten.nll_loss_backward.default", nll_loss_backward},
      {"aten.nll_loss2d_backward.default", nll_loss_backward},
  };
  return rows;
}

}  // namespace deplo::rules
