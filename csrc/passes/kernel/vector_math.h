#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "scalar/functions.h"

namespace deplo {

/// float32 functions as sequences of arithmetic, comparisons and selects on vectors. Error at most 1 ulp over the full range; NaN,
/// infinities, denormals and -0 as IEEE 754-2019 recommends. Hot functions (exp, exp2, tanh, erf) run in float32; the others run in
/// float64 inside and round once, which leaves them below 0.51 ulp, those by exp64_short below 0.55; those called near are less exact. Polynomials
/// are minimax fits (Remez) of the quotient named beside them, made for this file.
///
/// `B` builds or evaluates values:
///   using Value;  Value literal(DType, double);  Value apply(Fn, std::initializer_list<Value>);  Value cast(Value, DType);
///   Value bitcast(Value, DType);  Value patch(Value mask, Fn, Value x, Value y): y, but fn(x) computed lane by lane where mask holds.
template <class B>
class VectorMath {
 public:
  using V = B::Value;
  explicit VectorMath(B& builder) : b_(builder) {}

  V exp(V x) {
    // Clamped just beyond the result inf; the comparisons let NaN through. Products that vanish take Intel's CPUs a hundred cycles: lanes whose
    // result is 0 (masked scores are -inf) compute another one.
    auto vanishes = lt(x, f(-104));
    x = where(gt(x, f(89)), f(89), x);
    x = where(vanishes, f(0), x);
    auto t = fma(x, f(0x1.715476p+0), f(kMagic32));
    auto n = sub(t, f(kMagic32));
    // The upper part of ln 2 has 10 bits: n times it is exact.
    auto r = fma(n, f(-0.693359375), x);
    r = fma(n, f(0x1.bd0106p-13), r);
    // (e^r - 1 - r) / r^2 on |r| <= 0.35
    auto q = polynomial(DType::f32, r, {0x1.0p-1, 0x1.555486p-3, 0x1.555454p-5, 0x1.124148p-7, 0x1.6dbc78p-10});
    // 1 + r loses v, which goes with the smaller terms: below 0.85 ulp.
    auto s = add(r, f(1));
    auto v = sub(r, sub(s, f(1)));
    return where(vanishes, f(0), scale(add(s, fma(mul(r, r), q, v)), t));
  }

  V exp2(V x) {
    auto vanishes = lt(x, f(-150));
    x = where(gt(x, f(129)), f(129), x);
    x = where(vanishes, f(0), x);
    auto t = add(x, f(kMagic32));
    auto r = sub(x, sub(t, f(kMagic32)));
    return where(vanishes, f(0), scale(exp2_polynomial(r), t));
  }

  /// Within 2^-20.9 of 2^x, as weights that are rounded to 16 bits need it: results below 2^-126 are 0.
  V exp2_near(V x) {
    auto c = where(gt(x, f(128)), f(128), x);
    auto t = add(c, f(kMagic32));
    auto r = sub(c, sub(t, f(kMagic32)));
    auto p = polynomial(DType::f32, r, {1, 0x1.62e39ep-1, 0x1.ebfa4ep-3, 0x1.c74322p-5, 0x1.3cbea8p-7, 0x1.23a608p-10});
    // The exponent is added to p's own: 2^128 p is finite where p is below 1.
    auto y = bitcast(add(bitcast(p, DType::i32), shl(bitcast(t, DType::i32), i32(23))), DType::f32);
    y = where(b_.apply(Fn::ne, {x, x}), x, y);
    return where(lt(x, f(-126)), f(0), y);
  }

  V tanh(V x) {
    auto a = abs(x);
    auto u = mul(a, a);
    // (tanh(x)/x - 1) / x^2 on |x| <= 1; of its first coefficient, -1/3, a part that is exact comes last: below 0.94 ulp
    auto q = polynomial(
        DType::f32, u, {-0x1.5554c8p-8, 0x1.11106ep-3, -0x1.b9fd84p-5, 0x1.64f74ep-6, -0x1.19d03cp-7, 0x1.9437ep-9, -0x1.ba841ep-11, 0x1.0014b2p-13});
    auto p = add(q, f(-0.328125));
    auto small = fma(mul(a, u), p, a);
    auto c = where(gt(a, f(10)), f(10), a);
    auto e = exp(add(c, c));
    auto large = sub(f(1), div(f(2), add(e, f(1))));
    return copysign(where(lt(a, f(1)), small, large), x);
  }

  /// Within 2^-19 of it: for what is rounded to 16 bits.
  V tanh_near(V x) {
    auto a = abs(x);
    auto u = mul(a, a);
    // (tanh(x)/x - 1) / x^2 on |x| <= 0.5625
    auto small = fma(mul(a, u), polynomial(DType::f32, u, {-0x1.553b24p-2, 0x1.0d0c62p-3, -0x1.5d9b72p-5}), a);
    auto c = where(gt(a, f(10)), f(10), a);
    auto large = sub(f(1), share_near(f(2), exp_near(add(c, c))));
    return or_nan(x, copysign(where(lt(a, f(0.5625)), small, large), x));
  }

  V erf(V x) {
    auto a = abs(x);
    auto u = mul(a, a);
    // erf(x)/x - 1 in x^2 on |x| <= 1; -3/8 of the second coefficient is exact and comes last: below 0.94 ulp
    auto q =
        polynomial(DType::f32, u, {-0x1.274694p-10, 0x1.ce2f0ap-4, -0x1.b829c4p-6, 0x1.5629c2p-8, -0x1.bcc4a6p-11, 0x1.d839e2p-14, -0x1.43946p-17});
    auto p = fma(u, q, fma(u, f(-0.375), f(0x1.06eba8p-3)));
    auto small = fma(a, p, a);
    // log2(1 - erf(x)) on [1, 3.93]; beyond, erf rounds to 1
    auto c = where(gt(a, f(3.93)), f(3.93), a);
    auto rest = polynomial(DType::f32, c,
                           {0x1.35279ap-12, -0x1.37ba00p-8, -0x1.d399d6p-1, -0x1.40fd3ap-3, 0x1.2be11p-5, -0x1.94e4dp-8, 0x1.5ece5cp-11,
                            -0x1.325f18p-15, 0x1.85620ep-22});
    auto t = add(fma(c, f(-1.625), rest), f(kMagic32));
    // Its fraction, without rounding the whole: the digits that 1 - 2^l shows.
    auto r = add(fma(c, f(-1.625), sub(f(kMagic32), t)), rest);
    // 1 - 2^n (1 + w) = (1 - 2^n) - 2^n w, rounded once
    auto w = mul(r, exp2_quotient(r));
    auto power = bitcast(add(bitcast(f(1), DType::i32), shl(bitcast(t, DType::i32), i32(23))), DType::f32);
    auto large = fma(sub(f(0), power), w, sub(f(1), power));
    return copysign(where(ge(a, f(1)), large, small), x);
  }

  V sigmoid(V x) {
    auto vanishes = lt(x, f(-104));
    auto c = where(vanishes, f(0), x);
    auto y = wide(where(gt(c, f(20)), f(20), c));
    return where(vanishes, f(0), narrow(div(d(1), add(exp64_short(neg(y)), d(1)))));
  }

  V silu(V x) {
    return saturated(x, -109, mul(x, f(0)), 20, x, [&](V y) { return div(y, add(exp64_short(neg(y)), d(1))); });
  }

  /// In float32, within 2^-20 of it (2^-17 of results below e^-16): for what is rounded to 16 bits.
  V sigmoid_near(V x) {
    auto e = decay_near(x);
    auto y = share_near(f(1), e);
    return or_nan(x, where(lt(x, f(0)), mul(e, y), y));
  }

  V silu_near(V x) {
    auto e = decay_near(x);
    auto y = share_near(x, e);
    return where(lt(x, f(0)), mul(y, e), y);
  }

  V softplus(V x) {
    auto y = saturated(x, -104, f(0), 20, x, [&](V y) { return log1p64(exp64_short(y)); });
    return where(b_.apply(Fn::ne, {x, x}), x, y);
  }

  /// In float32, within 2^-19 of it: for what is rounded to 16 bits.
  V softplus_near(V x) {
    auto e = decay_near(x);
    // log(1 + e) / e on [0, 1]
    auto q = polynomial(DType::f32, e,
                        {0x1.fffffap-1, -0x1.fff932p-2, 0x1.54bdacp-2, -0x1.f5aac6p-3, 0x1.6b6c2cp-3, -0x1.b91076p-4, 0x1.692eaap-5, -0x1.17d014p-7});
    return or_nan(x, fma(e, q, where(gt(x, f(0)), x, f(0))));
  }

  // With e = e^x, tanh(log(1 + e)) is n / (n + 2), n = e (e + 2).
  V mish(V x) {
    return saturated(x, -109, mul(x, f(0)), 20, x, [&](V y) {
      auto e = exp64_short(y);
      auto n = fma(e, e, add(e, e));
      return div(mul(y, n), add(n, d(2)));
    });
  }

  /// In float32, within 2^-19 of it: for what is rounded to 16 bits.
  V mish_near(V x) {
    // Both divided by e^2x where x is positive.
    auto e = decay_near(x);
    auto negative = lt(x, f(0));
    auto twice = add(e, e);
    auto square = mul(e, e);
    auto n = add(twice, where(negative, square, f(1)));
    auto d = add(n, where(negative, f(2), add(square, square)));
    return mul(mul(x, n), reciprocal_near(d));
  }

  // P(X <= -a) = e^(-a^2 / 2) R(q) / (a + 3) with q = (a - 3) / (a + 3); R's relative error on [-1, 0.66] is 2^-30.
  V gelu(V x) {
    // From 14.5 on the tail vanishes, as it does at 0.
    auto c = abs(x);
    auto a = wide(where(gt(c, f(14.5)), f(0), c));
    auto inverse = div(d(1), add(a, d(3)));
    auto r = polynomial(
        DType::f64, fma(inverse, d(-6), d(1)),
        {0x1.754a751c5f6edp-1, -0x1.04c729abcdd7bp-1, 0x1.d713851690d05p-3, -0x1.832d0a3086842p-5, -0x1.56d5fb6b9ceafp-7, 0x1.c8bd7d05b5664p-8,
         0x1.0ca41882348f7p-10, -0x1.0eab8209f6893p-10, -0x1.00a4d37344bccp-12, 0x1.13424cccf9ed2p-13, 0x1.c8cd3758fa943p-15});
    auto square = mul(a, a);
    auto density = exp64_short(mul(square, d(-0.5)));
    auto tail = mul(mul(a, r), mul(density, inverse));
    // 0 x is NaN for -infinity, as in eager mode.
    auto zero = mul(x, f(0));
    auto whole = wide(where(gt(x, f(0)), x, zero));
    return narrow(sub(whole, tail));
  }

  /// The same in float32, within 2^-17 of it (2^-16 where the target computes exp2_near by itself; 2^-18 from -5.6 on): for what is rounded to 16
  /// bits.
  V gelu_near(V x) {
    // R in 1 / (a + 3); its relative error is 2^-20.7.
    return gelu_by(x, {0x1.98a9e2p-2, 0x1.3068aap+0, 0x1.ad65f6p+1, 0x1.6054f4p+2, 0x1.3d918ep+4, 0x1.ef3caep+1, -0x1.302e8ep+7, 0x1.4a98eap+7});
  }

  /// Within 2^-15.5 of it: for what is rounded to the 8 bits of bfloat16.
  V gelu_near_bf16(V x) { return gelu_by(x, {0x1.97e35ep-2, 0x1.381d5p+0, 0x1.77af74p+1, 0x1.f1cfe4p+2, 0x1.36a2dap+4, -0x1.346772p+5}); }

  V gelu_tanh(V x) {
    return saturated(x, -10.9, mul(x, f(0)), 6, x, [&](V y) {
      constexpr double kScale = 0x1.9884533d43651p+0;  // sqrt(8 / pi)
      auto slope = fma(mul(y, y), d(-0.044715 * kScale), d(-kScale));
      return div(y, add(exp64_short(mul(y, slope)), d(1)));
    });
  }

  /// The same in float32, for what is rounded to 16 bits: the exponent, at most 89 (21 in the range of float16), loses 2^-22.4 of itself.
  V gelu_tanh_near(V x) {
    constexpr double kScale = 0x1.9884533d43651p+0;  // sqrt(8 / pi)
    // Beyond 6 the result is x; below -10.9 it vanishes.
    auto vanishes = lt(x, f(-10.9));
    auto a = abs(x);
    auto c = where(gt(a, f(10.9)), f(10.9), a);
    auto e = exp_near(mul(c, fma(mul(c, c), f(-0.044715 * kScale), f(-kScale))));
    auto y = share_near(x, e);
    return where(vanishes, mul(x, f(0)), where(lt(x, f(0)), mul(y, e), y));
  }

  V logit(V x) {
    auto w = wide(x);
    auto y = narrow(log64(div(w, sub(d(1), w))));
    y = where(eq(x, f(0)), f(-kInf), y);
    y = where(eq(x, f(1)), f(kInf), y);
    return where(and_(ge(x, f(0)), le(x, f(1))), y, f(kNaN));
  }

  // With x = n + r, n whole: (-1)^n sin(pi r) / (pi x).
  V sinc(V x) {
    auto n = b_.apply(Fn::round, {x});
    auto r = wide(sub(x, n));
    // sin(pi r) / (pi r) in r^2
    auto p = polynomial(
        DType::f64, mul(r, r),
        {0x1.ffffffffd17d1p-1, -0x1.a51a660cabca7p+0, 0x1.9f9cab7887f16p-1, -0x1.86a6b089af237p-3, 0x1.abe34df562c31p-6, -0x1.24f9ac9bb0d40p-9});
    auto y = narrow(div(mul(r, p), wide(x)));
    auto half = mul(n, f(0.5));
    y = where(eq(b_.apply(Fn::floor, {half}), half), y, neg(y));
    return where(eq(x, f(0)), f(1), y);
  }

  V log(V x) { return finish_log(x, log64(wide(x))); }
  V log2(V x) { return finish_log(x, mul(log64(wide(x)), d(0x1.71547652b82fep+0))); }
  V log10(V x) { return finish_log(x, mul(log64(wide(x)), d(0x1.bcb7b1526e50ep-2))); }

  V log1p(V x) {
    auto y = narrow(log1p64(wide(x)));
    y = where(eq(x, f(-1)), f(-kInf), y);
    y = where(eq(x, f(kInf)), x, y);
    y = where(eq(x, f(0)), x, y);
    return where(not_(ge(x, f(-1))), f(kNaN), y);
  }

  V expm1(V x) { return where(eq(x, f(0)), x, narrow(expm1_64(clamp64(wide(x), 200)))); }

  V sinh(V x) {
    auto a = abs(clamp64(wide(x), 200));
    auto e = exp64(a);
    auto large = mul(sub(e, div(d(1), e)), d(0.5));
    auto u = mul(a, a);
    auto small = fma(mul(a, u), polynomial(DType::f64, u, {1.0 / 6, 1.0 / 120, 1.0 / 5040, 1.0 / 362880}), a);
    return copysign(narrow(where(lt(a, d(0.125)), small, large)), x);
  }

  V cosh(V x) {
    auto e = exp64(abs(clamp64(wide(x), 200)));
    return narrow(mul(add(e, div(d(1), e)), d(0.5)));
  }

  /// In float32, within 2^-19 of them: for what is rounded to 16 bits.
  V sin_near(V x) { return trigonometric_near(Fn::sin, x); }
  V cos_near(V x) { return trigonometric_near(Fn::cos, x); }

  V sin(V x) { return trigonometric(Fn::sin, x); }
  V cos(V x) { return trigonometric(Fn::cos, x); }
  V tan(V x) { return trigonometric(Fn::tan, x); }

  V asinh(V x) {
    auto a = abs(wide(x));
    auto u = mul(a, a);
    auto y = narrow(log1p64(add(a, div(u, add(d(1), sqrt(add(u, d(1))))))));
    y = where(eq(abs(x), f(kInf)), f(kInf), y);
    y = where(b_.apply(Fn::ne, {x, x}), x, y);
    return where(eq(x, f(0)), x, copysign(y, x));
  }

  V acosh(V x) {
    auto w = sub(wide(x), d(1));
    auto y = narrow(log1p64(add(w, sqrt(mul(w, add(w, d(2)))))));
    y = where(eq(x, f(kInf)), x, y);
    y = where(eq(x, f(1)), f(0), y);
    return where(not_(ge(x, f(1))), f(kNaN), y);
  }

  V atanh(V x) {
    auto a = abs(wide(x));
    auto y = narrow(mul(log1p64(div(add(a, a), sub(d(1), a))), d(0.5)));
    auto ax = abs(x);
    y = where(eq(ax, f(1)), f(kInf), y);
    y = where(not_(le(ax, f(1))), f(kNaN), y);
    return where(eq(x, f(0)), x, copysign(y, x));
  }

  V asin(V x) {
    auto a = abs(wide(x));
    auto root = sqrt(mul(sub(d(1), a), d(0.5)));
    auto big = gt(a, d(0.5));
    auto s = asin_polynomial(where(big, root, a));
    auto y = where(big, sub(d(kHalfPi), add(s, s)), s);
    return where(le(abs(x), f(1)), copysign(narrow(y), x), f(kNaN));
  }

  V acos(V x) {
    auto w = wide(x);
    auto a = abs(w);
    auto root = sqrt(mul(sub(d(1), a), d(0.5)));
    auto big = gt(a, d(0.5));
    auto s = asin_polynomial(where(big, root, w));
    auto near_one = add(s, s);
    auto y = where(big, where(lt(w, d(0)), sub(d(2 * kHalfPi), near_one), near_one), sub(d(kHalfPi), s));
    return where(le(abs(x), f(1)), narrow(y), f(kNaN));
  }

  V atan(V x) {
    auto a = abs(wide(x));
    auto inverted = gt(a, d(1));
    auto y = atan01(where(inverted, div(d(1), a), a));
    return copysign(narrow(where(inverted, sub(d(kHalfPi), y), y)), x);
  }

  /// Angle of the point (x, y), quadrant by the signs, also those of zeros and infinities (C's atan2).
  V atan2(V y, V x) {
    auto a = abs(wide(y));
    auto c = abs(wide(x));
    auto steep = gt(a, c);
    auto numerator = where(steep, c, a);
    auto denominator = where(steep, a, c);
    auto q = div(numerator, denominator);
    q = where(eq(denominator, d(0)), d(0), q);
    q = where(eq(numerator, d(kInf)), d(1), q);
    auto t = atan01(q);
    t = where(steep, sub(d(kHalfPi), t), t);
    t = where(b_.apply(Fn::signbit, {x}), sub(d(2 * kHalfPi), t), t);
    auto unordered = or_(b_.apply(Fn::ne, {x, x}), b_.apply(Fn::ne, {y, y}));
    return where(unordered, f(kNaN), copysign(narrow(t), y));
  }

  V hypot(V x, V y) {
    auto a = wide(x);
    auto c = wide(y);
    auto r = narrow(sqrt(fma(a, a, mul(c, c))));
    return where(or_(eq(abs(x), f(kInf)), eq(abs(y), f(kInf))), f(kInf), r);
  }

  /// C's pow with all its special cases.
  V pow(V x, V y) {
    auto a = abs(wide(x));
    auto w = wide(y);
    auto l = log64(a);
    l = where(eq(a, d(0)), d(-kInf), l);
    l = where(eq(a, d(kInf)), d(kInf), l);
    // NaN is not less than anything and survives log64 only through x itself.
    l = where(b_.apply(Fn::ne, {a, a}), a, l);
    auto r = exp64(clamp64(mul(w, l), 200));
    auto ay = abs(y);
    auto whole = eq(b_.apply(Fn::trunc, {ay}), ay);
    auto half = mul(ay, f(0.5));
    auto odd = and_(whole, not_(eq(b_.apply(Fn::trunc, {half}), half)));
    auto result = narrow(r);
    auto negative = b_.apply(Fn::signbit, {x});
    result = where(and_(negative, odd), b_.apply(Fn::neg, {result}), result);
    auto invalid = and_(and_(lt(x, f(0)), not_(whole)), lt(abs(x), f(kInf)));
    result = where(invalid, f(kNaN), result);
    result = where(and_(eq(abs(x), f(1)), eq(ay, f(kInf))), f(1), result);
    return where(or_(eq(x, f(1)), eq(y, f(0))), f(1), result);
  }

  V xlogy(V x, V y) {
    auto l = log64(wide(y));
    l = where(eq(y, f(0)), d(-kInf), l);
    l = where(eq(y, f(kInf)), d(kInf), l);
    l = where(ge(y, f(0)), l, d(kNaN));
    auto r = where(eq(x, f(0)), f(0), narrow(mul(wide(x), l)));
    return where(b_.apply(Fn::ne, {y, y}), y, r);
  }

  V logaddexp(V x, V y) { return log_of_sum(x, y, 1); }
  V logaddexp2(V x, V y) { return log_of_sum(x, y, kLn2); }

 private:
  static constexpr double kMagic32 = 12582912.0;          // 1.5 * 2^23: adding it rounds to an integer in the low bits
  static constexpr double kMagic64 = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kHalfPi = 0x1.921fb54442d18p+0;
  static constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  static constexpr double kInf = __builtin_inf();
  static constexpr double kNaN = __builtin_nan("");

  V f(double c) { return b_.literal(DType::f32, c); }
  V d(double c) { return b_.literal(DType::f64, c); }
  V i32(double c) { return b_.literal(DType::i32, c); }
  V i64(double c) { return b_.literal(DType::i64, c); }
  V add(V x, V y) { return b_.apply(Fn::add, {x, y}); }
  V sub(V x, V y) { return b_.apply(Fn::sub, {x, y}); }
  V mul(V x, V y) { return b_.apply(Fn::mul, {x, y}); }
  V div(V x, V y) { return b_.apply(Fn::div, {x, y}); }
  V fma(V x, V y, V z) { return b_.apply(Fn::fma, {x, y, z}); }
  V neg(V x) { return b_.apply(Fn::neg, {x}); }
  /// e^x of -174 <= x <= 174, within 2^-19 of it (2^-21 from e^-16 on), subnormal results too.
  V exp_near(V x) {
    if (b_.has(Fn::exp2_near)) return b_.apply(Fn::exp2_near, {mul(x, f(0x1.715476p+0))});
    // The square of its root, whose exponent is added to that of a polynomial.
    const auto half = f(0x1.715476p-1);
    auto t = fma(x, half, f(kMagic32));
    auto r = fma(x, half, sub(f(kMagic32), t));
    auto p = power_near(r);
    auto y = bitcast(add(bitcast(p, DType::i32), shl(bitcast(t, DType::i32), i32(23))), DType::f32);
    return mul(y, y);
  }
  /// 2^r on |r| <= 0.5, within 2^-23.
  V power_near(V r) { return polynomial(DType::f32, r, {0x1.000002p+0, 0x1.62e428p-1, 0x1.ebf918p-3, 0x1.c6b6e4p-5, 0x1.3d0c52p-7, 0x1.5c08e6p-10}); }
  V gelu_by(V x, std::initializer_list<double> of_tail) {
    auto c = abs(x);
    auto a = where(gt(c, f(14.5)), f(0), c);
    auto inverse = reciprocal_near(add(a, f(3)));
    std::vector<double> r(of_tail);
    auto square = mul(a, a);
    V density = square;
    if (b_.has(Fn::exp2_near)) {
      density = exp_near(mul(square, f(-0.5)));
    } else {
      // 2^64 times as much, which is no subnormal number; R is the smaller.
      const auto by = f(-0x1.715476p-1);
      auto t = fma(square, by, f(kMagic32 + 64));
      auto rest = fma(square, by, sub(f(kMagic32 + 64), t));
      auto p =
          r.size() < 8 ? polynomial(DType::f32, rest, {0x1.ffffe8p-1, 0x1.62e0dcp-1, 0x1.ec06dap-3, 0x1.ca144p-5, 0x1.3997d6p-7}) : power_near(rest);
      density = bitcast(add(bitcast(p, DType::i32), shl(bitcast(t, DType::i32), i32(23))), DType::f32);
      for (double& coefficient : r) coefficient *= 0x1p-64;
    }
    return fma(neg(a), mul(short_chain(inverse, r), mul(density, inverse)), where(lt(x, f(0)), sub(x, x), x));
  }
  /// e^-|x|; any number where x is NaN and the target has no exp2_near.
  V decay_near(V x) {
    auto a = abs(x);
    if (!b_.has(Fn::exp2_near)) a = where(gt(a, f(110)), f(110), a);
    return exp_near(neg(a));
  }
  /// y, but NaN where x is.
  V or_nan(V x, V y) { return b_.has(Fn::exp2_near) ? y : where(b_.apply(Fn::ne, {x, x}), x, y); }
  V reciprocal_near(V x) { return b_.has(Fn::reciprocal_near) ? b_.apply(Fn::reciprocal_near, {x}) : div(f(1), x); }
  /// x / (1 + e)
  V share_near(V x, V e) { return b_.has(Fn::reciprocal_near) ? mul(x, reciprocal_near(add(e, f(1)))) : div(x, add(e, f(1))); }
  V sqrt(V x) { return b_.apply(Fn::sqrt, {x}); }
  V abs(V x) { return b_.apply(Fn::abs, {x}); }
  V copysign(V x, V y) { return b_.apply(Fn::copysign, {x, y}); }
  V shl(V x, V y) { return b_.apply(Fn::shl, {x, y}); }
  V shr(V x, V y) { return b_.apply(Fn::shr, {x, y}); }
  V and_(V x, V y) { return b_.apply(Fn::bit_and, {x, y}); }
  V or_(V x, V y) { return b_.apply(Fn::bit_or, {x, y}); }
  V not_(V x) { return b_.apply(Fn::bit_not, {x}); }
  V lt(V x, V y) { return b_.apply(Fn::lt, {x, y}); }
  V le(V x, V y) { return b_.apply(Fn::le, {x, y}); }
  V gt(V x, V y) { return b_.apply(Fn::gt, {x, y}); }
  V ge(V x, V y) { return b_.apply(Fn::ge, {x, y}); }
  V eq(V x, V y) { return b_.apply(Fn::eq, {x, y}); }
  V where(V c, V x, V y) { return b_.apply(Fn::where, {c, x, y}); }
  V wide(V x) { return b_.cast(x, DType::f64); }
  V narrow(V x) { return b_.cast(x, DType::f32); }
  V bitcast(V x, DType t) { return b_.bitcast(x, t); }

  V clamp64(V x, double limit) {
    x = where(gt(x, d(limit)), d(limit), x);
    return where(lt(x, d(-limit)), d(-limit), x);
  }

  /// Horner's rule, lowest coefficient first.
  V polynomial(DType t, V x, std::initializer_list<double> c) {
    const double* p = c.end() - 1;
    V r = b_.literal(t, *p);
    while (p != c.begin()) r = fma(r, x, b_.literal(t, *--p));
    return r;
  }

  /// A polynomial of an even number of coefficients, pairs of them side by side (Estrin's scheme): vectors wait for one another less.
  V short_chain(V x, const std::vector<double>& c) {
    std::vector<V> terms;
    for (size_t k = 0; k < c.size(); k += 2) terms.push_back(fma(x, f(c[k + 1]), f(c[k])));
    for (V power = mul(x, x); terms.size() > 1; power = mul(power, power)) {
      std::vector<V> next;
      for (size_t k = 0; k < terms.size(); k += 2) next.push_back(k + 1 < terms.size() ? fma(terms[k + 1], power, terms[k]) : terms[k]);
      terms = std::move(next);
      if (terms.size() == 1) break;
    }
    return terms[0];
  }

  /// p * 2^n in two steps, so that a denormal result is rounded once; n lies in the low bits of t = n + kMagic32.
  V scale(V p, V t) {
    auto n = sub(bitcast(t, DType::i32), i32(0x4b400000));
    auto half = shr(n, i32(1));
    auto s1 = bitcast(shl(add(half, i32(127)), i32(23)), DType::f32);
    auto s2 = bitcast(shl(add(sub(n, half), i32(127)), i32(23)), DType::f32);
    return mul(mul(p, s1), s2);
  }

  /// (2^r - 1) / r on |r| <= 0.5.
  V exp2_quotient(V r) {
    return polynomial(DType::f32, r, {0x1.62e43p-1, 0x1.ebfbep-3, 0x1.c6b08ep-5, 0x1.3b2a1cp-7, 0x1.5d874cp-10, 0x1.444024p-13, 0x1.00dc64p-16});
  }
  /// 2^r on |r| <= 0.5.
  V exp2_polynomial(V r) { return fma(r, exp2_quotient(r), f(1)); }

  /// p 2^n; n lies in the low bits of t = n + kMagic64.
  V times_power64(V p, V t) { return bitcast(add(bitcast(p, DType::i64), shl(bitcast(t, DType::i64), i64(52))), DType::f64); }

  /// e^x in float64 for |x| <= 200, relative error 2e-14.
  V exp64(V x) {
    auto t = fma(x, d(0x1.71547652b82fep+0), d(kMagic64));
    auto n = sub(t, d(kMagic64));
    auto r = fma(n, d(-0x1.62e42fefa39efp-1), x);
    r = fma(n, d(-0x1.abc9e3b39803fp-56), r);
    auto p = polynomial(DType::f64, r,
                        {0x1.0000000000043p+0, 0x1.000000000003dp+0, 0x1.ffffffffe5427p-2, 0x1.5555555544c8ap-3, 0x1.5555558be302ap-5,
                         0x1.1111113a5e64fp-7, 0x1.6c1625a0b2d3p-10, 0x1.a01955eea4d32p-13, 0x1.a1851ca92182cp-16, 0x1.731b3a8641a1cp-19});
    return times_power64(p, t);
  }

  /// The same with a relative error of 2^-29, for results that are rounded to float32.
  V exp64_short(V x) {
    auto t = fma(x, d(0x1.71547652b82fep+0), d(kMagic64));
    auto n = sub(t, d(kMagic64));
    auto r = fma(n, d(-0x1.62e42fefa39efp-1), x);
    auto p = polynomial(DType::f64, r,
                        {0x1.0000000261c93p+0, 0x1.0000009c1992fp+0, 0x1.fffffaae83b86p-2, 0x1.55540a5be644ap-3, 0x1.55589a97fbee8p-5,
                         0x1.126d1dca8e5b6p-7, 0x1.6ab96f30e7310p-10});
    return times_power64(p, t);
  }

  /// body(x) in float64, rounded once; `below` and `above` where x passes the bounds, for which body computes another value: Intel's CPUs take a
  /// hundred cycles for products and conversions that vanish.
  template <class Body>
  V saturated(V x, double low, V below, double high, V above, Body body) {
    auto vanishes = lt(x, f(low));
    auto saturates = gt(x, f(high));
    auto y = narrow(body(wide(where(or_(vanishes, saturates), f(0), x))));
    return where(saturates, above, where(vanishes, below, y));
  }

  V expm1_64(V x) {
    auto large = sub(exp64(x), d(1));
    auto small = fma(mul(x, x), polynomial(DType::f64, x, {1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120}), x);
    return where(lt(abs(x), d(0x1p-8)), small, large);
  }

  /// log(v), v = 1 + w normal and positive: 2 atanh(s) with s = e / (2 + e), e = m - 1 for the mantissa m in [sqrt(1/2), sqrt(2)).
  V log_core(V v, V w) {
    auto bits = bitcast(v, DType::i64);
    // 1024 is added to the exponent so that the shift works on a non-negative number.
    auto k = shr(add(bits, i64(0x1p62 - 0x3fe6a09e667f3c00p0)), i64(52));
    auto n = sub(bitcast(or_(k, i64(0x4330000000000000p0)), DType::f64), d(0x1p52 + 1024));
    auto m = bitcast(sub(bits, shl(sub(k, i64(1024)), i64(52))), DType::f64);
    auto e = where(eq(k, i64(1024)), w, sub(m, d(1)));
    auto s = div(e, add(e, d(2)));
    // 2 atanh(s)/s in s^2
    auto p = polynomial(DType::f64, mul(s, s),
                        {0x1.0p+1, 0x1.55555555555b5p-1, 0x1.9999999978bc1p-2, 0x1.24924946fa00bp-2, 0x1.c71c4e70c3144p-3, 0x1.7466ed0ac9584p-3,
                         0x1.399118abb4892p-3, 0x1.2fa6fb27b0525p-3});
    return fma(n, d(0x1.62e42fefa39efp-1), mul(s, p));
  }
  V log64(V v) { return log_core(v, sub(v, d(1))); }
  V log1p64(V w) { return log_core(add(w, d(1)), w); }

  /// log(e^(u x) + e^(u y)) / u. What cancels beside 0 has float64's digits.
  V log_of_sum(V x, V y, double u) {
    auto larger = b_.apply(Fn::max, {x, y});
    auto rest = log1p64(exp64(clamp64(mul(abs(sub(wide(x), wide(y))), d(-u)), 200)));
    if (u != 1) rest = mul(rest, d(1 / u));
    // Of equal operands, infinities too, exact where u is that of base 2.
    rest = where(eq(x, y), d(kLn2 / u), rest);
    return narrow(add(wide(larger), rest));
  }

  V finish_log(V x, V wide_log) {
    auto y = narrow(wide_log);
    y = where(eq(x, f(0)), f(-kInf), y);
    y = where(eq(x, f(kInf)), x, y);
    return where(not_(ge(x, f(0))), f(kNaN), y);
  }

  /// atan on [0, 1]: above tan(pi/8) by atan(x) = pi/4 + atan((x - 1) / (x + 1)).
  V atan01(V x) {
    auto upper = gt(x, d(0x1.a827999fcef32p-2));
    auto z = where(upper, div(sub(x, d(1)), add(x, d(1))), x);
    auto p = polynomial(DType::f64, mul(z, z),
                        {0x1.ffffffffffff8p-1, -0x1.5555555550a55p-2, 0x1.99999992740fdp-3, -0x1.24924706d181ep-3, 0x1.c71bce6291026p-4,
                         -0x1.744edea727797p-4, 0x1.3a512d10d07a9p-4, -0x1.0a894c26e4695p-4, 0x1.9bf0be648e1dep-5, -0x1.9f9365b11fdf5p-6});
    auto y = mul(z, p);
    return where(upper, add(y, d(kHalfPi / 2)), y);
  }

  /// asin on [-0.5, 0.5] by asin(x)/x in x^2.
  V asin_polynomial(V x) {
    auto p =
        polynomial(DType::f64, mul(x, x),
                   {0x1.000000000001p+0, 0x1.55555555371dp-3, 0x1.3333335821b86p-4, 0x1.6db6c9da90cafp-5, 0x1.f1cb63514c6cbp-6, 0x1.6e3e477338dc2p-6,
                    0x1.1fb0aa9c0919bp-6, 0x1.998d63e6b9c72p-7, 0x1.28932032d092dp-6, -0x1.f4fa8f76b0adbp-8, 0x1.044358398c034p-5});
    return mul(x, p);
  }

  /// Reduction by multiples of pi/2 in float64 (Cody and Waite, two parts): exact enough for |x| < 2^30; larger arguments are patched.
  V trigonometric(Fn fn, V x) {
    auto w = wide(x);
    auto t = fma(w, d(0x1.45f306dc9c883p-1), d(kMagic64));
    auto n = sub(t, d(kMagic64));
    auto r = fma(n, d(-kHalfPi), w);
    r = fma(n, d(-0x1.1a62633145c07p-54), r);
    auto quadrant = bitcast(t, DType::i64);
    auto u = mul(r, r);
    auto s = mul(r, polynomial(DType::f64, u,
                               {0x1.fffffffffffd9p-1, -0x1.5555555550e5cp-3, 0x1.1111110bd4a6ap-7, -0x1.a019f8954954ap-13, 0x1.71d72ac95aea5p-19,
                                -0x1.a94e11bb55ebfp-26}));
    auto c = polynomial(DType::f64, u,
                        {1.0, -0x1.fffffffffff78p-2, 0x1.555555554e6e6p-5, -0x1.6c16c163b5a62p-10, 0x1.a019f7ef8d6e6p-16, -0x1.27df3a7a29493p-22,
                         0x1.1b895026c31ecp-29});
    auto swapped = eq(and_(quadrant, i64(1)), i64(1));
    V y = s;
    if (fn == Fn::tan) {
      y = div(where(swapped, b_.apply(Fn::neg, {c}), s), where(swapped, s, c));
    } else {
      auto turns = fn == Fn::sin ? quadrant : add(quadrant, i64(1));
      y = fn == Fn::sin ? where(swapped, c, s) : where(swapped, s, c);
      y = where(eq(and_(turns, i64(2)), i64(2)), b_.apply(Fn::neg, {y}), y);
    }
    return b_.patch(gt(abs(x), f(0x1p30)), fn, x, narrow(y));
  }

  /// The same in float32 with pi/2 in three parts: n times the first is exact up to |n| = 2^15.
  V trigonometric_near(Fn fn, V x) {
    auto t = fma(x, f(0x1.45f306p-1), f(kMagic32));
    auto n = sub(f(kMagic32), t);
    auto r = fma(n, f(0x1.921fb6p+0), x);
    r = fma(n, f(-0x1.777a5cp-25), r);
    r = fma(n, f(-0x1.ee59dap-50), r);
    auto quadrant = bitcast(t, DType::i32);
    auto u = mul(r, r);
    auto s = fma(mul(r, u), polynomial(DType::f32, u, {-0x1.554482p-3, 0x1.0b896cp-7}), r);
    auto c = fma(u, polynomial(DType::f32, u, {-0x1.ffffb2p-2, 0x1.553e7cp-5, -0x1.644cfcp-10}), f(1));
    auto swapped = eq(and_(quadrant, i32(1)), i32(1));
    auto turns = fn == Fn::sin ? quadrant : add(quadrant, i32(1));
    auto y = fn == Fn::sin ? where(swapped, c, s) : where(swapped, s, c);
    auto sign = shl(and_(turns, i32(2)), i32(30));
    y = bitcast(b_.apply(Fn::bit_xor, {bitcast(y, DType::i32), sign}), DType::f32);
    if (fn == Fn::sin) y = where(eq(x, f(0)), x, y);  // the reduction loses the sign of zero
    return b_.patch(gt(abs(x), f(0x1.9p15)), fn, x, y);
  }

  B& b_;
};

}  // namespace deplo
