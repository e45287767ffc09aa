#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::analysis {

/// A rounding to tf32 (`base/tf32.h`), of five steps:
///
///   where(x != x, x, bitcast((bitcast(x) + kTf32Half) & kTf32Mask))
struct Tf32Rounding {
  std::string operand;             ///< x
  std::vector<std::string> steps;  ///< values that it computes on the way, and its own
};

/// What `statements` compute as `rounded`, if that is such a rounding.
std::optional<Tf32Rounding> tf32_rounding(const loop_ir::Block& statements, const std::string& rounded);
/// The steps of all roundings among statements. Matrix units take numbers so, or one instruction makes them.
std::set<std::string> tf32_steps(const loop_ir::Block& statements);

}  // namespace deplo::analysis
