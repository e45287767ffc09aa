#pragma once

#include <cstdint>

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo::analysis {

/// What one application of a scalar function costs, in float additions (exp about 8, a division about 4); 0 for constants.
int cost_of(Fn fn);

/// What a kernel does in one run, as expressions over the sizes.
struct KernelCost {
  Expr operations = 0;  ///< applications of scalar functions and combiners, each weighted by cost_of
  Expr flops = 0;       ///< the same, each counted as 1 (a multiply-add is 2)
  Expr bytes_read = 0;  ///< each input buffer once, in full, or as often as it is addressed where that is less
  Expr bytes_written = 0;
};
KernelCost cost_of(const loop_ir::Kernel& kernel);

/// e with the hints' sizes; a symbol without a hint takes its lower bound, but at least 64.
double estimate(Expr e, const SizeHints& hints, const Ranges& symbols);

}  // namespace deplo::analysis
