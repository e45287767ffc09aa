#include "runtime/kernel_error.h"

#include "base/error.h"
#include "loop_ir/ir.h"

namespace deplo::runtime {

void throw_kernel_error(int32_t code, const std::string& kernel) {
  switch (static_cast<loop_ir::ErrorCode>(code)) {
    case loop_ir::ErrorCode::index_out_of_range: throw IndexError(fmt::format("index out of range in self (in {})", kernel));
    case loop_ir::ErrorCode::division_by_zero: throw ExecutionError("ZeroDivisionError");
    case loop_ir::ErrorCode::assertion: throw ExecutionError(fmt::format("a value is outside of the range that an operator takes (in {})", kernel));
    case loop_ir::ErrorCode::none: break;
  }
  throw InternalError(fmt::format("kernel {} set the unknown error code {}", kernel, code));
}

}  // namespace deplo::runtime
