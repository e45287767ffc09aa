#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {

using Renaming = std::map<std::string, std::string>;

/// The op with operands (not results) renamed; the same Ref if none is in `names`.
Ref<Op> rename_operands(const Ref<Op>& op, const Renaming& names);
/// The op with operands and results renamed; the same Ref if none is in `names`.
Ref<Op> rename_all(const Ref<Op>& op, const Renaming& names);

/// What a pass makes of one op, whose operands are already rewritten: ops that replace it (the same Ref to keep it), and for
/// a result that is now another value, its new name. A result name must stay defined or be renamed.
struct Replacement {
  std::vector<Ref<Op>> ops;
  Renaming names;
};

/// Runs over the ops in order; renames reach all later ops, writes and outputs.
Graph rewrite(Graph graph, const std::function<Replacement(const Ref<Op>&)>& f);

/// Names like %v7 that no value of the graph has.
class FreshNames {
 public:
  explicit FreshNames(const Graph& graph);
  std::string operator()();

 private:
  std::map<std::string, bool> taken_;
  int next_ = 0;
};

/// Every value's type by name, inputs included.
std::map<std::string, TensorType> types_of(const Graph& graph);
/// The op that defines each value; inputs are absent.
std::map<std::string, Ref<Op>> definitions_of(const Graph& graph);

/// Capture-free change of the coordinates of a map's index expressions.
IndexMap rename_axes(const IndexMap& map, const std::vector<std::string>& axes);

}  // namespace deplo::tensor_ir
