#pragma once

#include <cstdint>
#include <vector>

namespace deplo::runtime {

inline int64_t round_up(int64_t bytes, int64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

/// Memory that must hold from step `first` to step `last`, both included.
struct Lifetime {
  int64_t bytes = 0;
  int first = 0;
  int last = 0;
};

struct MemoryPlan {
  std::vector<int64_t> offsets;  ///< one per lifetime, multiples of the alignment
  int64_t bytes = 0;             ///< size of the arena
};

/// Places every lifetime in one arena so that no two which are alive at the same step overlap: the largest first, each
/// into the tightest gap that holds it (greedy by size; Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
/// Net Inference", 2020). Distinct buffers get distinct cache lines if alignment is at least one.
MemoryPlan plan_memory(const std::vector<Lifetime>& lifetimes, int64_t alignment);

/// The most bytes alive at one step: no plan can be smaller.
int64_t peak_bytes(const std::vector<Lifetime>& lifetimes, int64_t alignment);

}  // namespace deplo::runtime
