#include "runtime/turns.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>

#include "base/processors.h"

namespace deplo::runtime {
namespace {

constexpr int64_t kTurn = 5'000'000;         // now_in_nanoseconds; what a call works with moves to another processor's cache
constexpr int64_t kAway = 300'000;           // between two calls: longer, and others may have the place
constexpr int64_t kCrowdedFor = 2'000'000;   // after another thread's call: longer than most, short for who is alone from then on
constexpr int64_t kCompanyFor = 12'000'000;  // more than twice Python's switch interval: the other may wait for its lock
constexpr std::chrono::milliseconds kPatience{20};
constexpr std::chrono::microseconds kLook{1000};
constexpr int kMostPlaces = 256;

int64_t now_in_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Turns;

/// What a thread knows of its turn.
struct Caller {
  uint32_t number = 0;
  int depth = 0;  ///< programs of this thread, one inside the other
  const Turns* turns = nullptr;
  int place = -1;
  int64_t since = 0;
};

std::atomic<uint32_t> latest_number{0};

Caller& caller() {
  thread_local Caller self{latest_number.fetch_add(1) + 1};
  return self;
}

class Turns {
 public:
  bool begin(Caller& self) {
    const int64_t now = now_in_nanoseconds();
    if (self.turns != this) self = {self.number, self.depth, this, -1, 0};
    notice(self, now);
    if (self.place >= useful()) give_up(self);
    if (self.place >= 0) {
      uint64_t mine = outside(self.number);
      if (!places_[at(self)].holder.compare_exchange_strong(mine, inside(self.number))) self.place = -1;
    }
    if (self.place >= 0) {
      if (waiting_.load() == 0 || now - self.since < kTurn) return true;
      return !hand_on(self, now);
    }
    return waiting_.load() == 0 && take(self, now);
  }

  void wait(Caller& self) {
    std::unique_lock lock(mutex_);
    Waiter waiter{self};
    auto place = queue_.insert(queue_.end(), &waiter);
    waiting_.fetch_add(1);
    auto first_at = std::chrono::steady_clock::time_point::max();
    while (!waiter.is_let_in) {
      const auto now = std::chrono::steady_clock::now();
      const bool is_first = queue_.front() == &waiter;
      if (is_first) {
        first_at = std::min(first_at, now);
        if (take(self, now_in_nanoseconds()) || now - first_at >= kPatience) break;
      }
      waiter.let_in.wait_for(lock, is_first ? std::chrono::microseconds(kLook) : std::chrono::microseconds(kPatience));
    }
    if (!waiter.is_let_in) queue_.erase(place);
    wake_first();
    waiting_.fetch_sub(1);
  }

  void end(Caller& self) {
    if (self.place < 0) return;
    const int64_t now = now_in_nanoseconds();
    if (waiting_.load() > 0 && now - self.since >= kTurn && hand_on(self, now)) return;
    Place& mine = places_[at(self)];
    mine.left.store(now, std::memory_order_relaxed);
    mine.holder.store(outside(self.number));
  }

  int callers(const Caller& self) const { return 1 + waiting_.load() + others(self, kCrowdedFor); }

  bool has_company(const Caller& self) const {
    const int64_t now = now_in_nanoseconds();
    return now - company_.load(std::memory_order_relaxed) < kCompanyFor || waiting_.load() > 0 || others(self, 0) > 0;
  }

  void set_useful(int callers) { useful_.store(std::clamp(callers, 1, most_), std::memory_order_relaxed); }
  int useful() const { return useful_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Place {
    std::atomic<uint64_t> holder{0};  ///< a thread's number and, in the last bit, whether it runs a program; 0: nobody
    std::atomic<int64_t> left{0};     ///< when it did so last, where it does not
  };
  struct Waiter {
    explicit Waiter(Caller& thread) : self(thread) {}
    Caller& self;
    bool is_let_in = false;
    std::condition_variable let_in;
  };

  static uint64_t outside(uint32_t number) { return uint64_t{number} << 1; }
  static uint64_t inside(uint32_t number) { return outside(number) | 1; }
  static size_t at(const Caller& self) { return static_cast<size_t>(self.place); }
  static bool is_away(const Place& place, uint64_t holder, int64_t now, int64_t than) {
    return (holder & 1) == 0 && now - place.left.load(std::memory_order_relaxed) >= than;
  }

  /// Other threads that run programs, or did within this time.
  int others(const Caller& self, int64_t within) const {
    const int64_t now = now_in_nanoseconds();
    int count = 0;
    for (int p = 0; p < most_; ++p) {
      const Place& place = places_[static_cast<size_t>(p)];
      const uint64_t holder = place.holder.load(std::memory_order_relaxed);
      if (holder != 0 && holder >> 1 != self.number && !is_away(place, holder, now, within)) ++count;
    }
    return count;
  }

  /// Whether there are others is what the latest calls say: a place is held between calls, and nobody tells that he went.
  void notice(const Caller& self, int64_t now) {
    const int64_t before = latest_at_.load(std::memory_order_relaxed);
    latest_at_.store(now, std::memory_order_relaxed);
    if (latest_.load(std::memory_order_relaxed) == self.number) return;
    latest_.store(self.number, std::memory_order_relaxed);
    if (now - before < kCompanyFor) company_.store(now, std::memory_order_relaxed);
  }

  bool take(Caller& self, int64_t now) {
    const int useful = this->useful();
    for (int p = 0; p < useful; ++p) {
      Place& place = places_[static_cast<size_t>(p)];
      uint64_t holder = place.holder.load();
      if (holder != 0 && !is_away(place, holder, now, kAway)) continue;
      if (!place.holder.compare_exchange_strong(holder, inside(self.number))) continue;
      self.place = p;
      self.since = now;
      return true;
    }
    return false;
  }

  /// The first of the queue looks for places; called with the lock.
  void wake_first() {
    if (!queue_.empty()) queue_.front()->let_in.notify_one();
  }

  void give_up(Caller& self) {
    uint64_t mine = outside(self.number);
    places_[at(self)].holder.compare_exchange_strong(mine, 0);
    self.place = -1;
  }

  /// The turn of a thread that is inside goes to the one that waits longest, if there is one.
  bool hand_on(Caller& self, int64_t now) {
    std::lock_guard lock(mutex_);
    if (queue_.empty()) return false;
    Waiter& next = *queue_.front();
    queue_.pop_front();
    next.self.place = self.place;
    next.self.since = now;
    next.is_let_in = true;
    places_[at(self)].holder.store(inside(next.self.number));
    self.place = -1;
    next.let_in.notify_one();
    wake_first();
    return true;
  }

  const int most_ = std::min(available_processors(), kMostPlaces);
  std::atomic<int> useful_{most_};
  std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> latest_{0};  ///< caller
  std::atomic<int64_t> latest_at_{-kCompanyFor};
  std::atomic<int64_t> company_{-kCompanyFor};  ///< when a call came from another thread than the one before
  std::array<Place, kMostPlaces> places_;
  std::mutex mutex_;
  std::list<Waiter*> queue_;  ///< the longest waiting first
};

/// Made by the first program, when the process's processors are known; never destroyed. A forked child makes its own: the other threads are not
/// there.
std::atomic<Turns*> turns_now{nullptr};

Turns& turns() {
  Turns* found = turns_now.load(std::memory_order_acquire);
  if (found) return *found;
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, [] { turns_now.store(nullptr); }); });
  auto made = std::make_unique<Turns>();
  if (turns_now.compare_exchange_strong(found, made.get())) return *made.release();
  return *found;
}

}  // namespace

bool Turn::begin() {
  Caller& self = caller();
  begun_ = true;
  if (self.depth > 0) {
    ++self.depth;
    return true;
  }
  turns_ = &turns();
  const bool has_turn = static_cast<Turns*>(turns_)->begin(self);
  self.depth = 1;
  return has_turn;
}

void Turn::wait() { static_cast<Turns*>(turns_)->wait(caller()); }

Turn::~Turn() {
  if (!begun_) return;
  Caller& self = caller();
  --self.depth;
  // In a child that was forked inside of the program, nobody holds or waits for its parent's turns.
  if (turns_ && turns_ == turns_now.load(std::memory_order_acquire)) static_cast<Turns*>(turns_)->end(self);
}

int callers() { return turns().callers(caller()); }
bool has_company() { return turns().has_company(caller()); }
void set_useful_callers(int callers) { turns().set_useful(callers); }
int useful_callers() { return turns().useful(); }
uint32_t thread_number() { return caller().number; }

}  // namespace deplo::runtime
