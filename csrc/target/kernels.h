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

/// A launch of a kernel, but for the addresses of its buffers.
struct DeviceStep {
  std::string kernel;
  std::vector<size_t> buffers;  ///< in the order of its params: places in the table of addresses that start() is given
  uint64_t error = 0;           ///< address of the error word
};

/// Launches of a program at one tuple of sizes, made ready once. Any thread may call.
class DeviceLaunches {
 public:
  virtual ~DeviceLaunches() = default;
  /// Memory of the device that start() wants for blocks of threads; launches of one stream may share it.
  virtual int64_t scratch_bytes() const = 0;
  /// Starts launches first..last-1 in order on a stream (that of its driver's interface). `addresses` is the table of the steps' buffers.
  virtual void start(size_t first, size_t last, char* const* addresses, uint64_t scratch, void* stream) = 0;
};

/// Memory that kernels write and the host reads without a copy, freed with the object.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  char* data = nullptr;  ///< as the host addresses it; zero at first
  uint64_t address = 0;  ///< as kernels do
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

  // For programs whose tensors are on the device, which order their work by streams. A device that has no such tensors has none of these.

  /// `replay`: what start() is to launch again and again may be recorded, and then launched by one call of the driver.
  virtual std::unique_ptr<DeviceLaunches> prepare(const std::vector<DeviceStep>& steps, const std::map<std::string, int64_t>& symbols, bool replay);
  virtual std::unique_ptr<SharedMemory> share(int64_t bytes);
  /// Whether the host may wait for what was started: not while the stream records it for later.
  virtual bool may_wait(void* /*stream*/) { return true; }
  /// Starts a copy of a few bytes in the stream's order; they are read before it returns.
  virtual void copy_on_stream(uint64_t to, const void* from, int64_t bytes, void* stream);
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
