#include "base/memory.h"

#include <fmt/format.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
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

int64_t round_up(int64_t bytes, int64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

/// Blocks that nobody uses, neighbours joined: what one size leaves serves others.
class FreeBlocks {
 public:
  int64_t bytes() const { return bytes_; }
  bool empty() const { return by_address_.empty(); }

  void add(Block block) {
    bytes_ += block.bytes;
    auto next = by_address_.lower_bound(block.data);
    if (next != by_address_.end() && block.data + block.bytes == next->first) {
      block.bytes += next->second.bytes;
      next = forget(next);
    }
    if (next != by_address_.begin()) {
      auto last = std::prev(next);
      if (last->first + last->second.bytes == block.data) {
        block = {last->first, last->second.bytes + block.bytes};
        forget(last);
      }
    }
    insert(block, age_++);
  }

  /// The smallest that holds so many bytes, of which the rest stays here; data is null where none does.
  Block take(int64_t bytes) {
    auto found = by_size_.lower_bound({bytes, nullptr});
    if (found == by_size_.end()) return {nullptr, 0};
    const Block whole{found->second, found->first};
    auto at = by_address_.find(whole.data);
    const uint64_t age = at->second.age;
    forget(at);
    bytes_ -= bytes;
    if (whole.bytes > bytes) insert({whole.data + bytes, whole.bytes - bytes}, age);
    return {whole.data, bytes};
  }

  /// Up to so many bytes of the one that nobody has asked for the longest.
  Block take_oldest(int64_t bytes) {
    auto at = by_address_.find(by_age_.begin()->second);
    const Block whole{at->first, at->second.bytes};
    const uint64_t age = at->second.age;
    forget(at);
    char* end = whole.data + whole.bytes;
    char* cut = end - std::min(whole.bytes, bytes);
    cut = std::max(whole.data, cut - reinterpret_cast<uintptr_t>(cut) % kHugePage);
    bytes_ -= end - cut;
    if (cut > whole.data) insert({whole.data, cut - whole.data}, age);
    return {cut, end - cut};
  }

 private:
  struct Free {
    int64_t bytes;
    uint64_t age;
  };
  using ByAddress = std::map<char*, Free>;

  void insert(Block block, uint64_t age) {
    by_address_.emplace(block.data, Free{block.bytes, age});
    by_size_.emplace(block.bytes, block.data);
    by_age_.emplace(age, block.data);
  }

  ByAddress::iterator forget(ByAddress::iterator at) {
    by_size_.erase({at->second.bytes, at->first});
    by_age_.erase(at->second.age);
    return by_address_.erase(at);
  }

  ByAddress by_address_;
  std::set<std::pair<int64_t, char*>> by_size_;
  std::map<uint64_t, char*> by_age_;
  uint64_t age_ = 0;
  int64_t bytes_ = 0;
};

class Pool {
 public:
  Block take(int64_t bytes) {
    bytes = round_up(bytes, kPage);
    {
      std::lock_guard lock(mutex_);
      const Block block = free_.take(bytes);
      if (block.data) {
        use(bytes);
        return block;
      }
    }
    // Whole huge pages, also for little: what is cut from them, and joined again, serves large blocks.
    const int64_t mapped = round_up(bytes, kHugePage);
    void* data = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      trim();
      data = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (data == MAP_FAILED) throw ExecutionError(fmt::format("out of memory: a program asked the system for {} bytes at once", mapped));
    }
    madvise(data, static_cast<size_t>(mapped), MADV_HUGEPAGE);  // a hint: failure costs only speed
    const Block block{static_cast<char*>(data), bytes};
    std::lock_guard lock(mutex_);
    use(bytes);
    if (mapped > bytes) free_.add({block.data + bytes, mapped - bytes});
    return block;
  }

  void give(Block block) {
    std::vector<Block> gone;
    {
      std::lock_guard lock(mutex_);
      used_bytes_ -= block.bytes;
      recent_peak_ = std::max(used_bytes_, recent_peak_ - block.bytes / kPeakMemory);
      free_.add(block);
      const int64_t recent = recent_peak_ + recent_peak_ / kSlack;
      const int64_t most = std::max(used_bytes_ + kFreeFloor, std::min(recent, physical_bytes() / kShareOfMachine));
      // What nobody has asked for the longest goes first: programs that are gone leave sizes that no other one has.
      while (used_bytes_ + free_.bytes() > most && !free_.empty()) gone.push_back(free_.take_oldest(used_bytes_ + free_.bytes() - most));
    }
    unmap(gone);
  }

  void trim() {
    std::vector<Block> gone;
    {
      std::lock_guard lock(mutex_);
      while (!free_.empty()) gone.push_back(free_.take_oldest(free_.bytes()));
    }
    unmap(gone);
  }

  MemoryStats stats() {
    std::lock_guard lock(mutex_);
    return {used_bytes_, free_.bytes()};
  }

  // Held across a fork, so that the child never inherits the lock in the hands of a thread that it does not have.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  void use(int64_t bytes) {
    used_bytes_ += bytes;
    recent_peak_ = std::max(recent_peak_, used_bytes_);
  }

  static void unmap(const std::vector<Block>& blocks) {
    for (const Block& block : blocks) munmap(block.data, static_cast<size_t>(block.bytes));
  }

  std::mutex mutex_;
  FreeBlocks free_;
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
