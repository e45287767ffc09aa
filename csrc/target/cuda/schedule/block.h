#pragma once

#include <string>

#include "lower/loop_to_tile/convert.h"
#include "schedule/reader.h"
#include "tile_ir/ir.h"

namespace deplo::loop_to_tile {

// What schedules of GPU blocks share.

constexpr int64_t kGpuThreads = 256;
constexpr int64_t kMostGpuThreads = 1024;
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

}  // namespace deplo::loop_to_tile
