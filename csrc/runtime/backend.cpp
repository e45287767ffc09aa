#include "runtime/backend.h"

#include <chrono>

#include "base/error.h"
#include "runtime/topology.h"
#include "target/cuda/driver.h"
#include "target/cuda/launch.h"

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
  const Topology& found = topology();
  if (found.l1_bytes > 0) machine.l1_bytes = found.l1_bytes;
  if (found.l2_bytes > 0) machine.l2_bytes = found.l2_bytes;
  if (found.l3_bytes > 0) machine.l3_bytes = found.l3_bytes;
  return machine;
}

TargetInfo cuda_machine(const CompileOptions& options) {
  TargetInfo machine;
  machine.name = "cuda";
  machine.features = {options.cuda_arch};
  return machine;
}

std::string cuda_module_text(const kernel_ir::Module& module, const PassContext& /*context*/) { return cuda_text(module); }

runtime::KernelCode cpu_code(const kernel_ir::Module& module, const CompileOptions& options, CodegenStats* stats) {
  CodegenOptions codegen;
  codegen.cache_dir = options.cache_dir;
  codegen.workers = available_processors();
  codegen.debug = options.debug;
  return {compile_cpu_kernels(module.kernels, options.context, codegen, stats), nullptr, ""};
}

/// On the first GPU. What stands in the way is no failure of the compilation: the program says it.
runtime::KernelCode cuda_code(const kernel_ir::Module& module, const CompileOptions& options, CodegenStats* stats) {
  if (module.kernels.empty()) return {};
  auto start = std::chrono::steady_clock::now();
  try {
    auto kernels = std::make_shared<CudaKernels>(CudaDevice::open(options.cuda_driver), module, options.nvrtc);
    stats->compiled = static_cast<int>(module.kernels.size());
    stats->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return {{}, std::move(kernels), ""};
  } catch (const UnsupportedError& error) {
    return {{}, nullptr, error.what()};
  } catch (const ExecutionError& error) {
    return {{}, nullptr, error.what()};
  }
}

}  // namespace

const std::vector<Backend>& backends() {
  static const std::vector<Backend> kBackends{
      {"cpu", {{"llvm", of_each<cpu_llvm_text>}, {"asm", of_each<cpu_assembly_text>}}, cpu_machine, cpu_code},
      {"cuda", {{"cuda", cuda_module_text, "cu"}}, cuda_machine, cuda_code},
  };
  return kBackends;
}

const Backend& backend_of(std::string_view target) {
  for (const Backend& backend : backends())
    if (backend.target == target) return backend;
  throw InternalError(fmt::format("target {} has no backend", target));
}

}  // namespace deplo
