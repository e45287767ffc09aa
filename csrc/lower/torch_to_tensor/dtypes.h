#pragma once

#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {

/// Throws UnsupportedError where ATen's CPU kernel refuses the dtypes of a call's arguments. It is left to ATen then, whose error the user sees:
/// a formula would convert what is a mistake in eager mode. (Floats of 16 bits for which ATen merely has no kernel are computed.)
void refuse_dtypes(const torch_ir::Node& node, const Call::TorchValues& values);

}  // namespace deplo::rules
