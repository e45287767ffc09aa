#pragma once

#include "lower/torch_to_tensor/formula.h"

namespace deplo::rules {

/// The derivative P(X <= x) + x p(x) of GELU in float32 or float64, X normal with mean 0 and deviation 1 and p its density. Nothing is added to erf,
/// which would cancel.
Formula gelu_slope(const Formula& x);

}  // namespace deplo::rules
