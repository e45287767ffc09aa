#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Computes sums of products of dequantised numbers in integers. The sum over k of (a - za) sa (b - zb) sb, where a and b are bytes in memory, and
/// za, sa, zb and sb do not vary along k, is
///
///   sa sb (sum(a b) - za sum(b) - zb sum(a) + K za zb)
///
/// whose first sum is one of int32, exact and made of dot products of bytes. sum(b) of weights is computed once. sum(a) is computed only if zb is not
/// 0 everywhere, which a fact tells where zb is a static input. Padding is part of a: its bytes are the zero point there.
///
/// Happens for sums that a schedule for dot products of bytes takes: one operand in static memory, the other one not, a multiple of four steps of k,
/// so few of them that no sum leaves int32, not both operands unsigned, and stores along an axis of the static operand's. Innermost in the sum goes
/// the axis along which the other operand's elements may lie.
/// Before: fused kernels, with bytes between them (narrow_buffers). After: the same; sums of bytes alone are kernels of their own.
loop_ir::Module sum_in_integers(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
