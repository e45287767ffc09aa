#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "expr/node.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

// What schedules look at in a kernel's accesses of global memory.

constexpr int64_t kAccessBytes = 16;  ///< of one thread's widest access
constexpr int64_t kMostLanes = 8;     ///< elements of a thread's vector

/// Loads and stores of a kernel's parameters.
struct GlobalAccess {
  std::string buffer;
  Expr offset;        ///< in elements
  int64_t bytes = 0;  ///< of an element
  bool stores = false;
};

inline std::vector<GlobalAccess> global_accesses(const loop_ir::Kernel& kernel, const loop_ir::Block& body) {
  std::vector<GlobalAccess> out;
  Ranges ranges = kernel.symbols;
  visit_all(kernel.body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) ranges[loop->axis] = axis_range(loop->extent);
    if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node))
      for (const loop_ir::Axis& axis : reduce->axes) ranges[axis.name] = axis_range(axis.extent);
    if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt.node)) ranges[scan->axis.name] = axis_range(scan->axis.extent);
  });
  auto add = [&](const std::string& buffer, const std::vector<Expr>& index, bool stores) {
    const loop_ir::Param* param = kernel.find_param(buffer);
    if (!param) return;
    Expr offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset = offset + index[d] * param->strides[d];
    out.push_back({buffer, simplify(offset, ranges), size_of(param->dtype), stores});
  };
  visit_all(body, [&](const loop_ir::Stmt& stmt) {
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) add(load->buffer, load->index, false);
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt.node)) add(store->buffer, store->index, true);
  });
  return out;
}

/// Whether e is a multiple whatever the axes are; `sizes`: and if those that occur are.
inline bool multiples_of(Expr e, int64_t of, const Ranges& sizes = {}) {
  const std::vector<Term> terms = terms_of(e);
  return std::all_of(terms.begin(), terms.end(), [&](const Term& term) {
    return term.coefficient % of == 0 ||
           std::any_of(term.atoms.begin(), term.atoms.end(), [&](Expr atom) { return atom.is_symbol() && sizes.count(atom.name()) > 0; });
  });
}

/// Whether the accesses of a vector are whole: side by side, upwards or downwards, and at multiples of their length, if those of sizes are.
inline bool lies_whole(const GlobalAccess& access, const std::string& axis, int64_t lanes, const Ranges& sizes) {
  const auto step = linear_coefficient(access.offset, axis);
  const int64_t piece = std::min(lanes, kAccessBytes / access.bytes);
  if (step && step->is(-1)) return multiples_of(access.offset + sym(axis) + 1, piece, sizes);  // of what ends there
  return step && step->is(1) && multiples_of(access.offset - sym(axis), piece, sizes);
}

/// Elements of a vector along an axis of `extent` elements: as many of the narrowest that lies along it, in either direction, as an access takes, as
/// far as they divide a constant extent; 1 where nothing lies along it.
inline int64_t lanes_along(const std::vector<GlobalAccess>& accesses, const std::string& axis, Expr extent) {
  int64_t narrowest = 0;
  for (const GlobalAccess& access : accesses) {
    auto step = linear_coefficient(access.offset, axis);
    if (step && (step->is(1) || step->is(-1))) narrowest = narrowest == 0 ? access.bytes : std::min(narrowest, access.bytes);
  }
  if (narrowest == 0) return 1;
  int64_t lanes = std::min(kMostLanes, kAccessBytes / narrowest);
  if (extent.is_constant())
    while (lanes > 1 && extent.value() % lanes != 0) lanes /= 2;
  return lanes;
}

}  // namespace deplo::loop_to_tile
