#pragma once

#include <set>
#include <string>
#include <vector>

namespace deplo {

/// Those of `features`, by LLVM's names, that this CPU or its operating system lacks; what is not known here counts as lacking.
std::vector<std::string> lacking_features(const std::set<std::string>& features);
/// Whether Linux lets this process use the CPU's matrix unit: the registers are large, so that it must be asked first (arch_prctl of
/// Documentation/arch/x86/xstate.rst). It refuses where signal stacks are too small for them.
bool may_use_matrices();

}  // namespace deplo
