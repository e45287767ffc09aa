#include "base/error.h"
#include "target/cpu/codegen.h"

// The CPU target of a build without LLVM (-DDEPLO_LLVM=OFF): everything above it works, compiling does not.

namespace deplo {
namespace {

[[noreturn]] void refuse() {
  throw UnsupportedError(
      "this deplo was built without LLVM (-DDEPLO_LLVM=OFF): kernels for a CPU cannot be compiled; use the interpreter or target=cuda");
}

}  // namespace

std::vector<std::shared_ptr<CompiledKernel>> compile_cpu_kernels(const std::vector<Ref<kernel_ir::Kernel>>& /*kernels*/,
                                                                 const PassContext& /*context*/, const CodegenOptions& /*options*/,
                                                                 CodegenStats* /*stats*/) {
  refuse();
}
void offer_kernel(const std::string& /*image*/) {}
void keep_kernel(const std::string& /*image*/, const CodegenOptions& /*options*/) {}
std::string cpu_llvm_text(const kernel_ir::Kernel& /*kernel*/, const PassContext& /*context*/) { refuse(); }
std::string cpu_assembly_text(const kernel_ir::Kernel& /*kernel*/, const PassContext& /*context*/) { refuse(); }
TargetInfo cpu_target_info(const std::string& /*features*/) { return {}; }
std::string codegen_version() { return ""; }

}  // namespace deplo
