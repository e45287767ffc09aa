#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_ir/ir.h"
#include "target/cuda/driver.h"
#include "target/cuda/kernel_cache.h"
#include "target/kernels.h"

namespace deplo {

/// Launches whose argument arrays are built once: a call writes the addresses that have changed, and launches. With `replay`, a range of launches
/// that is started a second time becomes a graph of the driver, of which a call changes what has other addresses.
class CudaLaunches final : public DeviceLaunches {
 public:
  struct Kernel {
    Ref<kernel_ir::Kernel> kernel;
    std::shared_ptr<LoadedCudaKernel> code;
    CudaLaunch launch;
    bool is_empty = false;  ///< no blocks: nothing is launched
  };

  CudaLaunches(std::shared_ptr<CudaDevice> device, bool replay);
  /// Arguments are the buffers' addresses, the sizes, that of the error word, and, if it has one, that of scratch memory, of so many bytes (0: null).
  void add(Kernel kernel, const std::vector<size_t>& buffers, const std::vector<long long>& sizes, uint64_t error, bool has_scratch,
           int64_t scratch_bytes, std::vector<CudaMap> maps);
  /// After the last add().
  void finish();

  int64_t scratch_bytes() const override { return scratch_bytes_; }
  void start(size_t first, size_t last, char* const* addresses, uint64_t scratch, void* stream) override;

 private:
  /// A value that calls write.
  struct Patch {
    size_t value;
    size_t buffer;  ///< kScratch: the scratch memory's address
  };
  struct Map {
    CudaMap map;
    size_t address = 0;  ///< the value that is the buffer's address
    size_t value = 0;    ///< its own
    unsigned long long made_of = 0;
  };
  struct Entry {
    Kernel kernel;
    size_t first_value = 0;
    size_t last_value = 0;  ///< behind which are its maps
    size_t first_argument = 0;
    size_t first_patch = 0;
    size_t last_patch = 0;
    size_t first_map = 0;
    size_t last_map = 0;
  };
  struct Recorded {
    int starts = 0;
    std::unique_ptr<CudaGraph> graph;
    std::vector<unsigned long long> addresses;  ///< that the graph has, by patch of the range
  };

  /// Writes a launch's addresses.
  void patch(const Entry& entry, char* const* addresses, uint64_t scratch);
  void remap(const Entry& entry);
  /// Launches the range as a graph. False where that is not worth it.
  bool start_recorded(size_t first, size_t last, void* stream);
  void record(size_t first, size_t last, Recorded& range);
  /// Gives the graph the addresses of the range that it does not have.
  void update(size_t first, size_t last, Recorded& range);

  std::shared_ptr<CudaDevice> device_;
  bool replay_;
  int64_t scratch_bytes_ = 0;
  std::vector<Entry> entries_;
  std::vector<unsigned long long> values_;
  std::vector<void*> arguments_;  ///< the address of each value, of a map that of the first of its values
  std::vector<Patch> patches_;
  std::vector<Map> maps_;
  std::mutex mutex_;  ///< of values_ and recorded_
  std::map<std::pair<size_t, size_t>, Recorded> recorded_;
};

}  // namespace deplo
