#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Turns functional updates into stores in place: a token's slice of a key-value cache, an index_copy, a scatter, or several of them in a row
/// that are written back to the input they came from. Neither the copy of the old value nor the copy back remains, and later readers of the
/// new value read the input. Updates of a temporary that nothing else reads go to that one.
///
/// Happens only if nothing that runs after an update reads the old value, the new one of an input is not returned, and an element's update
/// reads no other element of what it replaces.
/// Before: lifted kernels, one per primitive. After: the same, with fewer copies.
loop_ir::Module update_in_place(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
