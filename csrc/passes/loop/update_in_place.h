#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Turns a functional update that is written back to the input it came from into stores in place: a token's slice of a key-value
/// cache, an index_copy, a scatter. Neither the copy of the old value nor the copy back remains, and later readers of the new value
/// read the input.
///
/// Happens only if nothing that runs after the update reads the old value, the new one is not returned, and the update reads the
/// input at no other place than the one it stores. A base that nothing else reads is updated in place too.
/// Before: lifted kernels, one per primitive. After: the same, with fewer copies.
loop_ir::Module update_in_place(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
