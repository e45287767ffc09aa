#pragma once

#include <cstdint>
#include <vector>

#include "scalar/functions.h"

namespace deplo {

/// The running state of one reduction or scan in an interpreter; the order in which elements are added does not matter but for rounding.
class Accumulator {
 public:
  /// `dtype` is that of the (first) operand. Float sums and products run in double and are rounded by results() in typed mode.
  Accumulator(Combiner combiner, DType dtype, Mode mode);

  /// Combines one element: operand_count(combiner) operands, or for welford also a partial result (count, mean, m2).
  void add(const std::vector<Scalar>& operands);
  /// The combined values so far. Over nothing: the identity; argmin and argmax give the largest index, welford (0, 0), online_softmax (-inf, 0).
  std::vector<Scalar> results(const std::vector<DType>& dtypes) const;

 private:
  Combiner combiner_;
  DType dtype_;
  Mode mode_;
  Scalar value_;  ///< sum, prod, min, max; the value of argmin and argmax
  int64_t index_ = INT64_MAX;
  double count_ = 0;  ///< welford, online_softmax
  double a_ = 0;      ///< mean, or the running maximum
  double b_ = 0;      ///< m2, or the running sum
};

/// What a combining store leaves in a place that held `old`.
Scalar combine(Combiner combiner, const Scalar& old, const Scalar& value, Mode mode);

}  // namespace deplo
