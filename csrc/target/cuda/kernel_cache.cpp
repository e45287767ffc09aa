#include "target/cuda/kernel_cache.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/processors.h"
#include "base/sha256.h"
#include "target/cuda/nvrtc.h"
#include "target/cuda/text.h"
#include "target/disk_cache.h"

namespace deplo {
namespace {

/// What every GPU gives a block without being asked (static and dynamic together).
constexpr int64_t kSharedBytesAlways = 48 << 10;
constexpr int64_t kCacheLimit = 1LL << 30;  // as that of the CPU's kernels, which share the folder

/// Loaded kernels by context and key. Never destroyed: programs may outlive static destructors.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<const void*, std::string>, std::weak_ptr<LoadedCudaKernel>> kernels;
};
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

/// "k3_linear_relu" is linear_relu_kernel in every program.
std::string name_of_operators(const std::string& name) {
  size_t at = name.size() > 1 && name[0] == 'k' ? name.find_first_not_of("0123456789", 1) : std::string::npos;
  return at != std::string::npos && at > 1 && name[at] == '_' && at + 1 < name.size() ? name.substr(at + 1) + "_kernel" : "deplo_kernel";
}

struct Job {
  std::string key;
  std::string name;
  std::string text;
  std::string image;
  std::string log;
};

/// Runs `one` on every job; the first failure is thrown once all have stopped.
template <class F>
void on_all_processors(const std::vector<Job*>& jobs, F&& one) {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  auto work = [&] {
    for (size_t k = next++; k < jobs.size(); k = next++) {
      try {
        one(*jobs[k]);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = jobs.size();
      }
    }
  };
  std::vector<std::thread> others;
  size_t threads = std::min(jobs.size(), static_cast<size_t>(std::max(available_processors(), 1)));
  for (size_t t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

LoadedCudaKernel::LoadedCudaKernel(std::shared_ptr<CudaDevice> on, const std::string& image, const std::string& name) : device(std::move(on)) {
  module = device->load_module(image);
  try {
    function = device->function(module, name);
    shared_bytes = device->static_shared_bytes(function);
    allowed_bytes_ = std::min(kSharedBytesAlways, device->shared_bytes()) - shared_bytes;
  } catch (const Error&) {
    device->unload_module(module);
    throw;
  }
}

bool LoadedCudaKernel::allows(int64_t dynamic_bytes) {
  std::lock_guard lock(mutex_);
  if (dynamic_bytes > allowed_bytes_ && dynamic_bytes + shared_bytes <= device->shared_bytes()) {
    allowed_bytes_ = device->shared_bytes() - shared_bytes;
    device->allow_shared_bytes(function, allowed_bytes_);
  }
  return dynamic_bytes <= allowed_bytes_;
}

LoadedCudaKernel::~LoadedCudaKernel() { device->unload_module(module); }

std::vector<std::shared_ptr<LoadedCudaKernel>> load_cuda_kernels(const std::shared_ptr<CudaDevice>& device, const kernel_ir::Module& module,
                                                                 const std::string& nvrtc, const std::string& cache_dir, bool debug,
                                                                 CodegenStats& stats) {
  if (module.kernels.empty()) return {};
  const std::string arch = nvrtc_arch(device->capability(), nvrtc);
  const std::string environment = fmt::format("cuda {} nvrtc {}\n", arch, nvrtc_version(nvrtc));
  DiskCache disk(cache_dir, kCacheLimit);
  std::map<std::string, Job> jobs;
  std::vector<std::string> keys;
  for (const auto& kernel : module.kernels) {
    kernel_ir::Kernel renamed = *kernel;
    if (!debug) {
      renamed.name = name_of_operators(kernel->name);
      renamed.provenance.clear();
    }
    Job job{"", renamed.name, cuda_text(renamed), "", ""};
    job.key = sha256_hex(environment + job.text);
    keys.push_back(job.key);
    jobs.try_emplace(job.key, std::move(job));
  }

  std::map<std::string, std::shared_ptr<LoadedCudaKernel>> loaded;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& [key, job] : jobs) {
      auto found = registry().kernels.find({device->context(), key});
      if (auto kernel = found == registry().kernels.end() ? nullptr : found->second.lock()) loaded[key] = std::move(kernel);
    }
  }
  stats.memory_hits += static_cast<int>(loaded.size());
  std::vector<Job*> missing;
  for (auto& [key, job] : jobs) {
    if (loaded.count(key)) continue;
    if (auto entry = disk.find(key)) {
      job.image = std::move(entry->object);
      ++stats.disk_hits;
    } else {
      missing.push_back(&job);
    }
  }
  on_all_processors(missing, [&](Job& job) {
    job.image = nvrtc_compile(job.text, arch, nvrtc).image;
    disk.store(job.key, {job.name, job.image});
  });
  stats.compiled += static_cast<int>(missing.size());
  for (auto& [key, job] : jobs)
    if (!loaded.count(key)) loaded[key] = std::make_shared<LoadedCudaKernel>(device, job.image, job.name);

  std::vector<std::shared_ptr<LoadedCudaKernel>> result;
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().kernels, [](const auto& item) { return item.second.expired(); });
  for (const std::string& key : keys) {
    result.push_back(loaded.at(key));
    registry().kernels[{device->context(), key}] = loaded.at(key);
  }
  return result;
}

}  // namespace deplo
