#include <limits>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"
#include "lower/torch_to_tensor/formula.h"

// Gradients of distances between rows (DistanceOpsKernel.cpp): each pair's share points along their difference.

namespace deplo::rules {
namespace {

// d distance / d (first row), times the incoming gradient; 0 where the rows are equal.
Formula share(const Formula& difference, const Formula& distance, const Formula& grad, double p) {
  Formula zero = difference.literal(0);
  Formula one = difference.literal(1);
  Formula sign = select(greater(difference, 0), one, select(less(difference, 0), -one, difference));  // NaN stays
  Formula size = difference.with(Fn::abs);
  Formula apart = distance.with(Fn::ne, distance.literal(0));
  if (p == 1) return grad * sign;
  if (p == 2) return select(apart, grad * difference / distance, zero);
  if (p == std::numeric_limits<double>::infinity()) {
    Formula gap = (size - distance).with(Fn::abs);
    return grad * sign * (one - min(gap.with(Fn::ceil), 1));
  }
  Formula scale = distance.with(Fn::pow, distance.literal(p - 1));
  if (p > 2) return select(apart, difference * size.with(Fn::pow, size.literal(p - 2)) * grad / scale, zero);
  Formula value = sign * size.with(Fn::pow, size.literal(p - 1)) * grad / scale;
  if (p < 1) apart = both(apart, difference.with(Fn::ne, zero));
  return select(apart, value, zero);
}

// The sum over the pairs of each row of `first` with the rows of `second`; `grad` and `distance` have a place for each pair.
// Where `left_out` holds the pair has no part.
Value summed(Builder& b, const Value& first, const Value& second, const Value& grad, const Value& distance, double p,
             const Value* left_out = nullptr) {
  Value difference = b.apply(Fn::sub, {b.unsqueeze(first, -2), b.unsqueeze(second, -3)});
  if (left_out) difference = b.apply(Fn::where, {b.unsqueeze(*left_out, -1), b.constant(difference.type.dtype, {}, 0), difference});
  const Shape& shape = difference.type.shape;
  auto over = [&](const Value& v) { return Formula{&b, b.broadcast(b.unsqueeze(v, -1), shape)}; };
  return b.reduce(Combiner::sum, share({&b, difference}, over(distance), over(grad), p).value, {-2}, false);
}

std::vector<Value> cdist_backward(Builder& b, const Call& call) {
  double p = call.real("p");
  Value x = as_compute(b, call.tensor("x1"));
  DType dtype = x.type.dtype;
  Value other = b.cast(call.tensor("x2"), dtype);
  Value grad = b.cast(call.tensor("grad"), dtype);
  Value distance = b.cast(call.tensor("cdist"), dtype);
  TensorType type = call.result();
  // Without pairs PyTorch does not broadcast the rows, either.
  if (p == 0 || product(grad.type.shape).is(0)) return {b.constant(type.dtype, type.shape, 0)};
  return finish(b, call, summed(b, x, other, grad, distance, p));
}

// v holds the pairs i < j, row after row: v at (i, j) and (j, i) of the square.
Value squared(Builder& b, const Value& v, Expr n) {
  Shape shape = {n, n};
  Value i = b.index(DType::i64, shape, min(axis(0), axis(1)));
  Value j = b.index(DType::i64, shape, max(axis(0), axis(1)));
  auto whole = [&](int64_t k) { return b.constant_int(DType::i64, {}, k); };
  Value twice = b.apply(Fn::mul, {i, b.apply(Fn::sub, {b.index(DType::i64, {}, n * 2 - 1), i})});
  Value place = b.apply(Fn::sub, {b.apply(Fn::add, {b.apply(Fn::floor_div, {twice, whole(2)}), b.apply(Fn::sub, {j, i})}), whole(1)});
  place = b.apply(Fn::where, {b.apply(Fn::eq, {i, j}), whole(0), place});  // never used: the difference is 0
  tensor_ir::IndexMap map;
  map.axes = {axis(0).name(), axis(1).name()};
  map.indirects.push_back({"k", place.name, {axis(0), axis(1)}, v.type.shape.at(0), false});
  map.sources.push_back({v.name, {Expr::symbol("k")}, {}});
  map.fill.dtype = v.type.dtype;
  return b.map({v.type.dtype, shape}, std::move(map));
}

std::vector<Value> pdist_backward(Builder& b, const Call& call) {
  double p = call.real("p");
  Value x = as_compute(b, call.tensor("self"));
  DType dtype = x.type.dtype;
  Value grad = b.cast(call.tensor("grad"), dtype);
  Value distance = b.cast(call.tensor("pdist"), dtype);
  DEPLO_SUPPORT(rank_of(x) == 2, "pdist of {} dimensions", rank_of(x));
  TensorType type = call.result();
  if (p == 0 || grad.type.shape.at(0).is(0)) return {b.constant(type.dtype, type.shape, 0)};
  Expr n = x.type.shape[0];
  Value pairs = squared(b, distance, n);
  // Rows stand opposite to themselves at no distance.
  Value same = b.apply(Fn::eq, {b.index(DType::i64, {n, n}, axis(0)), b.index(DType::i64, {n, n}, axis(1))});
  pairs = b.apply(Fn::where, {same, b.constant(dtype, {}, 0), pairs});
  return finish(b, call, summed(b, x, x, squared(b, grad, n), pairs, p, &same));
}

}  // namespace

const std::vector<Row>& distance_backward_rows() {
  static const std::vector<Row> rows = {
      {"aten._cdist_backward.default", cdist_backward},
      {"aten._pdist_backward.default", pdist_backward},
  };
  return rows;
}

}  // namespace deplo::rules
