#include "target/cpu/schedule/columns.h"

#include <algorithm>
#include <utility>

#include "lower/loop_to_tile/phases.h"

namespace deplo::loop_to_tile {
namespace {

using loop_ir::Axis;
using tile_ir::LoopKind;
using tile_ir::Space;

constexpr int64_t kStackBytes = 16 << 10;

bool straight_or_reduces(const Ref<loop_ir::Stmt>& stmt) {
  if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node))
    return NestConverter::is_straight(scan->body) && NestConverter::is_straight(scan->then);
  const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
  return NestConverter::is_straight(reduce ? reduce->body : loop_ir::Block{stmt});
}

bool all_straight_or_reduce(const loop_ir::Block& body) { return std::all_of(body.begin(), body.end(), straight_or_reduces); }

bool has_reduction(const loop_ir::Block& body) {
  return std::any_of(body.begin(), body.end(), [](const auto& stmt) {
    return std::holds_alternative<loop_ir::Reduce>(stmt->node) || std::holds_alternative<loop_ir::Scan>(stmt->node);
  });
}

bool has_loop(const loop_ir::Block& body) {
  return std::any_of(body.begin(), body.end(), [](const auto& stmt) { return std::holds_alternative<loop_ir::For>(stmt->node); });
}

/// What is as cheap as reading it from an array.
bool is_cheap(const loop_ir::Stmt& stmt, const std::set<std::string>& inputs) {
  const auto* let = std::get_if<loop_ir::Let>(&stmt.node);
  const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
  return (let && (let->fn == Fn::constant || let->fn == Fn::index)) || (load && inputs.count(load->buffer));
}

}  // namespace

bool runs_in_columns(const loop_ir::Block& body) {
  return std::all_of(body.begin(), body.end(), [](const auto& stmt) {
    if (std::holds_alternative<loop_ir::Local>(stmt->node)) return true;
    if (!std::holds_alternative<loop_ir::For>(stmt->node)) return straight_or_reduces(stmt);
    const loop_ir::Block inside = loop_ir::peel({stmt}).body;
    return all_straight_or_reduce(inside) || runs_in_columns(inside);
  });
}

double access_cost(const loop_ir::Block& body, const std::string& axis, const NestConverter& converter, const PassContext& ctx) {
  const int64_t lanes_of_vector = ctx.target.vector_bytes / 4;
  const auto vector = static_cast<double>(lanes_of_vector);
  auto cost = [&](const loop_ir::Block& statements, const std::string& lanes) {
    double sum = 0;
    loop_ir::visit(statements, [&](const loop_ir::Stmt& stmt, const std::vector<Axis>& loops) {
      const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
      const auto* store = std::get_if<loop_ir::Store>(&stmt.node);
      if (!load && !store) return;
      double points = 1;
      for (const Axis& a : loops) points *= static_cast<double>(std::max<int64_t>(1, converter.hint(a.extent)));
      const Expr offset = converter.merged_offset(load ? load->buffer : store->buffer, load ? load->index : store->index);
      auto step = linear_coefficient(offset, lanes);
      const bool inside = !axis.empty() || std::any_of(loops.begin(), loops.end(), [&](const Axis& a) { return a.name == lanes; });
      sum += points * (inside && step && (step->is(0) || step->is(1)) ? 1 / vector : 1);
    });
    return sum;
  };
  if (!axis.empty()) return cost(body, axis);
  double total = 0;
  for (const auto& stmt : body) {
    std::vector<Axis> axes;
    if (std::holds_alternative<loop_ir::For>(stmt->node)) axes = loop_ir::peel({stmt}).axes;
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node)) axes = reduce->axes;
    if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt->node)) axes = {scan->axis};
    double best = cost({stmt}, "");
    for (const Axis& a : axes) best = std::min(best, cost({stmt}, a.name));
    if (std::holds_alternative<loop_ir::For>(stmt->node)) {
      // Loops inside that stand beside other statements have lanes of their own.
      const loop_ir::Nest nest = loop_ir::peel({stmt});
      double points = 1;
      for (const Axis& a : nest.axes) points *= static_cast<double>(std::max<int64_t>(1, converter.hint(a.extent)));
      if (has_loop(nest.body)) best = std::min(best, points * access_cost(nest.body, "", converter, ctx));
    }
    total += best;
  }
  return total;
}

double bytes_of_column(const loop_ir::Block& body, const NestConverter& converter) {
  double bytes = 0;
  visit_all(body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* local = std::get_if<loop_ir::Local>(&stmt.node))
      bytes += static_cast<double>(converter.hint(product(local->shape))) * static_cast<double>(size_of(local->dtype));
  });
  return bytes;
}

tile_ir::Block run_columns(const loop_ir::Kernel& kernel, const loop_ir::Block& body, const Columns& columns, const Substitution& map,
                           const PassContext& ctx, InnerLanes& lanes) {
  std::set<std::string> inputs;
  for (const auto& p : kernel.params)
    if (p.kind == loop_ir::ParamKind::in) inputs.insert(p.name);
  CutRules rules;
  rules.apart = [](const loop_ir::For&) { return true; };
  rules.again = [&](const loop_ir::Stmt& stmt) { return is_cheap(stmt, inputs); };
  loop_ir::Names names;
  names.reserve(kernel);
  Phases phases = cut_into_phases(body, rules, names);
  for (Phase& phase : phases.all) phase.body = with_place(phase.body, phases.locals, sym(columns.axis.name) - columns.first, true);
  tile_ir::Block out;
  for (auto& l : phases.locals) {
    l.shape.emplace_back(columns.capacity);
    const std::vector<Expr> shape = substituted(l.shape, map);
    const Expr n = product(shape);
    const bool small = n.is_constant() && n.value() * size_of(l.dtype) <= kStackBytes;
    out.push_back(make(tile_ir::Alloc{l.name, l.dtype, shape, small ? Space::stack : Space::scratch}));
  }
  for (const Phase& phase : phases.all) {
    loop_ir::Block inside = phase.body;
    std::vector<Axis> axes;
    if (phase.nest) {
      loop_ir::Nest nest = loop_ir::peel({phase.body.back()});
      axes = nest.axes;
      inside.pop_back();
      inside.insert(inside.end(), nest.body.begin(), nest.body.end());
    }
    loop_ir::Kernel part = with_locals(kernel, std::move(inside), phases.locals);
    tile_ir::Block block;
    if (has_loop(part.body)) {
      block = run_columns(part, part.body, columns, map, ctx, lanes);
    } else {
      NestConverter converter(part, ctx);
      converter.map() = map;
      block = converter.convert(part.body, false, lanes);
      const int64_t by = has_reduction(part.body) ? columns.vectors : 1;
      block = {make(tile_ir::For{axis(columns.axis.name, columns.first, columns.end, LoopKind::lanes, 1, by), std::move(block)})};
    }
    for (size_t i = axes.size(); i-- > 0;) block = {make(tile_ir::For{axis(axes[i].name, 0, substitute(axes[i].extent, map)), std::move(block)})};
    out.insert(out.end(), block.begin(), block.end());
  }
  return out;
}

}  // namespace deplo::loop_to_tile
