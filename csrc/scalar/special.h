#pragma once

// Functions of float64 that libm lacks, or gives with more than an ulp of error. Each computes in the 80-bit format (or with the
// residuals of its roundings) and rounds once: at most 0.51 ulp unless said otherwise (digamma, zeta: of their largest term).

namespace deplo::special {

double log10(double x);
double sinh(double x);
double cosh(double x);
double tanh(double x);  ///< 0.9 ulp
double atanh(double x);
double sigmoid(double x);    ///< 1.55 ulp, as softplus, silu, mish and gelu_tanh
double softplus(double x);   ///< log(1 + exp(x))
double silu(double x);       ///< x sigmoid(x)
double mish(double x);       ///< x tanh(softplus(x))
double gelu(double x);       ///< x P(X <= x) for a standard normal X; 3 ulp
double gelu_tanh(double x);  ///< x sigmoid(sqrt(8 / pi) (x + 0.044715 x^3))
double logit(double x);      ///< log(x / (1 - x))
double sinc(double x);       ///< sin(pi x) / (pi x)
double xlogy(double x, double y);
double logaddexp(double x, double y);   ///< log(e^x + e^y); where the result is near 0, 2^-64 of the larger operand, as logaddexp2
double logaddexp2(double x, double y);  ///< log2(2^x + 2^y)
double erfc(double x);
double lgamma(double x);
double erfinv(double y);
double erfcx(double x);  ///< exp(x^2) erfc(x)
double ndtri(double p);  ///< the x with P(X <= x) = p for a standard normal X
double digamma(double x);
/// Hurwitz's zeta function sum (q + k)^-s, s > 1; where q <= 0, infinite at integers and NaN for fractional s. As torch.special.zeta.
double zeta(double s, double q);
double i0(double x);  ///< modified Bessel functions of the first kind
double i1(double x);
double i0e(double x);  ///< exp(-|x|) i0(x)
double i1e(double x);  ///< exp(-|x|) i1(x)

}  // namespace deplo::special
