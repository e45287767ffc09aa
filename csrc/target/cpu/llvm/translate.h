#pragma once

#include <llvm/IR/Module.h>

#include <string>

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// Adds `void symbol(const KernelArgs*, i64 thread, i64 threads)` for the kernel to the module: translation, no decisions.
void translate_kernel(const kernel_ir::Kernel& kernel, const std::string& symbol, llvm::Module& module, const TargetInfo& target);

}  // namespace deplo
