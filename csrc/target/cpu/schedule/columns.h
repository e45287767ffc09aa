#pragma once

#include "target/cpu/schedule/nest_converter.h"

namespace deplo::loop_to_tile {

/// A kernel whose outer axis runs along memory while its inner loops stride, as a softmax over channels or statistics of columns have it: the lanes
/// lie on that axis, and a block of them runs each statement and each inner loop before the next. Locals and values that cross from one to another
/// are arrays over the lanes.
struct Columns {
  loop_ir::Axis axis;
  Expr first;  ///< of the block
  Expr end;
  int64_t capacity = 0;  ///< lanes of the block at most
  int64_t vectors = 1;   ///< of a reduction, in flight
};

/// Straight-line statements, reductions and scans of such, locals, and loops over all these.
bool runs_in_columns(const loop_ir::Block& body);

/// Loads and stores of one point of the outer axes, where one along the lanes counts as a part of a vector: with the lanes on `axis`, or without a
/// name on the best axis of each inner loop.
double access_cost(const loop_ir::Block& body, const std::string& axis, const NestConverter& converter, const PassContext& ctx);

/// Bytes of the arrays for one lane.
double bytes_of_column(const loop_ir::Block& body, const NestConverter& converter);

/// The body for one block, under the substitution `map` of the other axes.
tile_ir::Block run_columns(const loop_ir::Kernel& kernel, const loop_ir::Block& body, const Columns& columns, const Substitution& map,
                           const PassContext& ctx, InnerLanes& lanes);

}  // namespace deplo::loop_to_tile
