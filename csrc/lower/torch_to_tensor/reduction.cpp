#include <cmath>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Sums, extremes, moments and norms over dimensions; the scans are in scan.cpp.

namespace deplo::rules {
namespace {

bool keepdim_argument(const Call& call) { return call.boolean("keepdim", false); }

// The input on its way into a reduction whose `dtype` argument, if any, decided the result's dtype.
Value reduction_input(Builder& b, const Call& call) {
  call.ignore("dtype");
  DType dtype = call.result().dtype;
  DEPLO_SUPPORT(dtype != DType::boolean, "arithmetic in bool");
  return compute_as(b, call.tensor("self"), dtype);
}

std::vector<Value> sum(Builder& b, const Call& call) {
  Value x = reduction_input(b, call);
  return {conform(b, reduce_dims(b, Combiner::sum, x, dims_argument(call), keepdim_argument(call)), call.result())};
}

std::vector<Value> nansum(Builder& b, const Call& call) {
  Value x = reduction_input(b, call);
  if (is_float(x.type.dtype)) x = b.apply(Fn::where, {b.apply(Fn::ne, {x, x}), constant_like(b, x, 0), x});
  return {conform(b, reduce_dims(b, Combiner::sum, x, dims_argument(call), keepdim_argument(call)), call.result())};
}

std::vector<Value> mean(Builder& b, const Call& call) {
  Value x = reduction_input(b, call);
  DEPLO_SUPPORT(is_float(x.type.dtype), "mean in {}", to_string(x.type.dtype));
  return {conform(b, mean_dims(b, x, dims_argument(call), keepdim_argument(call)), call.result())};
}

std::vector<Value> prod(Builder& b, const Call& call) {
  Value x = reduction_input(b, call);
  std::vector<int64_t> dims;
  if (call.has("dim")) dims = {call.integer("dim")};
  // Each factor would cost up to half an ulp, and near 1 they all err to the same side.
  if (is_float(x.type.dtype)) x = b.cast(x, DType::f64);
  return {conform(b, reduce_dims(b, Combiner::prod, x, dims, keepdim_argument(call)), call.result())};
}

// Where there is nothing to choose from, ATen's kernel raises.
void require_elements(Builder& b, const Value& x, const std::vector<int64_t>& dims) {
  DEPLO_SUPPORT(provably_nonnegative(reduced_count(x, dims) - 1, b.ranges()), "the extreme of what may have no elements");
}

template <Combiner combiner>
std::vector<Value> extreme(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  const std::vector<int64_t> dims = dims_argument(call);
  require_elements(b, x, dims);
  return {conform(b, reduce_dims(b, combiner, x, dims, keepdim_argument(call)), call.result())};
}

std::vector<Value> aminmax(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  std::vector<int64_t> dims;
  if (call.has("dim")) dims = {call.integer("dim")};
  bool keepdim = keepdim_argument(call);
  require_elements(b, x, dims);
  return {conform(b, reduce_dims(b, Combiner::min, x, dims, keepdim), call.result(0)),
          conform(b, reduce_dims(b, Combiner::max, x, dims, keepdim), call.result(1))};
}

// (value, index along `dim`, or into the flattened tensor) of the extreme.
std::vector<Value> with_index(Builder& b, Combiner combiner, Value x, std::optional<int64_t> dim, bool keepdim) {
  if (rank_of(x) == 0) {
    x = b.unsqueeze(x, 0);
    keepdim = false;
    dim = 0;
  }
  Expr position = 0;
  std::vector<int64_t> axes;
  if (dim) {
    axes = {wrapped_dim(*dim, rank_of(x))};
    position = axis(axes[0]);
  } else {
    axes = dim_range(0, rank_of(x));
    for (int64_t d : axes) position = position * x.type.shape[d] + axis(d);
  }
  require_elements(b, x, axes);
  return b.reduce_many(combiner, {x, b.index(DType::i64, x.type.shape, position)}, axes, keepdim);
}

// Extremes order bool as 0 < 1.
Value ordered(Builder& b, const Value& v) { return v.type.dtype == DType::boolean ? b.cast(v, DType::u8) : as_compute(b, v); }

template <Combiner combiner>
std::vector<Value> extreme_dim(Builder& b, const Call& call) {
  auto found = with_index(b, combiner, ordered(b, call.tensor("self")), call.integer("dim"), keepdim_argument(call));
  return {conform(b, found[0], call.result(0)), conform(b, found[1], call.result(1))};
}

template <Combiner combiner>
std::vector<Value> extreme_index(Builder& b, const Call& call) {
  std::optional<int64_t> dim;
  if (call.has("dim")) dim = call.integer("dim");
  DEPLO_SUPPORT(call.tensor("self").type.dtype != DType::boolean, "{} of bool, which PyTorch refuses", call.op());
  auto found = with_index(b, combiner, ordered(b, call.tensor("self")), dim, keepdim_argument(call));
  return {conform(b, found[1], call.result())};
}

Value nonzero(Builder& b, const Value& v) {
  if (v.type.dtype == DType::boolean) return v;
  Value x = as_compute(b, v);
  return b.apply(Fn::ne, x, 0);
}

template <Combiner combiner>
std::vector<Value> any_or_all(Builder& b, const Call& call) {
  Value x = nonzero(b, call.tensor("self"));
  // An empty list of dimensions reduces nothing here, unlike None.
  std::vector<int64_t> dims;
  if (call.op().ends_with(".dims") && call.has("dim")) {
    dims = call.integers("dim");
    if (dims.empty()) return {conform(b, x, call.result())};
  } else if (call.has("dim")) {
    dims = {call.integer("dim")};
  }
  return {conform(b, reduce_dims(b, combiner, x, dims, keepdim_argument(call)), call.result())};
}

std::vector<Value> count_nonzero(Builder& b, const Call& call) {
  Value x = b.cast(nonzero(b, call.tensor("self")), DType::i64);
  std::vector<int64_t> dims;
  if (call.op() == "aten.count_nonzero.dim_IntList") {
    dims = call.integers("dim");
  } else if (call.has("dim")) {
    dims = {call.integer("dim")};
  }
  return {conform(b, reduce_dims(b, Combiner::sum, x, dims, false), call.result())};
}

struct Moments {
  Value variance;
  Value mean;
};

// In float64, as eager accumulates: (sum (x - mean)^2) / max(0, n - correction). What the mean of float64 loses is added to it, so that equal
// numbers have no variance; that of narrower ones loses nothing then.
Moments moments(Builder& b, const Call& call) {
  Value input = call.tensor("self");
  DEPLO_SUPPORT(is_float(input.type.dtype), "variance of {}", to_string(input.type.dtype));
  Value x = b.cast(input, DType::f64);
  std::vector<int64_t> dims = dims_argument(call);
  bool keepdim = keepdim_argument(call);
  double correction = 1;
  if (call.op().ends_with(".correction")) {
    if (call.has("correction")) correction = call.number("correction").as_double();
  } else {
    correction = call.boolean("unbiased", true) ? 1 : 0;
  }
  Value center = mean_dims(b, x, dims, true);
  if (input.type.dtype == DType::f64) center = b.apply(Fn::add, {center, mean_dims(b, b.apply(Fn::sub, {x, center}), dims, true)});
  Value m2 = reduce_dims(b, Combiner::sum, square(b, b.apply(Fn::sub, {x, center})), dims, keepdim);
  Value count = size_value(b, DType::f64, reduced_count(x, dims));
  Value divisor = b.apply(Fn::max, b.apply(Fn::sub, count, correction), 0);
  return {b.apply(Fn::div, {m2, divisor}), mean_dims(b, x, dims, keepdim)};
}

std::vector<Value> var(Builder& b, const Call& call) { return {conform(b, moments(b, call).variance, call.result())}; }

std::vector<Value> std_deviation(Builder& b, const Call& call) { return {conform(b, b.apply(Fn::sqrt, {moments(b, call).variance}), call.result())}; }

std::vector<Value> var_mean(Builder& b, const Call& call) {
  Moments m = moments(b, call);
  return {conform(b, m.variance, call.result(0)), conform(b, m.mean, call.result(1))};
}

std::vector<Value> std_mean(Builder& b, const Call& call) {
  Moments m = moments(b, call);
  return {conform(b, b.apply(Fn::sqrt, {m.variance}), call.result(0)), conform(b, m.mean, call.result(1))};
}

std::vector<Value> logsumexp(Builder& b, const Call& call) {
  Value x = compute_as(b, call.tensor("self"), call.result().dtype);
  std::vector<int64_t> dims = dims_argument(call);
  bool keepdim = keepdim_argument(call);
  Value top = reduce_dims(b, Combiner::max, x, dims, true);
  // An infinite maximum must not become inf - inf.
  Value infinite = b.apply(Fn::eq, b.apply(Fn::abs, {top}), kInfinity);
  Value shift = b.apply(Fn::where, {infinite, constant_like(b, x, 0), top});
  Value total = reduce_dims(b, Combiner::sum, b.apply(Fn::exp, {b.apply(Fn::sub, {x, shift})}), dims, keepdim);
  Value log = b.apply(Fn::log, {total});
  return {conform(b, b.apply(Fn::add, {log, b.reshape(shift, log.type.shape)}), call.result())};
}

// (sum |x|^p)^(1/p) and its limits.
Value norm_of(Builder& b, const Value& x, double p, const std::vector<int64_t>& dims, bool keepdim) {
  auto reduce = [&](Combiner combiner, const Value& v) { return reduce_dims(b, combiner, v, dims, keepdim); };
  if (p == 0) return reduce(Combiner::sum, b.cast(b.apply(Fn::ne, x, 0), x.type.dtype));
  if (p == 2) return b.apply(Fn::sqrt, {reduce(Combiner::sum, square(b, x))});
  Value magnitude = b.apply(Fn::abs, {x});
  if (p == 1) return reduce(Combiner::sum, magnitude);
  if (p == kInfinity) return reduce(Combiner::max, magnitude);
  if (p == -kInfinity) return reduce(Combiner::min, magnitude);
  return b.apply(Fn::pow, reduce(Combiner::sum, b.apply(Fn::pow, magnitude, p)), 1 / p);
}

std::vector<Value> vector_norm(Builder& b, const Call& call) {
  call.ignore("dtype");
  Value x = compute_as(b, call.tensor("self"), call.result().dtype);
  double p = call.number("ord", 2).as_double();
  return {conform(b, norm_of(b, x, p, dims_argument(call), keepdim_argument(call)), call.result())};
}

// Every row of x1 against every row of x2.
std::vector<Value> pairwise_distance(Builder& b, const Value& x1, const Value& x2, double p, bool passes_over_nan) {
  DEPLO_SUPPORT(p != kInfinity || !x1.type.shape.back().is(0), "the largest of no differences");
  Value a = b.unsqueeze(as_compute(b, x1), -2);
  Value c = b.unsqueeze(as_compute(b, x2), -3);
  Value difference = b.apply(Fn::sub, {a, c});
  // As DistanceOpsKernel.cpp: NaN counts as NaN, and in the vectors of cdist it is never the largest.
  if (p == 0) return {reduce_dims(b, Combiner::sum, b.apply(Fn::min, b.apply(Fn::ceil, {b.apply(Fn::abs, {difference})}), 1), {-1}, false)};
  if (p == kInfinity && passes_over_nan)
    difference = b.apply(Fn::where, {b.apply(Fn::eq, {difference, difference}), difference, constant_like(b, difference, 0)});
  return {norm_of(b, difference, p, {-1}, false)};
}

std::vector<Value> cdist(Builder& b, const Call& call) {
  call.ignore("compute_mode");  // how eager computes p = 2
  return {conform(b, pairwise_distance(b, call.tensor("x1"), call.tensor("x2"), call.real("p", 2), true)[0], call.result())};
}

// The rows i < j of the square of distances, row after row: a scatter, since (i, j) does not follow linearly from the position.
std::vector<Value> pdist(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Expr n = x.type.shape.at(0);
  Expr count = call.result().shape.at(0);
  Value square = pairwise_distance(b, x, x, call.real("p", 2), false)[0];
  Value i = b.index(DType::i64, square.type.shape, axis(0));
  Value j = b.index(DType::i64, square.type.shape, axis(1));
  Value twice = b.apply(Fn::mul, {i, b.apply(Fn::sub, {size_value(b, DType::i64, n * 2 - 1), i})});
  Value place = b.apply(Fn::sub, b.apply(Fn::add, {b.apply(Fn::floor_div, twice, 2), b.apply(Fn::sub, {j, i})}), 1);
  place = b.apply(Fn::where, {b.apply(Fn::lt, {i, j}), place, size_value(b, DType::i64, count)});
  tensor_ir::Scatter scatter;
  scatter.combiner = Combiner::set;
  scatter.updates = square.name;
  scatter.axes = axis_names(2);
  scatter.indirects.push_back({"k", place.name, axes_from(0, 2), count + 1, true});
  scatter.index = {Expr::symbol("k")};
  Value packed = b.scatter(std::move(scatter), b.constant(square.type.dtype, {count + 1}, 0));
  return {conform(b, b.slice(packed, 0, 0, count, 1), call.result())};
}

std::vector<Value> norm(Builder& b, const Call& call) {
  call.ignore("dtype");
  Value x = compute_as(b, call.tensor("self"), call.result().dtype);
  double p = call.has("p") ? call.number("p").as_double() : 2;
  return {conform(b, norm_of(b, x, p, dims_argument(call), keepdim_argument(call)), call.result())};
}

std::vector<Value> trace(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  DEPLO_SUPPORT(rank_of(x) == 2, "trace of a tensor with {} dimensions", rank_of(x));
  Value diagonal = b.remap(x, {min(x.type.shape[0], x.type.shape[1])}, {axis(0), axis(0)});
  DEPLO_SUPPORT(call.result().dtype != DType::boolean, "arithmetic in bool");
  return {conform(b, reduce_dims(b, Combiner::sum, compute_as(b, diagonal, call.result().dtype), {}, false), call.result())};
}

}  // namespace

const std::vector<Row>& scan_rows();

const std::vector<Row>& reduction_rules() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten.sum.default", sum},
        {"aten.sum.dim_IntList", sum},
        {"aten.nansum.default", nansum},
        {"aten.mean.default", mean},
        {"aten.mean.dim", mean},
        {"aten.prod.default", prod},
        {"aten.prod.dim_int", prod},
        {"aten.amax.default", extreme<Combiner::max>},
        {"aten.amin.default", extreme<Combiner::min>},
        {"aten.max.default", extreme<Combiner::max>},
        {"aten.min.default", extreme<Combiner::min>},
        {"aten.aminmax.default", aminmax},
        {"aten.max.dim", extreme_dim<Combiner::argmax>},
        {"aten.min.dim", extreme_dim<Combiner::argmin>},
        {"aten.argmax.default", extreme_index<Combiner::argmax>},
        {"aten.argmin.default", extreme_index<Combiner::argmin>},
        {"aten.any.default", any_or_all<Combiner::max>},
        {"aten.any.dim", any_or_all<Combiner::max>},
        {"aten.any.dims", any_or_all<Combiner::max>},
        {"aten.all.default", any_or_all<Combiner::min>},
        {"aten.all.dim", any_or_all<Combiner::min>},
        {"aten.all.dims", any_or_all<Combiner::min>},
        {"aten.count_nonzero.default", count_nonzero},
        {"aten.count_nonzero.dim_IntList", count_nonzero},
        {"aten.var.default", var},
        {"aten.var.dim", var},
        {"aten.var.correction", var},
        {"aten.std.default", std_deviation},
        {"aten.std.dim", std_deviation},
        {"aten.std.correction", std_deviation},
        {"aten.var_mean.default", var_mean},
        {"aten.var_mean.dim", var_mean},
        {"aten.var_mean.correction", var_mean},
        {"aten.std_mean.default", std_mean},
        {"aten.std_mean.dim", std_mean},
        {"aten.std_mean.correction", std_mean},
        {"aten.logsumexp.default", logsumexp},
        {"aten._cdist_forward.default", cdist},
        {"aten._pdist_forward.default", pdist},
        {"aten.linalg_vector_norm.default", vector_norm},
        {"aten.norm.Scalar", norm},
        {"aten.norm.ScalarOpt_dim", norm},
        {"aten.norm.ScalarOpt_dim_dtype", norm},
        {"aten.norm.ScalarOpt_dtype", norm},
        {"aten.trace.default", trace},
    };
    all.insert(all.end(), scan_rows().begin(), scan_rows().end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
