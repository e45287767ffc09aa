#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/rewrite.h"

namespace deplo {

/// One kernel while nests are being fused: axes shared by everything in it, and what runs once per point of them.
struct NestGroup {
  std::vector<loop_ir::Axis> axes;
  loop_ir::Block body;
};

/// Which axes two groups can share: pairs (axis of `first`, axis of `second`), in the order of first's axes.
using AxisPairs = std::vector<std::pair<std::string, std::string>>;

/// The axes along which `second` reads nothing of `buffers` but what the same iteration of `first` stored. Nothing if a store or
/// load cannot be followed (guarded or combining stores, indirect places).
std::optional<AxisPairs> shared_by_dependence(const NestGroup& first, const NestGroup& second, const std::set<std::string>& buffers);

/// For nests without a dependence: the axes along which both read the same elements of `buffers`.
AxisPairs shared_by_input(const NestGroup& first, const NestGroup& second, const std::set<std::string>& buffers);

/// Both groups under the paired axes, first before second; the other axes become inner loops. Names of `second` that clash change.
NestGroup join(const NestGroup& first, const NestGroup& second, const AxisPairs& pairs, loop_ir::Names& names);

}  // namespace deplo
