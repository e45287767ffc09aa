#include "target/cuda/schedule/kernel.h"

#include "target/cuda/schedule/contraction.h"
#include "target/cuda/schedule/nest.h"

namespace deplo {

using namespace loop_to_tile;

Schedule propose_gpu(const loop_ir::Kernel& kernel, const PassContext& /*ctx*/) {
  GpuContraction contraction(kernel);
  return contraction.fits() ? contraction.propose() : GpuNest(kernel).propose();
}

tile_ir::Kernel apply_gpu(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& /*ctx*/) {
  tile_ir::Kernel out;
  out.name = kernel.name;
  out.params = kernel.params;
  out.symbols = kernel.symbols;
  out.provenance = kernel.provenance;
  out.schedule = schedule;
  out.body = schedule.kind == "gpu_contraction" ? GpuContraction(kernel).apply(schedule) : GpuNest(kernel).apply(schedule);
  return out;
}

}  // namespace deplo
