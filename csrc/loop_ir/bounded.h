#pragma once

#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// A value that two checks of one kind keep between 0 and a bound.
struct Bounded {
  std::string value;
  Expr most;
  ErrorCode code = ErrorCode::index_out_of_range;
  Cond above, below;

  /// The nearest place in range.
  Expr in_range() const { return max(0, min(most, Expr::symbol(value))); }
};

/// Those of the checks that come in such pairs, where the bound is not negative.
std::vector<Bounded> bounded_by(const std::vector<Check>& checks, const Ranges& ranges);

}  // namespace deplo::loop_ir
