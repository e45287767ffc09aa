#pragma once

#include "base/context.h"
#include "torch_ir/ir.h"

namespace deplo {

/// Lets equal ATen calls run once: two results of one sort, taken by two calls, are one library call. Calls that draw random numbers or that
/// deplo does not know stay apart, and so do those whose memory an output shows: each output keeps memory of its own.
/// Before: verified Torch IR. After: no two calls (but those) differ in their names and their places in the program alone.
torch_ir::Graph share_calls(torch_ir::Graph graph, const PassContext& context);

}  // namespace deplo
