#pragma once

#include <optional>

#include "target/cpu/schedule/nest_converter.h"

namespace deplo::loop_to_tile {

/// Sums along contiguous memory, as a layer has them for one row: several at a time, each with vectors of its own. So many streams of memory are
/// read side by side (one alone does not keep a core's memory busy), and what they share is loaded once.
struct Streams {
  int64_t count = 1;    ///< sums at a time
  int64_t vectors = 1;  ///< in flight, of each
  bool apart = true;    ///< long streams far from one another, which hardware follows; else side by side, the next ones fetched
};

/// Straight-line statements and float32 sums over axes of the same extents, none of which reads another's result. Of several axes vectors lie along
/// the last one, whose extent is a multiple of theirs: weights that were quantised in groups. None is longer at another point of the axis.
bool can_stream(const loop_ir::Block& block, const loop_ir::Axis& axis);

/// How many sums along `axis` of a nest with this body are worth reading at a time; nothing if one by one is as good.
std::optional<Streams> propose_streams(const loop_ir::Kernel& kernel, const loop_ir::Block& block, const loop_ir::Axis& axis, const PassContext& ctx);

/// The points first, first + apart, ... of an axis, `count` of them as far as there are so many.
struct StreamedPoints {
  Expr first;
  Expr apart = 1;
  int64_t count = 1;
  bool ahead = true;  ///< those of the next block are fetched
};

/// The body for these points of the axis, under the converter's map.
tile_ir::Block stream_sums(const loop_ir::Block& block, const loop_ir::Axis& axis, const StreamedPoints& points, const PassContext& ctx,
                           NestConverter& converter, InnerLanes& lanes);

}  // namespace deplo::loop_to_tile
