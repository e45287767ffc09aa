#pragma once

#include <memory>

#include "target/target.h"

namespace deplo {

/// This machine's processors: vectors, threads that share a parallel loop, machine code by LLVM.
std::unique_ptr<const Target> make_cpu_target();

}  // namespace deplo
