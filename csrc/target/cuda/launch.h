#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "program_ir/interpret.h"
#include "target/cuda/driver.h"

namespace deplo {

/// The kernels of a module, compiled for a device and loaded.
class CudaKernels {
 public:
  /// `nvrtc` is the path of that library; empty: the loader's own search. The module outlives the object.
  CudaKernels(std::shared_ptr<CudaDevice> device, const kernel_ir::Module& module, const std::string& nvrtc);
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  /// Starts a kernel on a stream (null: the default one). `buffers` are device addresses in the order of its params, `error` that of the error word.
  /// Scratch memory of blocks is dynamic shared memory where it fits, else memory of the device that is freed once the kernel has ended.
  void launch(const std::string& kernel, const std::vector<uint64_t>& buffers, const std::map<std::string, int64_t>& symbols, uint64_t error,
              void* stream = nullptr);

 private:
  struct Loaded {
    const kernel_ir::Kernel* kernel = nullptr;
    void* function = nullptr;
    int64_t shared_bytes = 0;   ///< that it declares itself
    int64_t allowed_bytes = 0;  ///< of dynamic shared memory
  };

  std::shared_ptr<CudaDevice> device_;
  std::shared_ptr<void> module_;
  std::map<std::string, Loaded> kernels_;
};

/// Runs a program step by step with its kernels on the device: what kernel_ir::interpret does, at other hands. Every buffer is copied there and back.
/// Throws what kernels report as IndexError and ExecutionError.
std::vector<Array> run_on_device(const std::shared_ptr<CudaDevice>& device, const kernel_ir::Module& module, const std::vector<Array>& inputs,
                                 const std::map<std::string, int64_t>& symbols, const LibraryCall& library, const std::string& nvrtc = "");

}  // namespace deplo
