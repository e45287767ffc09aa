#include "base/memory.h"

#include <fmt/format.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"

namespace deplo {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
/// So much free memory is kept at least; beyond it, as much as was in use at once of late, up to a share of the machine's. That is forgotten
/// while kPeakMemory times as much is given back: a training step gives its thousand blocks back and takes them again.
constexpr int64_t kFreeFloor = 256 << 20;
constexpr int64_t kShareOfMachine = 8;
constexpr int64_t kPeakMemory = 64;
/// The peak fades with the very block that made it, which is to stay: a result that is dropped before the next call takes as much again.
constexpr int64_t kSlack = 16;

int64_t physical_bytes() {
  static const int64_t bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return bytes;
}

struct Block {
  char* data;
  int64_t bytes;
};

class Pool {
 public:
  Block take(int64_t bytes) {
    bytes = (bytes + kPage - 1) / kPage * kPage;
    if (bytes >= kHugePage) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    {
      std::lock_guard lock(mutex_);
      auto at = free_.lower_bound(bytes);
      if (at != free_.end() && at->first <= bytes + bytes / 4) {
        Block block = remove(at);
        use(block.bytes);
        return block;
      }
    }
    void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      trim();
      data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (data == MAP_FAILED) throw ExecutionError(fmt::format("out of memory: a program asked the system for {} bytes at once", bytes));
    }
    if (bytes >= kHugePage) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a hint: failure costs only speed
    std::lock_guard lock(mutex_);
    use(bytes);
    return {static_cast<char*>(data), bytes};
  }

  void give(Block block) {
    std::vector<Block> gone;
    {
      std::lock_guard lock(mutex_);
      used_bytes_ -= block.bytes;
      recent_peak_ = std::max(used_bytes_, recent_peak_ - block.bytes / kPeakMemory);
      free_bytes_ += block.bytes;
      by_age_.emplace(given_, free_.emplace(block.bytes, Free{block.data, given_}));
      ++given_;
      // What nobody has asked for the longest goes first: programs that are gone leave sizes that no other one has.
      const int64_t recent = recent_peak_ + recent_peak_ / kSlack;
      const int64_t most = std::max(used_bytes_ + kFreeFloor, std::min(recent, physical_bytes() / kShareOfMachine));
      while (used_bytes_ + free_bytes_ > most) gone.push_back(remove(by_age_.begin()->second));
    }
    unmap(gone);
  }

  void trim() {
    std::vector<Block> gone;
    {
      std::lock_guard lock(mutex_);
      while (!by_age_.empty()) gone.push_back(remove(by_age_.begin()->second));
    }
    unmap(gone);
  }

  MemoryStats stats() {
    std::lock_guard lock(mutex_);
    return {used_bytes_, free_bytes_};
  }

  // Held across a fork, so that the child never inherits the lock in the hands of a thread that it does not have.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  void use(int64_t bytes) {
    used_bytes_ += bytes;
    recent_peak_ = std::max(recent_peak_, used_bytes_);
  }

  struct Free {
    char* data;
    uint64_t age;  ///< blocks that were given back before it
  };
  using BySize = std::multimap<int64_t, Free>;

  Block remove(BySize::iterator at) {
    Block block{at->second.data, at->first};
    by_age_.erase(at->second.age);
    free_.erase(at);
    free_bytes_ -= block.bytes;
    return block;
  }

  static void unmap(const std::vector<Block>& blocks) {
    for (const Block& block : blocks) munmap(block.data, static_cast<size_t>(block.bytes));
  }

  std::mutex mutex_;
  BySize free_;
  std::map<uint64_t, BySize::iterator> by_age_;
  uint64_t given_ = 0;
  int64_t free_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t recent_peak_ = 0;  ///< of used_bytes_, forgotten slowly
};

/// Never destroyed: blocks may die during exit, after static destructors ran.
Pool& pool() {
  static Pool* instance = [] {
    auto* made = new Pool;
    pthread_atfork([] { pool().before_fork(); }, [] { pool().after_fork(); }, [] { pool().after_fork(); });
    return made;
  }();
  return *instance;
}

/// Never destroyed, either.
struct Forgetters {
  std::mutex mutex;
  std::vector<void (*)()> all;
};
Forgetters& forgetters() {
  static auto* instance = new Forgetters;
  return *instance;
}

}  // namespace

Memory::Memory(int64_t bytes) {
  if (bytes == 0) return;
  Block block = pool().take(bytes);
  data_ = block.data;
  bytes_ = block.bytes;
}

Memory::~Memory() {
  if (data_) pool().give({data_, bytes_});
}

void Memory::keep_tail_small(int64_t bytes) {
  const int64_t whole = bytes / kHugePage * kHugePage;
  if (bytes_ > bytes && bytes_ >= kHugePage) madvise(data_ + whole, static_cast<size_t>(bytes_ - whole), MADV_NOHUGEPAGE);
}

Memory::Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MemoryStats memory_stats() { return pool().stats(); }

void at_trim(void (*forget)()) {
  std::lock_guard lock(forgetters().mutex);
  forgetters().all.push_back(forget);
}

void trim_memory() {
  std::vector<void (*)()> all;
  {
    std::lock_guard lock(forgetters().mutex);
    all = forgetters().all;
  }
  for (auto* forget : all) forget();
  pool().trim();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace deplo
