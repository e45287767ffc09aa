#include "runtime/owned.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <ctime>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "runtime/hash.h"

namespace deplo::runtime {
namespace {

enum class State : uint8_t {
  ordinary,   ///< memory like any other
  comparing,  ///< read-only, while the packed copy is compared with it
  gone,       ///< may not be touched
  returning,  ///< the same, while a thread makes it again
  shown,      ///< read-only, made again from the packed copy
};

struct Region {
  char* data = nullptr;
  char* memory = nullptr;
  char* end = nullptr;  ///< of its whole pages, whose begin is the region's key
  State state = State::ordinary;
  std::shared_ptr<PackedBlock> block;
  std::shared_ptr<const Unpacking> how;
  int64_t bytes = 0;  ///< of the weight
  uint64_t sample = 0;
  uint64_t edges = 0;  ///< hash of what lies outside of the whole pages
  uint64_t writes = 0;
  uint64_t ticket = 0;  ///< of the comparison
  int returns = 0;
  int64_t returned_at = 0;  ///< nanoseconds
  int64_t left_at = 0;

  /// Whether no write to the whole pages goes unseen.
  bool is_guarded() const { return state == State::gone || state == State::returning || state == State::shown; }
  const char* packed() const { return block->pointers[how->output]; }
};

int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kQuiet = 64 * kSecond;  ///< without a reader, after which it is forgotten how often a weight was read

/// How long a weight stays that was read for the nth time: programs that are made for it read it once each.
int64_t patience(int returns) { return returns <= 4 ? 0 : kSecond << std::min(2 * (returns - 5), 6); }

/// Puts fresh pages in the place of what is there, in one step.
bool replace_pages(char* begin, const char* end, int access) {
  return mmap(begin, static_cast<size_t>(end - begin), access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}
bool take_away(char* begin, const char* end) { return replace_pages(begin, end, PROT_NONE); }
bool allow(char* begin, const char* end, int access) { return mprotect(begin, static_cast<size_t>(end - begin), access) == 0; }

/// All regions, by their first whole page. Never destroyed: weights may die during exit, after static destructors ran. The lock is one that a handler
/// of signals may take: who holds it touches no weight that is gone, so that no thread ever waits for itself.
class Registry {
 public:
  class Lock {
   public:
    explicit Lock(Registry& all) : all_(all) { all.take(); }
    ~Lock() { all_.give(); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Registry& all_;
  };

  void take() {
    while (lock_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void give() { lock_.clear(std::memory_order_release); }

  std::map<char*, Region> regions;
  std::atomic<int64_t> known{0};
  std::atomic<int64_t> shown{0};
  uint64_t tickets = 0;

  void set(Region& region, State state) {
    if (state == State::gone) region.left_at = now();
    if (region.state == State::shown) shown.fetch_sub(1);
    if (state == State::shown) shown.fetch_add(1);
    region.state = state;
  }

  std::map<char*, Region>::iterator containing(const char* address) {
    auto after = regions.upper_bound(const_cast<char*>(address));
    if (after == regions.begin()) return regions.end();
    --after;
    return address < after->second.end ? after : regions.end();
  }

  /// After a fork: threads that were at work on a region are not there.
  void in_child() {
    for (auto& [begin, region] : regions) {
      if (region.state == State::returning) set(region, State::gone);
      if (region.state == State::comparing && allow(begin, region.end, PROT_READ | PROT_WRITE)) set(region, State::ordinary);
    }
  }

 private:
  std::atomic_flag lock_ = ATOMIC_FLAG_INIT;
};

Registry& registry() {
  static Registry* instance = [] {
    auto* made = new Registry;
    pthread_atfork([] { registry().take(); }, [] { registry().give(); },
                   [] {
                     registry().in_child();
                     registry().give();
                   });
    return made;
  }();
  return *instance;
}

/// Makes a weight's pages elsewhere and puts them in their place in one step: no thread ever sees half of it.
bool bring_back(char* begin, const Region& region, int access) {
  const auto bytes = static_cast<size_t>(region.end - begin);
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return false;
  const int64_t element = region.how->element;
  region.how->read(region.packed(), (begin - region.data) / element, (region.end - region.data) / element, static_cast<char*>(made));
  if (mprotect(made, bytes, access) == 0 && mremap(made, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, begin) != MAP_FAILED) return true;
  munmap(made, bytes);
  return false;
}

/// Whether an access to this address may be tried again. Runs in a handler of signals: system calls and arithmetic only.
bool resolve(const char* address, bool writes) {
  Registry& all = registry();
  for (;;) {
    all.take();
    const auto at = all.containing(address);
    if (at == all.regions.end()) {
      all.give();
      return false;
    }
    char* begin = at->first;
    Region& region = at->second;
    if (region.state == State::returning) {
      all.give();
      sched_yield();
      continue;
    }
    bool done = true;
    if (region.state == State::gone) {
      all.set(region, State::returning);
      all.give();
      done = bring_back(begin, region, writes ? PROT_READ | PROT_WRITE : PROT_READ);
      all.take();
      const int64_t time = now();
      region.returns = time - region.left_at > kQuiet ? 1 : region.returns + 1;
      region.returned_at = time;
      all.set(region, !done ? State::gone : writes ? State::ordinary : State::shown);
      if (done && writes) ++region.writes;
    } else if (region.state != State::ordinary && writes) {
      done = allow(begin, region.end, PROT_READ | PROT_WRITE);
      if (done) all.set(region, State::ordinary);
      if (done) ++region.writes;
    }
    all.give();
    return done;
  }
}

/// Who handled faults before, the latest last. Of several, which were put on top of this handler one by one, each is asked once: it may hand what it
/// does not know back to here.
struct Formers {
  static constexpr int kMost = 8;
  std::array<struct sigaction, kMost> handlers{};
  int count = 0;
};
Formers formers;

/// The address of a weight to which each thread's latest fault led. By the thread's number: a handler of signals may not have thread_local memory
/// allocated. Threads that share a place forget each other's.
class ResolvedFaults {
 public:
  void add(const char* address) {
    Entry& entry = own_entry();
    entry.thread.store(gettid());
    entry.address.store(address);
  }
  bool is_latest(const char* address) {
    const Entry& entry = own_entry();
    return entry.thread.load() == gettid() && entry.address.load() == address;
  }

 private:
  struct Entry {
    std::atomic<pid_t> thread{0};
    std::atomic<const char*> address{nullptr};
  };
  Entry& own_entry() { return entries_[static_cast<size_t>(gettid()) % entries_.size()]; }
  std::array<Entry, 256> entries_;
};
ResolvedFaults resolved_faults;

void pass_on(int signal, siginfo_t* info, void* context) {
  static const struct sigaction nobody{};
  const struct sigaction& former = formers.count > 0 ? formers.handlers[static_cast<size_t>(formers.count - 1)] : nobody;
  if (formers.count > 1) --formers.count;
  if ((former.sa_flags & SA_SIGINFO) != 0 && former.sa_sigaction) {
    former.sa_sigaction(signal, info, context);
  } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
    former.sa_handler(signal);
  } else {
    // The access runs into the same fault again, with nobody to handle it; what was sent by kill() is sent once more.
    ::signal(SIGSEGV, SIG_DFL);
    if (info->si_code <= 0) raise(SIGSEGV);
  }
}

struct Fault {
  const char* address = nullptr;
  bool writes = true;
  bool is_nested = false;  ///< the signal came on the stack for handlers of signals
};

/// The thread's latest access to a page that refused it; the kernel tells of it with every later signal, too.
Fault latest_fault_of(const ucontext_t& context) {
  Fault fault;
  fault.is_nested = (context.uc_stack.ss_flags & SS_ONSTACK) != 0;
#ifdef __x86_64__
  constexpr int64_t kPageFault = 14;
  constexpr int64_t kWrites = 2;  // in the error code of a page fault
  if (context.uc_mcontext.gregs[REG_TRAPNO] == kPageFault) fault.address = std::bit_cast<const char*>(context.uc_mcontext.gregs[REG_CR2]);
  fault.writes = (context.uc_mcontext.gregs[REG_ERR] & kWrites) != 0;
#elif defined(__aarch64__)
  fault.address = std::bit_cast<const char*>(context.uc_mcontext.fault_address);
#endif
  return fault;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const Fault fault = latest_fault_of(*static_cast<ucontext_t*>(context));
  const char* address = nullptr;
  if (info->si_code == SEGV_ACCERR) {
    address = static_cast<const char*>(info->si_addr);
  } else if (info->si_code == SI_TKILL && info->si_pid == getpid() && (fault.is_nested || !resolved_faults.is_latest(fault.address))) {
    // A handler that was put on top of this one (Python's faulthandler) raises the signal of a fault anew, without the address. What a program
    // raises by itself comes after faults that are known here.
    address = fault.address;
  }
  const bool is_resolved = address && resolve(address, fault.writes);
  if (is_resolved) resolved_faults.add(address);
  errno = error;
  if (!is_resolved) pass_on(signal, info, context);
}

/// Sees to it that faults come here first; others go on to who handled them before. Called with the lock.
bool handle_faults() {
  struct sigaction current{};
  if (sigaction(SIGSEGV, nullptr, &current) != 0) return false;
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_fault) return true;
  if (formers.count == Formers::kMost) return false;
  struct sigaction mine{};
  mine.sa_sigaction = on_fault;
  // On the stack that the former handler has for overflows of the thread's own.
  mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&mine.sa_mask);
  formers.handlers[static_cast<size_t>(formers.count++)] = current;
  return sigaction(SIGSEGV, &mine, nullptr) == 0;
}

char* page_of(char* address, int64_t page) { return address - reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(page); }

int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

/// The region of the weight that begins here.
std::map<char*, Region>::iterator find_by_data(Registry& all, const char* data) {
  const auto at = all.regions.find(page_of(const_cast<char*>(data) + page_bytes() - 1, page_bytes()));
  return at == all.regions.end() || at->second.data == data ? at : all.regions.end();
}

struct WholePages {
  char* begin;
  char* end;
};
WholePages whole_pages(const char* data, int64_t bytes) {
  char* first = const_cast<char*>(data);
  return {page_of(first + page_bytes() - 1, page_bytes()), page_of(first + bytes, page_bytes())};
}

/// Of a weight's bytes outside of its whole pages. Called without the lock: they may be another weight's that is gone.
uint64_t hash_of_edges(const char* data, int64_t bytes) {
  const auto [begin, end] = whole_pages(data, bytes);
  Hash hash;
  hash.add(data, begin);
  hash.add(end, data + bytes);
  return hash.value();
}

/// The weight's region, made if there is none; null where it shares pages with another one.
Region* find_region(Registry& all, const Owning& weight, char* begin, char* end) {
  auto at = all.regions.find(begin);
  if (at != all.regions.end()) {
    Region& region = at->second;
    if (region.state == State::ordinary) region.bytes = weight.bytes;
    return region.data == weight.data && region.end == end && region.bytes == weight.bytes ? &region : nullptr;
  }
  const auto next = all.regions.lower_bound(begin);
  if (next != all.regions.end() && next->first < end) return nullptr;
  if (next != all.regions.begin() && std::prev(next)->second.end > begin) return nullptr;
  Region& made = all.regions[begin];
  made.data = weight.data;
  made.memory = weight.memory;
  made.end = end;
  made.bytes = weight.bytes;
  all.known.fetch_add(1);
  return &made;
}

}  // namespace

std::string own(const Owning& weight) {
  constexpr int64_t kLeast = 1 << 16;  // below, two ranges of pages more are no gain
  const auto [begin, end] = whole_pages(weight.data, weight.bytes);
  if (end - begin < kLeast || (begin - weight.data) % weight.how->element != 0) return "it is small";
  Registry& all = registry();
  std::shared_ptr<PackedBlock> unused;  // dropped without the lock
  std::shared_ptr<const Unpacking> unused_how;
  uint64_t ticket = 0;
  {
    Registry::Lock lock(all);
    if (!handle_faults()) return "the system lets nobody handle SIGSEGV";
    Region* region = find_region(all, weight, begin, end);
    if (!region) return "another weight shares a part of its memory";
    switch (region->state) {
      case State::comparing:
      case State::returning:
      case State::gone: return "";
      case State::shown:
        if (region->block == weight.block) return "";
        break;
      case State::ordinary: break;
    }
    if (!allow(begin, end, PROT_READ)) return "the system does not protect its pages";
    all.set(*region, State::comparing);
    ticket = region->ticket = ++all.tickets;
  }
  // Whoever writes meanwhile makes the region ordinary again; who writes at its edges after they were looked at is seen by the next call.
  const uint64_t edges = hash_of_edges(weight.data, weight.bytes);
  const bool gives = weight.how->gives(weight.block->pointers[weight.how->output], weight.data);
  Registry::Lock lock(all);
  const auto at = all.regions.find(begin);
  if (at == all.regions.end() || at->second.state != State::comparing || at->second.ticket != ticket) return "it was written meanwhile";
  Region& region = at->second;
  if (!gives || !take_away(begin, end)) {
    if (allow(begin, end, PROT_READ | PROT_WRITE)) all.set(region, State::ordinary);
    return gives ? "the system gives no more ranges of pages" : "its packed copy does not hold all of it";
  }
  unused = std::exchange(region.block, weight.block);
  unused_how = std::exchange(region.how, weight.how);
  region.sample = weight.sample;
  region.edges = edges;
  all.set(region, State::gone);
  return "";
}

void let_go_again(const char* data) {
  Registry& all = registry();
  Registry::Lock lock(all);
  const auto at = find_by_data(all, data);
  if (at == all.regions.end() || at->second.state != State::shown) return;
  Region& region = at->second;
  if (now() - region.returned_at < patience(region.returns) || !handle_faults()) return;
  if (take_away(at->first, region.end)) all.set(region, State::gone);
}

OwnedContent owned_content(const char* data, int64_t bytes) {
  Registry& all = registry();
  if (all.known.load(std::memory_order_relaxed) == 0) return {};
  {
    Registry::Lock lock(all);
    const auto at = find_by_data(all, data);
    if (at == all.regions.end()) return {};
    const Region& region = at->second;
    if (!region.is_guarded() || region.bytes != bytes) return {false, 0, region.writes};
  }
  const uint64_t edges = hash_of_edges(data, bytes);
  Registry::Lock lock(all);
  const auto at = find_by_data(all, data);
  if (at == all.regions.end()) return {};
  Region& region = at->second;
  const bool is_known = region.is_guarded() && region.bytes == bytes;
  if (is_known && region.edges != edges) {
    region.edges = edges;
    ++region.writes;
  }
  return {is_known, region.sample, region.writes};
}

void forget_memory(void* memory) {
  Registry& all = registry();
  std::vector<std::pair<std::shared_ptr<PackedBlock>, std::shared_ptr<const Unpacking>>> unused;  // dropped without the lock
  Registry::Lock lock(all);
  for (auto at = all.regions.lower_bound(static_cast<char*>(memory)); at != all.regions.end() && at->second.memory == memory;) {
    Region& region = at->second;
    if (region.state == State::returning) {  // for restore_weights() of another thread
      all.give();
      sched_yield();
      all.take();
      at = all.regions.lower_bound(static_cast<char*>(memory));
      continue;
    }
    constexpr int kAll = PROT_READ | PROT_WRITE;
    if (region.state != State::ordinary && !allow(at->first, region.end, kAll)) replace_pages(at->first, region.end, kAll);
    all.set(region, State::ordinary);
    unused.emplace_back(std::move(region.block), std::move(region.how));
    at = all.regions.erase(at);
    all.known.fetch_sub(1);
  }
}

void drop_unused_copies() {
  Registry& all = registry();
  if (all.known.load(std::memory_order_relaxed) == 0) return;
  std::vector<std::pair<std::shared_ptr<PackedBlock>, std::shared_ptr<const Unpacking>>> unused;
  Registry::Lock lock(all);
  for (auto& [begin, region] : all.regions) {
    const bool is_back = region.state == State::ordinary || (region.state == State::shown && region.block.use_count() == 1);
    if (!region.block || !is_back) continue;
    if (region.state == State::shown && !allow(begin, region.end, PROT_READ | PROT_WRITE)) continue;
    all.set(region, State::ordinary);
    unused.emplace_back(std::move(region.block), std::move(region.how));
  }
}

void restore_weights() {
  Registry& all = registry();
  std::vector<const char*> gone;
  {
    Registry::Lock lock(all);
    for (const auto& [begin, region] : all.regions)
      if (region.state == State::gone || region.state == State::returning) gone.push_back(begin);
  }
  for (const char* begin : gone) {
    if (resolve(begin, false)) continue;
    Registry::Lock lock(all);
    const auto at = all.containing(begin);
    if (at != all.regions.end() && at->second.state == State::gone)
      throw ExecutionError(fmt::format("out of memory: {} bytes of a weight", at->second.end - at->first));
  }
}

void read_rows(const char* data, int64_t row_bytes, const int64_t* rows, int64_t count, char* out) {
  Registry& all = registry();
  std::shared_ptr<PackedBlock> block;
  std::shared_ptr<const Unpacking> how;
  const char* begin = nullptr;
  const char* end = nullptr;
  if (all.known.load(std::memory_order_relaxed) > 0) {
    Registry::Lock lock(all);
    const auto at = find_by_data(all, data);
    if (at != all.regions.end() && (at->second.state == State::gone || at->second.state == State::returning)) {
      begin = at->first;
      end = at->second.end;
      block = at->second.block;
      how = at->second.how;
    }
  }
  for (int64_t i = 0; i < count; ++i, out += row_bytes) {
    const char* first = data + rows[i] * row_bytes;
    const char* last = first + row_bytes;
    // What lies beside the whole pages is in memory.
    const char* gone = how ? std::clamp(begin, first, last) : last;
    const char* back = how ? std::clamp(end, gone, last) : last;
    std::copy(first, gone, out);
    if (gone < back) how->read(block->pointers[how->output], (gone - data) / how->element, (back - data) / how->element, out + (gone - first));
    std::copy(back, last, out + (back - first));
  }
}

int64_t weights_shown() {
  Registry& all = registry();
  return all.known.load(std::memory_order_relaxed) == 0 ? 0 : all.shown.load(std::memory_order_relaxed);
}

int64_t owned_bytes() {
  Registry& all = registry();
  Registry::Lock lock(all);
  int64_t bytes = 0;
  for (const auto& [begin, region] : all.regions)
    if (region.state == State::gone) bytes += region.end - begin;
  return bytes;
}

}  // namespace deplo::runtime
