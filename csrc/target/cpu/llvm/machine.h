#pragma once

#include <llvm/Target/TargetMachine.h>

#include <memory>
#include <string>

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// A TargetMachine for exactly the features in `target`; one per thread, they are not thread-safe.
std::unique_ptr<llvm::TargetMachine> make_machine(const TargetInfo& target);
/// Translates and optimises one kernel into `module` under the given symbol.
void build_module(const kernel_ir::Kernel& kernel, const std::string& symbol, const TargetInfo& target, llvm::TargetMachine& machine,
                  llvm::Module& module);
/// The object file of a built module.
std::string emit_object(llvm::Module& module, llvm::TargetMachine& machine);
/// "ops_hash": what the kernel fuses and which code it is, for perf and gdb.
std::string machine_symbol(const kernel_ir::Kernel& kernel, const std::string& key);
/// Text that is equal for equal kernels: their Kernel IR without name and provenance.
std::string canonical_text(const kernel_ir::Kernel& kernel);

}  // namespace deplo
