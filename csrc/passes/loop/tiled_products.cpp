#include "passes/loop/tiled_products.h"

#include <algorithm>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "loop_ir/rewrite.h"
#include "passes/loop/hoist_checks.h"
#include "passes/loop/split_axes.h"
#include "passes/loop/split_loops.h"
#include "target/target.h"

namespace deplo {
namespace {

constexpr double kTiledProduct = 1 << 20;  ///< multiply-adds that tiles take less time for than a kernel more does, and points by themselves more
constexpr double kRowsOfStreams = 16;      ///< up to which a CPU may well stream a matrix

bool multiplies_matrices(const loop_ir::Kernel& kernel, const PassContext& context) {
  const auto contractions = analysis::find_contractions(kernel, true);
  return std::any_of(contractions.begin(), contractions.end(), [&](const analysis::Contraction& c) {
    double work = 1;
    double rows = 1;
    double columns = 1;
    for (const auto& axis : c.axes) {
      const double extent = std::max(1.0, analysis::estimate(axis.extent, context.hints, kernel.symbols));
      work *= extent;
      if (axis.kind == analysis::AxisClass::m) rows *= extent;
      if (axis.kind == analysis::AxisClass::n) columns *= extent;
    }
    return work >= kTiledProduct && std::min(rows, columns) > (target_of(context).has_grid ? 1 : kRowsOfStreams);
  });
}

}  // namespace

MultipliedResults find_multiplied(const loop_ir::Module& module, const std::set<std::string>& written, const PassContext& context) {
  MultipliedResults found;
  if (written.empty()) return found;
  // As localize and the passes behind it will leave them.
  loop_ir::Module hoisted = split_loops(split_axes(module, context), context);
  for (auto& kernel : hoisted.kernels) {
    auto changed = std::make_shared<loop_ir::Kernel>(*kernel);
    const loop_ir::Nest nest = loop_ir::peel(changed->body);
    Ranges ranges = hoisted.symbols;
    for (const loop_ir::Axis& axis : nest.axes) ranges[axis.name] = axis_range(axis.extent);
    changed->body = loop_ir::make_nest(nest.axes, loop_ir::hoist_invariants(nest.body, ranges));
    kernel = std::move(changed);
  }
  const loop_ir::Module split = hoist_checks(std::move(hoisted), context);
  for (const Step& step : split.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call) continue;
    const loop_ir::Kernel& kernel = *split.find_kernel(call->kernel);
    std::set<std::string> results;
    for (size_t k = 0; k < call->arguments.size(); ++k)
      if (kernel.params[k].kind != loop_ir::ParamKind::in && written.count(call->arguments[k]) > 0) results.insert(call->arguments[k]);
    if (results.empty() || !multiplies_matrices(kernel, context)) continue;
    (target_of(context).multiplies(kernel, context) ? found.in_tiles : found.by_points).merge(results);
  }
  return found;
}

}  // namespace deplo
