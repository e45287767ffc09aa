#include "runtime/admission.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

namespace deplo::runtime {
namespace {

constexpr auto kLate = std::chrono::milliseconds(10);  ///< how long programs at once are remembered
constexpr auto kFair = std::chrono::milliseconds(1);   ///< after which a place is handed over
constexpr auto kPatience = std::chrono::milliseconds(50);
constexpr auto kRecount = std::chrono::seconds(1);

/// Processors that the cgroup's quota comes to, or many.
int quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string most;
  int64_t period = 0;
  if (!(file >> most >> period) || most == "max" || period <= 0) return 1 << 20;
  return static_cast<int>(std::max<int64_t>(1, (std::stoll(most) + period - 1) / period));
}

int usable_processors() {
  static const int most = quota();
  cpu_set_t set;
  CPU_ZERO(&set);
  bool known = sched_getaffinity(0, sizeof set, &set) == 0;
  int count = known ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(count, 1, most);
}

std::atomic<Admission*> current{nullptr};

}  // namespace

/// Never destroyed: threads may hold a place until the process ends.
Admission& Admission::of_process() {
  Admission* found = current.load(std::memory_order_acquire);
  if (found) return *found;
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); }); });
  auto made = std::make_unique<Admission>();
  if (current.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;
}

void Admission::count(Clock::time_point now) {
  int peak = peak_.load(std::memory_order_relaxed);
  int wanted = running_ + static_cast<int>(waiting_.size());
  if (wanted >= peak || now - peak_time_ > kLate) {
    peak_.store(wanted, std::memory_order_relaxed);
    peak_time_ = now;
  }
}

void Admission::enter(bool parks) {
  const auto now = Clock::now();
  std::unique_lock lock(mutex_);
  if (processors_.load(std::memory_order_relaxed) == 0 || now - counted_ > kRecount) {
    processors_.store(fixed_ > 0 ? fixed_ : usable_processors(), std::memory_order_relaxed);
    counted_ = now;
  }
  const int processors = processors_.load(std::memory_order_relaxed);
  if (parks && running_ >= processors) {
    Waiter self;
    self.since = now;
    waiting_.push_back(&self);
    count(now);
    while (!self.granted) {
      bool timely = self.wake.wait_until(lock, now + kPatience, [&] { return self.called || self.granted; });
      if (self.granted) return;  // whoever left did not give the place up
      if (!timely || running_ < processors) break;
      self.called = false;  // somebody was faster
    }
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &self));
  }
  ++running_;
  count(now);
}

void Admission::leave() {
  std::unique_lock lock(mutex_);
  if (!waiting_.empty() && running_ <= processors_.load(std::memory_order_relaxed)) {
    Waiter& first = *waiting_.front();
    if (!first.called && Clock::now() - first.since > kFair) {
      first.granted = true;
      waiting_.pop_front();
      first.wake.notify_one();
      return;
    }
    if (!first.called) {
      first.called = true;
      first.wake.notify_one();
    }
  }
  --running_;
}

}  // namespace deplo::runtime
