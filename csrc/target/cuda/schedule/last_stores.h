#pragma once

#include <optional>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// Points whose stores may meet along one axis, for their place is a value that varies with it, and along no other (index_copy, index_put): the last
/// one of those that store to a place stays, so that all others need not, and the order does not matter.
struct LastStores {
  std::string axis;
  Expr extent;
  std::string other;      ///< an iteration of the axis, of which `search` tells
  loop_ir::Block own;     ///< what the place of this iteration follows from
  loop_ir::Block search;  ///< gives `found`: `other` if it has the same place, else -1
  std::string found;
};

/// Nothing where another axis may meet, too, or the axis is long: each iteration looks at all of it. Takes names for what it adds.
std::optional<LastStores> find_last_stores(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body, loop_ir::Names& names);

}  // namespace deplo::loop_to_tile
