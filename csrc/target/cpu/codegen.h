#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/context.h"
#include "kernel_ir/ir.h"
#include "target/kernels.h"

namespace deplo {

struct CodegenOptions {
  std::string cache_dir;  ///< empty: no disk cache
  int64_t cache_limit_bytes = 1LL << 30;
  int workers = 1;     ///< threads that compile
  bool debug = false;  ///< name the code for perf (/tmp/perf-PID.map) and for gdb
};

/// Compiles kernels for this CPU, equal kernels once; results in the order given. Throws InternalError, or
/// UnsupportedError when built without LLVM.
std::vector<std::shared_ptr<CompiledKernel>> compile_cpu_kernels(const std::vector<Ref<kernel_ir::Kernel>>& kernels, const PassContext& context,
                                                                 const CodegenOptions& options, CodegenStats* stats);
/// Takes a kernel's image for the process: who compiles an equal kernel for the same CPU features links it, and keeps it in its disk cache. Nothing
/// happens if the bytes are no image of this format.
void offer_kernel(const std::string& image);
/// Stores a kernel's image in a disk cache, unless the bytes are no image of this format.
void keep_kernel(const std::string& image, const CodegenOptions& options);
/// LLVM IR (after optimisation) and assembly of one kernel, as text.
std::string cpu_llvm_text(const kernel_ir::Kernel& kernel, const PassContext& context);
std::string cpu_assembly_text(const kernel_ir::Kernel& kernel, const PassContext& context);
/// The CPU found, or restricted to `features` ("avx2", "avx512", "sse"); names both on an unknown value.
TargetInfo cpu_target_info(const std::string& features);
/// Versions of LLVM and of the generated code's format, part of every cache key; "" without LLVM.
std::string codegen_version();

}  // namespace deplo
