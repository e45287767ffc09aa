#pragma once

#include <memory>

#include "target/target.h"

namespace deplo {

/// One kernel for each of the program's, by `propose_gpu`. A layer whose weights are bytes that may fit 4 bits gets a second one, which reads them
/// two a byte from a buffer that is packed once, and runs where all of them do.
std::unique_ptr<Scheduler> make_cuda_scheduler(const loop_ir::Module& module, const PassContext& context);

}  // namespace deplo
