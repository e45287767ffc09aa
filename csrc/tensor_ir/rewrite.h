#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tensor_ir/ir.h"

namespace deplo::tensor_ir {

using Renaming = std::unordered_map<std::string, std::string>;

/// The op with operands (not results) renamed; the same Ref if none is in `names`.
Ref<Op> rename_operands(const Ref<Op>& op, const Renaming& names);
/// The op with operands and results renamed; the same Ref if none is in `names`.
Ref<Op> rename_all(const Ref<Op>& op, const Renaming& names);

/// Bit by bit, NaN included.
inline bool same_literal(const Scalar& a, const Scalar& b) {
  return a.dtype == b.dtype && a.i == b.i && std::bit_cast<uint64_t>(a.f) == std::bit_cast<uint64_t>(b.f);
}

/// A graph under reconstruction: a pass sees each op once, in order, with its operands already replaced.
class Editor {
 public:
  explicit Editor(Graph graph);

  const Ranges& symbols() const { return graph_.symbols; }
  std::string fresh();
  /// Appends an op; its first result.
  Value emit(Ref<Op> op);
  /// The emitted op that defines a value; null for inputs.
  const Op* definition(const std::string& name) const;
  /// The literal that a value is at every point, or null.
  const Scalar* literal(const std::string& name) const;
  Value value(const std::string& name) const;

  /// False if reading `to` for `from` would make an output share memory with an input or another output.
  bool may_replace(const std::string& from, const std::string& to) const;
  /// Lets later reads of `from` read `to`, if that may be.
  bool replace(const std::string& from, const std::string& to);

  /// Runs `visit` over the ops; it emits what takes the op's place.
  Graph run(const std::function<void(Editor&, const Ref<Op>&)>& visit);

 private:
  Graph graph_;
  std::vector<Ref<Op>> ops_;
  std::unordered_map<std::string, const Op*> definitions_;    ///< that are in ops_
  std::unordered_map<std::string, const TensorType*> types_;  ///< of inputs, and of results in ops_
  std::unordered_set<std::string> inputs_;
  std::unordered_set<std::string> outputs_;
  std::unordered_set<std::string> taken_;  ///< names, once a fresh one was asked for
  Renaming names_;
  int next_ = 0;
};

/// The map with other names for its axes.
IndexMap rename_axes(const IndexMap& map, const std::vector<std::string>& axes);

}  // namespace deplo::tensor_ir
