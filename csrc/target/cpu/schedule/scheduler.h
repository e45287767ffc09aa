#pragma once

#include "target/target.h"

namespace deplo {

/// Contractions with packed operands, rows that stay in the cache, and nests with vectors; of a contraction of symbolic size two versions where its
/// sizes decide between packing and streaming.
std::unique_ptr<Scheduler> make_cpu_scheduler(const loop_ir::Module& module, const PassContext& context);

}  // namespace deplo
