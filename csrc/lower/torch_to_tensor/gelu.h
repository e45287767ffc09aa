#pragma once

#include "lower/torch_to_tensor/formula.h"

namespace deplo::rules {

/// x P(X <= x) for a normal X with mean 0 and deviation 1, in float32 or float64. Unlike x (1 + erf(x / sqrt(2))) / 2, in which 1 + erf cancels,
/// it keeps its digits far below 0.
Formula gelu(const Formula& x);

/// Its derivative P(X <= x) + x p(x), p the density.
Formula gelu_slope(const Formula& x);

}  // namespace deplo::rules
