// A device `cuda` for a PyTorch that has none, for tests: its memory is the host's, its operators are those of the CPU on the same memory. deplo's
// kernels run there by fake_cuda.cpp. Loaded by torch.ops.load_library; tests ask it by ctypes what was done.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kDevices] = {};

/// What tests ask for: how often something was done since the last time.
std::atomic<int64_t> copies{0};  // between this device and the host
std::atomic<int64_t> allocations{0};
std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};  // the most of them
std::atomic<int64_t> waits{0};       // of the host for the device
std::atomic<int64_t> stream_waits{0};
std::atomic<int64_t> recorded{0};  // blocks that a stream other than their own uses
std::atomic<int64_t> limit{INT64_MAX};

/// Freed blocks are overwritten: who reads them later gets NaN.
struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(c10::kCUDA, current);
    if (bytes == 0) return {nullptr, device};
    TORCH_CHECK_WITH(OutOfMemoryError, live_bytes + static_cast<int64_t>(bytes) <= limit, "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
    ++allocations;
    const int64_t live = live_bytes += static_cast<int64_t>(bytes);
    for (int64_t peak = peak_bytes; peak < live && !peak_bytes.compare_exchange_weak(peak, live);) {
    }
    auto* block = static_cast<size_t*>(std::aligned_alloc(512, 512 + (bytes + 511) / 512 * 512));
    *block = bytes;
    char* data = reinterpret_cast<char*>(block) + 512;
    std::memset(data, 0xff, bytes);
    return {data, block, &free_block, device};
  }
  static void free_block(void* block) {
    size_t bytes = *static_cast<size_t*>(block);
    live_bytes -= static_cast<int64_t>(bytes);
    std::memset(static_cast<char*>(block) + 512, 0xff, bytes);
    std::free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(c10::kCUDA, current);
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    c10::DeviceIndex index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index), streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = &allocator; }
  void block(void*, const c10::Stream&) const override { ++stream_waits; }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++waits; }
  void synchronizeEvent(void*) const override { ++waits; }
  void synchronizeDevice(const c10::DeviceIndex) const override { ++waits; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override { ++recorded; }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

/// What asks whether there is an accelerator: the engine of autograd.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex current_device() const override { return current; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

at::Tensor empty_on_device(at::IntArrayRef sizes, std::optional<at::IntArrayRef> strides, std::optional<at::ScalarType> dtype,
                           std::optional<at::Device> device) {
  c10::OptionalDeviceGuard guard(device);
  auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  if (strides) return at::Tensor(at::detail::empty_strided_generic(sizes, *strides, &allocator, key, type));
  return at::Tensor(at::detail::empty_generic(sizes, &allocator, key, type, std::nullopt));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  at::Tensor made = empty_on_device(sizes, std::nullopt, dtype, device);
  if (format && *format != at::MemoryFormat::Preserve) made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return empty_on_device(sizes, strides, dtype, device);
}

/// The same memory as a tensor of the CPU, and back.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  // An operator may resize it: results start out so.
  if (tensor.numel() == 0) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  at::Tensor made = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  return made;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.is_cuda() != from.is_cuda()) ++copies;
  at::Tensor to = on_host(self);
  to.copy_(on_host(from), non_blocking);
  return self;
}

at::Tensor on_device(const at::Tensor& result, const std::vector<std::pair<at::Tensor, at::Tensor>>& aliases, at::Device device) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (const auto& [host, own] : aliases) {
    if (host.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return own;
    if (result.numel() > 0 && host.storage().data() == result.storage().data())
      return own.as_strided(result.sizes(), result.strides(), own.storage_offset() + result.storage_offset());
  }
  at::Tensor made = empty_on_device(result.sizes(), result.strides(), result.scalar_type(), device);
  on_host(made).copy_(result);
  return made;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;
  at::Device device(at::kCUDA, current);
  auto aliased = [&](const at::Tensor& tensor) {
    at::Tensor host = on_host(tensor);
    if (tensor.defined() && tensor.is_cuda()) {
      device = tensor.device();
      aliases.emplace_back(host, tensor);
    }
    return host;
  };
  for (size_t a = stack->size() - count; a < stack->size(); ++a) {
    c10::IValue& value = (*stack)[a];
    if (value.isTensor()) {
      value = aliased(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(aliased(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional<at::Tensor>(aliased(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = at::Device(at::kCPU);
    }
  }
  op.callBoxed(stack);
  for (const auto& [host, own] : aliases) {
    if (host.sizes() == own.sizes()) continue;
    at::Tensor larger = empty_on_device(host.sizes(), host.strides(), host.scalar_type(), device);
    on_host(larger).copy_(host);
    own.unsafeGetTensorImpl()->set_storage_keep_dtype(larger.storage());
    own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  }
  for (size_t r = stack->size() - op.schema().returns().size(); r < stack->size(); ++r) {
    c10::IValue& value = (*stack)[r];
    if (value.isTensor()) {
      value = on_device(value.toTensor(), aliases, device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor, aliases, device));
      value = list;
    }
  }
}

void record_stream(at::Tensor&, c10::Stream) { ++recorded; }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("record_stream", &record_stream);
}

struct Registered {
  Registered() { c10::SetAllocator(c10::kCUDA, &allocator); }
} registered;

}  // namespace

/// The counts since the last call, by name; live_bytes stays, of which peak_bytes were the most.
EXPORT int64_t fake_count(const char* name) {
  const std::map<std::string, std::atomic<int64_t>*> all{
      {"copies", &copies}, {"allocations", &allocations}, {"waits", &waits}, {"recorded", &recorded}, {"stream_waits", &stream_waits}};
  if (std::string(name) == "live_bytes") return live_bytes;
  if (std::string(name) == "peak_bytes") return peak_bytes.exchange(live_bytes);
  return all.at(name)->exchange(0);
}

EXPORT void fake_set_stream(int64_t id) { streams[current] = id; }
EXPORT void fake_set_limit(int64_t bytes) { limit = bytes < 0 ? INT64_MAX : bytes; }
