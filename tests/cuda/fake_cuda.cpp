// A libcuda and a libnvrtc for machines without a GPU, for tests: NVRTC's part compiles CUDA text for this CPU with the emulator, the driver's
// part runs it. Memory of the device is memory of the host. Both are opened like the real libraries.
//
// DEPLO_FAKE_CUDA changes what they do, as "name=value,...", read at each call:
//   fail=CALL:CODE   that entry point returns CODE
//   devices=N        of which cuDeviceGetCount tells (1)
//   capability=N     of the device (90)
//   shared=N         bytes of shared memory that a block may have (232448)
//   reversed=1       the threads of a block run the other way round
//   late=1           asynchronous copies take place when they are waited for, not at once
//   judge=PATH       texts are compiled to be watched: launches add a line of counts to that file, and fail at a race on shared memory or a read of
//                    what nobody wrote there
//   log=PATH         each call's name is appended to that file
//   idle=1           kernels do nothing: what is left is the cost of starting them
//   capturing=1      every stream says that it records

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "emulator.h"
#undef __restrict__

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNotFound = 500,
  kLaunchFailed = 719,
};

struct Function {
  bool (*run)(const deplo_emulated_launch*, void**);
  int dynamic_bytes = 48 << 10;
  int params = 0;
  const int* bytes = nullptr;  ///< of each
};

struct Module {
  void* library;
  std::map<std::string, Function> functions;
};

std::recursive_mutex mutex;
bool started = false;
int retained = 0;
thread_local std::vector<void*> contexts;
char primary;  // the context
std::map<void*, std::unique_ptr<Module>> modules;
/// What the tests leave behind on purpose is freed at the end.
struct Allocations : std::map<uintptr_t, size_t> {
  ~Allocations() {
    for (const auto& [pointer, bytes] : *this) std::free(reinterpret_cast<void*>(pointer));
  }
} allocations;

/// The settings, read anew when the variable has changed: calls that ask for none cost little, as the driver's own do.
const std::map<std::string, std::string>& settings() {
  static std::string text;
  static std::map<std::string, std::string> read;
  const char* all = std::getenv("DEPLO_FAKE_CUDA");
  if (text == (all ? all : "")) return read;
  text = all ? all : "";
  read.clear();
  std::istringstream in(text);
  for (std::string item; std::getline(in, item, ',');)
    if (size_t at = item.find('='); at != std::string::npos) read.emplace(item.substr(0, at), item.substr(at + 1));
  return read;
}

std::string setting(const std::string& name, const std::string& otherwise) {
  auto at = settings().find(name);
  return at == settings().end() ? otherwise : at->second;
}

int number(const std::string& name, int otherwise) { return std::stoi(setting(name, std::to_string(otherwise))); }

/// What every entry point does first: 0, or the code that it is to fail with.
int enter(const char* call) {
  if (settings().empty()) return kSuccess;
  if (std::string log = setting("log", ""); !log.empty()) std::ofstream(log, std::ios::app) << call << "\n";
  std::string fail = setting("fail", "");
  size_t colon = fail.find(':');
  return colon != std::string::npos && fail.substr(0, colon) == call ? std::stoi(fail.substr(colon + 1)) : kSuccess;
}

std::string temporary(const std::string& what) {
  const char* folder = std::getenv("TMPDIR");
  return std::string(folder ? folder : "/tmp") + "/deplo-emulated-" + std::to_string(getpid()) + "-" + what + "-";
}

/// For calls that need a context.
int enter_context(const char* call) {
  if (int error = enter(call)) return error;
  return !started ? kNotInitialized : contexts.empty() || contexts.back() != &primary ? kInvalidContext : kSuccess;
}

bool allocated(unsigned long long pointer, size_t bytes) {
  auto at = allocations.upper_bound(pointer);
  if (at == allocations.begin()) return false;
  --at;
  return pointer + bytes <= at->first + at->second;
}

bool read_file(const std::string& path, std::string& text) {
  std::ifstream in(path);
  std::ostringstream all;
  all << in.rdbuf();
  text = all.str();
  return in.good() || !text.empty();
}

}  // namespace

// ---- the driver ----------------------------------------------------------------------------------------------------

EXPORT int cuInit(unsigned flags) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuInit")) return error;
  started = true;
  return flags == 0 ? kSuccess : kInvalidValue;
}

EXPORT int cuGetErrorName(int error, const char** text) {
  static const std::map<int, const char*> kNames{
      {kSuccess, "CUDA_SUCCESS"},          {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"}, {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"}, {kNotFound, "CUDA_ERROR_NOT_FOUND"},         {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"}};
  auto at = kNames.find(error);
  *text = at == kNames.end() ? nullptr : at->second;
  return *text ? kSuccess : kInvalidValue;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  if (int failed = cuGetErrorName(error, text)) return failed;
  *text = error == kOutOfMemory ? "out of memory" : error == kLaunchFailed ? "unspecified launch failure" : "some text";
  return kSuccess;
}

EXPORT int cuDeviceGetCount(int* count) {
  std::lock_guard lock(mutex);
  *count = number("devices", 1);
  return enter("cuDeviceGetCount");
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuDeviceGet")) return error;
  *device = ordinal;
  return ordinal >= 0 && ordinal < number("devices", 1) ? kSuccess : kInvalidDevice;
}

EXPORT int cuDeviceGetName(char* name, int length, int /*device*/) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuDeviceGetName")) return error;
  std::snprintf(name, static_cast<size_t>(length), "emulated GPU");
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuDeviceGetAttribute")) return error;
  switch (attribute) {
    case 8: *value = std::min(48 << 10, number("shared", 232448)); return kSuccess;  // MAX_SHARED_MEMORY_PER_BLOCK
    case 75: *value = number("capability", 90) / 10; return kSuccess;
    case 76: *value = number("capability", 90) % 10; return kSuccess;
    case 97: *value = number("shared", 232448); return kSuccess;  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    default: return kInvalidValue;
  }
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int /*device*/) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuDevicePrimaryCtxRetain")) return error;
  ++retained;
  *context = &primary;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int /*device*/) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuDevicePrimaryCtxRelease_v2")) return error;
  return retained-- > 0 ? kSuccess : kInvalidContext;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuCtxPushCurrent_v2")) return error;
  contexts.push_back(context);
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  std::lock_guard lock(mutex);
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return enter("cuCtxPopCurrent_v2");
}

EXPORT int cuCtxSynchronize() {
  std::lock_guard lock(mutex);
  return enter_context("cuCtxSynchronize");
}

EXPORT int cuModuleLoadData(void** module, const void* image) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuModuleLoadData")) return error;
  // "emulated", the library's size, its bytes: caches keep images.
  const char* text = static_cast<const char*>(image);
  if (std::strncmp(text, "emulated\n", 9) != 0) return kInvalidImage;
  char* bytes = nullptr;
  size_t size = std::strtoull(text + 9, &bytes, 10);
  static int serial = 0;
  std::string library = temporary("loaded") + std::to_string(serial++) + ".so";
  std::ofstream(library, std::ios::binary).write(bytes + 1, static_cast<std::streamsize>(size));
  auto made = std::make_unique<Module>(Module{dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL), {}});
  std::remove(library.c_str());
  if (!made->library) {
    std::fprintf(stderr, "fake libcuda: %s\n", dlerror());
    return kInvalidImage;
  }
  *module = made.get();
  modules[*module] = std::move(made);
  return kSuccess;
}

EXPORT int cuModuleUnload(void* module) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuModuleUnload")) return error;
  auto at = modules.find(module);
  if (at == modules.end()) return kInvalidValue;
  dlclose(at->second->library);
  modules.erase(at);
  return kSuccess;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuModuleGetFunction")) return error;
  auto* m = static_cast<Module*>(module);
  if (modules.count(m) == 0) return kInvalidValue;
  void* found = dlsym(m->library, (std::string("deplo_launch_") + name).c_str());
  if (!found) return kNotFound;
  Function& made = m->functions[name];
  made.run = reinterpret_cast<bool (*)(const deplo_emulated_launch*, void**)>(found);
  const auto* params = static_cast<const int*>(dlsym(m->library, (std::string("deplo_params_") + name).c_str()));
  made.params = params ? *params : 0;
  made.bytes = static_cast<const int*>(dlsym(m->library, (std::string("deplo_bytes_") + name).c_str()));
  *function = &made;
  return kSuccess;
}

EXPORT int cuFuncGetAttribute(int* value, int attribute, void* /*function*/) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuFuncGetAttribute")) return error;
  *value = 2048;  // SHARED_SIZE_BYTES: some
  return attribute == 1 ? kSuccess : kInvalidValue;
}

EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuFuncSetAttribute")) return error;
  if (attribute != 8 || value + 2048 > number("shared", 232448)) return kInvalidValue;
  static_cast<Function*>(function)->dynamic_bytes = value;
  return kSuccess;
}

EXPORT int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemAlloc_v2")) return error;
  if (bytes == 0) return kInvalidValue;
  if (bytes > (size_t{1} << 34)) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!memory) return kOutOfMemory;
  std::memset(memory, 0xff, bytes);
  allocations[reinterpret_cast<uintptr_t>(memory)] = bytes;
  *pointer = reinterpret_cast<uintptr_t>(memory);
  return kSuccess;
}

EXPORT int cuMemFree_v2(unsigned long long pointer) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemFree_v2")) return error;
  if (allocations.erase(pointer) == 0) return kInvalidValue;
  std::free(reinterpret_cast<void*>(pointer));
  return kSuccess;
}

EXPORT int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemcpyHtoD_v2")) return error;
  if (!allocated(to, bytes)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}

EXPORT int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemcpyDtoH_v2")) return error;
  if (!allocated(from, bytes)) return kInvalidValue;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}

EXPORT int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* /*stream*/) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemcpyHtoDAsync_v2")) return error;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);  // to PyTorch's memory, of which this driver knows nothing
  return kSuccess;
}

EXPORT int cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemHostAlloc")) return error;
  if (bytes == 0 || flags != 3) return kInvalidValue;
  *pointer = std::malloc(bytes);
  std::memset(*pointer, 0xff, bytes);
  return kSuccess;
}

EXPORT int cuMemFreeHost(void* pointer) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemFreeHost")) return error;
  std::free(pointer);
  return kSuccess;
}

EXPORT int cuMemHostGetDevicePointer_v2(unsigned long long* address, void* pointer, unsigned /*flags*/) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemHostGetDevicePointer_v2")) return error;
  *address = reinterpret_cast<uintptr_t>(pointer);
  return kSuccess;
}

EXPORT int cuStreamIsCapturing(void* /*stream*/, int* status) {
  std::lock_guard lock(mutex);
  *status = number("capturing", 0);
  return enter_context("cuStreamIsCapturing");
}

EXPORT int cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t count) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuMemsetD8_v2")) return error;
  if (!allocated(pointer, count)) return kInvalidValue;
  std::memset(reinterpret_cast<void*>(pointer), value, count);
  return kSuccess;
}

namespace {

int launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
           unsigned shared_bytes, void** arguments, void** extra) {
  auto* f = static_cast<Function*>(function);
  bool sizes = grid_x > 0 && grid_y > 0 && grid_z > 0 && grid_y < 65536 && grid_z < 65536 && grid_x <= INT32_MAX;
  uint64_t threads = uint64_t{block_x} * block_y * block_z;
  if (!sizes || threads == 0 || threads > 1024 || shared_bytes > static_cast<unsigned>(f->dynamic_bytes) || extra) return kInvalidValue;
  if (number("idle", 0)) return kSuccess;
  deplo_emulated_launch launch{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, nullptr,
                               number("late", 0) != 0,   number("reversed", 0) != 0};
  const std::string judge = setting("judge", "");
  if (!judge.empty()) launch.judge = judge.c_str();
  return f->run(&launch, arguments) ? kSuccess : kLaunchFailed;
}

struct NodeParams {
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** arguments;
  void** extra;
};

/// A launch of a graph, with the values of its arguments as they were when it was given them.
struct Node {
  void* graph = nullptr;
  NodeParams params{};
  std::vector<std::vector<char>> values;

  void set(const NodeParams& given) {
    params = given;
    values.clear();
    const auto* function = static_cast<Function*>(given.function);
    for (int a = 0; a < function->params; ++a) {
      const char* from = static_cast<const char*>(given.arguments[a]);
      values.emplace_back(from, from + function->bytes[a]);
    }
  }
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;  ///< in the order in which they were added, which is that of their dependencies
};

/// Nodes by the graph's own, so that a node of another graph shows.
struct ReadyGraph {
  std::vector<std::pair<const Node*, Node>> nodes;
};

std::map<void*, std::unique_ptr<Graph>> graphs;
std::map<void*, std::unique_ptr<ReadyGraph>> ready_graphs;

}  // namespace

EXPORT int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void* /*stream*/, void** arguments, void** extra) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuLaunchKernel")) return error;
  return launch(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, arguments, extra);
}

EXPORT int cuTensorMapEncodeTiled(void* map, int type, unsigned dimensions, void* address, const uint64_t* extents, const uint64_t* strides,
                                  const unsigned* box, const unsigned* element_strides, int interleave, int swizzle, int /*promotion*/, int fill) {
  std::lock_guard lock(mutex);
  if (int error = enter("cuTensorMapEncodeTiled")) return error;
  constexpr int kFloat16 = 6;
  constexpr int kBFloat16 = 9;
  constexpr int kSwizzle128 = 3;
  constexpr unsigned kBytes = 2;
  const auto start = reinterpret_cast<uint64_t>(address);
  bool valid = (type == kFloat16 || type == kBFloat16) && dimensions >= 2 && dimensions <= 5 && start % 16 == 0 && interleave == 0 &&
               swizzle == kSwizzle128 && fill == 0 && box[0] * kBytes <= 128 && reinterpret_cast<uintptr_t>(map) % 64 == 0;
  deplo_emulated_map made{start, {}, {}, {}, dimensions, kBytes};
  for (unsigned d = 0; valid && d < dimensions; ++d) {
    valid = extents[d] > 0 && extents[d] <= (uint64_t{1} << 32) && box[d] > 0 && box[d] <= 256 && element_strides[d] == 1;
    if (d > 0) valid = valid && strides[d - 1] % 16 == 0 && strides[d - 1] < (uint64_t{1} << 40);
    made.extents[d] = extents[d];
    made.strides[d] = d == 0 ? kBytes : strides[d - 1];
    made.box[d] = box[d];
  }
  if (!valid) return kInvalidValue;
  std::memset(map, 0, 128);
  std::memcpy(map, &made, sizeof made);
  return kSuccess;
}

EXPORT int cuGraphCreate(void** graph, unsigned flags) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphCreate")) return error;
  auto made = std::make_unique<Graph>();
  *graph = made.get();
  graphs[*graph] = std::move(made);
  return flags == 0 ? kSuccess : kInvalidValue;
}

EXPORT int cuGraphDestroy(void* graph) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphDestroy")) return error;
  return graphs.erase(graph) == 1 ? kSuccess : kInvalidValue;
}

EXPORT int cuGraphAddKernelNode(void** node, void* graph, void* const* after, size_t count, const NodeParams* params) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphAddKernelNode")) return error;
  auto at = graphs.find(graph);
  if (at == graphs.end()) return kInvalidValue;
  auto& nodes = at->second->nodes;
  // What deplo launches is a chain.
  if (nodes.empty() ? count != 0 : count != 1 || after[0] != nodes.back().get()) return kInvalidValue;
  nodes.push_back(std::make_unique<Node>());
  nodes.back()->graph = graph;
  nodes.back()->set(*params);
  *node = nodes.back().get();
  return kSuccess;
}

EXPORT int cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphInstantiateWithFlags")) return error;
  auto at = graphs.find(graph);
  if (at == graphs.end() || flags != 0) return kInvalidValue;
  auto made = std::make_unique<ReadyGraph>();
  for (const auto& node : at->second->nodes) made->nodes.emplace_back(node.get(), *node);
  *ready = made.get();
  ready_graphs[*ready] = std::move(made);
  return kSuccess;
}

EXPORT int cuGraphExecKernelNodeSetParams(void* ready, void* node, const NodeParams* params) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphExecKernelNodeSetParams")) return error;
  auto at = ready_graphs.find(ready);
  if (at == ready_graphs.end()) return kInvalidValue;
  for (auto& [original, own] : at->second->nodes) {
    if (original != node) continue;
    own.set(*params);
    return kSuccess;
  }
  return kInvalidValue;
}

EXPORT int cuGraphExecDestroy(void* ready) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphExecDestroy")) return error;
  return ready_graphs.erase(ready) == 1 ? kSuccess : kInvalidValue;
}

EXPORT int cuGraphLaunch(void* ready, void* /*stream*/) {
  std::lock_guard lock(mutex);
  if (int error = enter_context("cuGraphLaunch")) return error;
  auto at = ready_graphs.find(ready);
  if (at == ready_graphs.end()) return kInvalidValue;
  for (auto& [original, own] : at->second->nodes) {
    std::vector<void*> arguments;
    for (auto& value : own.values) arguments.push_back(value.data());
    const NodeParams& p = own.params;
    if (int error =
            launch(p.function, p.grid[0], p.grid[1], p.grid[2], p.block[0], p.block[1], p.block[2], p.shared_bytes, arguments.data(), nullptr))
      return error;
  }
  return kSuccess;
}

// ---- NVRTC ---------------------------------------------------------------------------------------------------------

namespace {

struct Compilation {
  std::string text;
  std::string log;
  std::string image;
};

int run(const std::string& command) { return std::system(command.c_str()); }

std::map<std::string, std::string> images;  // by text

}  // namespace

/// Another one for another emulator: caches must not give kernels that an older one compiled.
EXPORT int nvrtcVersion(int* major, int* minor) {
  static const int kEmulator = [] {
    std::string all;
    for (const char* path : {DEPLO_EMULATOR, DEPLO_EMULATOR_LIBRARY}) {
      std::string text;
      read_file(path, text);
      all += text;
    }
    return static_cast<int>(std::hash<std::string>()(all) & 0x7fffffff);
  }();
  *major = 0;
  *minor = kEmulator;
  return 0;
}

EXPORT const char* nvrtcGetErrorString(int error) { return error == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }

EXPORT int nvrtcCreateProgram(void** program, const char* text, const char* /*name*/, int headers, const char* const* /*texts*/,
                              const char* const* /*names*/) {
  std::lock_guard lock(mutex);
  if (int error = enter("nvrtcCreateProgram")) return error;
  *program = new Compilation{text, "", ""};
  return headers == 0 ? 0 : 3;
}

EXPORT int nvrtcDestroyProgram(void** program) {
  delete static_cast<Compilation*>(*program);
  *program = nullptr;
  return 0;
}

EXPORT int nvrtcCompileProgram(void* program, int /*count*/, const char* const* /*options*/) {
  std::unique_lock lock(mutex);
  if (int error = enter("nvrtcCompileProgram")) return error;
  static int serial = 0;
  auto* c = static_cast<Compilation*>(program);
  const bool judged = !setting("judge", "").empty();
  const std::string known = (judged ? "judged " : "") + c->text;
  if (auto at = images.find(known); at != images.end()) {
    c->image = at->second;
    return 0;
  }
  std::string base = temporary("compiled") + std::to_string(serial++);
  lock.unlock();  // several threads compile at once
  {
    std::ofstream out(base + ".cpp");
    std::string text = std::regex_replace(c->text, std::regex("extern __shared__"), "extern");
    // An access of an array's own elements at constant places is taken for right, and not watched: arrays become pointers.
    if (judged)
      text = std::regex_replace(text, std::regex(R"((__shared__ __align__\(16\) (\w+) (\w+))\[(\d+)\];)"),
                                "$1_array[$4]; $2* volatile $3_pointer = $3_array; $2* const $3 = $3_pointer;");
    out << "#include \"" DEPLO_EMULATOR "\"\n" << text;
    static const std::regex kKernel(R"(__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\()");
    out << "\ntemplate <class... Args> constexpr int deplo_count(void (*)(Args...)) { return sizeof...(Args); }\n"
           "template <int N> struct deplo_sizes { int of[N]; };\n"
           "template <class... Args> constexpr deplo_sizes<sizeof...(Args)> deplo_bytes(void (*)(Args...)) { return {{(int)sizeof(Args)...}}; }\n";
    for (std::sregex_iterator k(c->text.begin(), c->text.end(), kKernel), end; k != end; ++k)
      out << "DEPLO_KERNEL(" << (*k)[1] << ")\nextern \"C\" const int deplo_params_" << (*k)[1] << " = deplo_count(" << (*k)[1]
          << ");\nextern \"C\" const auto deplo_bytes_" << (*k)[1] << " = deplo_bytes(" << (*k)[1] << ");\n";
  }
  std::string command =
      DEPLO_CXX " -std=c++17 -O0 -w -fPIC -shared " +
      std::string(judged ? "-DDEPLO_JUDGED -fsanitize=kernel-address --param asan-instrumentation-with-call-threshold=0 --param asan-stack=0 "
                           "--param asan-globals=0 "
                         : "") +
      "-o " + base + ".so " + base + ".cpp " DEPLO_EMULATOR_LIBRARY " > " + base + ".log 2>&1";
  bool done = run(command) == 0;
  read_file(base + ".log", c->log);
  std::remove((base + ".log").c_str());
  std::remove((base + ".cpp").c_str());
  if (!done) return 6;
  std::string library;
  read_file(base + ".so", library);
  std::remove((base + ".so").c_str());
  c->image = "emulated\n" + std::to_string(library.size()) + "\n" + library;
  lock.lock();
  images[known] = c->image;
  return 0;
}

EXPORT int nvrtcGetProgramLogSize(void* program, size_t* size) {
  *size = static_cast<Compilation*>(program)->log.size() + 1;
  return 0;
}

EXPORT int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, static_cast<Compilation*>(program)->log.c_str());
  return 0;
}

EXPORT int nvrtcGetCUBINSize(void* program, size_t* size) {
  *size = static_cast<Compilation*>(program)->image.size();
  return enter("nvrtcGetCUBINSize");
}

EXPORT int nvrtcGetCUBIN(void* program, char* image) {
  const std::string& made = static_cast<Compilation*>(program)->image;
  std::memcpy(image, made.data(), made.size());
  return enter("nvrtcGetCUBIN");
}

EXPORT int nvrtcGetPTXSize(void* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
EXPORT int nvrtcGetPTX(void* program, char* image) { return nvrtcGetCUBIN(program, image); }

EXPORT int nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return enter("nvrtcGetNumSupportedArchs");
}

EXPORT int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80;
  archs[1] = 90;
  return 0;
}
