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
/// Whether one instruction multiplies and adds bytes.
inline bool has_byte_products(const std::set<std::string>& features) { return features.count("avx512vnni") > 0 || features.count("avxvnni") > 0; }
/// Whether dot products of bytes (Fn::dot4) are faster than products of the numbers that they stand for: by an instruction (VNNI), or of pairs of
/// 16 bits (pmaddwd of AVX2).
inline bool multiplies_bytes(const std::set<std::string>& features) { return features.count("avx2") > 0 || has_byte_products(features); }

}  // namespace deplo
