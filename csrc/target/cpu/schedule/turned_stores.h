#pragma once

#include <string>
#include <vector>

#include "base/context.h"
#include "lower/loop_to_tile/convert.h"
#include "target/cpu/schedule/nest_converter.h"

namespace deplo::loop_to_tile {

/// Points of the axis along which results lie, which are computed with the lanes on another axis, kept in an array, and stored from there in squares
/// that are transposed in registers.
struct TurnedStores {
  loop_ir::Axis lanes;   ///< of what is computed
  Expr lo, hi;           ///< of the lanes
  int64_t capacity = 0;  ///< lanes of the array
  loop_ir::Axis along;   ///< of the results
  Expr first, count;     ///< points
  int64_t points = 0;    ///< of the array
  int64_t in_flight = 1;
};

/// The axis along which all results of straight-line statements lie, if none lies along `lanes`; nothing where their order matters.
const loop_ir::Axis* turned_axis(const loop_ir::Block& body, const std::vector<loop_ir::Axis>& axes, const std::string& lanes,
                                 const loop_ir::Kernel& kernel, const NestConverter& converter);

/// The loops over these points and lanes. `map` says what stands for the other axes.
tile_ir::Block turn_stores(const loop_ir::Block& body, const TurnedStores& turned, const Substitution& map, const loop_ir::Kernel& kernel,
                           const PassContext& ctx);

}  // namespace deplo::loop_to_tile
