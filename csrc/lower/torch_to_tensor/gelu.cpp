#include "lower/torch_to_tensor/gelu.h"

#include <cmath>
#include <vector>

namespace deplo::rules {
namespace {

// P(X <= -a) = exp(-a^2 / 2) R(q) / (a + k) with q = (a - k) / (a + k). R is a minimax fit (Remez) of the relative error, made for this
// file.
struct Fit {
  double last;               ///< from here on exp(-a^2 / 2) is 0
  double k;                  ///< maps [0, last] to q
  std::vector<double> tail;  ///< R(q)
};

const Fit& fit(DType dtype) {
  // Below 2^-25; the last number makes R(-1), hence the slope at 0, exact.
  static const Fit narrow{
      15,
      3.75,
      {0x1.80268cp-1, -0x1.2d2704p-1, 0x1.69690p-2, -0x1.36508ep-3, 0x1.33237cp-5, 0x1.3a979ap-10, -0x1.113884p-8, 0x1.0b312p-11, 0x1.d0f2cep-12},
  };
  // Below 2^-55.
  static const Fit wide{
      39,
      4,
      {0x1.82b4bb8c94dcep-1,   -0x1.373e3a893c28ap-1,  0x1.8c6dbf2cfc308p-2,   -0x1.7dff2bff6848fp-3,  0x1.eec4cc3e44374p-5,   -0x1.ee2761043915ep-8,
       -0x1.c81719c958e36p-9,  0x1.ab825fb0a52f5p-10,  0x1.17a4a5f909689p-13,  -0x1.e4a421b51c1f6p-13, -0x1.00110677a4e9fp-19, 0x1.26d06343017aep-15,
       0x1.7fd98de9fa4b5p-21,  -0x1.8d48febf9f1d1p-18, -0x1.4faadabae0124p-21, 0x1.124d4c78ab873p-20,  0x1.1ba268dfd6b86p-22,  -0x1.50457e7300b30p-23,
       -0x1.4b9d716fbd6dbp-24, 0x1.14069384f5f90p-26,  0x1.f647e9d5bb2a7p-27,  -0x1.73fafa52f825ep-32, -0x1.48cf5887ac45fp-30},
  };
  return dtype == DType::f64 ? wide : narrow;
}

// P(X <= -a) = power (1 + rest) part / sum for a = min(|x|, last).
struct Tail {
  Formula a;
  Formula power;  ///< exp of the rounded square, by -1/2
  Formula rest;   ///< what the square lost, by -1/2
  Formula part;   ///< R(q)
  Formula sum;    ///< a + k
};

Tail tail(const Formula& x) {
  const Fit& f = fit(x.value.type.dtype);
  const Formula a = min(x.with(Fn::abs), f.last);
  const Formula square = a * a;
  const Formula sum = a + f.k;
  return {a, (square * -0.5).with(Fn::exp), fma(a, a, -square) * -0.5, polynomial(fma(a / sum, a.literal(2), a.literal(-1)), f.tail), sum};
}

}  // namespace

Formula gelu_slope(const Formula& x) {
  const Tail t = tail(x);
  const Formula product = t.part / t.sum - x.with(Fn::abs) * (M_2_SQRTPI * M_SQRT1_2 * 0.5);
  const Formula negative = fma(product, t.rest, product) * t.power;
  return select(greater(x, 0), 1.0 - negative, negative);
}

}  // namespace deplo::rules
