#pragma once

#include "lower/torch_to_tensor/common.h"

namespace deplo::rules {

/// The window of a convolution, one entry per spatial dimension.
struct Window {
  std::vector<Expr> stride;
  std::vector<Expr> padding;
  std::vector<Expr> dilation;
  Expr groups = 1;
};

/// out[n, g*A + a, o] = sum over c, k of x[n, g*C + c, o*stride - padding + k*dilation] * w[g*A + a, c, k], zero outside x.
/// x: [N, G*C, in...], w: [G*A, C, K...]; the result is [N, G*A, out...] in `dtype`.
Value correlate(Builder& b, const Value& x, const Value& w, const Shape& out, const Window& window, DType dtype);

/// The adjoint: out[n, g*A + a, i] = sum over c, k of x[n, g*C + c, (i + padding - k*dilation) / stride] * w[g*C + c, a, k]
/// where the quotient is exact and inside x. x: [N, G*C, in...], w: [G*C, A, K...].
Value correlate_adjoint(Builder& b, const Value& x, const Value& w, const Shape& out, const Window& window, DType dtype);

/// The other adjoint: w[g*A + a, c, k] = sum over n, o of y[n, g*A + a, o] * x[n, g*C + c, o*stride - padding + k*dilation].
Value correlate_weight(Builder& b, const Value& y, const Value& x, const Shape& kernel, const Window& window, DType dtype);

}  // namespace deplo::rules
