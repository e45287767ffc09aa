#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/context.h"
#include "kernel_ir/ir.h"

namespace deplo {

/// What a kernel receives: buffers in the order of its params, symbols in the order of its symbols.
struct KernelArgs {
  void* const* buffers;
  const int64_t* symbols;
  int32_t* error;  ///< the error word: an ErrorCode, set and never cleared by kernels
  void* scratch;   ///< scratch_bytes of this thread, aligned to 64
};

/// Runs piece `thread` of `threads` of the kernel; the union of all pieces is the kernel.
using KernelFn = void (*)(const KernelArgs* args, int64_t thread, int64_t threads);

/// Machine code of one kernel; the code lives as long as the object.
class CompiledKernel {
 public:
  virtual ~CompiledKernel() = default;
  virtual KernelFn function() const = 0;
  /// What equal kernels for equal CPUs have in common.
  virtual const std::string& key() const = 0;
  /// The code as an entry of the disk cache, for offer_kernel and keep_kernel of another process.
  virtual std::string image() const = 0;
};

struct CodegenStats {
  int compiled = 0;  ///< kernels for which LLVM ran
  int memory_hits = 0;
  int disk_hits = 0;   ///< with kernels that were offered
  double seconds = 0;  ///< wall time
};

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

/// CUDA C++ text of a kernel whose loops were mapped to blocks and threads, or of all kernels of a module. No header is included. A kernel takes its
/// params, symbols (long long), the error word (int*) and, if it has scratch_bytes, memory of that many bytes for each block, or null if the launch
/// gives that many bytes of dynamic shared memory.
std::string cuda_text(const kernel_ir::Kernel& kernel);
std::string cuda_text(const kernel_ir::Module& module);

}  // namespace deplo
