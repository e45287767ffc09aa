#pragma once

#include <string_view>

#include "loop_ir/ir.h"

namespace deplo::analysis {

/// What bounds a kernel, whatever the operators were called.
enum class Work : uint8_t {
  attention,    ///< values weighted by the softmax of scores
  convolution,  ///< sums of products whose factor is read through a window
  contraction,  ///< sums of products
  window,       ///< other reductions whose points read what others read: pooling, depthwise convolutions
  reduction,    ///< norms, softmax, sums, scans
  points,
};
Work work_of(const loop_ir::Kernel& kernel);
std::string_view to_string(Work work);

}  // namespace deplo::analysis
