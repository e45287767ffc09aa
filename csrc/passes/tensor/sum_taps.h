#pragma once

#include "base/context.h"
#include "tensor_ir/ir.h"

namespace deplo {

/// Sums weights that multiply the same points: the taps of a window over an image that was enlarged by repeating its points. A convolution of 3 x 3
/// taps over an image of twice the lines and points takes 4 products a point instead of 9, as a transposed one of 4 x 4 over the small image does.
/// For sums of products in float32 or float64, `out[i] = sum over k of x[(i + k + a) // s] * w[k]`, each of whose points and taps meets s others: the
/// points become phases p and q, i + c = s*q + p, of which each reads x[q + t + b] beside the sum of the w[k] with (p + k) // s = t. Sums of weights
/// are rounded once, as a product's sum is, and infinite points meet their sum instead of each: where weights of one point differ in sign, an
/// infinity no longer becomes NaN, and weights whose sum overflows give infinities. Before: Tensor IR with composed maps. After: no such sum is left
/// where that saves work; numbers of 16 bits, which matrix units take as they are, stay.
tensor_ir::Graph sum_taps(tensor_ir::Graph graph, const PassContext& context);

}  // namespace deplo
