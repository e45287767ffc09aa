#pragma once

#include "lower/torch_to_tensor/common.h"

namespace deplo::rules {

struct PoolWindow {
  std::vector<Expr> kernel, stride, padding, dilation;
};
PoolWindow pool_window(const Call& call, size_t spatial);

/// The leading dimensions of `in` followed by `out`.
Shape pooled_shape(const Shape& in, const std::vector<Expr>& out);

/// x seen at every (output position, window position): the window's axes come last and are those to reduce.
struct Windows {
  Shape space;
  std::vector<Expr> index;  ///< into x
  std::vector<Cond> guard;  ///< inside x, and inside the window
  std::vector<int64_t> reduced;
};
Windows windows_of(const Value& x, const Shape& out, const PoolWindow& w);

/// Window o of adaptive pooling: [floor(o * in / out), ceil((o + 1) * in / out)).
struct AdaptiveRange {
  Expr begin, end;
};
AdaptiveRange adaptive_range(Expr o, Expr in, Expr out);
Windows adaptive_windows(Builder& b, const Value& x, const Shape& out, size_t count);
/// Elements in the adaptive window at the output axes of `out`.
Expr adaptive_count(Builder& b, const Shape& in, const Shape& out, int64_t spatial);

/// Position within the flattened spatial dimensions of x at each point of the windows.
Value flat_position(Builder& b, const Value& x, const Windows& windows);
/// What avg_pool of an x of that type divides by at each output position, in x's dtype.
Value average_divisor(Builder& b, const Call& call, const TensorType& x, const Shape& out, const PoolWindow& w);

}  // namespace deplo::rules
