#include "target/cuda/launch.h"

#include <cstring>
#include <optional>

#include "base/error.h"
#include "target/cuda/prepared.h"
#include "target/cuda/text.h"

namespace deplo {
namespace {

using Sizes = std::map<std::string, int64_t>;

/// Of the factors of its products of tiles.
std::vector<CudaMap> maps_of(const kernel_ir::Kernel& kernel, const Sizes& symbols) {
  std::vector<CudaMap> maps;
  const std::vector<const TileProducts*> all = tile_products(kernel);
  if (all.empty()) return maps;
  Sizes sizes = symbols;
  for (const kernel_ir::Size& s : kernel.sizes) sizes[s.name] = evaluate(s.value, symbols);
  for (const TileProducts* products : all)
    for (const TileFactor* factor : {&products->a, &products->b}) {
      CudaMap map;
      while (kernel.params[map.buffer].name != factor->buffer) ++map.buffer;
      const DType dtype = kernel.params[map.buffer].dtype;
      map.tensor.is_bf16 = dtype == DType::bf16;
      map.offset = static_cast<uint64_t>(evaluate(factor->offset, sizes) * size_of(dtype));
      for (size_t d = 0; d < factor->extents.size(); ++d) {
        map.tensor.extents.push_back(static_cast<uint64_t>(evaluate(factor->extents[d], sizes)));
        if (d > 0) map.tensor.strides.push_back(static_cast<uint64_t>(evaluate(factor->strides[d], sizes) * size_of(dtype)));
        map.tensor.box.push_back(1);
      }
      map.tensor.box[0] = kTileDepth;
      map.tensor.box[1] = static_cast<unsigned>(factor->turned ? kTileDepth : factor->rows);
      maps.push_back(std::move(map));
    }
  return maps;
}

}  // namespace

CudaKernels::CudaKernels(std::shared_ptr<CudaDevice> device, const kernel_ir::Module& module, const std::string& nvrtc, const std::string& cache_dir,
                         bool debug)
    : device_(std::move(device)) {
  auto code = load_cuda_kernels(device_, module, nvrtc, cache_dir, debug, stats_);
  for (size_t k = 0; k < code.size(); ++k) {
    const kernel_ir::Kernel& kernel = *module.kernels[k];
    const int64_t dynamic = dynamic_shared_bytes(kernel);
    DEPLO_SUPPORT(dynamic == 0 || code[k]->allows(dynamic), "kernel {} needs {} bytes of shared memory a block, {} gives {}", kernel.name, dynamic,
                  device_->description(), device_->shared_bytes());
    kernels_[kernel.name] = {module.kernels[k], code[k], dynamic};
  }
}

CudaKernels::Sized CudaKernels::sized(const Loaded& loaded, const Sizes& symbols) {
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
  made.launch.shared_bytes = static_cast<unsigned>(loaded.dynamic_bytes);
  made.has_scratch = !kernel.scratch_bytes.is(0);
  made.maps = maps_of(kernel, symbols);
  if (!made.has_scratch || made.blocks == 0) return made;
  int64_t bytes = evaluate(kernel.scratch_bytes, symbols);
  if (loaded.dynamic_bytes == 0 && loaded.code->allows(bytes))
    made.launch.shared_bytes = static_cast<unsigned>(bytes);
  else
    made.scratch_bytes = bytes * made.blocks;
  return made;
}

void CudaKernels::launch(const std::string& name, const std::vector<uint64_t>& buffers, const Sizes& symbols, uint64_t error) {
  const Loaded& loaded = kernels_.at(name);
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
  std::vector<TensorMap> maps;
  for (const CudaMap& map : made.maps) maps.push_back(device_->encode(map.tensor, buffers[map.buffer] + map.offset));
  for (TensorMap& map : maps) arguments.push_back(map.data());
  device_->launch(loaded.code->function, made.launch, arguments.data());
  if (memory) device_->synchronize();  // before it is freed
}

std::unique_ptr<DeviceLaunches> CudaKernels::prepare(const std::vector<DeviceStep>& steps, const Sizes& symbols, bool replay) {
  auto made = std::make_unique<CudaLaunches>(device_, replay);
  for (const DeviceStep& step : steps) {
    const Loaded& loaded = kernels_.at(step.kernel);
    Sized at = sized(loaded, symbols);
    made->add({loaded.kernel, loaded.code, at.launch, at.blocks == 0}, step.buffers, at.sizes, step.error, at.has_scratch, at.scratch_bytes,
              std::move(at.maps));
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
