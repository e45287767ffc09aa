#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/context.h"
#include "tile_ir/ir.h"

namespace deplo::cpu_cost {

// A Tile kernel in numbers: how often each loop turns, what a turn computes, and which part of which buffer it touches. Sizes have values; a loop
// whose body has other bounds or guards in other turns has a few of its turns as samples.

/// What one dimension of an access does as a loop turns.
struct Move {
  double places = 1;  ///< different coordinates
  double span = 0;    ///< from the least to the greatest
};

struct Access {
  int buffer = 0;
  bool writes = false;
  std::vector<int64_t> first;             ///< coordinates where all loops begin
  std::vector<std::map<int, Move>> dims;  ///< by loop
};

struct Loop;

/// Runs once for each turn of the loop around it. Times are in multiply-adds of full vectors, of which a core starts as many in a second as its peak
/// says.
struct Body {
  double arithmetic = 0;
  double loads = 0;  ///< of vectors, from the first cache
  double stores = 0;
  double latency = 0;  ///< that turns wait for one another: sums that are too few to hide how long each takes
  double overhead = 0;
  std::vector<Access> accesses;
  std::vector<Loop> loops;
};

/// Turns of one loop, with `weight` of them alike.
struct Sample {
  double weight = 1;
  Body body;
};

struct Loop {
  int id = 0;
  double turns = 1;
  bool flat = false;  ///< its turns are one piece of code: unrolled, or a few vectors
  std::vector<Sample> samples;
};

struct BufferSize {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  ///< in elements
  int64_t bytes = 4;             ///< of an element
  bool local = false;            ///< of one thread
};

struct Tree {
  std::vector<BufferSize> buffers;
  Body body;
  std::map<int, double> turns;  ///< of each loop, in elements
  int threads = 1;              ///< that work at a time
};

/// What one of `threads` threads does, the one that has most. `ratios`: time of a dot product of pairs (`dot2`) and of bytes (`dot4`), in
/// multiply-adds.
struct Ratios {
  double dot2 = 1;
  double dot4 = 1;
};

Tree make_tree(const tile_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes, const PassContext& context, const Ratios& ratios,
               int threads);

}  // namespace deplo::cpu_cost
