#include "target/cpu/schedule/turned_stores.h"

#include <algorithm>

#include "base/text.h"
#include "expr/node.h"
#include "loop_ir/build.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;

const loop_ir::Axis* turned_axis(const loop_ir::Block& body, const std::vector<loop_ir::Axis>& axes, const std::string& lanes,
                                 const loop_ir::Kernel& kernel, const NestConverter& converter) {
  const loop_ir::Axis* found = nullptr;
  std::set<std::string> stored;
  for (const auto& stmt : body) {
    const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
    if (!store) continue;
    const loop_ir::Param* param = kernel.find_param(store->buffer);
    if (!param || !store->guard.empty() || store->combiner != Combiner::set || !stored.insert(store->buffer).second) return nullptr;
    const Expr offset = converter.merged_offset(store->buffer, store->index);
    const auto across = linear_coefficient(offset, lanes);
    if (!across || across->is(0) || across->is(1)) return nullptr;
    const auto along = std::find_if(axes.begin(), axes.end(), [&](const loop_ir::Axis& a) {
      const auto step = linear_coefficient(offset, a.name);
      return a.name != lanes && step && step->is(1);
    });
    if (along == axes.end() || (found && found->name != along->name)) return nullptr;
    found = &*along;
  }
  const bool reads = std::any_of(body.begin(), body.end(), [&](const auto& stmt) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    return load && stored.count(load->buffer) > 0;
  });
  return reads ? nullptr : found;
}

tile_ir::Block turn_stores(const loop_ir::Block& body, const TurnedStores& turned, const Substitution& map, const loop_ir::Kernel& kernel,
                           const PassContext& ctx) {
  const int64_t side = ctx.target.vector_bytes / 4;
  loop_ir::Names names;
  names.reserve(kernel);
  const std::string point = names.fresh(turned.along.name + "_point");
  const auto with = [&](Expr lane, Expr at) {
    Substitution here = map;
    for (auto& [name, value] : here) value = substitute(value, {{turned.lanes.name, lane}, {turned.along.name, at}});
    here[turned.lanes.name] = lane;
    here[turned.along.name] = at;
    return here;
  };
  tile_ir::Block out;
  tile_ir::Block compute;
  tile_ir::Block stores;
  const Substitution computed = with(sym(turned.lanes.name), turned.first + sym(point));
  const std::string square = names.fresh(turned.lanes.name + "_square");
  const std::string inside = names.fresh(turned.lanes.name + "_in");
  const std::string rest = names.fresh(turned.lanes.name + "_rest");
  const Expr count = turned.hi - turned.lo;
  for (const auto& stmt : body) {
    const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
    if (!store) {
      std::visit(Overloaded{[](const loop_ir::For&) {}, [](const loop_ir::Reduce&) {}, [](const loop_ir::Scan&) {}, [](const loop_ir::Local&) {},
                            [&](const auto& s) { compute.push_back(make(substituted(s, computed))); }},
                 stmt->node);
      continue;
    }
    const std::string array = names.fresh(store->buffer + "_turned");
    const std::string value = names.fresh(store->value + "_" + store->buffer);
    const DType dtype = kernel.find_param(store->buffer)->dtype;
    out.push_back(make(tile_ir::Alloc{array, dtype, {turned.points, turned.capacity + side}, tile_ir::Space::scratch}));
    compute.push_back(make(loop_ir::Store{array, {sym(point), sym(turned.lanes.name) - turned.lo}, store->value, {}, Combiner::set}));
    const auto copy = [&](Expr lane) {
      const Substitution here = with(turned.lo + lane, turned.first + sym(point));
      loop_ir::Store moved = substituted(*store, here);
      moved.value = value;
      return tile_ir::Block{make(loop_ir::Load{value, dtype, array, {sym(point), lane}, {}, loop_ir::zero_of(dtype)}), make(std::move(moved))};
    };
    const auto in_lanes = [&](tile_ir::Block inner) {
      return tile_ir::Block{make(tile_ir::For{axis(point, 0, turned.count, LoopKind::lanes), std::move(inner)})};
    };
    const tile_ir::For unrolled{axis(inside, 0, side, LoopKind::unroll), copy(sym(square) * side + sym(inside))};
    stores.push_back(make(tile_ir::For{axis(square, 0, floordiv(count, side)), in_lanes({make(unrolled)})}));
    if (!simplify(mod(count, side), kernel.symbols).is(0))
      stores.push_back(make(tile_ir::For{axis(rest, floordiv(count, side) * side, count), in_lanes(copy(sym(rest)))}));
  }
  compute = {make(tile_ir::For{axis(turned.lanes.name, turned.lo, turned.hi, LoopKind::lanes, 1, turned.in_flight), std::move(compute)})};
  out.push_back(make(tile_ir::For{axis(point, 0, turned.count), std::move(compute)}));
  out.insert(out.end(), stores.begin(), stores.end());
  return out;
}

}  // namespace deplo::loop_to_tile
