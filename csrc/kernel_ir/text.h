#pragma once

#include <string>

#include "kernel_ir/ir.h"

namespace deplo::kernel_ir {

/// "f32x8", "i64", "boolx16".
std::string print(Type type);

}  // namespace deplo::kernel_ir
