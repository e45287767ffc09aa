#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "codegen/codegen.h"
#include "kernel_ir/ir.h"
#include "runtime/options.h"
#include "runtime/program.h"

namespace deplo {

/// Text that a target makes of Kernel IR, as a level that `lower` knows.
struct MachineText {
  std::string_view level;
  std::string (*write)(const kernel_ir::Module& module, const PassContext& context);
  std::string_view suffix{};  ///< of files that hold it; empty: dumps of programs leave it out
};

/// What a target has below Kernel IR.
struct Backend {
  std::string_view target;
  std::vector<MachineText> texts;
  TargetInfo (*machine)(const CompileOptions& options);  ///< the machine at hand, or the one that the options name
  runtime::KernelCode (*compile)(const kernel_ir::Module& module, const CompileOptions& options, CodegenStats* stats);
};
const Backend& backend_of(std::string_view target);
const std::vector<Backend>& backends();

}  // namespace deplo
