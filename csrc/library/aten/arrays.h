#pragma once

#include <ATen/core/Tensor.h>

#include "base/array.h"
#include "program_ir/interpret.h"

namespace deplo::aten {

Array to_array(const at::Tensor& tensor);
at::Tensor to_tensor(const Array& array);
/// Floats as float64, whatever the array's dtype.
at::Tensor to_exact_tensor(const Array& array);
/// The LibraryCall of interpreters that run beside PyTorch. In exact mode floats travel as float64.
LibraryCall aten_library(Mode mode);

}  // namespace deplo::aten
