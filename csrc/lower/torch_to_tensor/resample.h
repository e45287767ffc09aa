#pragma once

#include <optional>

#include "lower/torch_to_tensor/common.h"

namespace deplo::rules {

enum class Interpolation { nearest, nearest_exact, linear, cubic };

/// One source element of an output position along one dimension: where it is, and its weight over the outputs (none: 1).
struct Tap {
  Expr index;                                   ///< over axis(d), or the indirect's name
  std::optional<tensor_ir::Indirect> indirect;  ///< where no closed form is certain to round as eager does
  std::optional<Value> weight;                  ///< [out]
};

/// What upsampling reads along a dimension.
struct Resample {
  Expr in, out;
  std::optional<double> scale;  ///< as the caller gave it: output / input
  bool align_corners = false;
};
/// The taps of each output position along dimension d, with weights in dtype.
std::vector<Tap> taps_of(Builder& b, Interpolation mode, const Resample& r, int64_t d, DType dtype);

/// The scale argument of spatial dimension k, under whichever names the overload has.
std::vector<std::optional<double>> scales_of(const Call& call, size_t spatial);

/// Cubic convolution weights (Keys 1981, A = -0.75) of the four neighbours at distance t in [0, 1) from the second.
std::vector<Value> cubic_weights(Builder& b, const Value& t);
/// Their derivatives by t.
std::vector<Value> cubic_slopes(Builder& b, const Value& t);

}  // namespace deplo::rules
