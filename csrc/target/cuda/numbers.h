#pragma once

#include <string>
#include <string_view>

#include "base/dtype.h"
#include "scalar/functions.h"

namespace deplo::cuda {

// Numbers in CUDA text: elements as memory has them, and the float32 or float64 that they are computed in.

std::string_view memory_type(DType dtype);
/// A value of this type as one is computed with.
std::string literal(const Scalar& value, DType dtype);
/// The value of `operand`, which is of the type `from`, as one of the type `to`.
std::string cast(const std::string& operand, DType from, DType to);

}  // namespace deplo::cuda
