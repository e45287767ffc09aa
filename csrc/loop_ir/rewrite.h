#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// Rebuilds a block bottom-up through f, which maps a statement to the statements that take its place. A statement whose parts
/// did not change reaches f as it was.
Block rewrite(const Block& block, const std::function<Block(const Ref<Stmt>&)>& f);

/// What replaces what in a copy of a block: axes and i64 values inside expressions, values as operands, buffers.
struct Renaming {
  Substitution exprs;
  std::map<std::string, std::string> values;
  std::map<std::string, std::string> buffers;

  void value(const std::string& from, const std::string& to) {
    values[from] = to;
    exprs[from] = Expr::symbol(to);
  }
};

/// A copy with the renaming applied; every name that the block defines (values, axes, locals) is replaced by a fresh one, unless
/// `names` is null or the renaming says what it becomes.
Block copy_block(const Block& block, Renaming renaming, Names* names);

/// Calls f(stmt, loops) for every statement, outer before inner; `loops` are the axes around it, reduce and scan axes included.
using Visit = std::function<void(const Stmt& stmt, const std::vector<Axis>& loops)>;
void visit(const Block& block, const Visit& f);
size_t count_statements(const Block& block);  ///< those inside of others too

/// The perfect nest at the top of a body: its axes, and what the innermost one holds.
struct Nest {
  std::vector<Axis> axes;
  Block body;
};
Nest peel(const Block& block);

/// Leaves out choices of which nobody sees the other side: all that read one choose by the same truth afterwards. `results`: values of the block that
/// others read.
Block settle_choices(const Block& block, const std::set<std::string>& results);

/// Simplifies expressions and guards by the ranges of axes and symbols, shares equal values and loads, and drops what nothing uses.
/// Afterwards no guard is decided by the ranges and no value is computed twice where one scope sees both.
Block clean(const Block& block, const Ranges& symbols);

/// Moves values that do not depend on a loop out of it. Names must be unique in the kernel.
Block hoist_invariants(const Block& block, const Ranges& symbols);

}  // namespace deplo::loop_ir
