#include "scalar/functions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "scalar/special.h"

namespace deplo {
namespace {

constexpr FunctionInfo kTable[] = {
#define DEPLO_ROW(name, arity, signature, domain, ulp, meaning) {Fn::name, #name, arity, Signature::signature, Domain::domain, ulp, meaning},
    DEPLO_SCALAR_FUNCTIONS(DEPLO_ROW)
#undef DEPLO_ROW
};

bool in_domain(Domain domain, DType dtype) {
  switch (domain) {
    case Domain::any: return true;
    case Domain::floating: return is_float(dtype);
    case Domain::integral: return !is_float(dtype);
    case Domain::numeric: return dtype != DType::boolean;
  }
  return false;
}

int bits_of(DType dtype) { return static_cast<int>(size_of(dtype) * 8); }

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::f64: return value;
    case DType::f32: return static_cast<float>(value);
    case DType::f8:
      return f8_to_f32(f32_to_f8(static_cast<float>(value)));  // by way of float32, as PyTorch
    // Through float32 first only where that cannot round twice: the formats have at most 11 bits, float32 has 24 and float64 53,
    // so a double rounding needs a tie of the narrow format that float32 made; fix it by rounding to odd.
    case DType::bf16:
    case DType::f16: {
      auto narrow = static_cast<float>(value);
      if (static_cast<double>(narrow) != value && std::isfinite(narrow)) {
        auto bits = __builtin_bit_cast(uint32_t, narrow);
        bool up = std::fabs(static_cast<double>(narrow)) > std::fabs(value);
        if (up) bits -= 1;
        narrow = __builtin_bit_cast(float, bits | 1U);
      }
      return dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(narrow)) : f16_to_f32(f32_to_f16(narrow));
    }
    default: return value;
  }
}

int64_t wrap_to(DType dtype, int64_t value) {
  switch (dtype) {
    case DType::boolean: return value != 0;
    case DType::u8: return static_cast<uint8_t>(value);
    case DType::i8: return static_cast<int8_t>(value);
    case DType::i16: return static_cast<int16_t>(value);
    case DType::i32: return static_cast<int32_t>(value);
    default: return value;
  }
}

/// x86's conversion: out of range and NaN give the most negative value of the instruction's width, then truncation wraps.
int64_t float_to_int(DType to, double value) {
  if (to == DType::i64) return value >= -0x1p63 && value < 0x1p63 ? static_cast<int64_t>(value) : std::numeric_limits<int64_t>::min();
  int64_t wide = value > -2147483649.0 && value < 2147483648.0 ? static_cast<int64_t>(value) : std::numeric_limits<int32_t>::min();
  return wrap_to(to, wide);
}

double apply_unary(Fn fn, double x) {
  switch (fn) {
    case Fn::neg: return -x;
    case Fn::abs: return std::fabs(x);
    case Fn::exp: return std::exp(x);
    case Fn::exp2: return std::exp2(x);
    case Fn::expm1: return std::expm1(x);
    case Fn::log: return std::log(x);
    case Fn::log2: return std::log2(x);
    case Fn::log10: return special::log10(x);
    case Fn::log1p: return std::log1p(x);
    case Fn::sqrt: return std::sqrt(x);
    case Fn::sin: return std::sin(x);
    case Fn::cos: return std::cos(x);
    case Fn::tan: return std::tan(x);
    case Fn::asin: return std::asin(x);
    case Fn::acos: return std::acos(x);
    case Fn::atan: return std::atan(x);
    case Fn::sinh: return special::sinh(x);
    case Fn::cosh: return special::cosh(x);
    case Fn::tanh: return special::tanh(x);
    case Fn::asinh: return std::asinh(x);
    case Fn::acosh: return std::acosh(x);
    case Fn::atanh: return special::atanh(x);
    case Fn::sigmoid: return special::sigmoid(x);
    case Fn::softplus: return special::softplus(x);
    case Fn::silu: return special::silu(x);
    case Fn::mish: return special::mish(x);
    case Fn::gelu: return special::gelu(x);
    case Fn::gelu_tanh: return special::gelu_tanh(x);
    case Fn::logit: return special::logit(x);
    case Fn::sinc: return special::sinc(x);
    case Fn::erf: return std::erf(x);
    case Fn::erfc: return special::erfc(x);
    case Fn::erfinv: return special::erfinv(x);
    case Fn::lgamma: return special::lgamma(x);
    case Fn::digamma: return special::digamma(x);
    case Fn::erfcx: return special::erfcx(x);
    case Fn::ndtri: return special::ndtri(x);
    case Fn::i0: return special::i0(x);
    case Fn::i0e: return special::i0e(x);
    case Fn::i1: return special::i1(x);
    case Fn::i1e: return special::i1e(x);
    case Fn::floor: return std::floor(x);
    case Fn::ceil: return std::ceil(x);
    case Fn::round: return std::nearbyint(x);
    case Fn::trunc: return std::trunc(x);
    default: throw InternalError(fmt::format("{} is not a unary float function", to_string(fn)));
  }
}

double python_remainder(double a, double b) {
  double r = std::fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

double apply_binary(Fn fn, double x, double y) {
  switch (fn) {
    case Fn::add: return x + y;
    case Fn::sub: return x - y;
    case Fn::mul: return x * y;
    case Fn::div: return x / y;
    case Fn::fmod: return std::fmod(x, y);
    case Fn::remainder: return python_remainder(x, y);
    case Fn::pow: return std::pow(x, y);
    case Fn::atan2: return std::atan2(x, y);
    case Fn::hypot: return std::hypot(x, y);
    case Fn::xlogy: return special::xlogy(x, y);
    case Fn::logaddexp: return special::logaddexp(x, y);
    case Fn::logaddexp2: return special::logaddexp2(x, y);
    case Fn::zeta: return special::zeta(x, y);
    case Fn::copysign: return std::copysign(x, y);
    case Fn::min: return std::isnan(x) ? x : std::isnan(y) ? y : x < y ? x : y;
    case Fn::max: return std::isnan(x) ? x : std::isnan(y) ? y : x > y ? x : y;
    default: throw InternalError(fmt::format("{} is not a binary float function", to_string(fn)));
  }
}

uint64_t integer_power(uint64_t base, int64_t exponent) {
  uint64_t result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

int64_t dot_of_bytes(int64_t x, int64_t y, int64_t z) {
  for (int byte = 0; byte < 4; ++byte) z += ((x >> (8 * byte)) & 0xff) * static_cast<int8_t>((y >> (8 * byte)) & 0xff);
  return z;
}

int64_t apply_integer(Fn fn, DType dtype, int64_t x, int64_t y, bool* error) {
  auto ux = static_cast<uint64_t>(x);
  auto uy = static_cast<uint64_t>(y);
  auto wrapped = [&](uint64_t v) { return wrap_to(dtype, static_cast<int64_t>(v)); };
  bool divides = fn == Fn::trunc_div || fn == Fn::floor_div || fn == Fn::fmod || fn == Fn::remainder;
  if (divides && y == 0) {
    if (error) *error = true;
    return 0;
  }
  // -1 apart: the machine's division traps on the smallest integer.
  int64_t quotient = divides ? (y == -1 ? static_cast<int64_t>(0 - ux) : x / y) : 0;
  int64_t rest = divides && y != -1 ? x % y : 0;
  bool adjust = rest != 0 && (rest < 0) != (y < 0);
  int bits = bits_of(dtype);
  switch (fn) {
    case Fn::neg: return wrapped(0 - ux);
    case Fn::abs: return x < 0 ? wrapped(0 - ux) : x;
    case Fn::bit_not: return dtype == DType::boolean ? !x : wrapped(~ux);
    case Fn::add: return wrapped(ux + uy);
    case Fn::sub: return wrapped(ux - uy);
    case Fn::mul: return wrapped(ux * uy);
    case Fn::trunc_div: return wrapped(static_cast<uint64_t>(quotient));
    case Fn::floor_div: return wrapped(static_cast<uint64_t>(quotient - (adjust ? 1 : 0)));
    case Fn::fmod: return rest;
    case Fn::remainder: return adjust ? rest + y : rest;
    case Fn::pow:
      if (y < 0) return x == 1 ? 1 : x == -1 ? (y % 2 ? -1 : 1) : 0;
      return wrapped(integer_power(ux, y));
    case Fn::min: return x < y ? x : y;
    case Fn::max: return x > y ? x : y;
    case Fn::bit_and: return x & y;
    case Fn::bit_or: return x | y;
    case Fn::bit_xor: return x ^ y;
    case Fn::shl: return y < 0 || y >= bits ? 0 : wrapped(ux << uy);
    case Fn::shr: return y < 0 || y >= bits ? (x < 0 ? -1 : 0) : x >> y;
    default: throw InternalError(fmt::format("{} is not an integer function", to_string(fn)));
  }
}

template <class T>
bool compare(Fn fn, T x, T y) {
  switch (fn) {
    case Fn::eq: return x == y;
    case Fn::ne: return x != y;
    case Fn::lt: return x < y;
    case Fn::le: return x <= y;
    case Fn::gt: return x > y;
    case Fn::ge: return x >= y;
    default: throw InternalError(fmt::format("{} is not a comparison", to_string(fn)));
  }
}

Scalar convert(const Scalar& x, DType to, Mode mode) {
  if (is_float(x.dtype)) {
    if (to == DType::boolean) return Scalar::of_int(to, x.f != 0);
    if (!is_float(to)) return Scalar::of_int(to, float_to_int(to, x.f));
    if (mode == Mode::exact) return {to, x.f, 0};
    return Scalar::of_float(to, x.f);
  }
  if (is_float(to)) return mode == Mode::exact ? Scalar{to, static_cast<double>(x.i), 0} : Scalar::of_float(to, static_cast<double>(x.i));
  return Scalar::of_int(to, to == DType::boolean ? x.i != 0 : x.i);
}

uint64_t to_bits(const Scalar& x) {
  switch (x.dtype) {
    case DType::f64: return __builtin_bit_cast(uint64_t, x.f);
    case DType::f32: return __builtin_bit_cast(uint32_t, static_cast<float>(x.f));
    case DType::bf16: return f32_to_bf16(static_cast<float>(x.f));
    case DType::f16: return f32_to_f16(static_cast<float>(x.f));
    case DType::f8: return f32_to_f8(static_cast<float>(x.f));
    default: return static_cast<uint64_t>(x.i);
  }
}

Scalar from_bits(DType dtype, uint64_t bits) {
  switch (dtype) {
    case DType::f64: return {dtype, __builtin_bit_cast(double, bits), 0};
    case DType::f32: return {dtype, __builtin_bit_cast(float, static_cast<uint32_t>(bits)), 0};
    case DType::bf16: return {dtype, bf16_to_f32(static_cast<uint16_t>(bits)), 0};
    case DType::f16: return {dtype, f16_to_f32(static_cast<uint16_t>(bits)), 0};
    case DType::f8: return {dtype, f8_to_f32(static_cast<uint8_t>(bits)), 0};
    default: return Scalar::of_int(dtype, static_cast<int64_t>(bits));
  }
}

double next_after(DType dtype, double x, double y) {
  if (dtype == DType::f64) return std::nextafter(x, y);
  if (dtype == DType::f32) return std::nextafterf(static_cast<float>(x), static_cast<float>(y));
  if (std::isnan(x) || std::isnan(y)) return std::numeric_limits<double>::quiet_NaN();
  if (x == y) return y;
  uint64_t bits = to_bits({dtype, x, 0});
  if (x == 0) return from_bits(dtype, y > 0 ? 1 : 0x8001).f;
  return from_bits(dtype, (x < y) == (x > 0) ? bits + 1 : bits - 1).f;
}

}  // namespace

const FunctionInfo& info(Fn fn) { return kTable[static_cast<size_t>(fn)]; }
std::string_view to_string(Fn fn) { return info(fn).name; }

std::optional<Fn> parse_fn(std::string_view name) {
  for (const FunctionInfo& row : kTable)
    if (row.name == name) return row.fn;
  return std::nullopt;
}

std::string type_error(Fn fn, DType result, const DType* operands, int count) {
  const FunctionInfo& row = info(fn);
  if (count != row.arity) return fmt::format("{} takes {} operands, not {}", row.name, row.arity, count);
  int first = row.signature == Signature::select ? 1 : 0;
  if (row.signature == Signature::select && operands[0] != DType::boolean)
    return fmt::format("the condition of {} must be bool, not {}", row.name, to_string(operands[0]));
  const bool moves = row.signature == Signature::convert || row.signature == Signature::select || row.signature == Signature::nullary;
  const bool in_f8 = result == DType::f8 || std::any_of(operands, operands + count, [](DType dtype) { return dtype == DType::f8; });
  if (in_f8 && !moves) return fmt::format("{} does not take f8e4m3, which is only stored and converted", row.name);
  const int alike = row.signature == Signature::dot ? count - 1 : count;
  for (int i = first; i < alike; ++i) {
    if (!in_domain(row.domain, operands[i])) return fmt::format("{} does not take {}", row.name, to_string(operands[i]));
    if (operands[i] != operands[first])
      return fmt::format("operands of {} differ: {} and {}", row.name, to_string(operands[first]), to_string(operands[i]));
  }
  switch (row.signature) {
    case Signature::nullary: return fn == Fn::index && result == DType::boolean ? "index cannot be bool" : "";
    case Signature::same:
    case Signature::select:
      if (fn == Fn::dot4 && result != DType::i32) return fmt::format("dot4 takes i32, not {}", to_string(result));
      if (result != operands[first])
        return fmt::format("{} of {} gives {}, not {}", row.name, to_string(operands[first]), to_string(operands[first]), to_string(result));
      return "";
    case Signature::predicate:
      if (result != DType::boolean) return fmt::format("{} gives bool, not {}", row.name, to_string(result));
      return "";
    case Signature::convert:
      if (fn == Fn::bitcast && size_of(result) != size_of(operands[0]))
        return fmt::format("bitcast from {} to {}: the sizes differ", to_string(operands[0]), to_string(result));
      if (fn == Fn::narrow && (operands[0] != DType::f32 || result != DType::bf16))
        return fmt::format("narrow takes f32 and gives bf16, not {} and {}", to_string(operands[0]), to_string(result));
      if ((fn == Fn::exp2_near || fn == Fn::reciprocal_near) && (operands[0] != DType::f32 || result != DType::f32))
        return fmt::format("{} takes and gives f32, not {} and {}", row.name, to_string(operands[0]), to_string(result));
      return "";
    case Signature::dot:
      if (operands[0] != DType::bf16 && operands[0] != DType::f16)
        return fmt::format("{} takes bf16 or f16, not {}", row.name, to_string(operands[0]));
      if (operands[count - 1] != DType::f32 || result != DType::f32)
        return fmt::format("{} adds to f32 and gives f32, not {} and {}", row.name, to_string(operands[count - 1]), to_string(result));
      return "";
  }
  return "";
}

Scalar Scalar::of_float(DType dtype, double value) { return {dtype, round_to(dtype, value), 0}; }
Scalar Scalar::of_int(DType dtype, int64_t value) { return {dtype, 0, wrap_to(dtype, value)}; }

Scalar apply(Fn fn, DType result, const Scalar* x, Mode mode, bool* error) {
  auto real = [&](double value) { return mode == Mode::exact ? Scalar{result, value, 0} : Scalar::of_float(result, value); };
  switch (info(fn).signature) {
    case Signature::nullary: throw InternalError(fmt::format("{} has no operands to apply", to_string(fn)));
    case Signature::select: return x[0].i ? x[1] : x[2];
    case Signature::convert:
      if (fn == Fn::exp2_near) return real(std::exp2(x[0].f));
      if (fn == Fn::reciprocal_near) return real(1 / x[0].f);
      return fn == Fn::bitcast ? from_bits(result, to_bits(x[0])) : convert(x[0], result, mode);
    case Signature::predicate:
      if (fn == Fn::signbit) return Scalar::of_int(result, is_float(x[0].dtype) ? std::signbit(x[0].f) : x[0].i < 0);
      return Scalar::of_int(result, is_float(x[0].dtype) ? compare(fn, x[0].f, x[1].f) : compare(fn, x[0].i, x[1].i));
    case Signature::dot: {
      const Scalar inner[] = {x[1], x[3], x[4]};
      const Scalar sum = apply(Fn::fma, result, inner, mode, error);
      const Scalar outer[] = {x[0], x[2], sum};
      return apply(Fn::fma, result, outer, mode, error);
    }
    case Signature::same: break;
  }
  if (fn == Fn::dot4) return Scalar::of_int(result, dot_of_bytes(x[0].i, x[1].i, x[2].i));
  if (!is_float(result)) return {result, 0, apply_integer(fn, result, x[0].i, info(fn).arity > 1 ? x[1].i : 0, error)};
  if (fn == Fn::fma) {
    if (mode == Mode::typed && result == DType::f32)
      return Scalar::of_float(result, std::fmaf(static_cast<float>(x[0].f), static_cast<float>(x[1].f), static_cast<float>(x[2].f)));
    return real(std::fma(x[0].f, x[1].f, x[2].f));
  }
  if (fn == Fn::nextafter) return {result, next_after(result, x[0].f, x[1].f), 0};
  return real(info(fn).arity == 1 ? apply_unary(fn, x[0].f) : apply_binary(fn, x[0].f, x[1].f));
}

std::string_view to_string(Combiner combiner) {
  constexpr std::array<std::string_view, 9> kNames{"sum", "prod", "min", "max", "argmin", "argmax", "welford", "online_softmax", "set"};
  return kNames[static_cast<size_t>(combiner)];
}

std::optional<Combiner> parse_combiner(std::string_view name) {
  for (int k = 0; k <= static_cast<int>(Combiner::set); ++k)
    if (to_string(static_cast<Combiner>(k)) == name) return static_cast<Combiner>(k);
  return std::nullopt;
}

int operand_count(Combiner combiner) { return combiner == Combiner::argmin || combiner == Combiner::argmax ? 2 : 1; }

int result_count(Combiner combiner) {
  bool pair = combiner == Combiner::argmin || combiner == Combiner::argmax || combiner == Combiner::welford || combiner == Combiner::online_softmax;
  return pair ? 2 : 1;
}

Scalar identity(Combiner combiner, DType dtype) {
  bool lowest = combiner == Combiner::max || combiner == Combiner::argmax || combiner == Combiner::online_softmax;
  bool highest = combiner == Combiner::min || combiner == Combiner::argmin;
  if (is_float(dtype)) {
    double inf = std::numeric_limits<double>::infinity();
    return {dtype, lowest ? -inf : highest ? inf : combiner == Combiner::prod ? 1.0 : 0.0, 0};
  }
  if (!lowest && !highest) return {dtype, 0, combiner == Combiner::prod ? 1 : 0};
  if (dtype == DType::boolean || dtype == DType::u8) return {dtype, 0, highest ? (dtype == DType::u8 ? 255 : 1) : 0};
  int64_t top = dtype == DType::i64 ? std::numeric_limits<int64_t>::max() : (int64_t{1} << (bits_of(dtype) - 1)) - 1;
  return {dtype, 0, highest ? top : -top - 1};
}

}  // namespace deplo
