#include "target/cuda/launch.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "target/cuda/nvrtc.h"
#include "target/cuda/text.h"

namespace deplo {
namespace {

/// What every GPU gives a block without being asked (static and dynamic together).
constexpr int64_t kSharedBytesAlways = 48 << 10;

using Sizes = std::map<std::string, int64_t>;

}  // namespace

CudaKernels::CudaKernels(std::shared_ptr<CudaDevice> device, const kernel_ir::Module& module, const std::string& nvrtc) : device_(std::move(device)) {
  if (module.kernels.empty()) return;
  NvrtcOutput compiled = nvrtc_compile(cuda_text(module), nvrtc_arch(device_->capability(), nvrtc), nvrtc);
  module_ = {device_->load_module(compiled.image), [device = device_](void* loaded) { device->unload_module(loaded); }};
  for (const auto& kernel : module.kernels) {
    Loaded loaded{kernel, device_->function(module_.get(), kernel->name), 0, 0};
    loaded.shared_bytes = device_->static_shared_bytes(loaded.function);
    loaded.allowed_bytes = std::min(kSharedBytesAlways, device_->shared_bytes()) - loaded.shared_bytes;
    kernels_[kernel->name] = loaded;
  }
}

void CudaKernels::launch(const std::string& name, const std::vector<uint64_t>& buffers, const Sizes& symbols, uint64_t error) {
  Loaded& loaded = kernels_.at(name);
  const kernel_ir::Kernel& kernel = *loaded.kernel;
  CudaLaunch launch;
  int64_t blocks = 1;
  for (size_t d = 0; d < kernel.grid.size(); ++d) {
    int64_t size = evaluate(kernel.grid[d], symbols);
    // The limit of a grid's first dimension; the driver refuses more of the others.
    DEPLO_CHECK(size <= INT32_MAX, "kernel {} needs {} blocks, a grid has at most {}", name, size, INT32_MAX);
    launch.grid[d] = static_cast<unsigned>(size);
    blocks *= size;
  }
  if (blocks == 0) return;  // a launch of nothing is an error
  for (size_t d = 0; d < kernel.block.size(); ++d) launch.block[d] = static_cast<unsigned>(evaluate(kernel.block[d], symbols));

  std::vector<unsigned long long> pointers(buffers.begin(), buffers.end());
  std::vector<long long> sizes;
  for (int64_t value : kernel_ir::passed_values(kernel, symbols)) sizes.push_back(value);
  unsigned long long error_word = error;
  unsigned long long scratch = 0;
  std::vector<void*> arguments;
  for (auto& p : pointers) arguments.push_back(&p);
  for (auto& s : sizes) arguments.push_back(&s);
  arguments.push_back(&error_word);
  std::optional<CudaMemory> memory;
  if (!kernel.scratch_bytes.is(0)) {
    int64_t bytes = evaluate(kernel.scratch_bytes, symbols);
    std::lock_guard lock(mutex_);
    if (bytes > loaded.allowed_bytes && bytes + loaded.shared_bytes <= device_->shared_bytes()) {
      loaded.allowed_bytes = device_->shared_bytes() - loaded.shared_bytes;
      device_->allow_shared_bytes(loaded.function, loaded.allowed_bytes);
    }
    if (bytes <= loaded.allowed_bytes) {
      launch.shared_bytes = static_cast<unsigned>(bytes);
    } else {
      memory.emplace(device_, bytes * blocks);
      scratch = memory->pointer();
    }
    arguments.push_back(&scratch);
  }
  device_->launch(loaded.function, launch, arguments.data());
  if (memory) device_->synchronize();  // before it is freed
}

}  // namespace deplo
