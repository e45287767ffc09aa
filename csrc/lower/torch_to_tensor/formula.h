#pragma once

#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {

/// A value that arithmetic operators extend with ops of its builder, so that rules read as the formulas they stand for.
/// A literal takes the dtype of the value beside it; operands broadcast.
struct Formula {
  Builder* b;
  Value value;

  Formula with(Fn fn) const { return {b, b->apply(fn, {value})}; }
  Formula with(Fn fn, const Formula& y) const { return {b, b->apply(fn, {value, y.value})}; }
  Formula literal(double x) const { return {b, b->constant(value.type.dtype, value.type.shape, x)}; }
};

inline Formula operator+(const Formula& x, const Formula& y) { return x.with(Fn::add, y); }
inline Formula operator-(const Formula& x, const Formula& y) { return x.with(Fn::sub, y); }
inline Formula operator*(const Formula& x, const Formula& y) { return x.with(Fn::mul, y); }
inline Formula operator/(const Formula& x, const Formula& y) { return x.with(Fn::div, y); }
inline Formula operator+(const Formula& x, double y) { return x + x.literal(y); }
inline Formula operator-(const Formula& x, double y) { return x - x.literal(y); }
inline Formula operator*(const Formula& x, double y) { return x * x.literal(y); }
inline Formula operator/(const Formula& x, double y) { return x / x.literal(y); }
inline Formula operator+(double x, const Formula& y) { return y.literal(x) + y; }
inline Formula operator-(double x, const Formula& y) { return y.literal(x) - y; }
inline Formula operator*(double x, const Formula& y) { return y.literal(x) * y; }
inline Formula operator/(double x, const Formula& y) { return y.literal(x) / y; }
inline Formula operator-(const Formula& x) { return x.with(Fn::neg); }

/// x y + z, rounded once.
inline Formula fma(const Formula& x, const Formula& y, const Formula& z) { return {x.b, x.b->apply(Fn::fma, {x.value, y.value, z.value})}; }
/// c0 + c1 x + c2 x^2 + ... by Horner's rule.
inline Formula polynomial(const Formula& x, const std::vector<double>& c) {
  Formula sum = x.literal(c.back());
  for (size_t i = c.size() - 1; i-- > 0;) sum = fma(sum, x, x.literal(c[i]));
  return sum;
}

inline Formula greater(const Formula& x, const Formula& y) { return x.with(Fn::gt, y); }
inline Formula greater(const Formula& x, double y) { return x.with(Fn::gt, x.literal(y)); }
inline Formula less(const Formula& x, double y) { return x.with(Fn::lt, x.literal(y)); }
inline Formula less_equal(const Formula& x, double y) { return x.with(Fn::le, x.literal(y)); }
inline Formula equals(const Formula& x, double y) { return x.with(Fn::eq, x.literal(y)); }
inline Formula is_nan(const Formula& x) { return x.with(Fn::ne, x); }
inline Formula both(const Formula& x, const Formula& y) { return x.with(Fn::bit_and, y); }
// The bound comes first: of zeros of either sign x's is kept, as in eager, and only x can be NaN.
inline Formula min(const Formula& x, double y) { return x.literal(y).with(Fn::min, x); }
inline Formula max(const Formula& x, double y) { return x.literal(y).with(Fn::max, x); }
/// x kept within [lo, hi]; NaN stays.
inline Formula clamp(const Formula& x, double lo, double hi) { return min(max(x, lo), hi); }
inline Formula select(const Formula& condition, const Formula& x, const Formula& y) {
  return {x.b, x.b->apply(Fn::where, {condition.value, x.value, y.value})};
}

/// The type in which the result of a call is computed.
inline DType compute_dtype(const Call& call) { return compute_type(call.result().dtype); }
/// The value rounded and broadcast to the call's result.
inline std::vector<Value> finish(Builder& b, const Call& call, const Value& v) {
  return {b.broadcast(b.cast(v, call.result().dtype), call.result().shape)};
}

}  // namespace deplo::rules
