#include "scalar/special.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace deplo::special {
namespace {

using Wide = long double;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr Wide kPi = 3.141592653589793238462643383279502884L;
constexpr Wide kSqrtPi = 1.772453850905516027298167483341145183L;
constexpr Wide kSqrt2 = 1.414213562373095048801688724209698079L;
constexpr Wide kLn2 = 0.693147180559945309417232121458176568L;
constexpr Wide kNegligible = 0x1p-68L;

// B(2k) / (2k), k = 1, 2, ...: of the asymptotic series of digamma (Abramowitz and Stegun 6.3.18).
constexpr Wide kDigammaSeries[] = {1.0L / 12,       -1.0L / 120, 1.0L / 252,      -1.0L / 240,      1.0L / 132,
                                   -691.0L / 32760, 1.0L / 12,   -3617.0L / 8160, 43867.0L / 14364, -174611.0L / 6600};
// B(2k) / (2k)!: of the Euler-Maclaurin sum.
constexpr Wide kEulerMaclaurin[] = {1.0L / 12,
                                    -1.0L / 720,
                                    1.0L / 30240,
                                    -1.0L / 1209600,
                                    1.0L / 47900160,
                                    -691.0L / 1307674368000.0L,
                                    1.0L / 74724249600.0L,
                                    -3617.0L / 10670622842880000.0L,
                                    43867.0L / 5109094217170944000.0L,
                                    -174611.0L / 802857662698291200000.0L};

Wide digamma_positive(Wide x) {
  Wide shift = 0;
  while (x < 16) {
    shift -= 1 / x;
    x += 1;
  }
  Wide f = 1 / (x * x);
  Wide series = 0;
  for (int k = std::size(kDigammaSeries) - 1; k >= 0; --k) series = (series + kDigammaSeries[k]) * f;
  return std::log(x) - 0.5L / x - series + shift;
}

// sum_{k >= 0} (q + k)^-s for q > 0: terms up to q + k >= 12, then Euler and Maclaurin's formula.
Wide zeta_positive(Wide s, Wide q) {
  Wide sum = 0;
  while (q < 12) {
    Wide term = std::pow(q, -s);
    sum += term;
    if (term < sum * kNegligible) return sum;
    q += 1;
  }
  Wide power = std::pow(q, -s);
  sum += power * q / (s - 1) + power / 2;
  Wide factor = power * s / q;  // s (s + 1) ... (s + 2k) q^(-s - 2k - 1)
  Wide j = s;
  for (Wide coefficient : kEulerMaclaurin) {
    sum += factor * coefficient;
    factor *= (j + 1) * (j + 2) / (q * q);
    j += 2;
    if (factor < sum * kNegligible) break;
  }
  return sum;
}

// exp(y) without the digits that y loses as a float64; subnormal results in full.
Wide exp_of(Wide y) {
  const auto rounded = static_cast<double>(y);
  if (!(rounded > -700 && rounded < 700)) return std::exp(y);
  return std::exp(rounded) * (1 + (y - rounded));
}

// erfc(x) = q for q in (0, 1]: Halley's steps on log-scaled erfc, from its leading asymptotic term.
Wide erfc_inverse(Wide q) {
  Wide t = std::sqrt(-2 * std::log(q / 2));
  // Abramowitz and Stegun 26.2.22: within 3e-3 of the normal quantile.
  Wide x = (t - (2.30753L + 0.27061L * t) / (1 + t * (0.99229L + 0.04481L * t))) / kSqrt2;
  for (int step = 0; step < 3; ++step) {
    Wide error = std::erfc(x) - q;
    Wide slope = -2 / kSqrtPi * std::exp(-x * x);
    Wide newton = error / slope;
    x -= newton / (1 + x * newton);
  }
  return x;
}

// I_order(x) exp(-x) for x >= 0.
Wide bessel_i_scaled(int order, Wide x) {
  if (x < 30) {
    static const auto inverses = [] {
      std::array<std::array<Wide, 120>, 2> table{};
      for (int n = 0; n < 2; ++n)
        for (int k = 1; k < 120; ++k) table[n][k] = 1 / (static_cast<Wide>(k) * (k + n));
      return table;
    }();
    Wide quarter = x * x / 4;
    Wide term = 1;
    Wide sum = 1;
    for (int k = 1; k < 120; ++k) {
      term *= quarter * inverses[order][k];
      sum += term;
      if (term < sum * kNegligible) break;
    }
    return sum * std::exp(-x) * (order ? x / 2 : 1);
  }
  // Abramowitz and Stegun 9.7.1; the terms fall until k = 2x.
  Wide mu = order ? 4 : 0;
  Wide term = 1;
  Wide sum = 1;
  for (int k = 1; k < 60; ++k) {
    term *= -(mu - static_cast<Wide>(2 * k - 1) * (2 * k - 1)) / (8 * k * x);
    sum += term;
    if (std::fabs(term) < kNegligible) break;
  }
  return sum / std::sqrt(2 * kPi * x);
}

double bessel_i(int order, double x, bool scaled) {
  // Infinity is NaN without the scale, as in eager.
  if (!std::isfinite(x)) return scaled && std::isinf(x) ? 0 : kNaN;
  Wide a = std::fabs(static_cast<Wide>(x));
  Wide value = bessel_i_scaled(order, a) * (scaled ? 1 : std::exp(a));
  return static_cast<double>(order && std::signbit(x) ? -value : value);
}

}  // namespace

double log10(double x) { return static_cast<double>(std::log10(static_cast<Wide>(x))); }
double sinh(double x) { return static_cast<double>(std::sinh(static_cast<Wide>(x))); }
double cosh(double x) { return static_cast<double>(std::cosh(static_cast<Wide>(x))); }
double atanh(double x) { return static_cast<double>(std::atanh(static_cast<Wide>(x))); }
double lgamma(double x) { return static_cast<double>(std::lgamma(static_cast<Wide>(x))); }
double erfc(double x) { return static_cast<double>(std::erfc(static_cast<Wide>(x))); }

double sigmoid(double x) { return static_cast<double>(1 / (1 + exp_of(-static_cast<Wide>(x)))); }
double silu(double x) { return static_cast<double>(x / (1 + exp_of(-static_cast<Wide>(x)))); }

double softplus(double x) {
  if (x > 40) return x + std::exp(-x);
  return static_cast<double>(std::log1p(exp_of(x)));
}

double mish(double x) {
  if (x > 40) return x;
  const Wide e = exp_of(x);
  const Wide n = e * (e + 2);
  return static_cast<double>(x * (n / (n + 2)));
}

double gelu_tanh(double given) {
  const Wide x = given;
  const Wide y = std::sqrt(8 / kPi) * (x + Wide{0.044715} * x * x * x);
  return static_cast<double>(x / (1 + exp_of(-y)));
}

// x erfc(z) / 2 with z = -x / sqrt(2): that of the rounded z, moved along its slope.
double gelu(double given) {
  if (given > 9) return given;
  const Wide x = given;
  const Wide z = -x / kSqrt2;
  const auto rounded = static_cast<double>(z);
  if (!(rounded < 25)) return static_cast<double>(x * std::erfc(z) / 2);
  const Wide slope = 2 / kSqrtPi * std::exp(-rounded * rounded);
  return static_cast<double>(x * (std::erfc(rounded) - (z - rounded) * slope) / 2);
}

double logit(double given) {
  const Wide x = given;
  // Around 1/2 the difference of the quotient from 1 keeps the digits.
  if (std::abs(x - 0.5L) < 0.25L) return static_cast<double>(std::log1p((2 * x - 1) / (1 - x)));
  return static_cast<double>(std::log(x / (1 - x)));
}

// With x = n + r, n whole: (-1)^n sin(pi r) / (pi x).
double sinc(double x) {
  if (x == 0) return 1;
  const double n = std::nearbyint(x);
  const Wide sine = std::sin(kPi * (x - n));
  return static_cast<double>((std::fmod(n, 2) == 0 ? sine : -sine) / (kPi * x));
}

double xlogy(double x, double y) {
  if (std::isnan(y)) return y;
  return x == 0 ? 0 : static_cast<double>(x * std::log(static_cast<Wide>(y)));
}

double logaddexp(double x, double y) {
  if (std::isnan(x) || std::isnan(y)) return x + y;
  const Wide larger = std::max(x, y);
  if (std::isinf(x) && x == y) return x;
  return static_cast<double>(larger + std::log1p(std::exp(-std::abs(static_cast<Wide>(x) - y))));
}

double logaddexp2(double x, double y) {
  if (std::isnan(x) || std::isnan(y)) return x + y;
  const Wide larger = std::max(x, y);
  if (std::isinf(x) && x == y) return x;
  return static_cast<double>(larger + std::log1p(std::exp2(-std::abs(static_cast<Wide>(x) - y))) / kLn2);
}

double tanh(double x) {
  double a = std::fabs(x);
  if (a < 0.55) {
    // (tanh(x)/x - 1) / x^2 in x^2, minimax
    constexpr double kSmall[] = {-0x1.5555555555555p-2,  0x1.1111111111109p-3,  -0x1.ba1ba1ba1a732p-5,  0x1.664f48822e9a5p-6,
                                 -0x1.226e3539b9272p-7,  0x1.d6d3c60009e9cp-9,  -0x1.7da25da5066b5p-10, 0x1.3547bfaa42508p-11,
                                 -0x1.f41d11ba745a0p-13, 0x1.8c93b7d5aba25p-14, -0x1.1adede7706052p-15, 0x1.08378067f032ap-17};
    double u = a * a;
    double p = 0;
    for (int k = std::size(kSmall) - 1; k >= 0; --k) p = p * u + kSmall[k];
    return std::copysign(x + x * (u * p), x);  // -0 + 0 would be 0
  }
  if (!(a < 20)) return std::isnan(x) ? x : std::copysign(1.0, x);
  // 1 - 2 / (e^2a + 1), with what the sum and the quotient lost put back.
  double e = std::exp(2 * a);
  double sum = e + 1;
  double lost = 1 - (sum - e);
  double quotient = 2 / sum;
  double correction = (std::fma(-quotient, sum, 2.0) - quotient * lost) / sum;
  return std::copysign(1 - (quotient + correction), x);
}

double erfinv(double y) {
  double a = std::fabs(y);
  if (!(a < 1)) return a == 1 ? y * kInf : kNaN;
  if (a > 0.5) return static_cast<double>(std::copysign(erfc_inverse(1 - static_cast<Wide>(a)), static_cast<Wide>(y)));
  // A power series start, then Halley's steps on erf, whose error is relative to x.
  Wide w = static_cast<Wide>(y) * kSqrtPi / 2;
  Wide x = w + w * w * w / 3;
  for (int step = 0; step < 3; ++step) {
    Wide newton = (std::erf(x) - y) * (kSqrtPi / 2) * std::exp(x * x);
    x -= newton / (1 + x * newton);
  }
  return y == 0 ? y : static_cast<double>(x);
}

double erfcx(double x) {
  if (x > 7) {
    Wide f = 1 / (2 * static_cast<Wide>(x) * x);
    Wide term = 1;
    Wide sum = 1;
    for (int k = 1; k < 49; ++k) {
      term *= -f * (2 * k - 1);
      sum += term;
      if (std::fabs(term) < kNegligible) break;
    }
    return static_cast<double>(sum / (kSqrtPi * x));
  }
  if (x < -27) return kInf;
  // x^2 in two parts, the first of which is exact.
  Wide high = static_cast<float>(x);
  Wide low = x - high;
  return static_cast<double>(std::exp(high * high) * std::exp(low * (high + x)) * std::erfc(static_cast<Wide>(x)));
}

double ndtri(double p) {
  if (!(p > 0 && p < 1)) return p == 0 ? -kInf : p == 1 ? kInf : kNaN;
  if (p == 0.5) return 0;
  if (p < 0.25) return static_cast<double>(-kSqrt2 * erfc_inverse(2 * static_cast<Wide>(p)));
  if (p > 0.75) return static_cast<double>(kSqrt2 * erfc_inverse(2 * (1 - static_cast<Wide>(p))));
  Wide y = 2 * (static_cast<Wide>(p) - 0.5L);
  Wide x = y * kSqrtPi / 2;
  for (int step = 0; step < 4; ++step) {
    Wide newton = (std::erf(x) - y) * (kSqrtPi / 2) * std::exp(x * x);
    x -= newton / (1 + x * newton);
  }
  return static_cast<double>(kSqrt2 * x);
}

double digamma(double x) {
  if (x == 0) return std::copysign(kInf, -x);
  if (x > 0) return static_cast<double>(digamma_positive(x));
  if (!(x > -kInf)) return kNaN;
  Wide fraction = static_cast<Wide>(x) - std::round(static_cast<Wide>(x));
  if (fraction == 0) return kNaN;
  return static_cast<double>(digamma_positive(1 - static_cast<Wide>(x)) - kPi / std::tan(kPi * fraction));
}

double zeta(double s, double q) {
  if (s == 1) return kInf;
  if (!(s > 1) || std::isnan(q)) return kNaN;
  if (q > 0) return std::isinf(q) ? 0 : static_cast<double>(zeta_positive(s, q));
  if (q == std::floor(q)) return kInf;
  if (s != std::floor(s)) return kNaN;
  // The terms with q + k < 0 are those of f, f + 1, ..., |q|, each with its sign.
  Wide a = -static_cast<Wide>(q);
  Wide f = a - std::floor(a);
  Wide negative = zeta_positive(s, f) - zeta_positive(s, a + 1);
  return static_cast<double>((std::fmod(s, 2.0) == 0 ? negative : -negative) + zeta_positive(s, 1 - f));
}

double i0(double x) { return bessel_i(0, x, false); }
double i1(double x) { return bessel_i(1, x, false); }
double i0e(double x) { return bessel_i(0, x, true); }
double i1e(double x) { return bessel_i(1, x, true); }

}  // namespace deplo::special
