#include "bindings/python_lock.h"

#include <immintrin.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "runtime/turns.h"

namespace deplo::bindings {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kPatience = std::chrono::microseconds(1000);
constexpr auto kLongPatience = std::chrono::milliseconds(10);  // two of the intervals after which Python's own lock changes hands
constexpr auto kSurelyFree = std::chrono::microseconds(3);

/// The thread that has Python's lock; null: none. Newer versions tell only whether this one does.
constexpr bool kTellsHolder = PY_VERSION_HEX < 0x030C0000;
PyThreadState* thread_in_python() {
#if PY_VERSION_HEX < 0x030C0000
  return _PyThreadState_UncheckedGet();
#else
  return nullptr;
#endif
}

class Queue {
 public:
  void leave(uint32_t self) {
    if (!holder_.compare_exchange_strong(self, 0) || parked_.load() == 0) return;
    {
      std::lock_guard lock(mutex_);
    }
    left_.notify_one();
  }

  void enter(uint32_t self, PyThreadState* state) {
    if (!take(self) && !spin(self)) park(self);
    state_.store(state, std::memory_order_relaxed);
  }

 private:
  bool take(uint32_t self) {
    uint32_t nobody = 0;
    return holder_.compare_exchange_strong(nobody, self) || nobody == self;
  }

  bool spin(uint32_t self) {
    const auto end = Clock::now() + kSpin;
    auto free_since = Clock::time_point::max();
    for (auto now = Clock::now(); now < end; now = Clock::now()) {
      if (holder_.load(std::memory_order_relaxed) == 0 && take(self)) return true;
      free_since = kTellsHolder && !thread_in_python() ? std::min(free_since, now) : Clock::time_point::max();
      if (free_since < now - kSurelyFree) {
        holder_.store(self);
        return true;
      }
      for (int i = 0; i < 4; ++i) _mm_pause();
    }
    return false;
  }

  /// Who is in Python may be there for long (Dynamo compiles), or was and waits for something else: nobody tells when he does not come to another
  /// program.
  void park(uint32_t self) {
    const auto last = Clock::now() + kLongPatience;
    std::unique_lock lock(mutex_);
    parked_.fetch_add(1);
    while (!left_.wait_for(lock, kPatience, [&] { return take(self); })) {
      const bool is_there = kTellsHolder && thread_in_python() == state_.load(std::memory_order_relaxed);
      if (is_there && Clock::now() < last) continue;
      holder_.store(self);
      break;
    }
    parked_.fetch_sub(1);
  }

  alignas(64) std::atomic<uint32_t> holder_{0};  ///< the number of the thread that is in Python, unless it went without a program
  std::atomic<PyThreadState*> state_{nullptr};   ///< that thread's, to be compared only
  std::atomic<int> parked_{0};
  std::mutex mutex_;
  std::condition_variable left_;
};

/// Never destroyed; a forked child makes its own.
std::atomic<Queue*> queue_now{nullptr};

Queue& queue() {
  Queue* found = queue_now.load(std::memory_order_acquire);
  if (found) return *found;
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, [] { queue_now.store(nullptr); }); });
  auto made = std::make_unique<Queue>();
  if (queue_now.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;
}

/// Nanoseconds of processor time of this thread: waiting does not count.
int64_t used() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

constexpr int kEvery = 16;
constexpr int64_t kLongest = 10'000'000;
constexpr int64_t kLeastOverlap = 8;  // a thread more pays from this part of the time in Python on

/// Running means; threads may overwrite each other's.
std::atomic<int64_t> in_python{0};
std::atomic<int64_t> in_program{0};

void add(std::atomic<int64_t>& mean, int64_t value) {
  const int64_t before = mean.load(std::memory_order_relaxed);
  value = std::clamp<int64_t>(value, 1, kLongest);
  mean.store(before == 0 ? value : (3 * before + value) / 4, std::memory_order_relaxed);
}

struct Countdown {
  int left = 2;
  int64_t returned = -1;
};

Countdown& countdown() {
  thread_local Countdown here;
  return here;
}

}  // namespace

PyThreadState* release_python() {
  PyThreadState* state = PyEval_SaveThread();
  queue().leave(runtime::thread_number());
  return state;
}

void take_python(PyThreadState* state) {
  queue().enter(runtime::thread_number(), state);
  PyEval_RestoreThread(state);
}

CallSample::CallSample() {
  Countdown& here = countdown();
  if (here.returned < 0) return;
  began_ = used();
  add(in_python, began_ - here.returned);
  here.returned = -1;
}

void CallSample::program_ended() {
  if (began_ < 0) return;
  add(in_program, used() - began_);
  const int64_t python = in_python.load(std::memory_order_relaxed);
  const int64_t to_spare = python - python / kLeastOverlap;
  runtime::set_useful_callers(1 + static_cast<int>((in_program.load(std::memory_order_relaxed) + to_spare) / python));
}

CallSample::~CallSample() {
  Countdown& here = countdown();
  if (--here.left > 0) return;
  here.left = kEvery;
  here.returned = used();
}

}  // namespace deplo::bindings
