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

/// One byte of shared memory. Epochs are the barriers that its thread had passed, times what it had told others by flags.
struct Cell {
  unsigned writer = kNobody, write_epoch = 0, write_time = 0;
  unsigned reader = kNobody, read_epoch = 0, read_time = 0;
  bool more_readers = false;
  bool under_way = false;  ///< a copy to it has not been waited for
};

/// Who read 16 bytes for a product; kNobody: is still reading.
struct ChunkRead {
  unsigned thread, epoch, time;
};

/// What threads had done when they arrived at a flag, by thread: up to now, and when it was last raised.
struct FlagClock {
  std::vector<unsigned> arriving, raised;
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
  std::vector<unsigned> times;              ///< of each thread
  std::vector<std::vector<unsigned>> seen;  ///< by thread: those of others that it knows of
  std::map<const void*, FlagClock> flags;
  std::unordered_map<uintptr_t, std::vector<ChunkRead>> chunks;
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

void join(std::vector<unsigned>& into, const std::vector<unsigned>& from) {
  into.resize(std::max(into.size(), from.size()));
  for (size_t k = 0; k < from.size(); ++k) into[k] = std::max(into[k], from[k]);
}

/// Whether what a thread did in an epoch at a time comes before what another one does now.
bool is_before(unsigned other, unsigned epoch, unsigned time, unsigned thread) {
  if (time == kNobody) return false;
  if (other == thread || epoch < watch.epochs[thread]) return true;
  const std::vector<unsigned>& seen = watch.seen[thread];
  return other < seen.size() && seen[other] >= time;
}

void check_read(const Cell& cell, unsigned thread, unsigned epoch, bool by_warp = false) {
  if (cell.under_way) {
    ++watch.counts.races;
    found("shared memory is read before a copy to it was waited for", thread, cell.writer);
  }
  if (cell.writer == kNobody) {
    ++watch.counts.unwritten;
    found("shared memory that nobody wrote is read", thread, kNobody);
  } else if ((by_warp && cell.writer == thread && cell.write_epoch == epoch) || !is_before(cell.writer, cell.write_epoch, cell.write_time, thread)) {
    ++watch.counts.races;
    found("shared memory is written and read without a barrier between", thread, cell.writer);
  }
}

void read(Cell& cell, unsigned thread, unsigned epoch, bool by_warp = false) {
  check_read(cell, thread, epoch, by_warp);
  if (cell.reader == kNobody || cell.read_epoch != epoch) {
    cell.reader = thread;
    cell.read_epoch = epoch;
    cell.read_time = watch.times[thread];
    cell.more_readers = false;
  } else if (cell.reader != thread) {
    cell.more_readers = true;
  }
  cell.more_readers = cell.more_readers || by_warp;
}

void write(Cell& cell, unsigned thread, unsigned epoch) {
  const bool written = cell.writer != kNobody && !is_before(cell.writer, cell.write_epoch, cell.write_time, thread);
  const bool was_read =
      cell.reader != kNobody && cell.read_epoch == epoch && (cell.more_readers || !is_before(cell.reader, cell.read_epoch, cell.read_time, thread));
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
  cell.write_time = watch.times[thread];
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
  watch.times.assign(threads, 1);
  watch.seen.resize(threads);
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
  std::fill(watch.times.begin(), watch.times.end(), 1);
  for (auto& seen : watch.seen) seen.clear();
  watch.flags.clear();
  watch.chunks.clear();
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
    cell->write_time = watch.times[watch.thread];
  }
}

void read_row(const void* row, const void* text) {
  if (!watch.on) return;
  bool shared = false;
  const Cells cells = cells_at(reinterpret_cast<uintptr_t>(row), kWidest, &shared);
  for (Cell* cell = cells.first; cell != cells.last; ++cell) read(*cell, watch.thread, watch.epochs[watch.thread], true);
  ask(reinterpret_cast<uintptr_t>(row), kWidest, shared, text);
}

void copy_tile(const void* tile, std::size_t bytes) {
  if (!watch.on) return;
  bool shared = false;
  const auto start = reinterpret_cast<uintptr_t>(tile);
  const Cells cells = cells_at(start, bytes, &shared);
  if (!shared || static_cast<uintptr_t>(cells.last - cells.first) != bytes || start % (kWidest * 64) != 0) {
    ++watch.counts.races;
    found("a tile does not go to shared memory at a multiple of 1024 bytes", watch.thread, kNobody);
    return;
  }
  for (Cell* cell = cells.first; cell != cells.last; ++cell) {
    write(*cell, watch.thread, watch.epochs[watch.thread]);
    cell->under_way = true;
  }
  for (uintptr_t at = start; at < start + bytes; at += kWidest) {
    auto read = watch.chunks.find(at);
    if (read == watch.chunks.end()) continue;
    for (const ChunkRead& r : read->second) {
      if (is_before(r.thread, r.epoch, r.time, watch.thread)) continue;
      ++watch.counts.races;
      found("a tile is written while a product may read it", watch.thread, r.thread);
    }
    watch.chunks.erase(read);
  }
}

void line_copied(const void* from, std::size_t bytes) {
  if (!watch.judged) return;
  const auto start = reinterpret_cast<uintptr_t>(from);
  watch.counts.global_bytes += bytes;
  watch.counts.global_sectors += (start + bytes + kSector - 1) / kSector - start / kSector;
  ++watch.counts.global_requests;
}

void tile_copied(const void* tile, std::size_t bytes, unsigned by, const void* flag) {
  if (!watch.judged) return;
  bool shared = false;
  const Cells cells = cells_at(reinterpret_cast<uintptr_t>(tile), bytes, &shared);
  for (Cell* cell = cells.first; cell != cells.last; ++cell) cell->under_way = false;
  std::vector<unsigned>& clock = watch.flags[flag].arriving;
  clock.resize(std::max<size_t>(clock.size(), by + 1));
  clock[by] = std::max(clock[by], watch.times[by]);
}

void read_chunk(const void* chunk) {
  if (!watch.on) return;
  const auto at = reinterpret_cast<uintptr_t>(chunk);
  bool shared = false;
  const Cells cells = cells_at(at, kWidest, &shared);
  for (const Cell* cell = cells.first; cell != cells.last; ++cell) check_read(*cell, watch.thread, watch.epochs[watch.thread]);
  watch.chunks[at].push_back({watch.thread, watch.epochs[watch.thread], kNobody});
}

void chunk_was_read(const void* chunk) {
  if (!watch.on) return;
  auto reads = watch.chunks.find(reinterpret_cast<uintptr_t>(chunk));
  if (reads == watch.chunks.end()) return;
  for (ChunkRead& r : reads->second)
    if (r.thread == watch.thread && r.time == kNobody) r = {watch.thread, watch.epochs[watch.thread], watch.times[watch.thread]};
}

void arrive(const void* flag, unsigned number) {
  if (!watch.judged) return;
  std::vector<unsigned>& clock = watch.flags[flag].arriving;
  join(clock, watch.seen[number]);
  clock.resize(std::max<size_t>(clock.size(), number + 1));
  clock[number] = std::max(clock[number], watch.times[number]++);
}

void raise(const void* flag) {
  if (watch.judged) watch.flags[flag].raised = watch.flags[flag].arriving;
}

void pass(const void* flag, unsigned number) {
  if (watch.judged) join(watch.seen[number], watch.flags[flag].raised);
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
