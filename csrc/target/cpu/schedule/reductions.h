#pragma once

#include <set>
#include <string>

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// The value that a let or load defines; empty for others.
std::string defined_by(const loop_ir::Stmt& stmt);

/// Adds the names of values, axes and buffers that a statement reads, inside of a reduction too.
void collect_reads(const loop_ir::Stmt& stmt, std::set<std::string>& reads);

/// What stands in front of a reduction of the block that its body needs.
loop_ir::Block needed_before(const loop_ir::Block& block, const loop_ir::Reduce& reduce);

/// The multiplication that feeds a sum and nothing else, or null.
const loop_ir::Let* product_of(const loop_ir::Reduce& sum);

}  // namespace deplo::loop_to_tile
