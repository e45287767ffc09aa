#include <cmath>
#include <limits>

#include "base/error.h"
#include "lower/torch_to_tensor/formula.h"
#include "lower/torch_to_tensor/pointwise.h"

// Special functions beyond libm's: Bessel, zeta, quantiles of the normal distribution.

namespace deplo::rules {
namespace {

using Values = std::vector<Value>;

template <Fn fn>
Values of_self(Builder& b, const Call& call) {
  return finish(b, call, b.apply(fn, {operand(b, call, "self", compute_dtype(call))}));
}

Values zeta(Builder& b, const Call& call) {
  DType dtype = compute_dtype(call);
  return finish(b, call, b.apply(Fn::zeta, {operand(b, call, "self", dtype), operand(b, call, "other", dtype)}));
}

// The n-th derivative of digamma: (-1)^(n + 1) n! zeta(n + 1, x), in float64 because n! amplifies rounding.
Values polygamma(Builder& b, const Call& call) {
  int64_t n = call.integer("n");
  DEPLO_SUPPORT(n >= 0, "polygamma of order {}", n);
  if (n == 0) return of_self<Fn::digamma>(b, call);
  Formula x{&b, operand(b, call, "self", DType::f64)};
  double factor = std::tgamma(static_cast<double>(n) + 1) * (n % 2 ? 1 : -1);
  Formula derivative = x.literal(static_cast<double>(n) + 1).with(Fn::zeta, x) * factor;
  // Eager's first derivative goes through the sine of pi x, which has no limit; the others are infinite, as at poles.
  double infinity = std::numeric_limits<double>::infinity();
  if (n == 1) derivative = select(equals(x, -infinity), x.literal(std::numeric_limits<double>::quiet_NaN()), derivative);
  return finish(b, call, derivative.value);
}

// log P(X <= x): by erfcx where P is small.
Values log_ndtr(Builder& b, const Call& call) {
  Formula x{&b, operand(b, call, "self", compute_dtype(call))};
  Formula t = x * M_SQRT1_2;
  Formula small = ((-t).with(Fn::erfcx) / 2.0).with(Fn::log) - t * t;
  Formula large = (t.with(Fn::erfc) / -2.0).with(Fn::log1p);
  return finish(b, call, select(less(x, -1), small, large).value);
}

}  // namespace

const std::vector<Row>& special_rules() {
  static const std::vector<Row> rows{
      {"aten.i0.default", of_self<Fn::i0>},
      {"aten.polygamma.default", polygamma},
      {"aten.special_erfcx.default", of_self<Fn::erfcx>},
      {"aten.special_i0e.default", of_self<Fn::i0e>},
      {"aten.special_i1.default", of_self<Fn::i1>},
      {"aten.special_i1e.default", of_self<Fn::i1e>},
      {"aten.special_log_ndtr.default", log_ndtr},
      {"aten.special_ndtri.default", of_self<Fn::ndtri>},
      {"aten.special_zeta.default", zeta},
      {"aten.special_zeta.other_scalar", zeta},
      {"aten.special_zeta.self_scalar", zeta},
  };
  return rows;
}

}  // namespace deplo::rules
