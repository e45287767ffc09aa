#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::analysis {

/// Where an axis of a contraction occurs: batch in both operands and the result, m in the first operand and the result, n in the
/// second and the result, k (a reduce axis) in the operands but not the result, other: free axes that neither operand uses.
enum class AxisClass : uint8_t { batch, m, n, k, other };

struct ContractionAxis {
  std::string name;
  Expr extent;
  AxisClass kind = AxisClass::other;
  /// A `for` of the kernel's outermost perfect nest (shared by everything in the kernel), rather than an inner `for` or a reduce axis.
  bool shared = false;
};

/// One factor of the product and the statements of the reduce body that compute it (loads with their guards, casts, any
/// prologue), in order. A slice reads no value of the other operand's slice but may read values defined outside the reduce.
struct ContractionOperand {
  std::string value;
  loop_ir::Block slice;
  std::set<std::string> axes;        ///< axes, free and reduce, that the value depends on
  std::vector<std::string> buffers;  ///< that the slice loads, the one with most axes first
};

/// A reduce sum whose operand is a product of two factors, each depending on a proper subset of the axes, with at least one m, one n
/// and one k axis. Nothing here says matmul or convolution; schedules look at the axes.
struct Contraction {
  const loop_ir::Reduce* reduce = nullptr;  ///< inside the analysed kernel
  std::string result;
  DType dtype = DType::f32;  ///< of the accumulation
  ContractionOperand a;
  ContractionOperand b;
  std::vector<ContractionAxis> axes;  ///< enclosing `for`s from the outside in, then the reduce axes

  std::vector<ContractionAxis> axes_of(AxisClass kind) const;
};

/// Every contraction of a kernel in the order of its statements; `vectors`: also those without an m or n axis.
std::vector<Contraction> find_contractions(const loop_ir::Kernel& kernel, bool vectors = false);

}  // namespace deplo::analysis
