#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Lets a row buffer be written over another one of the same type where a loop reads the old one for the last time, each element just before
/// the new one is stored in the same place: a softmax keeps its scores, their exponentials and the quotients in one buffer.
/// Before and after: any Loop IR.
loop_ir::Module share_locals(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
