#include "lower/loop_to_tile/forward_taps.h"

#include <algorithm>

#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {
namespace {

using namespace loop_ir;

/// The step of an index along an axis where that is a known number, else 0.
int64_t step_of(Expr index, const std::string& axis) {
  const auto step = linear_coefficient(index, axis);
  return step && step->is_constant() ? step->value() : 0;
}

/// Whether in indices of the body the axis steps against those around the reduction, and with them in none.
bool runs_backward(const Axis& tap, const Block& body, const std::vector<Axis>& around) {
  bool backward = false;
  bool forward = false;
  visit(body, [&](const Stmt& stmt, const auto&) {
    const auto* load = std::get_if<Load>(&stmt.node);
    if (!load) return;
    for (const Expr& index : load->index) {
      const int64_t along = step_of(index, tap.name);
      if (along == 0) continue;
      for (const Axis& axis : around) {
        const int64_t step = step_of(index, axis.name);
        backward = backward || (step != 0 && (step < 0) != (along < 0));
        forward = forward || (step != 0 && (step < 0) == (along < 0));
      }
    }
  });
  return backward && !forward;
}

}  // namespace

Kernel with_forward_taps(const Kernel& kernel) {
  const Nest nest = peel(kernel.body);
  Kernel out = kernel;
  out.body = rewrite(kernel.body, [&](const Ref<Stmt>& stmt) -> Block {
    const auto* reduce = std::get_if<Reduce>(&stmt->node);
    if (!reduce || reduce->combiner != Combiner::sum) return {stmt};
    Renaming turned;
    for (const Axis& axis : reduce->axes)
      if (axis.extent.is_constant() && runs_backward(axis, reduce->body, nest.axes))
        turned.exprs[axis.name] = axis.extent - 1 - Expr::symbol(axis.name);
    if (turned.exprs.empty()) return {stmt};
    Reduce copy = *reduce;
    copy.body = copy_block(reduce->body, turned, nullptr);
    return {make_stmt(std::move(copy))};
  });
  return out;
}

}  // namespace deplo::loop_to_tile
