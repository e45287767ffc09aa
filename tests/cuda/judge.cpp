#include "judge.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "emulator.h"

extern "C" {
// The section of `__shared__` arrays of the text that this is linked with; absent if it has none.
extern char __start_deplo_shared_arrays[] __attribute__((weak, visibility("hidden")));
extern char __stop_deplo_shared_arrays[] __attribute__((weak, visibility("hidden")));
}

namespace deplo_judge {
namespace {

constexpr unsigned kWarp = 32;
constexpr uintptr_t kSector = 32, kBank = 4, kBanks = 32, kWidest = 16;
constexpr unsigned kNobody = ~0u;

/// One byte of shared memory. Epochs are the barriers that its thread had passed.
struct Cell {
  unsigned writer = kNobody, write_epoch = 0;
  unsigned reader = kNobody, read_epoch = 0;
  bool more_readers = false;
  bool under_way = false;  ///< a copy to it has not been waited for
};

struct Access {
  uintptr_t address;
  uintptr_t bytes;
};

struct Watch {
  bool judged = false;
  bool on = false;  ///< a thread runs
  unsigned thread = 0;
  uintptr_t stack = 0, stack_end = 0;
  uintptr_t dynamic_bytes = 0;
  std::vector<Cell> cells[2];  ///< of arrays, and of dynamic memory
  std::vector<unsigned> epochs;
  std::vector<std::unordered_map<uintptr_t, unsigned>> turns;                                      ///< of each thread at each access of the text
  std::map<std::tuple<uintptr_t, unsigned, unsigned, unsigned>, std::vector<Access>> requests[2];  ///< of warps: global, shared
  Counts counts;
  std::string first;
} watch;

void found(const char* what, unsigned thread, unsigned other) {
  if (!watch.first.empty()) return;
  watch.first = std::string(what) + " by thread " + std::to_string(thread);
  if (other != kNobody) watch.first += " and thread " + std::to_string(other);
}

void read(Cell& cell, unsigned thread, unsigned epoch, bool by_warp = false) {
  if (cell.under_way) {
    ++watch.counts.races;
    found("shared memory is read before a copy to it was waited for", thread, cell.writer);
  }
  if (cell.writer == kNobody) {
    ++watch.counts.unwritten;
    found("shared memory that nobody wrote is read", thread, kNobody);
  } else if ((by_warp || cell.writer != thread) && cell.write_epoch == epoch) {
    ++watch.counts.races;
    found("shared memory is written and read without a barrier between", thread, cell.writer);
  }
  if (cell.reader == kNobody || cell.read_epoch != epoch) {
    cell.reader = thread;
    cell.read_epoch = epoch;
    cell.more_readers = false;
  } else if (cell.reader != thread) {
    cell.more_readers = true;
  }
  cell.more_readers = cell.more_readers || by_warp;
}

void write(Cell& cell, unsigned thread, unsigned epoch) {
  const bool written = cell.writer != kNobody && cell.writer != thread && cell.write_epoch == epoch;
  const bool was_read = cell.reader != kNobody && cell.read_epoch == epoch && (cell.reader != thread || cell.more_readers);
  if (cell.under_way) {
    ++watch.counts.races;
    found("shared memory is written before a copy to it was waited for", thread, cell.writer);
  }
  if (written || was_read) {
    ++watch.counts.races;
    found(written ? "shared memory is written twice without a barrier between" : "shared memory is read and written without a barrier between",
          thread, written ? cell.writer : cell.reader);
  }
  cell.writer = thread;
  cell.write_epoch = epoch;
}

bool within(uintptr_t address, const void* start, uintptr_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(start);
  return address >= from && address < from + bytes;
}

/// The cells of shared memory that an access touches.
struct Cells {
  Cell* first = nullptr;
  Cell* last = nullptr;
};

Cells cells_at(uintptr_t address, uintptr_t bytes, bool* shared) {
  const uintptr_t array_bytes = __start_deplo_shared_arrays ? static_cast<uintptr_t>(__stop_deplo_shared_arrays - __start_deplo_shared_arrays) : 0;
  const bool of_array = within(address, __start_deplo_shared_arrays, array_bytes);
  const bool of_dynamic = within(address, deplo_shared, watch.dynamic_bytes);
  *shared = of_array || of_dynamic;
  if (!*shared) return {};
  std::vector<Cell>& cells = watch.cells[of_dynamic];
  const uintptr_t first = address - reinterpret_cast<uintptr_t>(of_array ? static_cast<void*>(__start_deplo_shared_arrays) : deplo_shared);
  return {cells.data() + first, cells.data() + std::min<uintptr_t>(first + bytes, cells.size())};
}

void ask(uintptr_t address, uintptr_t bytes, bool shared, const void* text) {
  const auto where = reinterpret_cast<uintptr_t>(text);
  const unsigned turn = watch.turns[watch.thread][where + shared]++;
  unsigned piece = 0;
  for (uintptr_t at = 0; at < bytes; at += kWidest)
    watch.requests[shared][{where, watch.thread / kWarp, turn, piece++}].push_back({address + at, std::min(bytes - at, kWidest)});
}

void access(const void* place, uintptr_t bytes, bool writes, const void* text) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  if (!watch.on || (address >= watch.stack && address < watch.stack_end)) return;
  for (const deplo_dim3* index : {&blockIdx, &threadIdx, &gridDim, &blockDim})
    if (within(address, index, sizeof *index)) return;
  bool shared = false;
  const Cells cells = cells_at(address, bytes, &shared);
  for (Cell* cell = cells.first; cell != cells.last; ++cell) {
    if (writes)
      write(*cell, watch.thread, watch.epochs[watch.thread]);
    else
      read(*cell, watch.thread, watch.epochs[watch.thread]);
  }
  ask(address, bytes, shared, text);
}

void count_global(const std::vector<Access>& request) {
  std::set<uintptr_t> places;
  std::set<uintptr_t> sectors;
  for (const Access& a : request) {
    if (places.insert(a.address).second) watch.counts.global_bytes += a.bytes;
    for (uintptr_t b = 0; b < a.bytes; ++b) sectors.insert((a.address + b) / kSector);
  }
  watch.counts.global_sectors += sectors.size();
  ++watch.counts.global_requests;
}

void count_shared(const std::vector<Access>& request) {
  const uintptr_t together = kBanks * kBank / std::max(request[0].bytes, kBank);
  for (size_t first = 0; first < request.size(); first += together) {
    std::map<uintptr_t, std::set<uintptr_t>> words;
    for (size_t k = first; k < std::min(request.size(), first + together); ++k)
      for (uintptr_t b = 0; b < request[k].bytes; ++b) words[(request[k].address + b) / kBank % kBanks].insert((request[k].address + b) / kBank);
    size_t ways = 1;
    for (const auto& [bank, distinct] : words) ways = std::max(ways, distinct.size());
    ++watch.counts.shared_requests;
    watch.counts.shared_ways += ways;
  }
}

}  // namespace

void start(bool judged, unsigned threads, unsigned shared_bytes) {
  watch = Watch();
  watch.judged = judged;
  watch.epochs.resize(threads);
  watch.turns.resize(threads);
  watch.dynamic_bytes = shared_bytes;
}

void start_block() {
  if (!watch.judged) return;
  const auto bytes = __start_deplo_shared_arrays ? static_cast<size_t>(__stop_deplo_shared_arrays - __start_deplo_shared_arrays) : 0;
  watch.cells[0].assign(bytes, {});
  watch.cells[1].assign(watch.dynamic_bytes, {});
  std::fill(watch.epochs.begin(), watch.epochs.end(), 0);
  for (auto& turns : watch.turns) turns.clear();
}

void set_thread(unsigned number, const void* stack, std::size_t bytes) {
  watch.on = watch.judged && stack != nullptr;
  watch.thread = number;
  watch.stack = reinterpret_cast<uintptr_t>(stack);
  watch.stack_end = watch.stack + bytes;
}

void copy(const void* to, const void* from, std::size_t bytes, const void* text) {
  if (!watch.on) return;
  bool shared = false;
  const Cells cells = cells_at(reinterpret_cast<uintptr_t>(to), kWidest, &shared);
  if (!shared || static_cast<uintptr_t>(cells.last - cells.first) != kWidest) {
    ++watch.counts.races;
    found("a copy does not go to shared memory", watch.thread, kNobody);
    return;
  }
  for (Cell* cell = cells.first; cell != cells.last; ++cell) {
    write(*cell, watch.thread, watch.epochs[watch.thread]);
    cell->under_way = true;
  }
  ask(reinterpret_cast<uintptr_t>(to), kWidest, true, text);
  if (bytes) ask(reinterpret_cast<uintptr_t>(from), bytes, false, text);
}

void copied(const void* to) {
  if (!watch.on) return;
  bool shared = false;
  const Cells cells = cells_at(reinterpret_cast<uintptr_t>(to), kWidest, &shared);
  for (Cell* cell = cells.first; cell != cells.last; ++cell) {
    cell->under_way = false;
    cell->writer = watch.thread;
    cell->write_epoch = watch.epochs[watch.thread];
  }
}

void read_row(const void* row, const void* text) {
  if (!watch.on) return;
  bool shared = false;
  const Cells cells = cells_at(reinterpret_cast<uintptr_t>(row), kWidest, &shared);
  for (Cell* cell = cells.first; cell != cells.last; ++cell) read(*cell, watch.thread, watch.epochs[watch.thread], true);
  ask(reinterpret_cast<uintptr_t>(row), kWidest, shared, text);
}

void pass_barrier(unsigned number) { ++watch.epochs[number]; }

void end_block() {
  for (const auto& [key, request] : watch.requests[0]) count_global(request);
  for (const auto& [key, request] : watch.requests[1]) count_shared(request);
  for (auto& requests : watch.requests) requests.clear();
}

Counts end(std::string& first) {
  watch.on = false;
  first = watch.first;
  return watch.counts;
}

}  // namespace deplo_judge

// What the compiler calls before each access.
#define DEPLO_ACCESS(size)                                                                                                   \
  extern "C" void __asan_load##size##_noabort(void* p) { deplo_judge::access(p, size, false, __builtin_return_address(0)); } \
  extern "C" void __asan_store##size##_noabort(void* p) { deplo_judge::access(p, size, true, __builtin_return_address(0)); }
DEPLO_ACCESS(1)
DEPLO_ACCESS(2)
DEPLO_ACCESS(4)
DEPLO_ACCESS(8)
DEPLO_ACCESS(16)
extern "C" void __asan_loadN_noabort(void* p, size_t size) { deplo_judge::access(p, size, false, __builtin_return_address(0)); }
extern "C" void __asan_storeN_noabort(void* p, size_t size) { deplo_judge::access(p, size, true, __builtin_return_address(0)); }
extern "C" void __asan_handle_no_return() {}
