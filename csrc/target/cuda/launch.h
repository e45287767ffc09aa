#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "target/cuda/driver.h"

namespace deplo {

/// The kernels of a module, compiled for a device and loaded. Any thread may launch.
class CudaKernels {
 public:
  /// `nvrtc` is the path of that library; empty: the loader's own search. Throws UnsupportedError where it is missing or does not know the device.
  CudaKernels(std::shared_ptr<CudaDevice> device, const kernel_ir::Module& module, const std::string& nvrtc);
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  CudaDevice& device() const { return *device_; }
  const std::shared_ptr<CudaDevice>& shared_device() const { return device_; }

  /// Starts a kernel on a stream (null: the default one). `buffers` are device addresses in the order of its params, `error` that of the error word.
  /// Scratch memory of blocks is dynamic shared memory where it fits, else memory of the device that is freed once the kernel has ended.
  void launch(const std::string& kernel, const std::vector<uint64_t>& buffers, const std::map<std::string, int64_t>& symbols, uint64_t error,
              void* stream = nullptr);

 private:
  struct Loaded {
    Ref<kernel_ir::Kernel> kernel;
    void* function = nullptr;
    int64_t shared_bytes = 0;   ///< that it declares itself
    int64_t allowed_bytes = 0;  ///< of dynamic shared memory; guarded by the mutex
  };

  std::shared_ptr<CudaDevice> device_;
  std::shared_ptr<void> module_;
  std::map<std::string, Loaded> kernels_;
  std::mutex mutex_;
};

}  // namespace deplo
