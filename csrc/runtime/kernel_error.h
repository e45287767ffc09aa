#pragma once

#include <cstdint>
#include <string>

namespace deplo::runtime {

/// Throws what the error word that a kernel has set means: IndexError, ExecutionError, or InternalError for no known code.
[[noreturn]] void throw_kernel_error(int32_t code, const std::string& kernel);

}  // namespace deplo::runtime
