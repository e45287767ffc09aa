#include "lower/torch_to_tensor/pointwise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "base/error.h"
#include "lower/torch_to_tensor/formula.h"

namespace deplo::rules {
namespace {

using Values = std::vector<Value>;

// Functions of one float; integers are promoted to the result's dtype.
template <Fn fn>
Values unary(Builder& b, const Call& call) {
  return finish(b, call, b.apply(fn, {operand(b, call, "self", compute_dtype(call))}));
}

// Rounding functions leave integers as they are.
template <Fn fn>
Values rounding(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  return is_float(x.type.dtype) ? unary<fn>(b, call) : Values{x};
}

template <Fn fn>
Values binary(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  return finish(b, call, b.apply(fn, {operand(b, call, "self", dtype), operand(b, call, "other", dtype)}));
}

// Of 16 bits: the next one of the integers that their bits are. From a zero it is the least number, with y's sign.
Values next_after(Builder& b, const Call& call) {
  const DType dtype = call.result().dtype;
  if (size_of(dtype) != 2) return binary<Fn::nextafter>(b, call);
  const Shape& shape = call.result().shape;
  const Formula from{&b, b.broadcast(operand(b, call, "self", dtype), shape)};
  const Formula x{&b, b.cast(from.value, compute_type(dtype))};
  const Formula y{&b, b.broadcast(operand(b, call, "other", compute_type(dtype)), shape)};
  const Formula bits{&b, b.bitcast(from.value, DType::i16)};
  const Formula away = x.with(Fn::lt, y).with(Fn::eq, greater(x, 0));
  const Formula next = select(away, bits + 1.0, bits - 1.0);
  const Formula least = select(greater(y, 0), bits.literal(1), bits.literal(-32767));
  const Formula moved{&b, b.cast(b.bitcast(select(equals(x, 0), least, next).value, dtype), compute_type(dtype))};
  return finish(b, call, select(x.with(Fn::eq, y), y, select(is_nan(x), x, select(is_nan(y), y, moved))).value);
}

// The second operand of a product or quotient: one element keeps its digits (BinaryOpsKernel.cpp, mul_kernel), where all else is rounded to 16 bits
// first.
Value factor(Builder& b, const Call& call, DType dtype) {
  if (!call.is_tensor("other")) return operand(b, call, "other", dtype);
  Value v = call.tensor("other");
  bool one = std::all_of(v.type.shape.begin(), v.type.shape.end(), [](const Expr& size) { return size.is(1); });
  return one ? b.cast(v, dtype) : operand(b, call, "other", dtype);
}

template <Fn fn>
Values product(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  return finish(b, call, b.apply(fn, {operand(b, call, "self", dtype), factor(b, call, dtype)}));
}

// For bool, sum is `or` and product is `and`.
Value add_values(Builder& b, const Value& x, const Value& y) { return b.apply(x.type.dtype == DType::boolean ? Fn::bit_or : Fn::add, {x, y}); }
Value mul_values(Builder& b, const Value& x, const Value& y) { return b.apply(x.type.dtype == DType::boolean ? Fn::bit_and : Fn::mul, {x, y}); }

bool is_one(const Call& call, std::string_view name) { return !call.is_symbolic(name) && call.number(name, 1.0).as_double() == 1.0; }

Value scaled_by(Builder& b, const Call& call, const Value& x, std::string_view name) {
  if (is_one(call, name)) return x;
  bool whole = call.is_symbolic(name) || !is_float(call.number(name, 1.0).dtype);
  if (!is_float(x.type.dtype)) require_fit(call, name, x.type.dtype);
  DEPLO_SUPPORT(is_float(x.type.dtype) || whole, "a float {} for {}", name, to_string(x.type.dtype));
  return mul_values(b, x, scalar_operand(b, call, name, x.type.dtype));
}

// x + alpha * y, or x - alpha * y. Of floats it is rounded once, as in eager's vectors of float32 and float64.
Value add_scaled(Builder& b, const Call& call, const Value& x, const Value& y, bool minus) {
  const bool truth = call.has("alpha") && !call.is_symbolic("alpha") && call.number("alpha").dtype == DType::boolean;
  DEPLO_SUPPORT(!truth || x.type.dtype == DType::boolean, "a bool alpha for {}", to_string(x.type.dtype));
  if (is_float(x.type.dtype) && !is_one(call, "alpha")) {
    require_fit(call, "alpha", call.result().dtype);
    Value alpha = scalar_operand(b, call, "alpha", x.type.dtype);
    return b.apply(Fn::fma, {y, minus ? b.apply(Fn::neg, {alpha}) : alpha, x});
  }
  Value scaled = scaled_by(b, call, y, "alpha");
  return minus ? b.apply(Fn::sub, {x, scaled}) : add_values(b, x, scaled);
}

Values add(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  return finish(b, call, add_scaled(b, call, operand(b, call, "self", dtype), operand(b, call, "other", dtype), false));
}

Values subtract(Builder& b, const Call& call, std::string_view from, std::string_view what) {
  DType dtype = compute_dtype(call);
  DEPLO_SUPPORT(dtype != DType::boolean, "subtraction of bool");
  return finish(b, call, add_scaled(b, call, operand(b, call, from, dtype), operand(b, call, what, dtype), true));
}

Values sub(Builder& b, const Call& call) { return subtract(b, call, "self", "other"); }
Values rsub(Builder& b, const Call& call) { return subtract(b, call, "other", "self"); }

Values mul(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  return finish(b, call, mul_values(b, operand(b, call, "self", dtype), factor(b, call, dtype)));
}

// BinaryOps.h, div_floor_floating: a quotient that is exact stays exact, signs of zero included.
Formula floor_quotient(const Formula& x, const Formula& y) {
  Formula rest = x.with(Fn::fmod, y);
  Formula quotient = (x - rest) / y;
  Formula zero = x.literal(0);
  Formula opposite = less(y, 0).with(Fn::ne, less(rest, 0));
  quotient = select(both(rest.with(Fn::ne, zero), opposite), quotient - 1.0, quotient);
  Formula floored = quotient.with(Fn::floor);
  floored = select(greater(quotient - floored, 0.5), floored + 1.0, floored);
  Formula exact = x / y;
  Formula signed_zero = zero.with(Fn::copysign, exact);
  Formula result = select(quotient.with(Fn::ne, zero), floored, signed_zero);
  return select(equals(y, 0), exact, result);
}

Values floor_divide_values(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  Value x = operand(b, call, "self", dtype);
  Value y = factor(b, call, dtype);
  if (!is_float(dtype)) return finish(b, call, b.apply(Fn::floor_div, {x, y}));
  Shape shape = b.common_shape(x.type.shape, y.type.shape);
  return finish(b, call, floor_quotient({&b, b.broadcast(x, shape)}, {&b, b.broadcast(y, shape)}).value);
}

Values div(Builder& b, const Call& call) {
  std::string mode = call.word("rounding_mode", "");
  if (mode == "floor") return floor_divide_values(b, call);
  if (mode.empty()) return product<Fn::div>(b, call);
  DEPLO_SUPPORT(mode == "trunc", "rounding mode {}", mode);
  DType dtype = compute_dtype(call);
  if (!is_float(dtype)) return product<Fn::trunc_div>(b, call);
  return finish(b, call, b.apply(Fn::trunc, {b.apply(Fn::div, {operand(b, call, "self", dtype), factor(b, call, dtype)})}));
}

// Comparisons happen in the common dtype, where a number operand is rounded as eager rounds it.
template <Fn fn>
Values comparison(Builder& b, const Call& call) {
  DType dtype = common_dtype(call, {"self", "other"});
  require_fit(call, "other", dtype);
  return finish(b, call, b.apply(fn, {operand(b, call, "self", dtype), operand(b, call, "other", dtype)}));
}

template <Fn fn>
Values logical(Builder& b, const Call& call) {
  return finish(b, call, b.apply(fn, {b.cast(call.tensor("self"), DType::boolean), b.cast(call.tensor("other"), DType::boolean)}));
}

Values logical_not(Builder& b, const Call& call) { return finish(b, call, b.apply(Fn::bit_not, {b.cast(call.tensor("self"), DType::boolean)})); }

// fmax and fmin prefer the operand that is a number.
template <Fn fn>
Values number_extreme(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  Formula x{&b, operand(b, call, "self", dtype)};
  Formula y{&b, operand(b, call, "other", dtype)};
  if (!is_float(dtype)) return finish(b, call, x.with(fn, y).value);
  return finish(b, call, select(is_nan(x), y, select(is_nan(y), x, x.with(fn, y))).value);
}

// The bounds may be missing, numbers or tensors.
Value bounded(Builder& b, const Call& call, Value x, Fn fn, std::string_view name) {
  if (!call.has(name)) return call.ignore(name), x;
  require_fit(call, name, call.result().dtype);
  return b.apply(fn, {operand(b, call, name, x.type.dtype), x});  // of zeros of either sign x's is kept
}

Values clamp_values(Builder& b, const Call& call) {
  Value x = operand(b, call, "self", compute_dtype(call));
  x = bounded(b, call, x, Fn::max, "min");
  return finish(b, call, bounded(b, call, x, Fn::min, "max"));
}

Values where(Builder& b, const Call& call) {
  Value condition = call.tensor("condition");
  DEPLO_SUPPORT(condition.type.dtype == DType::boolean, "a condition of dtype {}", to_string(condition.type.dtype));
  DType dtype = call.result().dtype;
  return finish(b, call, b.apply(Fn::where, {condition, operand(b, call, "self", dtype), operand(b, call, "other", dtype)}));
}

Values masked_fill(Builder& b, const Call& call) {
  DType dtype = call.result().dtype;
  Value mask = call.tensor("mask");
  DEPLO_SUPPORT(mask.type.dtype == DType::boolean, "a mask of dtype {}", to_string(mask.type.dtype));
  Value value = call.is_tensor("value") ? b.cast(call.tensor("value"), dtype) : checked_scalar(b, call, "value", dtype);
  return finish(b, call, b.apply(Fn::where, {mask, value, b.cast(call.tensor("self"), dtype)}));
}

Values to_copy(Builder& b, const Call& call) {
  call.dtype("dtype");
  return finish(b, call, call.tensor("self"));
}

// Pow.h, pow_tensor_scalar_optimized_kernel: the exponents that eager computes by other means.
Value float_power(Builder& b, const Value& base, double exponent) {
  Formula x{&b, base};
  if (exponent == 0) return x.literal(1).value;
  if (exponent == 1) return base;
  if (exponent == 0.5) return x.with(Fn::sqrt).value;
  if (exponent == 2) return (x * x).value;
  if (exponent == 3) return (x * x * x).value;
  if (exponent == -0.5) return (1.0 / x.with(Fn::sqrt)).value;
  if (exponent == -1) return (1.0 / x).value;
  if (exponent == -2) return (1.0 / (x * x)).value;
  return x.with(Fn::pow, x.literal(exponent)).value;
}

Values pow_scalar(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  Value x = b.cast(call.tensor("self"), dtype);
  if (call.is_symbolic("exponent")) {
    DEPLO_SUPPORT(is_float(dtype), "an integer to a symbolic power");
    return finish(b, call, b.apply(Fn::pow, {x, scalar_operand(b, call, "exponent", dtype)}));
  }
  Scalar exponent = call.number("exponent");
  if (size_of(call.result().dtype) == 2) require_fit(call, "exponent", call.result().dtype);
  if (is_float(dtype)) return finish(b, call, float_power(b, x, exponent.as_double()));
  DEPLO_SUPPORT(dtype != DType::boolean, "powers of bool");
  DEPLO_SUPPORT(!is_float(exponent.dtype) && exponent.i >= 0, "an integer to the power {}", exponent.as_double());
  require_fit(call, "exponent", dtype);
  return finish(b, call, b.apply(Fn::pow, {x, b.constant_int(dtype, {}, exponent.i)}));
}

Values pow_tensors(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  DEPLO_SUPPORT(dtype != DType::boolean, "powers of bool");
  return finish(b, call, b.apply(Fn::pow, {operand(b, call, "self", dtype), operand(b, call, "exponent", dtype)}));
}

Values lerp(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  Formula start{&b, operand(b, call, "self", dtype)};
  Formula end{&b, operand(b, call, "end", dtype)};
  Formula difference = end - start;
  if (!call.is_tensor("weight")) {
    double w = call.real("weight");
    // Lerp.h: the form whose error vanishes at the nearer end.
    Formula result = std::fabs(w) < 0.5 ? start + difference * w : end - difference * (1.0 - w);
    return finish(b, call, result.value);
  }
  Formula w{&b, operand(b, call, "weight", dtype)};
  Shape shape = b.common_shape(w.value.type.shape, difference.value.type.shape);
  w.value = b.broadcast(w.value, shape);
  Formula near_start = start + w * difference;
  Formula near_end = end - difference * (1.0 - w);
  return finish(b, call, select(less(w.with(Fn::abs), 0.5), near_start, near_end).value);
}

template <bool divides>
Values add_product(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  DEPLO_SUPPORT(!divides || is_float(dtype), "addcdiv of {}", to_string(dtype));
  Value x = operand(b, call, "tensor1", dtype);
  Value y = operand(b, call, "tensor2", dtype);
  Value product = b.apply(divides ? Fn::div : Fn::mul, {scaled_by(b, call, x, "value"), y});
  return finish(b, call, b.apply(Fn::add, {operand(b, call, "self", dtype), product}));
}

Values multiply_add(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  DEPLO_SUPPORT(is_float(dtype), "fma of {}", to_string(dtype));
  return finish(b, call, b.apply(Fn::fma, {operand(b, call, "a", dtype), operand(b, call, "b", dtype), operand(b, call, "c", dtype)}));
}

Values is_nan_values(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  if (!is_float(x.type.dtype)) return {b.constant(DType::boolean, x.type.shape, 0)};
  return {b.apply(Fn::ne, {x, x})};
}

// Equal to an infinity: either, the positive or the negative one.
template <int sign>
Values is_infinite(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  if (!is_float(x.type.dtype)) return {b.constant(DType::boolean, x.type.shape, 0)};
  Formula magnitude{&b, sign == 0 ? b.apply(Fn::abs, {x}) : x};
  double infinity = std::numeric_limits<double>::infinity();
  return {equals(magnitude, sign < 0 ? -infinity : infinity).value};
}

// The largest finite value of a float dtype.
double largest(DType dtype) {
  switch (dtype) {
    case DType::f16: return 65504.0;
    case DType::bf16: return 0x1.fep127;
    case DType::f32: return std::numeric_limits<float>::max();
    default: return std::numeric_limits<double>::max();
  }
}

Values nan_to_num(Builder& b, const Call& call) {
  Value v = call.tensor("self");
  double nan = call.real("nan", 0.0);
  double high = call.real("posinf", largest(v.type.dtype));
  double low = call.real("neginf", -largest(v.type.dtype));
  if (!is_float(v.type.dtype)) return {v};
  Formula x{&b, v};
  double infinity = std::numeric_limits<double>::infinity();
  Formula bounded = select(equals(x, infinity), x.literal(high), select(equals(x, -infinity), x.literal(low), x));
  return finish(b, call, select(is_nan(x), x.literal(nan), bounded).value);
}

// The difference of two comparisons: 0 for NaN, as in eager.
Values sign(Builder& b, const Call& call) {
  Value v = call.tensor("self");
  if (v.type.dtype == DType::boolean) return {v};
  Formula x{&b, v};
  Value positive = b.cast(greater(x, 0).value, v.type.dtype);
  Value negative = b.cast(less(x, 0).value, v.type.dtype);
  return finish(b, call, b.apply(Fn::sub, {positive, negative}));
}

// UnaryOpsKernel.cpp, round_decimals_kernel.
Values round_decimals(Builder& b, const Call& call) {
  Value v = call.tensor("self");
  int64_t decimals = call.integer("decimals");
  DEPLO_SUPPORT(is_float(v.type.dtype), "decimals of {}", to_string(v.type.dtype));
  if (decimals == 0) return finish(b, call, b.apply(Fn::round, {v}));
  Formula x{&b, b.cast(v, compute_dtype(call))};
  double power = std::pow(10.0, static_cast<double>(std::abs(decimals)));
  Formula result = decimals > 0 ? (x * power).with(Fn::round) / power : (x / power).with(Fn::round) * power;
  return finish(b, call, result.value);
}

// Of a real number: 0 or pi.
Values angle(Builder& b, const Call& call) {
  Formula x{&b, operand(b, call, "self", compute_dtype(call))};
  return finish(b, call, select(is_nan(x), x, select(less(x, 0), x.literal(std::numbers::pi), x.literal(0))).value);
}

Values sign_bit(Builder& b, const Call& call) {
  Value v = call.tensor("self");
  if (v.type.dtype == DType::boolean) return {b.constant(DType::boolean, v.type.shape, 0)};
  return {b.apply(Fn::signbit, {v})};
}

Values heaviside(Builder& b, const Call& call) {
  Formula x{&b, call.tensor("self")};
  Formula y{&b, call.tensor("values")};
  DEPLO_SUPPORT(x.value.type.dtype != DType::boolean, "heaviside of bool");
  DEPLO_SUPPORT(x.value.type.dtype == y.value.type.dtype, "heaviside of {} and {}", to_string(x.value.type.dtype), to_string(y.value.type.dtype));
  Formula step{&b, b.cast(greater(x, 0).value, x.value.type.dtype)};
  return finish(b, call, select(equals(x, 0), y, step).value);
}

Values copysign(Builder& b, const Call& call) { return binary<Fn::copysign>(b, call); }

template <Fn fn>
Values remainder(Builder& b, const Call& call) {
  DEPLO_SUPPORT(call.result().dtype != DType::boolean, "remainders of bool");
  return binary<fn>(b, call);
}

Values negate(Builder& b, const Call& call) { return unary<Fn::neg>(b, call); }

}  // namespace

// A finite number that becomes infinite or wraps does not fit.
bool fits(const Scalar& number, DType dtype) {
  if (is_float(dtype)) {
    double value = number.as_double();
    return !std::isfinite(value) || std::fabs(value) <= largest(dtype);
  }
  if (dtype == DType::boolean) return true;
  if (is_float(number.dtype)) {
    if (!std::isfinite(number.f) || std::fabs(number.f) >= 0x1p63 || (dtype == DType::u8 && number.f < 0)) return false;
    return fits(Scalar::of_int(DType::i64, static_cast<int64_t>(number.f)), dtype);
  }
  if (dtype == DType::u8 && number.i < 0 && number.i >= -255) return true;  // c10::overflows lets small negatives wrap, but of floats
  return Scalar::of_int(dtype, number.i).i == number.i;
}

void require_fit(const Call& call, std::string_view name, DType dtype) {
  if (!call.has(name) || call.is_symbolic(name) || call.is_tensor(name)) return;
  Scalar number = call.number(name);
  DEPLO_SUPPORT(fits(number, dtype), "{} does not hold {}", to_string(dtype), number.as_double());
}

Value checked_scalar(Builder& b, const Call& call, std::string_view name, DType dtype) {
  require_fit(call, name, dtype);
  return operand(b, call, name, dtype);
}

const std::vector<Row>& pointwise_rules() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all{
        {"aten.__lshift__.Scalar", binary<Fn::shl>},
        {"aten.__lshift__.Tensor", binary<Fn::shl>},
        {"aten.__rshift__.Scalar", binary<Fn::shr>},
        {"aten.__rshift__.Tensor", binary<Fn::shr>},
        {"aten.abs.default",
         [](Builder& b, const Call& call) {
           Value x = call.tensor("self");
           return x.type.dtype == DType::boolean ? Values{x} : unary<Fn::abs>(b, call);
         }},
        {"aten.acos.default", unary<Fn::acos>},
        {"aten.acosh.default", unary<Fn::acosh>},
        {"aten.add.Scalar", add},
        {"aten.add.Tensor", add},
        {"aten.addcdiv.default", add_product<true>},
        {"aten.addcmul.default", add_product<false>},
        {"aten.angle.default", angle},
        {"aten.asin.default", unary<Fn::asin>},
        {"aten.asinh.default", unary<Fn::asinh>},
        {"aten.atan.default", unary<Fn::atan>},
        {"aten.atan2.default", binary<Fn::atan2>},
        {"aten.atanh.default", unary<Fn::atanh>},
        {"aten.bitwise_and.Scalar", binary<Fn::bit_and>},
        {"aten.bitwise_and.Scalar_Tensor", binary<Fn::bit_and>},
        {"aten.bitwise_and.Tensor", binary<Fn::bit_and>},
        {"aten.bitwise_left_shift.Tensor", binary<Fn::shl>},
        {"aten.bitwise_left_shift.Tensor_Scalar", binary<Fn::shl>},
        {"aten.bitwise_not.default", unary<Fn::bit_not>},
        {"aten.bitwise_or.Scalar", binary<Fn::bit_or>},
        {"aten.bitwise_or.Scalar_Tensor", binary<Fn::bit_or>},
        {"aten.bitwise_or.Tensor", binary<Fn::bit_or>},
        {"aten.bitwise_right_shift.Tensor", binary<Fn::shr>},
        {"aten.bitwise_right_shift.Tensor_Scalar", binary<Fn::shr>},
        {"aten.bitwise_xor.Scalar", binary<Fn::bit_xor>},
        {"aten.bitwise_xor.Scalar_Tensor", binary<Fn::bit_xor>},
        {"aten.bitwise_xor.Tensor", binary<Fn::bit_xor>},
        {"aten.ceil.default", rounding<Fn::ceil>},
        {"aten.clamp.Tensor", clamp_values},
        {"aten.clamp.default", clamp_values},
        {"aten.clamp_max.Tensor", clamp_values},
        {"aten.clamp_max.default", clamp_values},
        {"aten.clamp_min.Tensor", clamp_values},
        {"aten.clamp_min.default", clamp_values},
        {"aten.copysign.Scalar", copysign},
        {"aten.copysign.Tensor", copysign},
        {"aten.cos.default", unary<Fn::cos>},
        {"aten.cosh.default", unary<Fn::cosh>},
        {"aten.digamma.default", unary<Fn::digamma>},
        {"aten.div.Scalar", div},
        {"aten.div.Scalar_mode", div},
        {"aten.div.Tensor", div},
        {"aten.div.Tensor_mode", div},
        {"aten.eq.Scalar", comparison<Fn::eq>},
        {"aten.eq.Tensor", comparison<Fn::eq>},
        {"aten.erf.default", unary<Fn::erf>},
        {"aten.erfc.default", unary<Fn::erfc>},
        {"aten.erfinv.default", unary<Fn::erfinv>},
        {"aten.exp.default", unary<Fn::exp>},
        {"aten.exp2.default", unary<Fn::exp2>},
        {"aten.expm1.default", unary<Fn::expm1>},
        {"aten.floor.default", rounding<Fn::floor>},
        {"aten.floor_divide.default", floor_divide_values},
        {"aten.fmax.default", number_extreme<Fn::max>},
        {"aten.fmin.default", number_extreme<Fn::min>},
        {"aten.fmod.Scalar", remainder<Fn::fmod>},
        {"aten.fmod.Tensor", remainder<Fn::fmod>},
        {"aten.ge.Scalar", comparison<Fn::ge>},
        {"aten.ge.Tensor", comparison<Fn::ge>},
        {"aten.gt.Scalar", comparison<Fn::gt>},
        {"aten.gt.Tensor", comparison<Fn::gt>},
        {"aten.heaviside.default", heaviside},
        {"aten.hypot.default", binary<Fn::hypot>},
        {"aten.isinf.default", is_infinite<0>},
        {"aten.isnan.default", is_nan_values},
        {"aten.isneginf.default", is_infinite<-1>},
        {"aten.isposinf.default", is_infinite<1>},
        {"aten.le.Scalar", comparison<Fn::le>},
        {"aten.le.Tensor", comparison<Fn::le>},
        {"aten.lerp.Scalar", lerp},
        {"aten.lerp.Tensor", lerp},
        {"aten.lgamma.default", unary<Fn::lgamma>},
        {"aten.log.default", unary<Fn::log>},
        {"aten.log10.default", unary<Fn::log10>},
        {"aten.log1p.default", unary<Fn::log1p>},
        {"aten.log2.default", unary<Fn::log2>},
        {"aten.logaddexp.default", binary<Fn::logaddexp>},
        {"aten.logaddexp2.default", binary<Fn::logaddexp2>},
        {"aten.logical_and.default", logical<Fn::bit_and>},
        {"aten.logical_not.default", logical_not},
        {"aten.logical_or.default", logical<Fn::bit_or>},
        {"aten.logical_xor.default", logical<Fn::bit_xor>},
        {"aten.lt.Scalar", comparison<Fn::lt>},
        {"aten.lt.Tensor", comparison<Fn::lt>},
        {"aten.masked_fill.Scalar", masked_fill},
        {"aten.masked_fill.Tensor", masked_fill},
        {"aten.maximum.default", binary<Fn::max>},
        {"aten.minimum.default", binary<Fn::min>},
        {"aten.mul.Scalar", mul},
        {"aten.mul.Tensor", mul},
        {"aten.nan_to_num.default", nan_to_num},
        {"aten.ne.Scalar", comparison<Fn::ne>},
        {"aten.ne.Tensor", comparison<Fn::ne>},
        {"aten.neg.default", negate},
        {"aten.nextafter.default", next_after},
        {"aten.pow.Scalar", pow_tensors},
        {"aten.pow.Tensor_Scalar", pow_scalar},
        {"aten.pow.Tensor_Tensor", pow_tensors},
        {"aten.remainder.Scalar", remainder<Fn::remainder>},
        {"aten.remainder.Scalar_Tensor", remainder<Fn::remainder>},
        {"aten.remainder.Tensor", remainder<Fn::remainder>},
        {"aten.round.decimals", round_decimals},
        {"aten.round.default", rounding<Fn::round>},
        {"aten.rsub.Scalar", rsub},
        {"aten.rsub.Tensor", rsub},
        {"aten.sgn.default", sign},
        {"aten.sign.default", sign},
        {"aten.signbit.default", sign_bit},
        {"aten.sin.default", unary<Fn::sin>},
        {"aten.sinh.default", unary<Fn::sinh>},
        {"aten.sqrt.default", unary<Fn::sqrt>},
        {"aten.sub.Scalar", sub},
        {"aten.sub.Tensor", sub},
        {"aten.tan.default", unary<Fn::tan>},
        {"aten.tanh.default", unary<Fn::tanh>},
        {"aten.true_divide.Tensor", div},
        {"aten.trunc.default", rounding<Fn::trunc>},
        {"aten.where.self", where},
        {"aten.xlogy.Scalar_Other", binary<Fn::xlogy>},
        {"aten.xlogy.Scalar_Self", binary<Fn::xlogy>},
        {"aten.xlogy.Tensor", binary<Fn::xlogy>},
        {"aten._to_copy.default", to_copy},
        {"prims.fma.default", multiply_add},
        {"prims.convert_element_type.default", [](Builder& b, const Call& call) { return call.dtype("dtype"), finish(b, call, call.tensor("a")); }},
    };
    for (const auto* more : {&activation_rules(), &special_rules()}) all.insert(all.end(), more->begin(), more->end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
