#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

namespace deplo::runtime {

/// How many programs of this process run at once, and with how many threads each. As many are let in as there are processors; the others park, in
/// the order in which they came. Whoever leaves wakes the first of them, and hands it the place outright once it has waited for a millisecond:
/// before, the thread that leaves may be back first, which saves a switch between threads for each short call.
/// A program that waits for one that waits for it is let in after kPatience, so that nothing can deadlock.
class Admission {
 public:
  /// That of the process; a forked child has its own.
  static Admission& of_process();

  /// `processors`: 0 for those that affinity and cgroup allow.
  explicit Admission(int processors = 0) : fixed_(processors) {}

  /// Counts a program in; with `parks` after waiting for a processor.
  void enter(bool parks);
  void leave();
  /// Threads of those asked for that fall to one program: all if none other ran of late, else its part of the processors.
  int share(int threads) const {
    int others = peak_.load(std::memory_order_relaxed);
    if (others <= 1) return threads;
    int part = processors_.load(std::memory_order_relaxed) / others;
    return part < 1 ? 1 : part < threads ? part : threads;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Waiter {
    std::condition_variable wake;
    Clock::time_point since;
    bool called = false;   ///< may try
    bool granted = false;  ///< has the place
  };
  void count(Clock::time_point now);

  const int fixed_;
  std::mutex mutex_;
  int running_ = 0;
  std::deque<Waiter*> waiting_;
  Clock::time_point peak_time_;
  Clock::time_point counted_;  ///< when processors were
  std::atomic<int> peak_{0};   ///< most programs at once of late
  std::atomic<int> processors_{0};
};

}  // namespace deplo::runtime
