#include "loop_ir/bounded.h"

namespace deplo::loop_ir {

std::vector<Bounded> bounded_by(const std::vector<Check>& checks, const Ranges& ranges) {
  std::vector<Bounded> found;
  for (const Check& above : checks) {
    if (above.cond.kind != Cond::Kind::ge0 || !above.cond.expr.is_symbol()) continue;
    for (const Check& below : checks) {
      const Expr most = below.cond.expr + above.cond.expr;
      if (below.cond.kind != Cond::Kind::ge0 || below.code != above.code) continue;
      if (uses(most, above.cond.expr.name()) || !provably_nonnegative(most, ranges)) continue;
      found.push_back({above.cond.expr.name(), most, above.code, above.cond, below.cond});
    }
  }
  return found;
}

}  // namespace deplo::loop_ir
