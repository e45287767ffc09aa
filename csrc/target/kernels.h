#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace deplo {

// What a target makes of a program's kernels: functions of this process, or kernels on a device with memory of its own.

/// What a function receives: buffers in the order of its kernel's params, symbols in the order of its symbols.
struct KernelArgs {
  void* const* buffers;
  const int64_t* symbols;
  int32_t* error;  ///< the error word: an ErrorCode, set and never cleared by kernels
  void* scratch;   ///< scratch_bytes of this thread, aligned to 64
};

/// Runs piece `thread` of `threads` of the kernel; the union of all pieces is the kernel.
using KernelFn = void (*)(const KernelArgs* args, int64_t thread, int64_t threads);

/// Machine code of one kernel; the code lives as long as the object.
class CompiledKernel {
 public:
  virtual ~CompiledKernel() = default;
  virtual KernelFn function() const = 0;
  /// What equal kernels for equal machines have in common; empty where code is not kept.
  virtual const std::string& key() const {
    static const std::string none;
    return none;
  }
  /// The code as an entry of the target's disk cache, for offer_kernel and keep_kernel of another process.
  virtual std::string image() const { return {}; }
  /// The code as an ELF object file, and the name of its function there; empty where there is none.
  virtual std::pair<std::string, std::string> object() const { return {}; }
};

/// The kernels of a module on a device, and the device's memory, which calls address by numbers. What the device refuses is an ExecutionError that
/// says why; what is used up (memory) is a UserError. Any thread may call.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  /// The device, as people call it: "NVIDIA H100 (sm_90)".
  virtual std::string describe_device() const = 0;

  virtual uint64_t allocate(int64_t bytes) = 0;
  virtual void free(uint64_t pointer) noexcept = 0;
  virtual void copy_to_device(uint64_t to, const void* from, int64_t bytes) = 0;
  virtual void copy_to_host(void* to, uint64_t from, int64_t bytes) = 0;
  virtual void fill(uint64_t pointer, unsigned char value, int64_t bytes) = 0;
  /// Starts a kernel after those that were started before. `buffers` are addresses in the order of its params, `error` that of the error word.
  virtual void launch(const std::string& kernel, const std::vector<uint64_t>& buffers, const std::map<std::string, int64_t>& symbols,
                      uint64_t error) = 0;
  /// Waits for everything that was started, and reports what went wrong in it.
  virtual void synchronize() = 0;
};

/// Memory of a device, freed with the object.
class DeviceMemory {
 public:
  DeviceMemory(DeviceKernels& device, int64_t bytes) : device_(device), pointer_(device.allocate(bytes)) {}
  ~DeviceMemory() { device_.free(pointer_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  uint64_t pointer() const { return pointer_; }

 private:
  DeviceKernels& device_;
  uint64_t pointer_;
};

/// What runs a program's kernels.
struct KernelCode {
  std::vector<std::shared_ptr<CompiledKernel>> functions;  ///< one entry per kernel of the module
  std::shared_ptr<DeviceKernels> device;                   ///< in place of functions: the kernels, loaded there
  std::string missing;                                     ///< what this machine lacks to run them; empty: nothing
};

/// What making machine code did.
struct CodegenStats {
  int compiled = 0;  ///< kernels for which a compiler ran
  int memory_hits = 0;
  int disk_hits = 0;   ///< with kernels that were offered
  double seconds = 0;  ///< wall time
};

}  // namespace deplo
