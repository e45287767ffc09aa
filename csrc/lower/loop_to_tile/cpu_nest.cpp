#include "lower/loop_to_tile/cpu_nest.h"

#include <algorithm>
#include <map>

#include "analysis/cost.h"
#include "base/error.h"
#include "lower/loop_to_tile/nest_converter.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using tile_ir::LoopKind;

constexpr int64_t kChunkOperations = 32768;  // work that pays for waking a thread
constexpr int64_t kLaneBlock = 4096;         // points of a long vector axis that one parallel iteration takes
constexpr int64_t kColumnBlock = 64;         // columns that one parallel iteration reduces side by side

class NestScheduler {
 public:
  NestScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), nest_(outer_nest(kernel)), converter_(kernel, ctx) {}

  tile_ir::Kernel run() {
    tile_ir::Kernel out;
    out.name = kernel_.name;
    out.params = kernel_.params;
    out.symbols = kernel_.symbols;
    out.provenance = kernel_.provenance;
    const auto& colliding = converter_.colliding();
    std::vector<loop_ir::Axis> free;
    std::vector<loop_ir::Axis> ordered;  // serial, inside the parallel ones
    for (const auto& a : nest_.axes) (colliding.empty() || separates(a.name, colliding) ? free : ordered).push_back(a);
    if (ordered.empty()) converter_.merge(free);
    bool straight = NestConverter::is_straight(*nest_.inner);
    std::string lanes = straight || columns() ? converter_.best_lane_axis(free) : "";
    if (straight && lanes.empty() && !free.empty() && ordered.empty()) lanes = free.back().name;
    out.body = nest(free, ordered, lanes, straight);
    out.chunks = chunks();
    out.schedule = describe(free, ordered, lanes);
    return out;
  }

 private:
  /// Reductions whose memory runs along an outer axis: that axis gets the lanes and each lane reduces its own column.
  bool columns() const {
    double outer = 0;
    double inner = 0;
    for (const auto& stmt : *nest_.inner)
      if (std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Scan>(stmt->node) ||
          std::holds_alternative<loop_ir::Local>(stmt->node))
        return false;
    for (const auto& a : nest_.axes) outer = std::max(outer, converter_.lane_score(a));
    visit_all(*nest_.inner, [&](const loop_ir::Stmt& stmt) {
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node))
        for (const auto& a : reduce->axes) inner = std::max(inner, converter_.lane_score(a));
    });
    return outer > inner;
  }

  // ---- building --------------------------------------------------------------------------------------------------

  tile_ir::Block nest(std::vector<loop_ir::Axis> free, const std::vector<loop_ir::Axis>& ordered, const std::string& lanes, bool straight) {
    auto at = std::find_if(free.begin(), free.end(), [&](const auto& a) { return a.name == lanes; });
    bool has_lanes = at != free.end();
    loop_ir::Axis lane_axis;
    if (has_lanes) {
      lane_axis = *at;
      free.erase(at);
    }
    // A long vector axis is cut into blocks, which join the parallel axes.
    int64_t block = straight ? kLaneBlock : kColumnBlock;
    bool cut = has_lanes && ordered.empty() && converter_.hint(lane_axis.extent) > block;
    if (cut) free.push_back({lane_axis.name + "_block", ceildiv(lane_axis.extent, block)});
    Substitution outer;
    if (free.size() == 1)
      outer[free[0].name] = sym("par");
    else
      outer = unflatten(free, sym("par"));
    Substitution& map = converter_.map();
    for (auto& [name, value] : map) value = substitute(value, outer);
    for (const auto& [name, value] : outer) map.emplace(name, value);

    tile_ir::Block body = converter_.convert(*nest_.inner, !has_lanes);
    if (has_lanes) {
      Expr lo = cut ? outer.at(lane_axis.name + "_block") * block : Expr(0);
      Expr hi = cut ? min(lane_axis.extent, lo + block) : lane_axis.extent;
      body = {make(tile_ir::For{axis(lane_axis.name, lo, hi, LoopKind::lanes), std::move(body)})};
    }
    for (size_t i = ordered.size(); i-- > 0;) body = {make(tile_ir::For{axis(ordered[i].name, 0, ordered[i].extent), std::move(body)})};
    parallel_extent_ = count(free);
    return {make(tile_ir::For{axis("par", 0, parallel_extent_, LoopKind::parallel), std::move(body)})};
  }

  /// From shapes alone: as many pieces as there is work for, at most one per parallel iteration.
  Expr chunks() const {
    Expr work = analysis::cost_of(kernel_).operations + count(nest_.axes);
    // Loops whose length varies with an outer axis (the last piece of a split reduction) count by their longest run.
    std::set<std::string> axes;
    Ranges ranges = kernel_.symbols;
    visit_all(kernel_.body, [&](const loop_ir::Stmt& stmt) {
      if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) {
        axes.insert(loop->axis);
        ranges[loop->axis] = axis_range(loop->extent);
      }
    });
    work = upper_bound(simplify(work, ranges), axes, ranges).value_or(count(nest_.axes));
    for (const std::string& name : symbols_of(work))
      if (!kernel_.symbols.count(name)) work = count(nest_.axes);
    return max(1, min(parallel_extent_, ceildiv(work, kChunkOperations)));
  }

  static std::string describe(const std::vector<loop_ir::Axis>& free, const std::vector<loop_ir::Axis>& ordered, const std::string& lanes) {
    std::string text;
    auto add = [&](const std::string& word) { text += (text.empty() ? "" : "; ") + word; };
    for (const auto& a : free)
      if (a.name != lanes) add("parallel " + a.name);
    for (const auto& a : ordered) add("serial " + a.name);
    if (!lanes.empty()) add("vectorize " + lanes);
    return text;
  }

  const loop_ir::Kernel& kernel_;
  OuterNest nest_;
  NestConverter converter_;
  Expr parallel_extent_ = 1;
};

}  // namespace

tile_ir::Kernel schedule_cpu_nest(const loop_ir::Kernel& kernel, const PassContext& ctx) { return NestScheduler(kernel, ctx).run(); }

}  // namespace deplo
