#include "runtime/thread_team.h"

#include <immintrin.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/processors.h"
#include "runtime/turns.h"

namespace deplo::runtime {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);

/// Spins until `done()` or for kSpin; whether it is done.
template <class F>
bool spin(const F& done) {
  for (int i = 0; i < 128; ++i) {
    if (done()) return true;
    _mm_pause();
  }
  for (auto end = Clock::now() + kSpin; Clock::now() < end;)
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      _mm_pause();
    }
  return false;
}

/// The parts that one thread takes first; `next` runs past `end` when it is exhausted.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

void share_out(Share* shares, int64_t parts, int threads) {
  for (int t = 0; t < threads; ++t) {
    shares[t].next.store(parts * t / threads, std::memory_order_relaxed);
    shares[t].end = parts * (t + 1) / threads;
  }
}

/// Takes parts, those of the thread's own share first, until none is left; whether there was one for it.
bool work_on(Share* shares, int threads, int self, PartFn fn, void* context) {
  bool any = false;
  for (int k = 0; k < threads; ++k) {
    Share& share = shares[(self + k) % threads];
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      int64_t part = share.next.fetch_add(1, std::memory_order_relaxed);
      if (part >= share.end) break;
      fn(context, part, self);
      any = true;
    }
  }
  return any;
}

class Team {
 public:
  bool try_borrow(int threads) {
    if (!borrowed_.try_lock()) return false;
    grow(threads);
    return true;
  }
  void give_back() { borrowed_.unlock(); }
  int size() const { return workers_ + 1; }

  void run(int64_t parts, int threads, PartFn fn, void* context) {
    fn_ = fn;
    context_ = context;
    threads_ = threads;
    share_out(shares_.data(), parts, threads);
    gate_.fetch_and(~kClosed, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    work(0);
    // Every part is taken. Workers that are still inside finish theirs; those that come late find the gate closed.
    gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    auto empty = [&] { return gate_.load(std::memory_order_acquire) == kClosed; };
    if (spin(empty)) return;
    for (int32_t seen = gate_.load(std::memory_order_acquire); seen != kClosed; seen = gate_.load(std::memory_order_acquire))
      gate_.wait(seen, std::memory_order_acquire);
  }

 private:
  static constexpr int32_t kClosed = 1 << 30;

  void grow(int threads) {
    // Signals belong to the threads of the host program.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    // Those of faults stay: blocked, they end the process, and weights that are gone come back by one (owned.h).
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    if (size() >= threads) return;
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; size() < threads; ++workers_) std::thread([this, index = workers_ + 1] { serve(index); }).detach();
    } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
      // The system gives no more threads: work with those that there are.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void serve(int index) {
    pthread_setname_np(pthread_self(), "deplo");
    use_available_processors();
    uint32_t seen = 0;
    for (;;) {
      auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
      if (!spin(changed)) epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      // The job's fields may be read between a successful entry and the exit only.
      if ((gate_.fetch_add(1, std::memory_order_acq_rel) & kClosed) == 0 && index < threads_) work(index);
      if (gate_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) gate_.notify_one();
    }
  }

  void work(int self) { work_on(shares_.data(), threads_, self, fn_, context_); }

  std::mutex borrowed_;
  int workers_ = 0;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int32_t> gate_{kClosed};  ///< threads inside, and whether the job is closed
  PartFn fn_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 1;
  std::array<Share, kMaxThreads> shares_;
};

std::atomic<Team*> current{nullptr};
std::atomic<HostPool> host_pool{nullptr};

int64_t nanoseconds() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

/// OpenMP's workers do not survive a fork, and whoever waits for them hangs.
void forget_host_pool() { host_pool.store(nullptr); }

/// Until when the processors are taken to be busy with others' work. A job on the host's pool ends when every thread of it has come, and one that has
/// no processor comes a time slice later, though all parts are done; on deplo's own team nobody waits for who has not begun. But that shares the
/// processors with workers of the host's that spin: one late job alone is cheaper than the pause that would avoid more of them, so that pauses grow
/// as long as jobs between them are late.
std::atomic<int64_t> contended_until{0};
std::atomic<int64_t> pause_now{0};
std::atomic<int64_t> patience_with_host{0};
std::atomic<int64_t> first_pause{0};
std::atomic<int64_t> longest_pause{0};
constexpr int64_t kCalm = 20'000'000;  // nanoseconds without a late job after which the next one is the first again

void pause_from_host(int64_t now) {
  const bool again = now - contended_until.load(std::memory_order_relaxed) < kCalm;
  const int64_t pause =
      again ? std::min(2 * pause_now.load(std::memory_order_relaxed), longest_pause.load(std::memory_order_relaxed)) : first_pause.load();
  pause_now.store(pause, std::memory_order_relaxed);
  contended_until.store(now + pause, std::memory_order_relaxed);
}

/// One job on the host's pool: whichever of its threads come take the parts.
struct HostJob {
  Share* shares;
  int threads;
  PartFn fn;
  void* context;
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> arrived{1};
  std::atomic<int64_t> all_done{0};  ///< when the last part was done

  static void enter(void* data) {
    auto& job = *static_cast<HostJob*>(data);
    // The caller's share is the first one each time: what it wrote in the kernel before is in its cache.
    const int self = std::this_thread::get_id() == job.caller ? 0 : job.arrived.fetch_add(1, std::memory_order_relaxed);
    if (self >= job.threads || !work_on(job.shares, job.threads, self, job.fn, job.context)) return;
    const int64_t now = nanoseconds();
    int64_t latest = job.all_done.load(std::memory_order_relaxed);
    while (latest < now && !job.all_done.compare_exchange_weak(latest, now, std::memory_order_relaxed)) {
    }
  }
};

void run_on_host(HostPool pool, int64_t parts, int threads, PartFn fn, void* context) {
  thread_local std::array<Share, kMaxThreads> shares;
  share_out(shares.data(), parts, threads);
  HostJob job{shares.data(), threads, fn, context};
  pool(HostJob::enter, &job, static_cast<unsigned>(threads), 0);
  const int64_t now = nanoseconds();
  const int64_t late = now - job.all_done.load(std::memory_order_relaxed);
  if (late > patience_with_host.load(std::memory_order_relaxed)) pause_from_host(now);
}

/// Never destroyed: parked workers refer to it until the process ends.
Team& team() {
  Team* found = current.load(std::memory_order_acquire);
  if (found) return *found;
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); }); });
  auto made = std::make_unique<Team>();
  if (current.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;
}

}  // namespace

void use_host_pool(HostPool pool, std::chrono::nanoseconds patience, std::chrono::nanoseconds first, std::chrono::nanoseconds longest) {
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_host_pool); });
  patience_with_host.store(patience.count());
  first_pause.store(first.count());
  longest_pause.store(longest.count());
  contended_until.store(-kCalm);
  host_pool.store(pool);
}

namespace {

/// The part of `threads` that one of several callers has; halved and halved again, so that it seldom changes: OpenMP ends threads that a job has not.
int part_of(int threads, int callers) {
  for (int count = 1; count < callers && threads > 1; count *= 2) threads /= 2;
  return threads;
}

}  // namespace

TeamLease::TeamLease(int threads) {
  threads = std::clamp(threads, 0, kMaxThreads);
  if (threads <= 1) return;
  callers_ = callers();
  threads = part_of(threads, callers_);
  if (threads == 1) return;
  // OpenMP gives every thread that asks workers of its own, and a job ends only when all of them have come.
  if (host_pool.load(std::memory_order_relaxed) && nanoseconds() >= contended_until.load(std::memory_order_relaxed)) {
    threads_ = threads;
    return;
  }
  Team& shared = team();
  if (!shared.try_borrow(threads)) return;
  team_ = &shared;
  threads_ = std::min(threads, shared.size());
}

TeamLease::~TeamLease() {
  if (team_) static_cast<Team*>(team_)->give_back();
}

void TeamLease::run(int64_t parts, PartFn fn, void* context) {
  // Somebody may have come since: as long as he is there, workers of the host's wait for a processor.
  const bool crowded = threads_ > 1 && parts > 1 && !team_ && callers() > callers_;
  if (threads_ == 1 || parts <= 1 || crowded) {
    for (int64_t part = 0; part < parts; ++part) fn(context, part, 0);
    return;
  }
  // Always with all threads: OpenMP ends those beyond the number asked for, and starts them again for the next job.
  if (!team_) return run_on_host(host_pool.load(std::memory_order_relaxed), parts, threads_, fn, context);
  static_cast<Team*>(team_)->run(parts, static_cast<int>(std::min<int64_t>(threads_, parts)), fn, context);
}

}  // namespace deplo::runtime
