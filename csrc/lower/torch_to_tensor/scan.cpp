#include <limits>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Running sums, products and extremes along one dimension.

namespace deplo::rules {
namespace {

template <Combiner combiner>
std::vector<Value> running(Builder& b, const Call& call) {
  call.ignore("dtype");
  TensorType type = call.result();
  DEPLO_SUPPORT(type.dtype != DType::boolean, "arithmetic in bool");
  Value x = compute_as(b, call.tensor("self"), type.dtype);
  int64_t dim = wrapped_dim(call.integer("dim"), rank_of(x));
  if (rank_of(x) == 0) return {conform(b, x, type)};
  // A running sum is one long chain: float64 keeps it as exact as eager's.
  if (is_float(type.dtype)) x = b.cast(x, DType::f64);
  return {conform(b, b.scan(combiner, {x}, dim)[0], type)};
}

// Eager's cummax and cummin let the last of equal values (and of NaNs) win: the positions run backwards.
template <Combiner combiner>
std::vector<Value> running_extreme(Builder& b, const Call& call) {
  Value input = call.tensor("self");
  Value x = input.type.dtype == DType::boolean ? b.cast(input, DType::u8) : as_compute(b, input);
  int64_t dim = wrapped_dim(call.integer("dim"), rank_of(x));
  if (rank_of(x) == 0) return {conform(b, x, call.result(0)), b.constant_int(DType::i64, {}, 0)};
  Value position = b.index(DType::i64, x.type.shape, Expr(0) - axis(dim));
  std::vector<Value> found = b.scan(combiner, {x, position}, dim);
  return {conform(b, found[0], call.result(0)), b.apply(Fn::neg, {found[1]})};
}

std::vector<Value> logcumsumexp(Builder& b, const Call& call) {
  TensorType type = call.result();
  DEPLO_SUPPORT(is_float(type.dtype), "logcumsumexp of {}", to_string(type.dtype));
  Value x = as_compute(b, call.tensor("self"));
  int64_t dim = wrapped_dim(call.integer("dim"), rank_of(x));
  if (rank_of(x) == 0) return {conform(b, x, type)};
  std::vector<Value> state = b.scan(Combiner::online_softmax, {b.cast(x, DType::f64)}, dim);
  Value value = b.apply(Fn::add, {state[0], b.apply(Fn::log, {state[1]})});
  Value infinite = b.apply(Fn::eq, b.apply(Fn::abs, {state[0]}), std::numeric_limits<double>::infinity());
  return {conform(b, b.apply(Fn::where, {infinite, state[0], value}), type)};
}

// deplo's own operator (deplo/faded.py): the sum over j <= t of exp(level[t] - level[j]) added[j], where levels never rise. Softmax's sums are
// relative to the largest number so far, which is -level[t].
std::vector<Value> faded_sum(Builder& b, const Call& call) {
  TensorType type = call.result();
  Value level = call.tensor("level");
  Value added = call.tensor("added");
  const int64_t dim = wrapped_dim(call.integer("dim"), rank_of(level));
  DEPLO_SUPPORT(level.type.dtype == DType::f64 && added.type.dtype == DType::f32, "levels of {} beside {}", to_string(level.type.dtype),
                to_string(added.type.dtype));
  Value heights = b.apply(Fn::neg, {level});
  return {conform(b, b.scan(Combiner::online_softmax, {heights, b.cast(added, DType::f64)}, dim)[1], type)};
}

}  // namespace

const std::vector<Row>& scan_rows() {
  static const std::vector<Row> rows = {
      {"aten.cumsum.default", running<Combiner::sum>},
      {"aten.cumprod.default", running<Combiner::prod>},
      {"aten.cummax.default", running_extreme<Combiner::argmax>},
      {"aten.cummin.default", running_extreme<Combiner::argmin>},
      {"aten.logcumsumexp.default", logcumsumexp},
      {"deplo.faded_sum.default", faded_sum},
  };
  return rows;
}

}  // namespace deplo::rules
