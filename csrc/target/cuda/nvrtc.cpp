#include "target/cuda/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "target/cuda/devices.h"

namespace deplo {
namespace {

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
void load(void* handle, const char* name, F& function) {
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
  load(handle, "nvrtcVersion", api->version);
  load(handle, "nvrtcCreateProgram", api->create);
  load(handle, "nvrtcCompileProgram", api->compile);
  load(handle, "nvrtcGetProgramLogSize", api->log_size);
  load(handle, "nvrtcGetProgramLog", api->log);
  load(handle, "nvrtcGetCUBINSize", api->cubin_size);
  load(handle, "nvrtcGetCUBIN", api->cubin);
  load(handle, "nvrtcGetPTXSize", api->ptx_size);
  load(handle, "nvrtcGetPTX", api->ptx);
  load(handle, "nvrtcGetNumSupportedArchs", api->arch_count);
  load(handle, "nvrtcGetSupportedArchs", api->archs);
  load(handle, "nvrtcDestroyProgram", api->destroy);
  load(handle, "nvrtcGetErrorString", api->error_text);
  opened[path] = api;
  return api;
}

}  // namespace

NvrtcOutput nvrtc_compile(const std::string& text, const std::string& arch, const std::string& library) {
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
