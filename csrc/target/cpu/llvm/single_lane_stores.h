#pragma once

namespace llvm {
class Module;
}

namespace deplo {

/// Writes masked stores whose constant mask has at most one lane on as scalar stores. LLVM 22 does so itself after joining the store with
/// the truncation of its value (bf16 and narrow integers on AVX-512), but then writes the lane in its width before the truncation.
void split_single_lane_stores(llvm::Module& module);

}  // namespace deplo
