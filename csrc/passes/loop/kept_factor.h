#pragma once

#include <optional>
#include <string>
#include <vector>

#include "analysis/contraction.h"
#include "loop_ir/rewrite.h"
#include "passes/loop/program_graph.h"

namespace deplo {

/// A factor of a product as a computation of its own. A cast to more bytes stays with the product.
struct Factor {
  std::string value;
  DType dtype = DType::f32;
  loop_ir::Block body;  ///< loads and lets that the value takes
};

/// A dimension of the memory that keeps a factor: an axis of the kernel that fills it, and which element of it the product takes.
struct KeptDimension {
  loop_ir::Axis axis;
  Expr place;
};

/// Nothing where the kernel itself makes what the factor is of.
std::optional<Factor> find_factor(const loop_ir::Kernel& kernel, const analysis::ContractionOperand& operand);

/// Whether it changes from call to call, and is of buffers that nobody writes to meanwhile: memory of its own is worth filling.
bool may_be_kept(const ProgramGraph& graph, const Factor& factor);

/// A kernel in front of `at` computes the factor, by a body over the dimensions' axes, and checks `moved`; the product loads it.
void keep_factor(ProgramGraph& graph, size_t at, const loop_ir::Kernel& kernel, const Factor& factor, const std::vector<KeptDimension>& dimensions,
                 const std::vector<loop_ir::Check>& moved);

/// A node of the graph as a kernel, whose buffers are the program's.
loop_ir::Kernel kernel_of(const loop_ir::Block& body, const Ranges& symbols);

}  // namespace deplo
