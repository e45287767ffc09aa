#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/schedule.h"
#include "tile_ir/ir.h"

namespace deplo {

/// How a target turns the kernels of one Loop program into those of a Tile program.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  /// Adds to `out` the Tile kernels of a kernel, under its name and names of others that it needs: by the schedules given for these names, else by
  /// its own proposals. UserError for a schedule that does not fit.
  virtual void add_kernel(const loop_ir::Kernel& kernel, const std::map<std::string, Schedule>& given, tile_ir::Module& out) = 0;
  /// Adds the steps that stand for a call of such a kernel, with the buffers that they need.
  virtual void add_call(const CallStep& call, tile_ir::Module& out);
};

/// What the lowerings ask of a target. What a machine of it has (features, sizes of vectors and caches) is TargetInfo.
struct Target {
  std::string_view name;
  bool has_grid = false;        ///< loops run on blocks of threads; elsewhere chunks of a parallel loop do
  int most_vector_bytes = 64;   ///< of one thread's vectors
  bool shuffles_lanes = false;  ///< picks lanes of vectors in registers: strided loads then read all that lies between
  std::unique_ptr<Scheduler> (*make_scheduler)(const loop_ir::Module& module, const PassContext& context) = nullptr;
};

/// UserError that names the targets if there is none of this name.
const Target& find_target(std::string_view name);
inline const Target& target_of(const PassContext& context) { return find_target(context.target.name); }
std::vector<std::string> target_names();

// Each in csrc/target/<name>/target.cpp; target.cpp lists them.
extern const Target kCpuTarget;
extern const Target kCudaTarget;

}  // namespace deplo
