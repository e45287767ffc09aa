#pragma once

#include <map>
#include <set>
#include <string>

#include "base/context.h"
#include "tile_ir/ir.h"

namespace deplo::tile_to_kernel {

/// How a register array becomes variables.
struct RegisterPlan {
  enum class Mode : uint8_t {
    scalars,  ///< never indexed by a lanes axis: one variable per element
    lanes,    ///< the last dimension in vectors of `width`
    memory,   ///< cannot be registers: a stack array
  };
  Mode mode = Mode::scalars;
  int width = 1;
};

/// What is decided about a kernel before any statement is lowered.
struct Plan {
  /// Vector width of each lanes loop (by its For or Reduce node); 1: it runs element by element.
  std::map<const void*, int> lanes;
  /// Lanes loops that index register arrays, with the length of those arrays' last dimension: all their vectors are emitted at once.
  std::map<const void*, int64_t> whole;
  std::map<std::string, RegisterPlan> registers;
  /// Buffers that a loop (by its For, Reduce or Scan node) may write, register arrays among them.
  std::map<const void*, std::set<std::string>> stores;
  /// Position of each statement in the text, and of the last use of each value by its definition (Let, Load, Reduce, Scan node).
  std::map<const void*, int> order;
  std::map<const void*, int> last_use;

  int width(const void* loop) const {
    auto it = lanes.find(loop);
    return it == lanes.end() ? 1 : it->second;
  }
  bool in_registers(const std::string& buffer) const {
    auto it = registers.find(buffer);
    return it != registers.end() && it->second.mode != RegisterPlan::Mode::memory;
  }
};

Plan make_plan(const tile_ir::Kernel& kernel, const PassContext& context);

/// Names in the body of a lanes loop over `axis` whose values differ between lanes.
std::set<std::string> varying_names(const tile_ir::Block& body, const std::string& axis, const Plan& plan);

/// The lanes axis of a reduction that runs in vectors, or nothing.
const tile_ir::Axis* lanes_axis(const tile_ir::Reduce& reduce, const Plan& plan);

}  // namespace deplo::tile_to_kernel
