#pragma once

#include <functional>
#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_ir {

/// How a block touches one buffer that it does not declare.
struct Access {
  std::string buffer;
  bool reads = false;
  bool writes = false;
  bool reads_first = false;  ///< a load or combining store comes before any plain store in the order of statements
};

/// The buffers that a block touches, in order of first touch, without its locals.
std::vector<Access> accesses(const Block& block);

/// Parameters for a body over a program's buffers, named like them: inputs in order of first touch, then those it writes.
/// inout is what is read before it is written, and what keeps the elements that the body does not overwrite (`updated`).
std::vector<Param> make_params(const Block& body, const FindBuffer& find_buffer, const std::vector<std::string>& updated = {});

/// Calls f(e) on every expression in a block: indices, guards, extents, shapes of locals.
void for_each_expr(const Block& block, const std::function<void(const Expr&)>& f);

/// Those of `symbols` that occur in the kernel, and in the bounds of those.
Ranges used_symbols(const Kernel& kernel, const Ranges& symbols);

}  // namespace deplo::loop_ir
