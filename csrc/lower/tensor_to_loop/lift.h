#pragma once

#include <functional>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "loop_ir/ir.h"
#include "tensor_ir/ir.h"

namespace deplo::lift {

/// What a lifted kernel needs to know of the tensors around it.
struct Tensors {
  std::function<const tensor_ir::TensorType&(const std::string& value)> type;  ///< of a Tensor IR value
  std::function<std::string(const std::string& value)> buffer;                 ///< where it lies
  const Ranges& symbols;
  const std::set<std::string>& reserved;  ///< names that no axis or value may take
};

/// One nest: its free axes in order of the result's dimensions, its body, and whether its stores combine with or overwrite a
/// part of what the buffer holds.
struct Nest {
  std::vector<loop_ir::Axis> axes;
  loop_ir::Block body;
  std::vector<std::string> written;  ///< buffers
  bool updates = false;
};

/// The nests of one primitive, in order (a scatter has two: the copy of its base, then the combining stores).
std::vector<Nest> lift(const tensor_ir::Op& op, const Tensors& tensors);

/// Copies `source` into `target`, both of this type.
Nest lift_copy(const std::string& source, const std::string& target, const tensor_ir::TensorType& type, const Tensors& tensors);

}  // namespace deplo::lift
