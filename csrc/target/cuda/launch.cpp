#include "target/cuda/launch.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "codegen/codegen.h"
#include "loop_ir/text.h"
#include "target/cuda/nvrtc.h"

namespace deplo {
namespace {

/// What every GPU gives a block without being asked (static and dynamic together).
constexpr int64_t kSharedBytesAlways = 48 << 10;

using Sizes = std::map<std::string, int64_t>;

// ---- arrays as memory ----------------------------------------------------------------------------------------------

template <class T>
void put(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

void put_scalar(char* at, const Scalar& v) {
  switch (v.dtype) {
    case DType::f16: return put(at, f32_to_f16(static_cast<float>(v.f)));
    case DType::bf16: return put(at, f32_to_bf16(static_cast<float>(v.f)));
    case DType::f32: return put(at, static_cast<float>(v.f));
    case DType::f64: return put(at, v.f);
    case DType::i64: return put(at, v.i);
    case DType::i32: return put(at, static_cast<int32_t>(v.i));
    case DType::i16: return put(at, static_cast<int16_t>(v.i));
    case DType::i8: return put(at, static_cast<int8_t>(v.i));
    case DType::u8: return put(at, static_cast<uint8_t>(v.i));
    case DType::boolean: return put(at, static_cast<uint8_t>(v.i != 0));
  }
}

Scalar get_scalar(const char* at, DType dtype) {
  switch (dtype) {
    case DType::f16: return Scalar::of_float(dtype, f16_to_f32(get<uint16_t>(at)));
    case DType::bf16: return Scalar::of_float(dtype, bf16_to_f32(get<uint16_t>(at)));
    case DType::f32: return Scalar::of_float(dtype, get<float>(at));
    case DType::f64: return Scalar::of_float(dtype, get<double>(at));
    case DType::i64: return Scalar::of_int(dtype, get<int64_t>(at));
    case DType::i32: return Scalar::of_int(dtype, get<int32_t>(at));
    case DType::i16: return Scalar::of_int(dtype, get<int16_t>(at));
    case DType::i8: return Scalar::of_int(dtype, get<int8_t>(at));
    default: return Scalar::of_int(dtype, get<uint8_t>(at));
  }
}

/// The bytes of a strided buffer.
class Image {
 public:
  Image(const Buffer& buffer, const Array& array, const Sizes& symbols)
      : dtype_(buffer.dtype),
        layout_{array.shape, evaluate_shape(buffer.strides, symbols)},
        bytes_(static_cast<size_t>(layout_.span() * size_of(dtype_)), static_cast<char>(0xff)) {  // NaN shows a read of what is no element
    layout_.for_each([&](int64_t flat, int64_t offset) { put_scalar(at(offset), array.get(flat)); });
  }

  char* data() { return bytes_.data(); }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }

  void read_into(Array& array) {
    layout_.for_each([&](int64_t flat, int64_t offset) { array.set(flat, get_scalar(at(offset), dtype_)); });
  }

 private:
  char* at(int64_t offset) { return bytes_.data() + offset * size_of(dtype_); }

  DType dtype_;
  StridedLayout layout_;
  std::vector<char> bytes_;
};

void throw_kernel_error(int32_t code, const std::string& kernel) {
  auto error = static_cast<loop_ir::ErrorCode>(code);
  if (error == loop_ir::ErrorCode::index_out_of_range) throw IndexError(fmt::format("kernel @{}: index out of range", kernel));
  if (error != loop_ir::ErrorCode::none) throw ExecutionError(fmt::format("kernel @{}: {}", kernel, loop_ir::to_string(error)));
}

}  // namespace

// ---- kernels -------------------------------------------------------------------------------------------------------

CudaKernels::CudaKernels(std::shared_ptr<CudaDevice> device, const kernel_ir::Module& module, const std::string& nvrtc) : device_(std::move(device)) {
  if (module.kernels.empty()) return;
  NvrtcOutput compiled = nvrtc_compile(cuda_text(module), nvrtc_arch(device_->capability(), nvrtc), nvrtc);
  module_ = {device_->load_module(compiled.image), [device = device_](void* loaded) { device->unload_module(loaded); }};
  for (const auto& kernel : module.kernels) {
    Loaded loaded{kernel.get(), device_->function(module_.get(), kernel->name), 0, 0};
    loaded.shared_bytes = device_->static_shared_bytes(loaded.function);
    loaded.allowed_bytes = std::min(kSharedBytesAlways, device_->shared_bytes()) - loaded.shared_bytes;
    kernels_[kernel->name] = loaded;
  }
}

void CudaKernels::launch(const std::string& name, const std::vector<uint64_t>& buffers, const Sizes& symbols, uint64_t error, void* stream) {
  Loaded& loaded = kernels_.at(name);
  const kernel_ir::Kernel& kernel = *loaded.kernel;
  CudaLaunch launch;
  launch.stream = stream;
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
  for (const std::string& s : kernel.symbols) sizes.push_back(symbols.at(s));
  unsigned long long error_word = error;
  unsigned long long scratch = 0;
  std::vector<void*> arguments;
  for (auto& p : pointers) arguments.push_back(&p);
  for (auto& s : sizes) arguments.push_back(&s);
  arguments.push_back(&error_word);
  std::optional<CudaMemory> memory;
  if (!kernel.scratch_bytes.is(0)) {
    int64_t bytes = evaluate(kernel.scratch_bytes, symbols);
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

// ---- programs ------------------------------------------------------------------------------------------------------

std::vector<Array> run_on_device(const std::shared_ptr<CudaDevice>& device, const kernel_ir::Module& module, const std::vector<Array>& inputs,
                                 const Sizes& symbols, const LibraryCall& library, const std::string& nvrtc) {
  CudaKernels kernels(device, module, nvrtc);
  CudaMemory error_word(device, sizeof(int32_t));
  auto find_params = [&](const std::string& name) -> std::optional<std::vector<ParamType>> {
    std::vector<ParamType> params;
    for (const auto& p : module.find_kernel(name)->params) params.push_back({p.dtype, p.kind != loop_ir::ParamKind::in});
    return params;
  };
  auto call = [&](const CallStep& step, const std::vector<Array*>& arrays, const Sizes& sizes) {
    const kernel_ir::Kernel& kernel = *module.find_kernel(step.kernel);
    std::vector<Image> images;
    std::vector<CudaMemory> memory;
    std::vector<uint64_t> pointers;
    for (size_t k = 0; k < arrays.size(); ++k) {
      images.emplace_back(*module.find_buffer(step.arguments[k]), *arrays[k], sizes);
      memory.emplace_back(device, images[k].size());
      pointers.push_back(memory[k].pointer());
      device->copy_to_device(pointers[k], images[k].data(), images[k].size());
    }
    device->fill(error_word.pointer(), 0, sizeof(int32_t));
    kernels.launch(step.kernel, pointers, sizes, error_word.pointer());
    device->synchronize();
    int32_t error = 0;
    device->copy_to_host(&error, error_word.pointer(), sizeof error);
    throw_kernel_error(error, step.kernel);
    for (size_t k = 0; k < arrays.size(); ++k) {
      if (kernel.params[k].kind == loop_ir::ParamKind::in) continue;
      device->copy_to_host(images[k].data(), pointers[k], images[k].size());
      images[k].read_into(*arrays[k]);
    }
  };
  return interpret(module, find_params, inputs, symbols, call, Mode::typed, library);
}

}  // namespace deplo
