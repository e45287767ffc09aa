#include "lower/loop_to_tile/masked_keys.h"

#include <algorithm>
#include <set>
#include <string>

#include "analysis/weighted_sum.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

using loop_ir::Block;
using loop_ir::Stmt;

bool has_masked_keys(const loop_ir::Kernel& kernel) {
  const auto sum = analysis::find_weighted_sum(kernel, *outer_nest(kernel).inner);
  return sum && !analysis::key_limits(*sum).empty();
}

loop_ir::Kernel without_masked_keys(const loop_ir::Kernel& kernel) {
  const OuterNest nest = outer_nest(kernel);
  const auto sum = analysis::find_weighted_sum(kernel, *nest.inner);
  if (!sum) return kernel;
  const Expr all = sum->key.extent;
  Expr lo = 0;
  Expr hi = all;
  for (const analysis::KeyLimit& l : analysis::key_limits(*sum)) {
    // A start that moves with the axes would change how accesses lie along them.
    const bool moves = std::any_of(nest.axes.begin(), nest.axes.end(), [&](const auto& a) { return uses(l.limit, a.name); });
    if (l.above)
      hi = min(hi, min(l.limit, all - 1) + 1);  // a loaded position may be the largest integer
    else if (!moves)
      lo = max(lo, l.limit);
  }
  if (hi == all && lo.is(0)) return kernel;
  // One key is left of a row that is masked as a whole, which then is what it was, NaN mostly; and loops that are sure to run share what they read.
  lo = max(min(lo, all - 1), 0);
  Expr extent = max(hi - lo, 1);
  if (!provably_nonnegative(all - 1, kernel.symbols)) extent = min(extent, all);
  std::set<std::string> locals;
  for (const auto& stmt : *nest.inner)
    if (const auto* local = std::get_if<loop_ir::Local>(&stmt->node)) locals.insert(local->name);
  // What is kept for each key begins with the first one that counts: no place is a loaded value.
  auto shifted = [&](const Block& body, const std::string& axis) {
    if (lo.is(0)) return body;
    return loop_ir::rewrite(loop_ir::copy_block(body, {{{axis, Expr::symbol(axis) + lo}}, {}, {}}, nullptr), [&](const Ref<Stmt>& stmt) -> Block {
      auto placed = [&](auto access) -> Block {
        access.index = {Expr::symbol(axis)};
        return {loop_ir::make_stmt(std::move(access))};
      };
      if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node); load && locals.count(load->buffer) > 0) return placed(*load);
      if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node); store && locals.count(store->buffer) > 0) return placed(*store);
      return {stmt};
    });
  };
  loop_ir::Kernel out = kernel;
  Block inner = loop_ir::rewrite(*nest.inner, [&](const Ref<Stmt>& stmt) -> Block {
    if (std::find(sum->over_keys.begin(), sum->over_keys.end(), stmt.get()) == sum->over_keys.end()) return {stmt};
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt->node)) return {loop_ir::make_for({loop->axis, extent}, shifted(loop->body, loop->axis))};
    auto reduce = std::get<loop_ir::Reduce>(stmt->node);
    reduce.axes[0].extent = extent;
    reduce.body = shifted(reduce.body, reduce.axes[0].name);
    return {loop_ir::make_stmt(std::move(reduce))};
  });
  out.body = loop_ir::make_nest(nest.axes, std::move(inner));
  return out;
}

}  // namespace deplo::loop_to_tile
