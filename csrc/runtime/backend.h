#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_ir/ir.h"
#include "runtime/options.h"

namespace deplo {

/// Text that a target makes of Kernel IR, as a level that `lower` knows.
struct MachineText {
  std::string_view level;
  std::string (*write)(const kernel_ir::Module& module, const PassContext& context);
};

/// What a target has below Kernel IR.
struct Backend {
  std::string_view target;
  std::vector<MachineText> texts;
  bool runs_programs = false;                            ///< compile_text makes programs for it
  TargetInfo (*machine)(const CompileOptions& options);  ///< the machine at hand, or the one that the options name
};
const Backend& backend_of(std::string_view target);
const std::vector<Backend>& backends();

}  // namespace deplo
