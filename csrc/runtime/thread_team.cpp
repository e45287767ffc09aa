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
    for (int t = 0; t < threads; ++t) {
      shares_[static_cast<size_t>(t)].next.store(parts * t / threads, std::memory_order_relaxed);
      shares_[static_cast<size_t>(t)].end = parts * (t + 1) / threads;
    }
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

  void work(int self) {
    for (int k = 0; k < threads_; ++k) {
      Share& share = shares_[static_cast<size_t>((self + k) % threads_)];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        int64_t part = share.next.fetch_add(1, std::memory_order_relaxed);
        if (part >= share.end) break;
        fn_(context_, part, self);
      }
    }
  }

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

TeamLease::TeamLease(int threads) {
  threads = std::clamp(threads, 1, kMaxThreads);
  if (threads == 1) return;
  Team& shared = team();
  if (!shared.try_borrow(threads)) return;
  team_ = &shared;
  threads_ = std::min(threads, shared.size());
}

TeamLease::~TeamLease() {
  if (team_) static_cast<Team*>(team_)->give_back();
}

void TeamLease::run(int64_t parts, PartFn fn, void* context) {
  if (threads_ == 1 || parts <= 1) {
    for (int64_t part = 0; part < parts; ++part) fn(context, part, 0);
    return;
  }
  static_cast<Team*>(team_)->run(parts, static_cast<int>(std::min<int64_t>(threads_, parts)), fn, context);
}

}  // namespace deplo::runtime
