#pragma once

#include <cstdint>

namespace deplo {

/// A block from the process-wide pool: aligned to a page, uninitialised. Returned to the pool, not to the system, when it
/// dies: first touch of fresh pages costs more than most kernels. Blocks lie in huge pages, which they share.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes);  ///< 0 bytes: null. Throws ExecutionError where the system has no more
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct MemoryStats {
  int64_t used_bytes = 0;  ///< held by living blocks
  int64_t free_bytes = 0;  ///< kept for reuse
};
MemoryStats memory_stats();
/// Gives what is kept for reuse back to the system.
void trim_memory();
/// Has trim_memory() call `forget`, which lets go of other things that are kept for reuse; for the rest of the process. It is called under no lock.
void at_trim(void (*forget)());

}  // namespace deplo
