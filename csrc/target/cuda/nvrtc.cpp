#include "target/cuda/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "target/cuda/devices.h"

namespace deplo {
namespace {

// Attributes of kernels in a cubin (section .nv.info), those whose values are bytes.
constexpr uint64_t kWithBytes = 4, kRegisters = 0x2f, kFrame = 0x11;
constexpr int64_t kRegistersOfSm = 65536;

// The part of NVRTC's C interface (nvrtc.h of CUDA 13) that deplo calls, so that building needs no CUDA.
using Program = struct Opaque*;
struct Nvrtc {
  int (*version)(int*, int*) = nullptr;
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*compile)(Program, int, const char* const*) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*cubin_size)(Program, size_t*) = nullptr;
  int (*cubin)(Program, char*) = nullptr;
  int (*ptx_size)(Program, size_t*) = nullptr;
  int (*ptx)(Program, char*) = nullptr;
  int (*arch_count)(int*) = nullptr;
  int (*archs)(int*) = nullptr;
  int (*destroy)(Program*) = nullptr;
  const char* (*error_text)(int) = nullptr;
};

template <class F>
void find_function(void* handle, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  DEPLO_SUPPORT(function, "this libnvrtc has no {}: install nvidia-cuda-nvrtc 13.0", name);
}

std::shared_ptr<const Nvrtc> open_nvrtc(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Nvrtc>> opened;
  std::lock_guard lock(mutex);
  if (auto it = opened.find(path); it != opened.end()) return it->second;
  void* handle = nullptr;
  if (!path.empty()) {
    // NVRTC opens its builtins by name alone; having them loaded from beside it makes that name resolve.
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path(), ignored)) {
      std::string name = entry.path().filename().string();
      if (name.starts_with("libnvrtc-builtins.so")) dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
    }
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  } else {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
      if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (!handle) {
    const char* why = dlerror();
    throw UnsupportedError(
        fmt::format("NVRTC could not be opened ({}): install the package nvidia-cuda-nvrtc 13.0 to compile for CUDA", why ? why : "not found"));
  }
  auto api = std::make_shared<Nvrtc>();
  find_function(handle, "nvrtcVersion", api->version);
  find_function(handle, "nvrtcCreateProgram", api->create);
  find_function(handle, "nvrtcCompileProgram", api->compile);
  find_function(handle, "nvrtcGetProgramLogSize", api->log_size);
  find_function(handle, "nvrtcGetProgramLog", api->log);
  find_function(handle, "nvrtcGetCUBINSize", api->cubin_size);
  find_function(handle, "nvrtcGetCUBIN", api->cubin);
  find_function(handle, "nvrtcGetPTXSize", api->ptx_size);
  find_function(handle, "nvrtcGetPTX", api->ptx);
  find_function(handle, "nvrtcGetNumSupportedArchs", api->arch_count);
  find_function(handle, "nvrtcGetSupportedArchs", api->archs);
  find_function(handle, "nvrtcDestroyProgram", api->destroy);
  find_function(handle, "nvrtcGetErrorString", api->error_text);
  opened[path] = api;
  return api;
}

/// What the machine code of one kernel takes of a thread.
struct Takes {
  int64_t registers = 0;
  int64_t stack_bytes = 0;
};

/// From a cubin's table of attributes; nothing of other images.
Takes takes_of(const std::string& image) {
  Takes takes;
  const auto read = [&](size_t at, size_t bytes) {
    uint64_t value = 0;
    if (at <= image.size() && bytes <= image.size() - at) std::memcpy(&value, image.data() + at, bytes);
    return value;
  };
  if (!image.starts_with("\x7f"
                         "ELF"))
    return takes;
  const size_t sections = read(40, 8);
  const size_t size = read(58, 2);
  const size_t names = read(sections + read(62, 2) * size + 24, 8);
  for (size_t k = 0; k < read(60, 2); ++k) {
    const size_t section = sections + k * size;
    const std::string_view name = ".nv.info";
    const size_t named = names + read(section, 4);
    if (named > image.size() || image.compare(named, name.size() + 1, name.data(), name.size() + 1) != 0) continue;
    size_t at = read(section + 24, 8);
    for (const size_t end = at + read(section + 32, 8); at + 4 <= end && end <= image.size();) {
      if (read(at, 1) != kWithBytes) {
        at += 4;
        continue;
      }
      const auto value = static_cast<int64_t>(read(at + 8, 4));
      if (read(at + 1, 1) == kRegisters) takes.registers = std::max(takes.registers, value);
      if (read(at + 1, 1) == kFrame) takes.stack_bytes = std::max(takes.stack_bytes, value);
      at += 4 + read(at + 2, 2);
    }
  }
  return takes;
}

NvrtcOutput compile_once(const std::string& text, const std::string& arch, const std::string& library) {
  auto api = open_nvrtc(library);
  Program program = nullptr;
  int status = api->create(&program, text.c_str(), "deplo.cu", 0, nullptr, nullptr);
  DEPLO_ASSERT(status == 0, "NVRTC could not make a program: {}", api->error_text(status));
  struct Closer {
    const Nvrtc& api;
    Program* program;
    ~Closer() { api.destroy(program); }
  } closer{*api, &program};
  std::string arch_option = "--gpu-architecture=" + arch;
  // FMA contraction is allowed by the numerics of every target; nothing else is relaxed.
  std::vector<const char*> options{arch_option.c_str(), "--std=c++17", "--fmad=true"};
  status = api->compile(program, static_cast<int>(options.size()), options.data());
  NvrtcOutput out;
  size_t size = 0;
  if (api->log_size(program, &size) == 0 && size > 1) {
    out.log.resize(size);
    api->log(program, out.log.data());
    out.log.resize(size - 1);
  }
  DEPLO_ASSERT(status == 0, "NVRTC ({}) refused a kernel: {}\n{}", arch, api->error_text(status), out.log);
  bool ptx = arch.starts_with("compute_");
  size = 0;
  status = (ptx ? api->ptx_size : api->cubin_size)(program, &size);
  DEPLO_ASSERT(status == 0 && size > 0, "NVRTC gave no code for {}", arch);
  out.image.resize(size);
  status = (ptx ? api->ptx : api->cubin)(program, out.image.data());
  DEPLO_ASSERT(status == 0, "NVRTC gave no code for {}: {}", arch, api->error_text(status));
  return out;
}

}  // namespace

NvrtcOutput nvrtc_compile(const std::string& text, const std::string& arch, const std::string& library) {
  NvrtcOutput best = compile_once(text, arch, library);
  static const std::regex bounds(R"(__launch_bounds__\((\d+)\))");
  const Takes takes = takes_of(best.image);
  std::smatch found;
  if (takes.stack_bytes == 0 || !std::regex_search(text, found, bounds)) return best;
  // The compiler saves registers for the sake of more blocks at once even where what is left does not do: it is told how few are enough.
  const int64_t threads = std::stoll(found[1]);
  for (const int64_t registers : {64, 128, 255}) {
    if (registers <= takes.registers) continue;
    const int64_t blocks = std::max<int64_t>(1, kRegistersOfSm / (registers * threads));
    NvrtcOutput next = compile_once(std::regex_replace(text, bounds, fmt::format("__launch_bounds__($1, {})", blocks)), arch, library);
    const int64_t stack_bytes = takes_of(next.image).stack_bytes;
    if (stack_bytes == 0) return next;
    if (stack_bytes == takes.stack_bytes) break;  // an array, which no register holds
  }
  return best;
}

std::string nvrtc_version(const std::string& library) {
  auto api = open_nvrtc(library);
  int major = 0;
  int minor = 0;
  int status = api->version(&major, &minor);
  DEPLO_ASSERT(status == 0, "NVRTC could not tell its version: {}", api->error_text(status));
  return fmt::format("{}.{}", major, minor);
}

std::string nvrtc_arch(int capability, const std::string& library) {
  auto api = open_nvrtc(library);
  int count = 0;
  int status = api->arch_count(&count);
  DEPLO_ASSERT(status == 0, "NVRTC could not count architectures: {}", api->error_text(status));
  std::vector<int> archs(static_cast<size_t>(count));
  status = api->archs(archs.data());
  DEPLO_ASSERT(status == 0, "NVRTC could not list architectures: {}", api->error_text(status));
  int newest = 0;
  for (int arch : archs) {
    if (arch == capability) return cuda_arch(arch);
    if (arch < capability) newest = std::max(newest, arch);
  }
  DEPLO_SUPPORT(newest > 0, "this NVRTC compiles for sm_{} and later, the device is sm_{}: install an older nvidia-cuda-nvrtc",
                archs.empty() ? 0 : *std::min_element(archs.begin(), archs.end()), capability);
  return fmt::format("compute_{}", newest);
}

}  // namespace deplo
