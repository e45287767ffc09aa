#include <llvm/ExecutionEngine/Orc/AbsoluteSymbols.h>
#include <llvm/ExecutionEngine/Orc/LLJIT.h>
#include <llvm/Support/MemoryBuffer.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/memory.h"
#include "base/sha256.h"
#include "target/cpu/callable.h"
#include "target/cpu/codegen.h"
#include "target/cpu/llvm/debugger.h"
#include "target/cpu/llvm/functions.h"
#include "target/cpu/llvm/machine.h"
#include "target/cpu/llvm/memory_cache.h"
#include "target/disk_cache.h"

namespace deplo {
namespace {

std::string text_of(llvm::Error error) { return llvm::toString(std::move(error)); }

/// The process's one LLJIT; each kernel is a library of its own in it, so that it can be unloaded alone.
class Jit {
 public:
  static Jit& instance() {
    // Never destroyed: programs may outlive static destruction.
    static Jit* jit = new Jit();
    return *jit;
  }

  struct Loaded {
    llvm::orc::JITDylib* library;
    void* address;
  };

  Loaded load(const std::string& symbol, const std::string& object) {
    static std::atomic<int> serial{0};
    auto library = lljit_->createJITDylib(symbol + "." + std::to_string(serial++));
    if (!library) throw InternalError("[jit] " + text_of(library.takeError()));
    library->addToLinkOrder(lljit_->getMainJITDylib());
    auto buffer = llvm::MemoryBuffer::getMemBufferCopy(object, symbol);
    if (auto error = lljit_->addObjectFile(*library, std::move(buffer))) throw InternalError("[jit] " + text_of(std::move(error)));
    auto address = lljit_->lookup(*library, symbol);
    if (!address) throw InternalError("[jit] " + text_of(address.takeError()));
    return {&*library, address->toPtr<void*>()};
  }

  void unload(llvm::orc::JITDylib& library) { llvm::consumeError(lljit_->getExecutionSession().removeJITDylib(library)); }

 private:
  Jit() {
    make_machine(TargetInfo{});  // registers the target
    llvm::orc::JITTargetMachineBuilder builder(llvm::Triple("x86_64-unknown-linux-gnu"));
    auto made = llvm::orc::LLJITBuilder()
                    .setJITTargetMachineBuilder(std::move(builder))
                    .setLinkProcessSymbolsByDefault(false)
                    .setPlatformSetUp(llvm::orc::setUpInactivePlatform)
                    .create();
    if (!made) throw InternalError("[jit] " + text_of(made.takeError()));
    lljit_ = std::move(*made);
    llvm::orc::SymbolMap symbols;
    for (const std::string& name : callable_symbols())
      symbols[lljit_->mangleAndIntern(name)] = {llvm::orc::ExecutorAddr::fromPtr(callable_address(name)), llvm::JITSymbolFlags::Exported};
    if (auto error = lljit_->getMainJITDylib().define(llvm::orc::absoluteSymbols(std::move(symbols))))
      throw InternalError("[jit] " + text_of(std::move(error)));
  }

  std::unique_ptr<llvm::orc::LLJIT> lljit_;
};

class LoadedKernel : public CompiledKernel {
 public:
  LoadedKernel(std::string key, DiskCache::Entry entry, Jit::Loaded loaded, std::unique_ptr<DebuggerEntry> debugger)
      : key_(std::move(key)), entry_(std::move(entry)), loaded_(loaded), debugger_(std::move(debugger)) {}
  ~LoadedKernel() override {
    debugger_.reset();
    Jit::instance().unload(*loaded_.library);
  }
  KernelFn function() const override { return reinterpret_cast<KernelFn>(loaded_.address); }
  const std::string& key() const override { return key_; }
  std::string image() const override { return DiskCache::to_bytes(key_, entry_); }
  std::pair<std::string, std::string> object() const override { return {entry_.object, entry_.symbol}; }

 private:
  std::string key_;
  DiskCache::Entry entry_;
  Jit::Loaded loaded_;
  std::unique_ptr<DebuggerEntry> debugger_;
};

/// Of kernels that no program holds.
constexpr size_t kMostKept = 256;

MemoryCache& memory_cache() {
  static auto* cache = [] {
    at_trim(&forget_unused_kernels);
    return new MemoryCache(kMostKept);
  }();
  return *cache;
}

/// Kernels that came with a graph compiled elsewhere, until somebody links them.
class OfferedKernels {
 public:
  void add(const std::string& key, DiskCache::Entry entry) {
    std::lock_guard lock(mutex_);
    entries_[key] = std::move(entry);
  }
  std::optional<DiskCache::Entry> take(const std::string& key) {
    std::lock_guard lock(mutex_);
    auto found = entries_.extract(key);
    return found ? std::optional(std::move(found.mapped())) : std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, DiskCache::Entry> entries_;
};

OfferedKernels& offered_kernels() {
  static auto* offered = new OfferedKernels();
  return *offered;
}

std::string features_of(const TargetInfo& target) {
  std::string text = std::to_string(target.vector_bytes);
  for (const std::string& f : target.features) text += " " + f;
  return text;
}

/// One kernel to make: found on disk, or compiled and stored there.
struct Job {
  std::string key;
  const kernel_ir::Kernel* kernel;
  std::optional<DiskCache::Entry> offered;
  std::shared_ptr<CompiledKernel> result;
  bool from_disk = false;
};

/// Code that debuggers know is not shared with code that they don't.
std::string memory_key(const std::string& key, bool debug) { return debug ? key + " debug" : key; }

void make_kernel(Job& job, const TargetInfo& target, const DiskCache& disk, llvm::TargetMachine* machine, bool debug) {
  auto entry = disk.find(job.key);
  if (!entry && job.offered) {
    entry = std::move(job.offered);
    disk.store(job.key, *entry);
  }
  job.from_disk = entry.has_value();
  if (!entry) {
    llvm::LLVMContext context;
    llvm::Module module(job.kernel->name, context);
    entry = DiskCache::Entry{machine_symbol(*job.kernel, job.key), ""};
    build_module(*job.kernel, entry->symbol, target, *machine, module);
    entry->object = emit_object(module, *machine);
    disk.store(job.key, *entry);
  }
  Jit::Loaded loaded = Jit::instance().load(entry->symbol, entry->object);
  auto debugger = debug ? std::make_unique<DebuggerEntry>(entry->symbol, loaded.address, entry->object) : nullptr;
  job.result = std::make_shared<LoadedKernel>(job.key, std::move(*entry), loaded, std::move(debugger));
  memory_cache().store(memory_key(job.key, debug), job.result);
}

void run_jobs(std::vector<Job>& jobs, int workers, const std::function<void(Job&, llvm::TargetMachine*)>& make, const TargetInfo& target) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  auto work = [&] {
    std::unique_ptr<llvm::TargetMachine> machine;
    while (true) {
      size_t k = next++;
      if (k >= jobs.size()) return;
      try {
        if (!machine) machine = make_machine(target);
        make(jobs[k], machine.get());
      } catch (const std::exception&) {  // carried to the calling thread, the first one wins
        std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = jobs.size();
      }
    }
  };
  size_t helpers = std::min(static_cast<size_t>(std::max(workers, 1)), jobs.size()) - (jobs.empty() ? 0 : 1);
  std::vector<std::thread> threads;
  for (size_t k = 0; k < helpers; ++k) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

void offer_kernel(const std::string& image) {
  if (auto found = DiskCache::from_bytes(image)) offered_kernels().add(found->first, std::move(found->second));
}

void keep_kernel(const std::string& image, const CodegenOptions& options) {
  if (auto found = DiskCache::from_bytes(image)) DiskCache(options.cache_dir, options.cache_limit_bytes).store(found->first, found->second);
}

void forget_unused_kernels() { memory_cache().clear(); }

std::vector<std::shared_ptr<CompiledKernel>> compile_cpu_kernels(const std::vector<Ref<kernel_ir::Kernel>>& kernels, const PassContext& context,
                                                                 const CodegenOptions& options, CodegenStats* stats) {
  auto start = std::chrono::steady_clock::now();
  std::string environment = codegen_version() + "\n" + features_of(context.target) + "\n";
  std::vector<std::string> keys;
  std::map<std::string, std::shared_ptr<CompiledKernel>> ready;
  std::map<std::string, size_t> planned;
  std::vector<Job> jobs;
  CodegenStats counted;
  for (const auto& kernel : kernels) {
    std::string key = sha256_hex(environment + canonical_text(*kernel));
    keys.push_back(key);
    if (ready.count(key) || planned.count(key)) continue;
    auto offered = offered_kernels().take(key);  // also where it is not needed: it would stay
    if (auto found = memory_cache().find(memory_key(key, options.debug))) {
      ready[key] = found;
      ++counted.memory_hits;
      continue;
    }
    planned[key] = jobs.size();
    jobs.push_back({key, kernel.get(), std::move(offered), nullptr, false});
  }
  DiskCache disk(options.cache_dir, options.cache_limit_bytes);
  run_jobs(
      jobs, options.workers, [&](Job& job, llvm::TargetMachine* machine) { make_kernel(job, context.target, disk, machine, options.debug); },
      context.target);
  for (Job& job : jobs) {
    ++(job.from_disk ? counted.disk_hits : counted.compiled);
    ready[job.key] = job.result;
  }
  std::vector<std::shared_ptr<CompiledKernel>> results;
  for (const std::string& key : keys) results.push_back(ready.at(key));
  counted.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (stats) *stats = counted;
  return results;
}

}  // namespace deplo
