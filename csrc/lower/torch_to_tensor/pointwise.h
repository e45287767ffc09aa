#pragma once

#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {

/// The activation functions, a part of pointwise_rules().
const std::vector<Row>& activation_rules();
/// Special functions, likewise.
const std::vector<Row>& special_rules();

/// Whether eager accepts `number` as a value of `dtype` (a finite number must not become infinite, an integer must not wrap).
bool fits(const Scalar& number, DType dtype);
/// UnsupportedError for a number that eager mode refuses as a value of the dtype. Missing, symbolic and tensor arguments pass.
void require_fit(const Call& call, std::string_view name, DType dtype);
/// scalar_operand of a number that fits; UnsupportedError otherwise.
Value checked_scalar(Builder& b, const Call& call, std::string_view name, DType dtype);

}  // namespace deplo::rules
