#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace deplo {

struct CudaApi;

/// A grid, a block, and the bytes of dynamic shared memory of a launch.
struct CudaLaunch {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  void* stream = nullptr;  ///< a CUstream; null: the default stream
};

/// Memory as tiles of up to five dimensions are copied from it (`program_ir/tiles.h`).
struct CudaTensor {
  bool is_bf16 = true;
  std::vector<uint64_t> extents;
  std::vector<uint64_t> strides;  ///< bytes, but for the first dimension
  std::vector<unsigned> box;      ///< elements of a tile
};
using TensorMap = std::array<unsigned long long, 16>;
/// A tensor map of one of a kernel's buffers.
struct CudaMap {
  size_t buffer = 0;    ///< by the kernel's parameters
  uint64_t offset = 0;  ///< bytes from there to its first element
  CudaTensor tensor;
};

/// One GPU through the CUDA driver's C interface, in its primary context, which PyTorch shares. libcuda is opened at run time: building needs no
/// CUDA. A call that the driver refuses is an ExecutionError with the call, the driver's name of the error and its text; what is used up
/// (memory) is a UserError. Any thread may call.
class CudaDevice {
 public:
  /// Opens `library`, or else libcuda.so.1 by the loader's own search. Throws UnsupportedError that says what is missing: the library, an entry
  /// point of it, a driver, a device.
  static std::shared_ptr<CudaDevice> open(const std::string& library = "", int ordinal = 0);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const std::string& name() const { return name_; }
  const void* context() const { return context_; }
  int capability() const { return capability_; }  ///< 90 for sm_90
  /// "NVIDIA H100 (sm_90)".
  std::string description() const;
  /// Shared memory of one block, in bytes: what a kernel gets when it asks.
  int64_t shared_bytes() const { return shared_bytes_; }

  uint64_t allocate(int64_t bytes);
  void free(uint64_t pointer) noexcept;
  void copy_to_device(uint64_t to, const void* from, int64_t bytes);
  void copy_to_host(void* to, uint64_t from, int64_t bytes);
  void fill(uint64_t pointer, unsigned char value, int64_t bytes);
  /// Waits for everything that was launched, and reports what went wrong in it.
  void synchronize();

  /// A cubin, or PTX text that ends in NUL.
  void* load_module(const std::string& image);
  void unload_module(void* module) noexcept;
  void* function(void* module, const std::string& name);
  /// A map of 16-bit numbers (`tensor`'s) for copies of tiles; zeros where the address is no multiple of 16 bytes, which maps cannot say. Throws
  /// UnsupportedError where the driver has no maps.
  TensorMap encode(const CudaTensor& tensor, uint64_t address);
  /// Shared memory that the function declares itself.
  int64_t static_shared_bytes(void* function);
  /// Lets launches of the function ask for that much dynamic shared memory.
  void allow_shared_bytes(void* function, int64_t bytes);
  /// `arguments` points to the value of each parameter.
  void launch(void* function, const CudaLaunch& launch, void** arguments);
  /// The same for a caller that holds a Current.
  void launch_in_context(void* function, const CudaLaunch& launch, void** arguments);

  /// Memory of the host that kernels reach: as the host addresses it, and as they do.
  std::pair<void*, uint64_t> allocate_shared(int64_t bytes);
  void free_shared(void* pointer) noexcept;
  /// In the stream's order; what is copied is read before it returns.
  void copy_on_stream(uint64_t to, const void* from, int64_t bytes, void* stream);
  /// Whether what the stream is given is recorded, not run. For a caller that holds a Current.
  bool is_capturing(void* stream);

  /// Makes the device's context the calling thread's while it lives.
  class Current {
   public:
    explicit Current(const CudaDevice& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaApi& api_;
  };

 private:
  friend class CudaGraph;
  CudaDevice() = default;

  std::shared_ptr<const CudaApi> api_;
  int device_ = 0;
  void* context_ = nullptr;
  std::string name_;
  int capability_ = 0;
  int64_t shared_bytes_ = 0;
};

/// Launches in a row that the driver starts by one call. `arguments` are read while a call lasts. change() and launch() are for callers that hold a
/// Current; launches wait for each other, whatever their streams.
class CudaGraph {
 public:
  explicit CudaGraph(std::shared_ptr<CudaDevice> device);
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void add(void* function, const CudaLaunch& launch, void** arguments);
  /// After the last add(), before the first launch().
  void finish();
  /// Gives a launch other arguments, for what is launched from now on.
  void change(size_t node, void* function, const CudaLaunch& launch, void** arguments);
  void launch(void* stream);

 private:
  std::shared_ptr<CudaDevice> device_;
  void* graph_ = nullptr;
  void* ready_ = nullptr;  ///< a CUgraphExec
  std::vector<void*> nodes_;
};

/// Memory of a device, freed with the object.
class CudaMemory {
 public:
  CudaMemory(std::shared_ptr<CudaDevice> device, int64_t bytes) : device_(std::move(device)), pointer_(device_->allocate(bytes)) {}
  ~CudaMemory() {
    if (device_) device_->free(pointer_);
  }
  CudaMemory(CudaMemory&& other) noexcept : device_(std::move(other.device_)), pointer_(other.pointer_) {}
  CudaMemory& operator=(CudaMemory&&) = delete;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  uint64_t pointer() const { return pointer_; }

 private:
  std::shared_ptr<CudaDevice> device_;
  uint64_t pointer_ = 0;
};

}  // namespace deplo
