#pragma once

#include <string>
#include <vector>

#include "lower/loop_to_tile/convert.h"
#include "schedule/reader.h"
#include "tile_ir/ir.h"

namespace deplo::loop_to_tile {

// What schedules of GPU blocks share.

constexpr int64_t kGpuThreads = 256;
constexpr int64_t kMostGpuThreads = 1024;
constexpr int64_t kWarpThreads = 32;
/// Shared memory that every GPU gives to a block without being asked for more.
constexpr int64_t kSharedBytes = 48 << 10;
/// That some GPU gives to a block which asks for it.
constexpr int64_t kMostSharedBytes = 227 << 10;

/// The number of `threads(T)`, a power of two.
inline int64_t read_threads(ScheduleReader& reader) {
  const Directive& threads = reader.one("threads");
  reader.only(threads, {""});
  int64_t n = reader.number(threads, "", 1, kMostGpuThreads);
  if ((n & (n - 1)) != 0) reader.fail(threads, "allowed: powers of two");
  return n;
}

inline tile_ir::Block gpu_grid(const std::string& block, Expr blocks, const std::string& thread, int64_t threads, tile_ir::Block body) {
  tile_ir::Block inner{make(tile_ir::For{axis(thread, 0, threads, tile_ir::LoopKind::thread_x), std::move(body)})};
  return {make(tile_ir::For{axis(block, 0, blocks, tile_ir::LoopKind::block_x), std::move(inner)})};
}

/// Loops that are a nest but for what is loaded and computed between them, as one: `body` has all that, computed anew by each element.
struct Flat {
  std::vector<loop_ir::Axis> axes;
  loop_ir::Block body;
};

inline Flat flatten(const loop_ir::For& loop) {
  Flat flat;
  const loop_ir::For* at = &loop;
  while (at) {
    flat.axes.push_back({at->axis, at->extent});
    const auto* inner = at->body.empty() ? nullptr : std::get_if<loop_ir::For>(&at->body.back()->node);
    for (const auto& stmt : at->body) {
      const bool computes = std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node);
      if (inner && !computes && stmt != at->body.back()) return {{{loop.axis, loop.extent}}, loop.body};
    }
    flat.body.insert(flat.body.end(), at->body.begin(), inner ? std::prev(at->body.end()) : at->body.end());
    at = inner;
  }
  return flat;
}

}  // namespace deplo::loop_to_tile
