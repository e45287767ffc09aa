#include "runtime/memory_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace deplo::runtime {
namespace {

struct Placed {
  int64_t offset;
  int64_t end;
  int first;
  int last;
};

/// The offset of the tightest gap between the blocks alive during [first, last] that holds `bytes`, else after all of them.
int64_t best_gap(const std::vector<Placed>& by_offset, const Lifetime& lifetime, int64_t bytes) {
  int64_t best = -1;
  int64_t best_size = std::numeric_limits<int64_t>::max();
  int64_t free_from = 0;
  for (const Placed& block : by_offset) {
    if (block.last < lifetime.first || lifetime.last < block.first) continue;
    int64_t gap = block.offset - free_from;
    if (gap >= bytes && gap < best_size) {
      best = free_from;
      best_size = gap;
    }
    free_from = std::max(free_from, block.end);
  }
  return best >= 0 ? best : free_from;
}

}  // namespace

MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes, int64_t alignment) {
  std::vector<size_t> order(lifetimes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lifetimes[a].bytes > lifetimes[b].bytes; });
  MemoryPlan plan;
  plan.offsets.resize(lifetimes.size(), 0);
  std::vector<Placed> by_offset;
  for (size_t index : order) {
    const Lifetime& lifetime = lifetimes[index];
    int64_t bytes = round_up(lifetime.bytes, alignment);
    if (bytes == 0) continue;
    int64_t offset = best_gap(by_offset, lifetime, bytes);
    Placed placed{offset, offset + bytes, lifetime.first, lifetime.last};
    auto at = std::upper_bound(by_offset.begin(), by_offset.end(), placed, [](const Placed& a, const Placed& b) { return a.offset < b.offset; });
    by_offset.insert(at, placed);
    plan.offsets[index] = offset;
    plan.bytes = std::max(plan.bytes, offset + bytes);
  }
  return plan;
}

int64_t peak_bytes(const std::vector<Lifetime>& lifetimes, int64_t alignment) {
  std::map<int, int64_t> change;
  for (const Lifetime& lifetime : lifetimes) {
    change[lifetime.first] += round_up(lifetime.bytes, alignment);
    change[lifetime.last + 1] -= round_up(lifetime.bytes, alignment);
  }
  int64_t alive = 0;
  int64_t peak = 0;
  for (const auto& [step, bytes] : change) peak = std::max(peak, alive += bytes);
  return peak;
}

}  // namespace deplo::runtime
