#pragma once

#include <string>

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// A program that calls this kernel of the module once, on inputs of its own: what it reads and writes are inputs, what it only writes are outputs,
/// and its symbols are inputs at the end. Inputs are static where the module binds nothing else. The kernel's name and origin are left out, so that
/// equal kernels of any programs give the same.
loop_ir::Module alone(const loop_ir::Module& module, const loop_ir::Kernel& kernel);

/// What schedules of a kernel that stands `alone` are filed under: its text, the class of each size (its number of bits), and what else the context
/// says that schedules depend on.
std::string tuning_key(const loop_ir::Module& alone, const PassContext& ctx);

}  // namespace deplo::loop_to_tile
