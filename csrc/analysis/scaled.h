#pragma once

#include <optional>
#include <string>

#include "loop_ir/ir.h"

namespace deplo::analysis {

/// Of a value that statements of `body` make as cast(cast(n * s)), rounded to 16 bits and widened again: n * s, where n is made of bytes by casts,
/// sums and differences, and s does not vary along `axis`. What was quantised in groups along it is that: in a sum of products along `axis` the
/// factor s could as well leave the sum, so that the rounding is none that the result needs.
std::optional<std::string> scaled_whole_number(const loop_ir::Block& body, const std::string& value, const std::string& axis);

}  // namespace deplo::analysis
