#include "base/processors.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>

namespace deplo {
namespace {

struct Places {
  cpu_set_t first{};
  cpu_set_t all{};
};

/// Never destroyed: another thread may read it. Read without a lock, which a fork could leave taken.
std::atomic<const Places*> places_now{nullptr};

cpu_set_t available() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  const Places* places = places_now.load(std::memory_order_acquire);
  return places && CPU_EQUAL(&set, &places->first) ? places->all : set;
}

}  // namespace

int available_processors() {
  const cpu_set_t set = available();
  return std::max(1, CPU_COUNT(&set));
}

void use_places(const std::vector<std::vector<int>>& places) {
  static auto& kept = *new std::list<Places>;
  static std::mutex telling;
  std::lock_guard lock(telling);
  Places* told = places.empty() ? nullptr : &kept.emplace_back();
  for (const auto& place : places)
    for (int processor : place) {
      if (processor < 0 || processor >= CPU_SETSIZE) continue;
      CPU_SET(static_cast<size_t>(processor), &told->all);
      if (&place == &places.front()) CPU_SET(static_cast<size_t>(processor), &told->first);
    }
  places_now.store(told, std::memory_order_release);
}

void use_available_processors() {
  const cpu_set_t set = available();
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace deplo
