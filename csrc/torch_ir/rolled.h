#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "torch_ir/ir.h"

namespace deplo::torch_ir {

/// A graph of equal parts that follow each other, as layers do, of which all but four are left out: the first two and the last two. Part p of the
/// whole has the values and inputs of part q at the same places, and reads of the part before it what q reads of its own.
struct Rolled {
  static constexpr size_t kKept = 4;

  Graph graph;                                       ///< the four parts and what lies around them
  std::vector<Input> inputs;                         ///< of the whole
  std::vector<std::vector<std::string>> values;      ///< of each part of the whole: what its nodes define, in order
  std::vector<std::vector<std::string>> own_inputs;  ///< of each part of the whole: inputs that it alone reads or writes

  /// An output of the whole. Of a part's value or input it is the output at the same place of each part that is kept, where that has one.
  struct Output {
    std::array<std::optional<size_t>, kKept> of_kept{};  ///< outputs of the graph
    std::optional<size_t> part = std::nullopt;           ///< nothing: output of_kept[0] of the graph, and no part's
  };
  std::vector<Output> outputs;

  size_t parts() const { return values.size(); }
  bool is_left_out(size_t part) const { return part >= 2 && part + 2 < parts(); }
  /// Of the whole, for each part that is kept.
  std::vector<size_t> kept() const { return {0, 1, parts() - 2, parts() - 1}; }
};

}  // namespace deplo::torch_ir
