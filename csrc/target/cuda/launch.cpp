#include "target/cuda/launch.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "target/cuda/nvrtc.h"
#include "target/cuda/prepared.h"
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

CudaKernels::Sized CudaKernels::sized(Loaded& loaded, const Sizes& symbols) {
  const kernel_ir::Kernel& kernel = *loaded.kernel;
  Sized made;
  made.blocks = 1;
  for (size_t d = 0; d < kernel.grid.size(); ++d) {
    int64_t size = evaluate(kernel.grid[d], symbols);
    // The limit of a grid's first dimension; the driver refuses more of the others.
    DEPLO_CHECK(size <= INT32_MAX, "kernel {} needs {} blocks, a grid has at most {}", kernel.name, size, INT32_MAX);
    made.launch.grid[d] = static_cast<unsigned>(size);
    made.blocks *= size;
  }
  for (size_t d = 0; d < kernel.block.size(); ++d) made.launch.block[d] = static_cast<unsigned>(evaluate(kernel.block[d], symbols));
  for (int64_t value : kernel_ir::passed_values(kernel, symbols)) made.sizes.push_back(value);
  made.has_scratch = !kernel.scratch_bytes.is(0);
  if (!made.has_scratch || made.blocks == 0) return made;
  int64_t bytes = evaluate(kernel.scratch_bytes, symbols);
  std::lock_guard lock(mutex_);
  if (bytes > loaded.allowed_bytes && bytes + loaded.shared_bytes <= device_->shared_bytes()) {
    loaded.allowed_bytes = device_->shared_bytes() - loaded.shared_bytes;
    device_->allow_shared_bytes(loaded.function, loaded.allowed_bytes);
  }
  if (bytes <= loaded.allowed_bytes)
    made.launch.shared_bytes = static_cast<unsigned>(bytes);
  else
    made.scratch_bytes = bytes * made.blocks;
  return made;
}

void CudaKernels::launch(const std::string& name, const std::vector<uint64_t>& buffers, const Sizes& symbols, uint64_t error) {
  Loaded& loaded = kernels_.at(name);
  Sized made = sized(loaded, symbols);
  if (made.blocks == 0) return;  // a launch of nothing is an error
  std::vector<unsigned long long> pointers(buffers.begin(), buffers.end());
  unsigned long long error_word = error;
  unsigned long long scratch = 0;
  std::vector<void*> arguments;
  for (auto& p : pointers) arguments.push_back(&p);
  for (auto& s : made.sizes) arguments.push_back(&s);
  arguments.push_back(&error_word);
  if (made.has_scratch) arguments.push_back(&scratch);
  std::optional<CudaMemory> memory;
  if (made.scratch_bytes > 0) {
    memory.emplace(device_, made.scratch_bytes);
    scratch = memory->pointer();
  }
  device_->launch(loaded.function, made.launch, arguments.data());
  if (memory) device_->synchronize();  // before it is freed
}

std::unique_ptr<DeviceLaunches> CudaKernels::prepare(const std::vector<DeviceStep>& steps, const Sizes& symbols, bool replay) {
  auto made = std::make_unique<CudaLaunches>(device_, module_, replay);
  for (const DeviceStep& step : steps) {
    Loaded& loaded = kernels_.at(step.kernel);
    Sized at = sized(loaded, symbols);
    made->add({loaded.kernel, loaded.function, at.launch, at.blocks == 0}, step.buffers, at.sizes, step.error, at.has_scratch, at.scratch_bytes);
  }
  made->finish();
  return made;
}

namespace {

class CudaSharedMemory final : public SharedMemory {
 public:
  CudaSharedMemory(std::shared_ptr<CudaDevice> device, int64_t bytes) : device_(std::move(device)) {
    auto [pointer, where] = device_->allocate_shared(bytes);
    std::memset(pointer, 0, static_cast<size_t>(bytes));
    data = static_cast<char*>(pointer);
    address = where;
  }
  ~CudaSharedMemory() override { device_->free_shared(data); }
  CudaSharedMemory(const CudaSharedMemory&) = delete;
  CudaSharedMemory& operator=(const CudaSharedMemory&) = delete;

 private:
  std::shared_ptr<CudaDevice> device_;
};

}  // namespace

std::unique_ptr<SharedMemory> CudaKernels::share(int64_t bytes) { return std::make_unique<CudaSharedMemory>(device_, bytes); }

}  // namespace deplo
