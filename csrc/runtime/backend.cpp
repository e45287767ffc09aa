#include "runtime/backend.h"

#include <algorithm>

#include "base/error.h"
#include "codegen/codegen.h"

namespace deplo {
namespace {

using KernelText = std::string (*)(const kernel_ir::Kernel& kernel, const PassContext& context);

template <KernelText write>
std::string of_each(const kernel_ir::Module& module, const PassContext& context) {
  std::string text;
  for (const auto& kernel : module.kernels) text += write(*kernel, context) + "\n";
  return text;
}

TargetInfo cpu_machine(const CompileOptions& options) {
  TargetInfo machine = cpu_target_info(options.features);
  machine.threads = options.threads > 0 ? options.threads : available_processors();
  return machine;
}

TargetInfo cuda_machine(const CompileOptions& options) {
  TargetInfo machine;
  machine.name = "cuda";
  machine.features = {options.cuda_arch};
  return machine;
}

std::string cuda_module_text(const kernel_ir::Module& module, const PassContext& /*context*/) { return cuda_text(module); }

}  // namespace

const std::vector<Backend>& backends() {
  static const std::vector<Backend> kBackends{
      {"cpu", {{"llvm", of_each<cpu_llvm_text>}, {"asm", of_each<cpu_assembly_text>}}, true, cpu_machine},
      {"cuda", {{"cuda", cuda_module_text}}, false, cuda_machine},
  };
  return kBackends;
}

const Backend& backend_of(std::string_view target) {
  for (const Backend& backend : backends())
    if (backend.target == target) return backend;
  throw InternalError(fmt::format("target {} has no backend", target));
}

}  // namespace deplo
