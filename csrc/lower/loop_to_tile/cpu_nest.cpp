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
constexpr int64_t kColumnVectors = 2;        // of a column block: one accumulator for every so many vector registers
constexpr int64_t kTransposedBlock = 256;    // points along memory that a transposing nest reads together

class NestScheduler {
 public:
  NestScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx)
      : kernel_(kernel), ctx_(ctx), nest_(outer_nest(kernel)), converter_(kernel, ctx) {}

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
    for (const auto& a : nest_.axes) outer = std::max(outer, converter_.lane_score(a, true));
    visit_all(*nest_.inner, [&](const loop_ir::Stmt& stmt) {
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node))
        for (const auto& a : reduce->axes) inner = std::max(inner, converter_.lane_score(a, true));
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
    int64_t vector = ctx_.target.vector_bytes / 4;
    int64_t in_flight = straight ? 1 : ctx_.target.vector_registers / kColumnVectors;
    const loop_ir::Axis* along = straight && has_lanes && ordered.empty() ? converter_.transposed_axis(free, lanes) : nullptr;
    if (along && (converter_.hint(along->extent) < vector || converter_.hint(lane_axis.extent) < vector)) along = nullptr;
    loop_ir::Axis transposed;
    if (along) {
      transposed = *along;
      std::erase_if(free, [&](const auto& a) { return a.name == transposed.name; });
      free.push_back({transposed.name + "_block", ceildiv(transposed.extent, kTransposedBlock)});
    }
    int64_t block = along ? vector : straight ? kLaneBlock : vector * in_flight;
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

    auto in_lanes = [&](tile_ir::Block body) -> tile_ir::Block {
      if (!has_lanes) return body;
      Expr lo = cut ? outer.at(lane_axis.name + "_block") * block : Expr(0);
      Expr hi = cut ? min(lane_axis.extent, lo + block) : lane_axis.extent;
      return {make(tile_ir::For{axis(lane_axis.name, lo, hi, LoopKind::lanes, 1, in_flight), std::move(body)})};
    };
    tile_ir::Block body;
    if (transposed.name.empty()) {
      body = in_lanes(converter_.convert(*nest_.inner, !has_lanes));
    } else {
      Expr first = outer.at(transposed.name + "_block") * kTransposedBlock;
      body = squares(transposed, first, min(kTransposedBlock, transposed.extent - first), vector, in_lanes);
    }
    for (size_t i = ordered.size(); i-- > 0;) body = {make(tile_ir::For{axis(ordered[i].name, 0, ordered[i].extent), std::move(body)})};
    parallel_extent_ = count(free);
    return {make(tile_ir::For{axis("par", 0, parallel_extent_, LoopKind::parallel), std::move(body)})};
  }

  /// The axis along which memory runs, unrolled inside the lanes by as many points as a vector has, so that squares are transposed in
  /// registers; then what remains of it.
  template <class InLanes>
  tile_ir::Block squares(const loop_ir::Axis& along, Expr first, Expr valid, int64_t side, const InLanes& in_lanes) {
    Substitution& map = converter_.map();
    Substitution before = map;
    auto at = [&](Expr point) {
      map = before;
      for (auto& [name, value] : map) value = substitute(value, {{along.name, point}});
      map[along.name] = point;
      tile_ir::Block body = converter_.convert(*nest_.inner, false);
      map = before;
      return body;
    };
    std::string square = along.name + "_square";
    std::string inside = along.name + "_in";
    tile_ir::Block body = at(first + sym(square) * side + sym(inside));
    body = {make(tile_ir::For{axis(inside, 0, side, LoopKind::unroll), std::move(body)})};
    tile_ir::Block out{make(tile_ir::For{axis(square, 0, floordiv(valid, side)), in_lanes(std::move(body))})};
    if (along.extent.is_constant() && along.extent.value() % side == 0) return out;
    std::string rest = along.name + "_rest";
    out.push_back(make(tile_ir::For{axis(rest, floordiv(valid, side) * side, valid), in_lanes(at(first + sym(rest)))}));
    return out;
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
    work = upper_bound(simplify(widest(work, axes), ranges), axes, ranges).value_or(count(nest_.axes));
    for (const std::string& name : symbols_of(work))
      if (!kernel_.symbols.count(name)) work = count(nest_.axes);
    return max(1, min(parallel_extent_, ceildiv(work, kChunkOperations)));
  }

  /// e, a sum of products of extents, with every minimum that an axis enters replaced by its other operands.
  static Expr widest(Expr e, const std::set<std::string>& axes) {
    auto varies = [&](Expr t) { return std::any_of(axes.begin(), axes.end(), [&](const std::string& a) { return uses(t, a); }); };
    if (!varies(e)) return e;
    if (e.kind() == ExprKind::add || e.kind() == ExprKind::mul) {
      Expr result = e.kind() == ExprKind::add ? 0 : 1;
      for (const Expr& t : e.operands()) result = e.kind() == ExprKind::add ? result + widest(t, axes) : result * widest(t, axes);
      return result;
    }
    if (e.kind() != ExprKind::min) return e;
    std::optional<Expr> least;
    for (const Expr& t : e.operands())
      if (!varies(t)) least = least ? min(*least, t) : t;
    return least.value_or(e);
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
  const PassContext& ctx_;
  OuterNest nest_;
  NestConverter converter_;
  Expr parallel_extent_ = 1;
};

}  // namespace

tile_ir::Kernel schedule_cpu_nest(const loop_ir::Kernel& kernel, const PassContext& ctx) { return NestScheduler(kernel, ctx).run(); }

}  // namespace deplo
