#pragma once

#include <map>
#include <optional>

#include "target/cpu/schedule/nest_converter.h"

namespace deplo::loop_to_tile {

/// Reductions over a few neighbours of each point, as depthwise convolutions, pooling layers and stencils have them. Several points of an axis lie
/// side by side in registers: what their windows share is loaded once, and every tap is a statement of its own. Where guards keep windows inside of
/// an image, its interior, which needs none, is apart from the borders.
struct Windows {
  std::string axis;       ///< whose points lie side by side
  int64_t points = 1;     ///< of it
  int64_t tile = 0;       ///< points that one parallel iteration takes; 0: all
  std::string lanes;      ///< another axis
  int64_t vectors = 1;    ///< in flight
  int64_t lane_tile = 0;  ///< lanes that one parallel iteration takes; 0: all
};

/// Straight-line statements and reductions of such over few points each, by sum, min or max, none of which reads another's result.
bool has_windows(const loop_ir::Block& block);

/// Windows of a nest over these axes, whose merged ones `converter` maps; nothing if neighbours share no memory, or would not lie in vectors.
std::optional<Windows> propose_windows(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const loop_ir::Kernel& kernel,
                                       const NestConverter& converter, const PassContext& ctx);

/// Whether the lanes may be cut into tiles: no guard asks where they are.
bool can_cut_lanes(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const std::string& lanes, const loop_ir::Kernel& kernel,
                   const NestConverter& converter);

struct Span {
  Expr from, to;
};

/// The body for `points` of the axis and `across` of the lanes, under the converter's map of all axes but these two.
tile_ir::Block run_windows(const loop_ir::Block& block, const std::vector<loop_ir::Axis>& axes, const Windows& windows, const Span& points,
                           const Span& across, const loop_ir::Kernel& kernel, const PassContext& ctx, NestConverter& converter, InnerLanes& lanes);

}  // namespace deplo::loop_to_tile
