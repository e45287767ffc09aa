#include <limits>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// The few greatest (or least) elements along a dimension, as that many reductions: each finds the best of what those before it left.

namespace deplo::rules {
namespace {

constexpr int64_t kMostRounds = 16;
// A round is a pass over all elements; beyond these numbers ATen's partial sorting of one pass is faster.
constexpr int64_t kFewRounds = 4;
constexpr int64_t kFewElements = 512;

// Elements that are taken lie beyond all others: they have the worst value, and places past the end, which lose a tie. So does NaN where the least
// are wanted, but for it comes before them. What is found there is NaN at its own place.
struct Candidates {
  Value value;
  Value place;
};

std::vector<Value> topk(Builder& b, const Call& call) {
  Value input = call.tensor("self");
  Expr wanted = call.size("k");
  bool largest = call.boolean("largest", true);
  DEPLO_SUPPORT(call.boolean("sorted", true), "the order of topk(sorted=False) is ATen's");
  DEPLO_SUPPORT(wanted.is_constant() && wanted.value() >= 1 && wanted.value() <= kMostRounds, "topk of 1 to {} elements is generated, not of {}",
                kMostRounds, print(wanted));
  int64_t count = wanted.value();
  DEPLO_SUPPORT(input.type.dtype != DType::boolean, "topk of bool, which PyTorch refuses");
  bool scalar = rank_of(input) == 0;
  Value x = as_compute(b, scalar ? b.unsqueeze(input, 0) : input);
  int64_t dim = wrapped_dim(call.integer("dim", -1), rank_of(x));
  Expr extent = x.type.shape[dim];
  DEPLO_SUPPORT(provably_nonnegative(extent - count, b.known_sizes()), "the {} best of {} elements, which may be fewer", count, print(extent));
  DEPLO_SUPPORT(count <= kFewRounds || provably_nonnegative(Expr(kFewElements) - extent, b.known_sizes()),
                "topk of more than {} is generated for up to {} elements, not for {}", kFewRounds, kFewElements, print(extent));

  DType dtype = x.type.dtype;
  Combiner combiner = largest ? Combiner::argmax : Combiner::argmin;
  Value worst = b.constant(Shape{}, identity(combiner, dtype));
  Value number = b.index(DType::i64, x.type.shape, axis(dim));
  Value length = size_value(b, DType::i64, extent);
  Candidates left{x, number};
  bool has_nan = !largest && is_float(dtype);
  if (has_nan) {
    Value is_nan = b.apply(Fn::ne, {x, x});
    left.value = b.apply(Fn::where, {is_nan, worst, x});
    left.place = b.apply(Fn::where, {is_nan, b.apply(Fn::add, {number, length}), number});
  }
  Value taken = b.index(DType::i64, x.type.shape, axis(dim) + extent * 2);
  std::vector<Value> values;
  std::vector<Value> places;
  for (int64_t round = 0; round < count; ++round) {
    std::vector<Value> found = b.reduce_many(combiner, {left.value, left.place}, {dim}, true);
    Value value = found[0];
    Value place = found[1];
    if (round + 1 < count) {
      Value is_it = b.apply(Fn::eq, {left.place, place});
      left.value = b.apply(Fn::where, {is_it, worst, left.value});
      left.place = b.apply(Fn::where, {is_it, taken, left.place});
    }
    if (has_nan) {
      Value is_nan = b.apply(Fn::ge, {place, length});
      value = b.apply(Fn::where, {is_nan, constant_like(b, value, std::numeric_limits<double>::quiet_NaN()), value});
      place = b.apply(Fn::where, {is_nan, b.apply(Fn::sub, {place, length}), place});
    }
    values.push_back(value);
    places.push_back(place);
  }
  auto joined = [&](const std::vector<Value>& parts, int result) {
    Value all = parts.size() == 1 ? parts[0] : b.concatenate(parts, dim);
    return conform(b, scalar ? b.squeeze(all, 0) : all, call.result(result));
  };
  return {joined(values, 0), joined(places, 1)};
}

}  // namespace

const std::vector<Row>& topk_rows() {
  static const std::vector<Row> rows = {{"aten.topk.default", topk}};
  return rows;
}

}  // namespace deplo::rules
