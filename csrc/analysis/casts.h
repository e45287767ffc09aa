#pragma once

#include "base/dtype.h"

namespace deplo::analysis {

/// Whether a cast from one dtype to a wider one keeps every value: of bytes to int32 or bfloat16, of 16-bit floats to float32.
bool is_lossless(DType from, DType to);

}  // namespace deplo::analysis
