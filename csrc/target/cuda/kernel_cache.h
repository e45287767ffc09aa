#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "target/cuda/driver.h"
#include "target/target.h"

namespace deplo {

/// A kernel that a device has loaded; unloaded with the object.
struct LoadedCudaKernel {
  std::shared_ptr<CudaDevice> device;
  void* module = nullptr;
  void* function = nullptr;
  int64_t shared_bytes = 0;  ///< that it declares itself

  /// Whether launches may give a block so much dynamic shared memory: lets them ask for it, if the device has that much.
  bool allows(int64_t dynamic_bytes);

  LoadedCudaKernel(std::shared_ptr<CudaDevice> on, const std::string& image, const std::string& name);
  ~LoadedCudaKernel();
  LoadedCudaKernel(const LoadedCudaKernel&) = delete;
  LoadedCudaKernel& operator=(const LoadedCudaKernel&) = delete;

 private:
  std::mutex mutex_;
  int64_t allowed_bytes_ = 0;  ///< of dynamic shared memory
};

/// The kernels of a module, loaded on a device, in the module's order. Of equal text only one is compiled, loaded and kept: those that some program
/// of the process holds, then those of the disk cache (under text, architecture and version of NVRTC), are taken from there; the others go through
/// NVRTC on all processors at once. Kernels have the operators' names for profilers, without the numbers that tell a program's kernels apart; with
/// the option `debug` their own. Throws UnsupportedError where NVRTC is missing or does not know the device.
std::vector<std::shared_ptr<LoadedCudaKernel>> load_cuda_kernels(const std::shared_ptr<CudaDevice>& device, const kernel_ir::Module& module,
                                                                 const std::string& nvrtc, const std::string& cache_dir, bool debug,
                                                                 CodegenStats& stats);

}  // namespace deplo
