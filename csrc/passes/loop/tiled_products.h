#pragma once

#include <set>
#include <string>

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Which of some buffers come of kernels whose products of matrices the target multiplies in tiles, and which of those that it would multiply point
/// by point.
struct MultipliedResults {
  std::set<std::string> in_tiles;
  std::set<std::string> by_points;
};

/// Of the buffers `written`. The target is asked about the kernels as they are once axes and loops are split, and checks moved in front. Few products
/// are none.
MultipliedResults find_multiplied(const loop_ir::Module& module, const std::set<std::string>& written, const PassContext& context);

}  // namespace deplo
