#pragma once

#include <c10/core/ScalarType.h>

#include "base/dtype.h"

namespace deplo::aten {

c10::ScalarType to_scalar_type(DType dtype);
/// Throws UnsupportedError for complex, quantised and other types that deplo does not have.
DType from_scalar_type(c10::ScalarType type);

}  // namespace deplo::aten
