#include "lower/lower.h"

#include "base/error.h"
#include "lower/loop_to_tile/cpu_nest.h"
#include "lower/loop_to_tile/gpu.h"

namespace deplo {

tile_ir::Module lower_loop_to_tile(const loop_ir::Module& module, const PassContext& ctx) {
  tile_ir::Module out;
  static_cast<ProgramBody&>(out) = module;
  for (const auto& kernel : module.kernels) {
    tile_ir::Kernel scheduled = ctx.target.name == "cuda" ? schedule_gpu(*kernel, ctx) : schedule_cpu_nest(*kernel, ctx);
    out.kernels.push_back(std::make_shared<tile_ir::Kernel>(std::move(scheduled)));
  }
  return out;
}

}  // namespace deplo
