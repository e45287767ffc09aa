#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_ir/attribute.h"

namespace deplo::aten {

/// One boxed ATen call with its arguments bound to the schema: constants are converted once, tensors and sizes per call.
class AtenCall {
 public:
  using TensorOf = std::function<at::Tensor(const std::string& name)>;
  using SizeOf = std::function<int64_t(Expr size)>;

  /// `op` is "aten._softmax.default". Throws UnsupportedError for an unknown overload, or an argument that its schema does not have.
  AtenCall(const std::string& op, const std::vector<std::pair<std::string, Attribute>>& arguments);

  /// Runs below autograd and autocast, which have had their say when the graph was traced. Lists of tensors are
  /// flattened; an undefined tensor stands for None. On a `device` that is none of the host's, so are results of calls without operands.
  std::vector<at::Tensor> run(const TensorOf& tensor_of, const SizeOf& size_of, c10::Device device = c10::kCPU) const;
  const std::string& op() const { return op_; }

 private:
  struct Argument {
    const Attribute* given = nullptr;  ///< null: `value` holds what to pass
    c10::TypePtr type;
    bool is_factor = false;  ///< of a product, where the call says how exact it is
    int32_t repeat = 0;      ///< length of a fixed list that may be given as one element
    c10::IValue value;
  };

  std::string op_;
  c10::OperatorHandle handle_;
  std::vector<std::pair<std::string, Attribute>> attributes_;
  std::vector<Argument> arguments_;
  bool rounds_ = false;  ///< factors of products, to tf32
};

}  // namespace deplo::aten
