#pragma once

#include "base/context.h"
#include "loop_ir/ir.h"

namespace deplo {

/// Computes a factor of sums of products where it is summed, if it is a matrix that kernels before made of sums of products (the gradients of
/// attention take four kernels otherwise, and two matrices of rows by keys between them): the kernel that sums becomes a chain
/// (`analysis/product_chain.h`), and kernels that sum over the same matrices along the same axis become one. Done where the target multiplies chains
/// as such (`Target::chains`), all readers of the matrices become chains, so that no matrix is left in memory, and these are more bytes than what the
/// chains read. Before: nests are fused. After: the kernels that only made such matrices are gone.
loop_ir::Module chain_products(loop_ir::Module module, const PassContext& context);

}  // namespace deplo
