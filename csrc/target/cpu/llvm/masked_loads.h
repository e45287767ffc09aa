#pragma once

#include "base/context.h"

namespace llvm {
class Module;
}

namespace deplo {

/// Writes masked loads of 32 and 64 bits as VMASKMOV of whole registers, on CPUs with AVX2 whose masks are vectors. LLVM 22 drops the mask there
/// where it takes a load, or what a mask is made of, apart by registers: one lane or none that can be on, and it reads all. Only code
/// generation may follow: InstCombine would turn these calls into masked loads again.
void write_masked_loads(llvm::Module& module, const TargetInfo& target);

}  // namespace deplo
