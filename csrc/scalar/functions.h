#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"

namespace deplo {

// The closed table of scalar functions that every level below Torch IR shares.
//
// Semantics: floats are IEEE 754 with round-to-nearest-even; no flag ever licenses reassociation or assumes the absence
// of NaN, infinity or -0. Integer arithmetic wraps. Integer division or remainder by zero sets the kernel's error word
// (the result is then 0); INT_MIN / -1 wraps. A shift by an amount outside [0, bits) gives 0 (or the sign for shr of a
// negative). min and max propagate NaN. Operands of one application have one dtype unless the signature says otherwise.

enum class Signature : uint8_t {
  nullary,    ///< constant, index
  same,       ///< T, ... -> T
  predicate,  ///< T, ... -> bool
  select,     ///< bool, T, T -> T
  convert,    ///< any -> the result's dtype
  dot,        ///< T, T, T, T, float32 -> float32, where T is bf16 or f16
};

/// Which dtypes a function takes (of its operands; of the result for nullary ones).
enum class Domain : uint8_t { any, floating, integral /* integers and bool */, numeric /* all but bool */ };

// F(name, arity, signature, domain, max ulp in float32 of generated code, meaning)
#define DEPLO_SCALAR_FUNCTIONS(F)                                                                                       \
  F(constant, 0, nullary, any, 0, "the literal")                                                                        \
  F(index, 0, nullary, any, 0, "the value of an index expression, as the result's dtype (exact or rounded)")            \
  F(neg, 1, same, numeric, 0, "-x; the sign bit of a float flips")                                                      \
  F(abs, 1, same, numeric, 0, "|x|; wraps for the smallest integer")                                                    \
  F(exp, 1, same, floating, 1, "e^x")                                                                                   \
  F(exp2, 1, same, floating, 1, "2^x")                                                                                  \
  F(expm1, 1, same, floating, 1, "e^x - 1, accurate near 0")                                                            \
  F(log, 1, same, floating, 1, "natural logarithm; -inf at 0, NaN below")                                               \
  F(log2, 1, same, floating, 1, "logarithm to base 2")                                                                  \
  F(log10, 1, same, floating, 1, "logarithm to base 10")                                                                \
  F(log1p, 1, same, floating, 1, "log(1 + x), accurate near 0")                                                         \
  F(sqrt, 1, same, floating, 0, "square root, correctly rounded")                                                       \
  F(sin, 1, same, floating, 1, "sine, full range")                                                                      \
  F(cos, 1, same, floating, 1, "cosine, full range")                                                                    \
  F(tan, 1, same, floating, 1, "tangent, full range")                                                                   \
  F(asin, 1, same, floating, 1, "arc sine")                                                                             \
  F(acos, 1, same, floating, 1, "arc cosine")                                                                           \
  F(atan, 1, same, floating, 1, "arc tangent")                                                                          \
  F(sinh, 1, same, floating, 1, "hyperbolic sine")                                                                      \
  F(cosh, 1, same, floating, 1, "hyperbolic cosine")                                                                    \
  F(tanh, 1, same, floating, 1, "hyperbolic tangent; keeps -0")                                                         \
  F(asinh, 1, same, floating, 1, "inverse hyperbolic sine")                                                             \
  F(acosh, 1, same, floating, 1, "inverse hyperbolic cosine")                                                           \
  F(atanh, 1, same, floating, 1, "inverse hyperbolic tangent")                                                          \
  F(sigmoid, 1, same, floating, 1, "1 / (1 + e^-x)")                                                                    \
  F(softplus, 1, same, floating, 1, "log(1 + e^x)")                                                                     \
  F(silu, 1, same, floating, 1, "x sigmoid(x)")                                                                         \
  F(mish, 1, same, floating, 1, "x tanh(softplus(x))")                                                                  \
  F(gelu, 1, same, floating, 1, "x P(X <= x) for a standard normal X")                                                  \
  F(gelu_tanh, 1, same, floating, 1, "x sigmoid(sqrt(8 / pi) (x + 0.044715 x^3))")                                      \
  F(logit, 1, same, floating, 1, "log(x / (1 - x)); NaN outside of [0, 1]")                                             \
  F(sinc, 1, same, floating, 1, "sin(pi x) / (pi x); 1 at 0")                                                           \
  F(erf, 1, same, floating, 1, "error function")                                                                        \
  F(erfc, 1, same, floating, 1, "1 - erf(x), accurate for large x")                                                     \
  F(erfinv, 1, same, floating, 1, "inverse error function")                                                             \
  F(lgamma, 1, same, floating, 1, "log |Gamma(x)|")                                                                     \
  F(digamma, 1, same, floating, 1, "Gamma'(x) / Gamma(x)")                                                              \
  F(erfcx, 1, same, floating, 1, "exp(x^2) erfc(x)")                                                                    \
  F(ndtri, 1, same, floating, 1, "inverse of the standard normal distribution")                                         \
  F(i0, 1, same, floating, 1, "modified Bessel function of the first kind, order 0")                                    \
  F(i0e, 1, same, floating, 1, "exp(-|x|) i0(x)")                                                                       \
  F(i1, 1, same, floating, 1, "modified Bessel function of the first kind, order 1")                                    \
  F(i1e, 1, same, floating, 1, "exp(-|x|) i1(x)")                                                                       \
  F(floor, 1, same, floating, 0, "toward -inf")                                                                         \
  F(ceil, 1, same, floating, 0, "toward +inf")                                                                          \
  F(round, 1, same, floating, 0, "to nearest, halves to even")                                                          \
  F(trunc, 1, same, floating, 0, "toward 0")                                                                            \
  F(bit_not, 1, same, integral, 0, "bitwise complement; logical for bool")                                              \
  F(signbit, 1, predicate, numeric, 0, "the sign bit (x < 0 for integers)")                                             \
  F(add, 2, same, numeric, 0, "x + y")                                                                                  \
  F(sub, 2, same, numeric, 0, "x - y")                                                                                  \
  F(mul, 2, same, numeric, 0, "x * y")                                                                                  \
  F(div, 2, same, floating, 0, "x / y")                                                                                 \
  F(trunc_div, 2, same, integral, 0, "integer quotient toward 0")                                                       \
  F(floor_div, 2, same, integral, 0, "integer quotient toward -inf")                                                    \
  F(fmod, 2, same, numeric, 0, "remainder with the sign of x (C)")                                                      \
  F(remainder, 2, same, numeric, 0, "remainder with the sign of y (Python)")                                            \
  F(pow, 2, same, numeric, 1, "x^y; a negative integer exponent gives 0 unless x is +-1")                               \
  F(atan2, 2, same, floating, 1, "angle of (y=first, x=second)")                                                        \
  F(hypot, 2, same, floating, 1, "sqrt(x^2 + y^2) without overflow")                                                    \
  F(xlogy, 2, same, floating, 1, "x log(y); 0 where x is 0, unless y is NaN")                                           \
  F(logaddexp, 2, same, floating, 1, "log(e^x + e^y)")                                                                  \
  F(logaddexp2, 2, same, floating, 1, "log2(2^x + 2^y)")                                                                \
  F(zeta, 2, same, floating, 1, "Hurwitz's zeta function: the sum of (y + k)^-x")                                       \
  F(copysign, 2, same, floating, 0, "|x| with the sign of y")                                                           \
  F(nextafter, 2, same, floating, 0, "the next float from x toward y")                                                  \
  F(min, 2, same, any, 0, "the smaller; NaN if either is")                                                              \
  F(max, 2, same, any, 0, "the larger; NaN if either is")                                                               \
  F(bit_and, 2, same, integral, 0, "bitwise and; logical for bool")                                                     \
  F(bit_or, 2, same, integral, 0, "bitwise or; logical for bool")                                                       \
  F(bit_xor, 2, same, integral, 0, "bitwise exclusive or; logical for bool")                                            \
  F(shl, 2, same, integral, 0, "x << y")                                                                                \
  F(shr, 2, same, integral, 0, "x >> y, arithmetic for signed x")                                                       \
  F(eq, 2, predicate, any, 0, "x == y")                                                                                 \
  F(ne, 2, predicate, any, 0, "x != y; true for NaN")                                                                   \
  F(lt, 2, predicate, any, 0, "x < y")                                                                                  \
  F(le, 2, predicate, any, 0, "x <= y")                                                                                 \
  F(gt, 2, predicate, any, 0, "x > y")                                                                                  \
  F(ge, 2, predicate, any, 0, "x >= y")                                                                                 \
  F(where, 3, select, any, 0, "y if x else z")                                                                          \
  F(fma, 3, same, floating, 0, "x * y + z with one rounding")                                                           \
  F(dot2, 5, dot, floating, 0, "fma(x0, y0, fma(x1, y1, z)) of x0, x1, y0, y1, z; subnormals may count as 0")           \
  F(dot4, 3, same, integral, 0, "z + the products of the four unsigned bytes of x with the signed ones of y; of int32") \
  F(cast, 1, convert, any, 0, "PyTorch's conversion; float to bool is x != 0; float to int truncates, as x86")          \
  F(narrow, 1, convert, floating, 0, "cast of float32 to bf16; subnormals may count as 0")                              \
  F(exp2_near, 1, convert, floating, 0, "2^x of float32, within 2^-20 of it; subnormal results may be 0")               \
  F(reciprocal_near, 1, convert, floating, 0, "1 / x of float32, within 2^-22 of it, for 2^-126 <= |x| < 2^126")        \
  F(bitcast, 1, convert, any, 0, "the same bits as another dtype of the same size")

enum class Fn : uint8_t {
#define DEPLO_ROW(name, arity, signature, domain, ulp, meaning) name,
  DEPLO_SCALAR_FUNCTIONS(DEPLO_ROW)
#undef DEPLO_ROW
};

constexpr int kMostOperands = 5;  ///< of any function

struct FunctionInfo {
  Fn fn;
  std::string_view name;
  int arity;
  Signature signature;
  Domain domain;
  double max_ulp;
  std::string_view meaning;
};

const FunctionInfo& info(Fn fn);
std::string_view to_string(Fn fn);
std::optional<Fn> parse_fn(std::string_view name);
/// "" if fn takes these dtypes and gives `result`; otherwise the complaint.
std::string type_error(Fn fn, DType result, const DType* operands, int count);

/// A value in an interpreter: floats as double, integers and bool as int64 (u8 zero-extended).
struct Scalar {
  DType dtype = DType::f32;
  double f = 0;
  int64_t i = 0;
  static Scalar of_float(DType dtype, double value);  ///< rounded to dtype
  static Scalar of_int(DType dtype, int64_t value);   ///< wrapped to dtype
  bool operator==(const Scalar& other) const { return dtype == other.dtype && i == other.i && same_float(f, other.f); }
  double as_double() const { return is_float(dtype) ? f : static_cast<double>(i); }
};

/// How interpreters compute. exact: floats are float64 throughout and float-to-float casts are skipped, so that levels agree
/// to 1e-12; typed: every result is rounded to its dtype.
enum class Mode : uint8_t { exact, typed };

/// Applies any function of the table but constant and index. `error` (may be null) is set on division by zero.
Scalar apply(Fn fn, DType result, const Scalar* operands, Mode mode, bool* error);

/// Associative combiners of reductions, scans and scatters.
enum class Combiner : uint8_t {
  sum,
  prod,
  min,
  max,  ///< one operand; min and max propagate NaN; for bool, max is any and min is all
  argmin,
  argmax,          ///< operands (value, index i64); NaN wins; a tie goes to the lower index
  welford,         ///< operand x; results (mean, m2) with m2 = sum (x - mean)^2; also combines partial (count, mean, m2)
  online_softmax,  ///< operand x; results (m, s) with m = max x, s = sum exp(x - m)
  set,             ///< scatter only: the last write in iteration order wins
};
std::string_view to_string(Combiner combiner);
std::optional<Combiner> parse_combiner(std::string_view name);
int operand_count(Combiner combiner);  ///< argmin/argmax 2, others 1
int result_count(Combiner combiner);   ///< argmin/argmax, welford, online_softmax 2, others 1
/// The identity of sum, prod, min, max and of the value part of argmin / argmax.
Scalar identity(Combiner combiner, DType dtype);

}  // namespace deplo
