#include "lower/loop_to_tile/convert.h"

#include <algorithm>

namespace deplo::loop_to_tile {

std::vector<Expr> substituted(std::vector<Expr> exprs, const Substitution& map) {
  for (Expr& e : exprs) e = substitute(e, map);
  return exprs;
}

std::vector<Cond> substituted(std::vector<Cond> conds, const Substitution& map) {
  for (Cond& c : conds) c = substitute(c, map);
  return conds;
}

loop_ir::Let substituted(loop_ir::Let s, const Substitution& map) {
  s.index = substitute(s.index, map);
  return s;
}

loop_ir::Load substituted(loop_ir::Load s, const Substitution& map) {
  s.index = substituted(std::move(s.index), map);
  s.guard = substituted(std::move(s.guard), map);
  return s;
}

loop_ir::Store substituted(loop_ir::Store s, const Substitution& map) {
  s.index = substituted(std::move(s.index), map);
  s.guard = substituted(std::move(s.guard), map);
  return s;
}

loop_ir::Check substituted(loop_ir::Check s, const Substitution& map) {
  s.cond = substitute(s.cond, map);
  return s;
}

Expr count(const std::vector<loop_ir::Axis>& axes) {
  Expr n = 1;
  for (const auto& a : axes) n = n * a.extent;
  return n;
}

Substitution unflatten(const std::vector<loop_ir::Axis>& axes, Expr linear) {
  Substitution map;
  Expr rest = linear;
  for (size_t i = axes.size(); i-- > 0;) {
    const Expr extent = axes[i].extent.is(0) ? Expr(1) : axes[i].extent;  // nothing runs
    map[axes[i].name] = i == 0 ? rest : mod(rest, extent);
    if (i > 0) rest = floordiv(rest, extent);
  }
  return map;
}

OuterNest outer_nest(const loop_ir::Kernel& kernel) {
  OuterNest nest;
  nest.inner = &kernel.body;
  while (nest.inner->size() == 1) {
    const auto* loop = std::get_if<loop_ir::For>(&nest.inner->front()->node);
    if (!loop) break;
    nest.axes.push_back({loop->axis, loop->extent});
    nest.inner = &loop->body;
  }
  return nest;
}

std::vector<const loop_ir::Store*> colliding_stores(const loop_ir::Kernel& kernel) {
  std::set<std::string> values;
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) values.insert(load->name);
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) values.insert(let->name);
  });
  std::vector<const loop_ir::Store*> stores;
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    const auto* store = std::get_if<loop_ir::Store>(&stmt.node);
    if (!store) return;
    bool collides = store->combiner != Combiner::set;
    for (Expr e : store->index)
      for (const std::string& s : symbols_of(e)) collides = collides || values.count(s) > 0;
    if (collides) stores.push_back(store);
  });
  return stores;
}

bool separates(const std::string& axis, const std::vector<const loop_ir::Store*>& stores) {
  return std::all_of(stores.begin(), stores.end(), [&](const loop_ir::Store* store) {
    return std::any_of(store->index.begin(), store->index.end(), [&](Expr e) { return uses(e, axis) && (e - sym(axis)).is_constant(); });
  });
}

}  // namespace deplo::loop_to_tile
