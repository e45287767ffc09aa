#pragma once

#include "lower/torch_to_tensor/common.h"

namespace deplo::rules {

/// The mean over `dims` and the variance times scale^2, in two passes; both keep the reduced dimensions as 1. The mean of the differences is what
/// rounding left of the mean, without which rows of equal numbers would have a variance (Chan, Golub, LeVeque: Algorithms for computing the sample
/// variance, 1983); of numbers around 0 it is no better known than the mean itself, and left out.
struct Moments {
  Value mean;
  Value variance;
};
Moments moments(Builder& b, const Value& x, const std::vector<int64_t>& dims, double scale);

/// (x - mean) and 1 / sqrt(mean((x - mean)^2) + eps) over `dims`, in two passes; mean and rstd keep the reduced dimensions as 1.
struct Centered {
  Value difference;
  Value mean;
  Value rstd;
};
Centered centered(Builder& b, const Value& x, const std::vector<int64_t>& dims, double eps);

/// exp(x - max) / sum over `dim`, in x's dtype.
Value softmax_of(Builder& b, const Value& x, int64_t dim);
/// The same with 0 in place of NaN in rows that are -inf throughout.
Value safe_softmax_of(Builder& b, const Value& x, int64_t dim);

/// [N, G*K, rest...] as [N, G, K, rest...] and back.
Value split_channels(Builder& b, const Value& x, Expr groups);
Value merge_channels(Builder& b, const Value& x);

}  // namespace deplo::rules
