#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "tile_ir/ir.h"

namespace deplo {

/// An operand that a `once` step packs, because nothing but static buffers goes into it.
struct PackedOperand {
  tile_ir::Kernel kernel;            ///< params: the sources, then the packed buffer
  std::vector<std::string> sources;  ///< params of the scheduled kernel, in the order of the pack kernel's
  std::string param;                 ///< name of the packed buffer among the scheduled kernel's params, appended in this order
  std::vector<Expr> shape;           ///< of float32 elements, row-major
};

struct ScheduledContraction {
  tile_ir::Kernel kernel;
  std::vector<PackedOperand> packed;
};

/// Schedules a kernel whose outer nest holds contractions and straight-line statements. Of the two operands of a contraction, the one that
/// varies along the store's contiguous axis gets the vector lanes (panels [k][NR]), the other one is broadcast row by row
/// (panels [k][MR]); an MR x NR block accumulates in registers over KC steps of k and is added to a tile of the result in
/// scratch memory, over which the remaining statements run while it is in cache. Operands made of `statics` alone are packed once,
/// others per block, in both cases with whatever computes them (casts, scales, padding, windows of a convolution).
/// Nothing if the kernel is not of this form, or if streaming the operands as they lie is better (one or two rows).
std::optional<ScheduledContraction> schedule_cpu_contraction(const loop_ir::Kernel& kernel, const std::set<std::string>& statics,
                                                             const PassContext& ctx);

}  // namespace deplo
