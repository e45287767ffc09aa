#pragma once

#include <optional>
#include <string>
#include <vector>

#include "loop_ir/rewrite.h"

namespace deplo {

/// A kernel that stores one buffer at its axes in order, without reduction or scan: v[i...] = f(i...).
struct PointwiseNest {
  std::vector<loop_ir::Axis> axes;
  loop_ir::Block body;  ///< straight-line, without the store
  std::string buffer;
  std::string value;

  std::vector<Expr> index() const;
};

std::optional<PointwiseNest> as_pointwise(const loop_ir::Block& kernel_body);
/// The body of the perfect nest at the top of a kernel's body, as a part of that.
const loop_ir::Block& innermost(const loop_ir::Block& kernel_body);

/// False if a load of the producer's buffer cannot become its body (a check under a guard over an extent that may be 0).
bool can_substitute(const loop_ir::Block& body, const PointwiseNest& producer, const Ranges& symbols);

/// Replaces every load of the producer's buffer by the producer's body. A guard moves to the producer's loads where its fill then
/// gives the same value, and becomes a select otherwise. Equal loads that one scope sees get one copy of the body. `names` holds the names
/// that the kernel uses.
loop_ir::Block substitute_producer(const loop_ir::Block& body, const PointwiseNest& producer, const Ranges& symbols, loop_ir::Names& names);

}  // namespace deplo
