#include "base/error.h"
#include "kernel_ir/ir.h"

namespace deplo::kernel_ir {

std::string print(const Kernel& /*kernel*/) { throw UnsupportedError("level not built: kernel"); }
std::string print(const Module& /*module*/) { throw UnsupportedError("level not built: kernel"); }
Module parse(const std::string& /*text*/, const std::string& /*file*/) { throw UnsupportedError("level not built: kernel"); }
void verify(const Module& /*module*/) { throw UnsupportedError("level not built: kernel"); }

}  // namespace deplo::kernel_ir
