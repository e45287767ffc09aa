#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {

/// Statements that run for every point of an outer axis before those of the next phase start.
struct Phase {
  loop_ir::Block body;
  const loop_ir::For* nest = nullptr;  ///< a loop that is a phase of its own: the last statement, behind values that it needs
};

struct Phases {
  std::vector<Phase> all;
  std::vector<loop_ir::Local> locals;  ///< with one for each value that crosses from one phase to another
};

/// What another phase needs of a value: it is computed again, or kept in a local.
struct CutRules {
  std::function<bool(const loop_ir::For&)> apart;   ///< a loop is a phase of its own
  std::function<bool(const loop_ir::Stmt&)> again;  ///< a let or load is repeated
};

/// Cuts the body of a loop into phases, which may run one after the other over all its points.
Phases cut_into_phases(const loop_ir::Block& body, const CutRules& rules, loop_ir::Names& names);

/// Accesses to the locals get one more coordinate: the first one, or the last.
loop_ir::Block with_place(const loop_ir::Block& body, const std::vector<loop_ir::Local>& locals, Expr place, bool last);

/// A kernel of some statements, in which the locals are parameters of these shapes.
loop_ir::Kernel with_locals(const loop_ir::Kernel& kernel, loop_ir::Block body, const std::vector<loop_ir::Local>& locals);

}  // namespace deplo::loop_to_tile
