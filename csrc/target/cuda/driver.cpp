#include "target/cuda/driver.h"

#include <dlfcn.h>

#include <algorithm>

#include "base/error.h"

namespace deplo {

// The part of the CUDA driver API (cuda.h) that deplo calls. Names with a version are those that the header's names stand for; none of these has
// changed since CUDA 11. CUdevice and the enums are int, CUdeviceptr is 64 bits wide, the rest are opaque pointers.
// Graphs came with CUDA 10; the names without a version take CUDA_KERNEL_NODE_PARAMS_v1.
struct CudaNode {
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** arguments;
  void** extra;
};

struct CudaApi {
  int (*cuInit)(unsigned flags) = nullptr;
  int (*cuGetErrorName)(int error, const char** text) = nullptr;
  int (*cuGetErrorString)(int error, const char** text) = nullptr;
  int (*cuDeviceGetCount)(int* count) = nullptr;
  int (*cuDeviceGet)(int* device, int ordinal) = nullptr;
  int (*cuDeviceGetName)(char* name, int length, int device) = nullptr;
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device) = nullptr;
  int (*cuDevicePrimaryCtxRetain)(void** context, int device) = nullptr;
  int (*cuDevicePrimaryCtxRelease)(int device) = nullptr;
  int (*cuCtxPushCurrent)(void* context) = nullptr;
  int (*cuCtxPopCurrent)(void** context) = nullptr;
  int (*cuCtxSynchronize)() = nullptr;
  int (*cuModuleLoadData)(void** module, const void* image) = nullptr;
  int (*cuModuleUnload)(void* module) = nullptr;
  int (*cuModuleGetFunction)(void** function, void* module, const char* name) = nullptr;
  int (*cuFuncGetAttribute)(int* value, int attribute, void* function) = nullptr;
  int (*cuFuncSetAttribute)(void* function, int attribute, int value) = nullptr;
  int (*cuMemAlloc)(unsigned long long* pointer, size_t bytes) = nullptr;
  int (*cuMemFree)(unsigned long long pointer) = nullptr;
  int (*cuMemcpyHtoD)(unsigned long long to, const void* from, size_t bytes) = nullptr;
  int (*cuMemcpyDtoH)(void* to, unsigned long long from, size_t bytes) = nullptr;
  int (*cuMemsetD8)(unsigned long long pointer, unsigned char value, size_t count) = nullptr;
  int (*cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                        unsigned shared_bytes, void* stream, void** arguments, void** extra) = nullptr;
  int (*cuMemHostAlloc)(void** pointer, size_t bytes, unsigned flags) = nullptr;
  int (*cuMemFreeHost)(void* pointer) = nullptr;
  int (*cuMemHostGetDevicePointer)(unsigned long long* address, void* pointer, unsigned flags) = nullptr;
  int (*cuMemcpyHtoDAsync)(unsigned long long to, const void* from, size_t bytes, void* stream) = nullptr;
  int (*cuStreamIsCapturing)(void* stream, int* status) = nullptr;
  int (*cuGraphCreate)(void** graph, unsigned flags) = nullptr;
  int (*cuGraphDestroy)(void* graph) = nullptr;
  int (*cuGraphAddKernelNode)(void** node, void* graph, void* const* after, size_t count, const CudaNode* kernel) = nullptr;
  int (*cuGraphInstantiateWithFlags)(void** ready, void* graph, unsigned long long flags) = nullptr;
  int (*cuGraphExecKernelNodeSetParams)(void* ready, void* node, const CudaNode* kernel) = nullptr;
  int (*cuGraphExecDestroy)(void* ready) = nullptr;
  int (*cuGraphLaunch)(void* ready, void* stream) = nullptr;

  // Of CUDA 12, by an address as large as its pointer.
  int (*cuTensorMapEncodeTiled)(void* map, int type, unsigned dimensions, unsigned long long address, const uint64_t* extents,
                                const uint64_t* strides, const unsigned* box, const unsigned* element_strides, int interleave, int swizzle,
                                int promotion, int fill) = nullptr;

  explicit CudaApi(const std::string& library);
  /// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string describe(int error) const;
  void check(int error, const char* call) const;
};

namespace {

constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

// CUdevice_attribute and CUfunction_attribute.
constexpr int kSharedBytes = 8;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;
constexpr int kSharedBytesOptIn = 97;
constexpr int kFunctionSharedBytes = 1;
constexpr int kFunctionDynamicSharedBytes = 8;

// CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion.
constexpr int kMapFloat16 = 6;
constexpr int kMapBFloat16 = 9;
constexpr int kMapSwizzle128 = 3;
constexpr int kMapPromotion256 = 3;
constexpr uint64_t kMapAlignment = 16;

template <class F>
void load(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  DEPLO_SUPPORT(function, "this libcuda has no {}: install a driver of CUDA 11.4 or later", name);
}

}  // namespace

CudaApi::CudaApi(const std::string& library) {
  const char* name = library.empty() ? "libcuda.so.1" : library.c_str();
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    throw UnsupportedError(fmt::format("the CUDA driver could not be opened ({}): install NVIDIA's driver to run on a GPU", why ? why : name));
  }
  load(handle, "cuInit", cuInit);
  load(handle, "cuGetErrorName", cuGetErrorName);
  load(handle, "cuGetErrorString", cuGetErrorString);
  load(handle, "cuDeviceGetCount", cuDeviceGetCount);
  load(handle, "cuDeviceGet", cuDeviceGet);
  load(handle, "cuDeviceGetName", cuDeviceGetName);
  load(handle, "cuDeviceGetAttribute", cuDeviceGetAttribute);
  load(handle, "cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain);
  load(handle, "cuDevicePrimaryCtxRelease_v2", cuDevicePrimaryCtxRelease);
  load(handle, "cuCtxPushCurrent_v2", cuCtxPushCurrent);
  load(handle, "cuCtxPopCurrent_v2", cuCtxPopCurrent);
  load(handle, "cuCtxSynchronize", cuCtxSynchronize);
  load(handle, "cuModuleLoadData", cuModuleLoadData);
  load(handle, "cuModuleUnload", cuModuleUnload);
  load(handle, "cuModuleGetFunction", cuModuleGetFunction);
  load(handle, "cuFuncGetAttribute", cuFuncGetAttribute);
  load(handle, "cuFuncSetAttribute", cuFuncSetAttribute);
  load(handle, "cuMemAlloc_v2", cuMemAlloc);
  load(handle, "cuMemFree_v2", cuMemFree);
  load(handle, "cuMemcpyHtoD_v2", cuMemcpyHtoD);
  load(handle, "cuMemcpyDtoH_v2", cuMemcpyDtoH);
  load(handle, "cuMemsetD8_v2", cuMemsetD8);
  load(handle, "cuLaunchKernel", cuLaunchKernel);
  load(handle, "cuMemHostAlloc", cuMemHostAlloc);
  load(handle, "cuMemFreeHost", cuMemFreeHost);
  load(handle, "cuMemHostGetDevicePointer_v2", cuMemHostGetDevicePointer);
  load(handle, "cuMemcpyHtoDAsync_v2", cuMemcpyHtoDAsync);
  load(handle, "cuStreamIsCapturing", cuStreamIsCapturing);
  load(handle, "cuGraphCreate", cuGraphCreate);
  load(handle, "cuGraphDestroy", cuGraphDestroy);
  load(handle, "cuGraphAddKernelNode", cuGraphAddKernelNode);
  load(handle, "cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags);
  load(handle, "cuGraphExecKernelNodeSetParams", cuGraphExecKernelNodeSetParams);
  load(handle, "cuGraphExecDestroy", cuGraphExecDestroy);
  load(handle, "cuGraphLaunch", cuGraphLaunch);
  cuTensorMapEncodeTiled = reinterpret_cast<decltype(cuTensorMapEncodeTiled)>(dlsym(handle, "cuTensorMapEncodeTiled"));
}

std::string CudaApi::describe(int error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(error, &name) != 0 || !name) return fmt::format("error {}", error);
  return cuGetErrorString(error, &text) == 0 && text ? fmt::format("{} ({})", name, text) : name;
}

void CudaApi::check(int error, const char* call) const {
  if (error != 0) throw ExecutionError(fmt::format("the CUDA driver failed in {}: {}", call, describe(error)));
}

namespace {

CudaNode node_of(void* function, const CudaLaunch& l, void** arguments) {
  return {function, {l.grid[0], l.grid[1], l.grid[2]}, {l.block[0], l.block[1], l.block[2]}, l.shared_bytes, arguments, nullptr};
}

}  // namespace

CudaDevice::Current::Current(const CudaDevice& device) : api_(*device.api_) {
  api_.check(api_.cuCtxPushCurrent(device.context_), "cuCtxPushCurrent");
}

CudaDevice::Current::~Current() {
  void* popped = nullptr;
  api_.cuCtxPopCurrent(&popped);
}

std::shared_ptr<CudaDevice> CudaDevice::open(const std::string& library, int ordinal) {
  auto api = std::make_shared<CudaApi>(library);
  int error = api->cuInit(0);
  DEPLO_SUPPORT(error == 0, "the CUDA driver cannot start: {}", api->describe(error));
  int count = 0;
  error = api->cuDeviceGetCount(&count);
  DEPLO_SUPPORT(error == 0, "the CUDA driver cannot count devices: {}", api->describe(error));
  DEPLO_SUPPORT(count > 0, "the CUDA driver finds no device (CUDA_VISIBLE_DEVICES may hide it)");
  DEPLO_CHECK(ordinal >= 0 && ordinal < count, "there is no CUDA device {}: the driver finds {}", ordinal, count);
  std::shared_ptr<CudaDevice> device(new CudaDevice);
  device->api_ = api;
  api->check(api->cuDeviceGet(&device->device_, ordinal), "cuDeviceGet");
  char name[256] = "";
  api->check(api->cuDeviceGetName(name, sizeof name, device->device_), "cuDeviceGetName");
  device->name_ = name;
  auto attribute = [&](int which) {
    int value = 0;
    api->check(api->cuDeviceGetAttribute(&value, which, device->device_), "cuDeviceGetAttribute");
    return value;
  };
  device->capability_ = attribute(kCapabilityMajor) * 10 + attribute(kCapabilityMinor);
  device->shared_bytes_ = std::max(attribute(kSharedBytes), attribute(kSharedBytesOptIn));
  api->check(api->cuDevicePrimaryCtxRetain(&device->context_, device->device_), "cuDevicePrimaryCtxRetain");
  return device;
}

CudaDevice::~CudaDevice() {
  if (context_) api_->cuDevicePrimaryCtxRelease(device_);
}

TensorMap CudaDevice::encode(const CudaTensor& tensor, uint64_t address) {
  DEPLO_SUPPORT(api_->cuTensorMapEncodeTiled, "this libcuda has no cuTensorMapEncodeTiled: install a driver of CUDA 12 or later");
  alignas(64) TensorMap map{};
  // Of such addresses and of nothing there are none: kernels look at the address, and read nothing of nothing.
  const bool is_empty = std::any_of(tensor.extents.begin(), tensor.extents.end(), [](auto n) { return n == 0; });
  if (address % kMapAlignment != 0 || is_empty) return map;
  const std::vector<unsigned> steps(tensor.extents.size(), 1);
  api_->check(api_->cuTensorMapEncodeTiled(map.data(), tensor.is_bf16 ? kMapBFloat16 : kMapFloat16, static_cast<unsigned>(tensor.extents.size()),
                                           address, tensor.extents.data(), tensor.strides.data(), tensor.box.data(), steps.data(), 0, kMapSwizzle128,
                                           kMapPromotion256, 0),
              "cuTensorMapEncodeTiled");
  return map;
}

std::string CudaDevice::description() const { return fmt::format("{} (sm_{})", name_, capability_); }

uint64_t CudaDevice::allocate(int64_t bytes) {
  Current current(*this);
  unsigned long long pointer = 0;
  int error = api_->cuMemAlloc(&pointer, static_cast<size_t>(std::max<int64_t>(bytes, 1)));  // of 0 bytes it fails
  DEPLO_CHECK(error != kOutOfMemory, "{} has no {} bytes of memory left: {}", name_, bytes, api_->describe(error));
  api_->check(error, "cuMemAlloc");
  return pointer;
}

void CudaDevice::free(uint64_t pointer) noexcept {
  // After a failed kernel every call fails, this one too; the failure was reported where it was seen first.
  if (api_->cuCtxPushCurrent(context_) != 0) return;
  api_->cuMemFree(pointer);
  void* popped = nullptr;
  api_->cuCtxPopCurrent(&popped);
}

void CudaDevice::copy_to_device(uint64_t to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  Current current(*this);
  api_->check(api_->cuMemcpyHtoD(to, from, static_cast<size_t>(bytes)), "cuMemcpyHtoD");
}

void CudaDevice::copy_to_host(void* to, uint64_t from, int64_t bytes) {
  if (bytes == 0) return;
  Current current(*this);
  api_->check(api_->cuMemcpyDtoH(to, from, static_cast<size_t>(bytes)), "cuMemcpyDtoH");
}

void CudaDevice::fill(uint64_t pointer, unsigned char value, int64_t bytes) {
  if (bytes == 0) return;
  Current current(*this);
  api_->check(api_->cuMemsetD8(pointer, value, static_cast<size_t>(bytes)), "cuMemsetD8");
}

void CudaDevice::synchronize() {
  Current current(*this);
  api_->check(api_->cuCtxSynchronize(), "cuCtxSynchronize");
}

void* CudaDevice::load_module(const std::string& image) {
  Current current(*this);
  void* module = nullptr;
  api_->check(api_->cuModuleLoadData(&module, image.c_str()), "cuModuleLoadData");
  return module;
}

void CudaDevice::unload_module(void* module) noexcept {
  if (api_->cuCtxPushCurrent(context_) != 0) return;
  api_->cuModuleUnload(module);
  void* popped = nullptr;
  api_->cuCtxPopCurrent(&popped);
}

void* CudaDevice::function(void* module, const std::string& name) {
  Current current(*this);
  void* function = nullptr;
  api_->check(api_->cuModuleGetFunction(&function, module, name.c_str()), "cuModuleGetFunction");
  return function;
}

int64_t CudaDevice::static_shared_bytes(void* function) {
  Current current(*this);
  int bytes = 0;
  api_->check(api_->cuFuncGetAttribute(&bytes, kFunctionSharedBytes, function), "cuFuncGetAttribute");
  return bytes;
}

void CudaDevice::allow_shared_bytes(void* function, int64_t bytes) {
  Current current(*this);
  api_->check(api_->cuFuncSetAttribute(function, kFunctionDynamicSharedBytes, static_cast<int>(bytes)), "cuFuncSetAttribute");
}

std::pair<void*, uint64_t> CudaDevice::allocate_shared(int64_t bytes) {
  Current current(*this);
  constexpr unsigned kPortableMapped = 3;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
  void* pointer = nullptr;
  api_->check(api_->cuMemHostAlloc(&pointer, static_cast<size_t>(bytes), kPortableMapped), "cuMemHostAlloc");
  unsigned long long address = 0;
  if (int error = api_->cuMemHostGetDevicePointer(&address, pointer, 0); error != 0) {
    api_->cuMemFreeHost(pointer);
    api_->check(error, "cuMemHostGetDevicePointer");
  }
  return {pointer, address};
}

void CudaDevice::free_shared(void* pointer) noexcept {
  if (api_->cuCtxPushCurrent(context_) != 0) return;
  api_->cuMemFreeHost(pointer);
  void* popped = nullptr;
  api_->cuCtxPopCurrent(&popped);
}

void CudaDevice::copy_on_stream(uint64_t to, const void* from, int64_t bytes, void* stream) {
  Current current(*this);
  api_->check(api_->cuMemcpyHtoDAsync(to, from, static_cast<size_t>(bytes), stream), "cuMemcpyHtoDAsync");
}

bool CudaDevice::is_capturing(void* stream) {
  int status = 0;
  return api_->cuStreamIsCapturing(stream, &status) != 0 || status != 0;
}

CudaGraph::CudaGraph(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {
  CudaDevice::Current current(*device_);
  device_->api_->check(device_->api_->cuGraphCreate(&graph_, 0), "cuGraphCreate");
}

CudaGraph::~CudaGraph() {
  const CudaApi& api = *device_->api_;
  if (api.cuCtxPushCurrent(device_->context_) != 0) return;
  if (ready_) api.cuGraphExecDestroy(ready_);
  api.cuGraphDestroy(graph_);
  void* popped = nullptr;
  api.cuCtxPopCurrent(&popped);
}

void CudaGraph::add(void* function, const CudaLaunch& launch, void** arguments) {
  CudaDevice::Current current(*device_);
  CudaNode kernel = node_of(function, launch, arguments);
  void* node = nullptr;
  const std::vector<void*> after = nodes_.empty() ? std::vector<void*>{} : std::vector<void*>{nodes_.back()};
  device_->api_->check(device_->api_->cuGraphAddKernelNode(&node, graph_, after.data(), after.size(), &kernel), "cuGraphAddKernelNode");
  nodes_.push_back(node);
}

void CudaGraph::finish() {
  CudaDevice::Current current(*device_);
  device_->api_->check(device_->api_->cuGraphInstantiateWithFlags(&ready_, graph_, 0), "cuGraphInstantiateWithFlags");
}

void CudaGraph::change(size_t node, void* function, const CudaLaunch& launch, void** arguments) {
  CudaNode kernel = node_of(function, launch, arguments);
  device_->api_->check(device_->api_->cuGraphExecKernelNodeSetParams(ready_, nodes_[node], &kernel), "cuGraphExecKernelNodeSetParams");
}

void CudaGraph::launch(void* stream) { device_->api_->check(device_->api_->cuGraphLaunch(ready_, stream), "cuGraphLaunch"); }

void CudaDevice::launch(void* function, const CudaLaunch& l, void** arguments) {
  Current current(*this);
  launch_in_context(function, l, arguments);
}

void CudaDevice::launch_in_context(void* function, const CudaLaunch& l, void** arguments) {
  api_->check(api_->cuLaunchKernel(function, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2], l.shared_bytes, l.stream, arguments,
                                   nullptr),
              "cuLaunchKernel");
}

}  // namespace deplo
