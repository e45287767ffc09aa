#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"
#include "target/cuda/driver.h"
#include "target/cuda/kernel_cache.h"
#include "target/kernels.h"

namespace deplo {

/// The kernels of a module, compiled for a device and loaded. Any thread may launch.
class CudaKernels final : public DeviceKernels {
 public:
  /// `nvrtc` is the path of that library; empty: the loader's own search. `cache_dir`: a folder of compiled kernels; empty: none. Throws
  /// UnsupportedError where NVRTC is missing or does not know the device.
  CudaKernels(std::shared_ptr<CudaDevice> device, const kernel_ir::Module& module, const std::string& nvrtc, const std::string& cache_dir = "",
              bool debug = false);
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  /// What compiling them did.
  const CodegenStats& stats() const { return stats_; }

  std::string describe_device() const override { return device_->description(); }
  uint64_t allocate(int64_t bytes) override { return device_->allocate(bytes); }
  void free(uint64_t pointer) noexcept override { device_->free(pointer); }
  void copy_to_device(uint64_t to, const void* from, int64_t bytes) override { device_->copy_to_device(to, from, bytes); }
  void copy_to_host(void* to, uint64_t from, int64_t bytes) override { device_->copy_to_host(to, from, bytes); }
  void fill(uint64_t pointer, unsigned char value, int64_t bytes) override { device_->fill(pointer, value, bytes); }
  void synchronize() override { device_->synchronize(); }
  /// On the default stream. Scratch memory of blocks is dynamic shared memory where it fits, else memory of the device that is freed once the kernel
  /// has ended.
  void launch(const std::string& kernel, const std::vector<uint64_t>& buffers, const std::map<std::string, int64_t>& symbols,
              uint64_t error) override;
  std::unique_ptr<DeviceLaunches> prepare(const std::vector<DeviceStep>& steps, const std::map<std::string, int64_t>& symbols, bool replay) override;
  std::unique_ptr<SharedMemory> share(int64_t bytes) override;
  bool may_wait(void* stream) override {
    CudaDevice::Current current(*device_);
    return !device_->is_capturing(stream);
  }
  void copy_on_stream(uint64_t to, const void* from, int64_t bytes, void* stream) override { device_->copy_on_stream(to, from, bytes, stream); }

 private:
  struct Loaded {
    Ref<kernel_ir::Kernel> kernel;
    std::shared_ptr<LoadedCudaKernel> code;
    int64_t dynamic_bytes = 0;  ///< of shared memory that its own arrays need
  };
  /// A launch of a kernel at some sizes.
  struct Sized {
    CudaLaunch launch;
    int64_t blocks = 0;            ///< 0: nothing to launch
    std::vector<long long> sizes;  ///< its symbols
    bool has_scratch = false;      ///< it takes an address of scratch memory
    int64_t scratch_bytes = 0;     ///< that must be in global memory, of all blocks together
    std::vector<CudaMap> maps;     ///< that it takes
  };
  Sized sized(const Loaded& loaded, const std::map<std::string, int64_t>& symbols);

  std::shared_ptr<CudaDevice> device_;
  CodegenStats stats_;
  std::map<std::string, Loaded> kernels_;
};

}  // namespace deplo
