#pragma once

#include <optional>
#include <string>
#include <vector>

#include "analysis/conditions.h"
#include "analysis/contraction.h"
#include "loop_ir/ir.h"

namespace deplo::analysis {

/// For each point of a kernel's outer axes, what these loops, in this order and no others, compute over one or more axes of keys:
///
///   t_p[j] = sum over d of x_p[d] * y_p[j, d]              `inner`, in a nest over the keys
///   w_q[j] = f_q(t_0[j], t_1[j], ..., j)                   stored in locals in the same nest
///   z_q[c] = h_q(sum over j of w_q[j] * v_q[j, c], c)      `outer`, each in a nest over its columns
///
/// So the keys may be taken in blocks: neither sums nor weights need memory. The gradient of attention is two of those.
struct ProductChain {
  struct Inner {
    Contraction contraction;
    ContractionOperand rows, moving;  ///< x and y
  };
  struct Outer {
    Contraction contraction;
    ContractionOperand other;  ///< v
    std::string weight;        ///< the value that the nest over the keys stores as w
    bool rounded = false;      ///< to 16 bits before it is multiplied
    loop_ir::Axis column;
    loop_ir::Block body;  ///< of the nest of columns
  };
  std::vector<loop_ir::Axis> keys;  ///< of the nest over them, outer first
  std::vector<Inner> inner;
  std::vector<Outer> outer;
  loop_ir::Block rows;    ///< the straight-line statements of the outer nest, in order
  loop_ir::Block points;  ///< of the nest over the keys, but for reductions and stores
};

/// Such a chain, if it is all that the kernel's outer nest holds. `body`: what the nest holds.
std::optional<ProductChain> find_product_chain(const loop_ir::Kernel& kernel, const loop_ir::Block& body);

/// What guards, and comparisons of integers that choose between a number and 0 or an exponent of -inf, say about the last axis of keys: all weights
/// are 0 for others.
std::vector<KeyLimit> key_limits(const ProductChain& chain);

}  // namespace deplo::analysis
