#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"
#include "tile_ir/ir.h"

namespace deplo::loop_to_tile {

// Steps that the schedulers of all targets share.

template <class Node>
Ref<tile_ir::Stmt> make(Node node) {
  return std::make_shared<tile_ir::Stmt>(tile_ir::Stmt{std::move(node)});
}

inline Expr sym(const std::string& name) { return Expr::symbol(name); }

inline tile_ir::Axis axis(std::string name, Expr lo, Expr hi, tile_ir::LoopKind kind = tile_ir::LoopKind::serial, int64_t step = 1, int64_t by = 1) {
  return {std::move(name), lo, hi, step, kind, by};
}

std::vector<Expr> substituted(std::vector<Expr> exprs, const Substitution& map);
std::vector<Cond> substituted(std::vector<Cond> conds, const Substitution& map);
loop_ir::Let substituted(loop_ir::Let s, const Substitution& map);
loop_ir::Load substituted(loop_ir::Load s, const Substitution& map);
loop_ir::Store substituted(loop_ir::Store s, const Substitution& map);
loop_ir::Check substituted(loop_ir::Check s, const Substitution& map);

/// The product of the extents.
Expr count(const std::vector<loop_ir::Axis>& axes);
/// Each axis as a function of the row-major linear index.
Substitution unflatten(const std::vector<loop_ir::Axis>& axes, Expr linear);

/// The outer axes of a kernel's perfect nest, and what lies inside.
struct OuterNest {
  std::vector<loop_ir::Axis> axes;
  const loop_ir::Block* inner = nullptr;
};
OuterNest outer_nest(const loop_ir::Kernel& kernel);

/// Calls f on every statement, outer before inner.
template <class F>
void visit_all(const loop_ir::Block& block, const F& f) {
  for (const auto& stmt : block) {
    f(*stmt);
    std::visit(Overloaded{[&](const loop_ir::For& s) { visit_all(s.body, f); }, [&](const loop_ir::Reduce& s) { visit_all(s.body, f); },
                          [&](const loop_ir::Scan& s) {
                            visit_all(s.body, f);
                            visit_all(s.then, f);
                          },
                          [](const auto&) {}},
               stmt->node);
  }
}

/// Stores that may meet in one place from different iterations: those that combine, or whose place is a loaded value.
std::vector<const loop_ir::Store*> colliding_stores(const loop_ir::Kernel& kernel);
/// Axes whose every value leads each colliding store to places of its own (the axis alone, shifted, is one coordinate).
bool separates(const std::string& axis, const std::vector<const loop_ir::Store*>& stores);

}  // namespace deplo::loop_to_tile
