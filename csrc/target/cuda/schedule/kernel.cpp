#include "target/cuda/schedule/kernel.h"

#include <algorithm>

#include "target/cuda/schedule/chain.h"
#include "target/cuda/schedule/contraction.h"
#include "target/cuda/schedule/groups.h"
#include "target/cuda/schedule/matrix.h"
#include "target/cuda/schedule/nest.h"
#include "target/cuda/schedule/online.h"
#include "target/cuda/schedule/row_vectors.h"
#include "target/cuda/schedule/scan_readers.h"
#include "target/cuda/schedule/stencil.h"
#include "target/cuda/schedule/tiles.h"
#include "target/cuda/schedule/transpose.h"
#include "target/cuda/schedule/vectors.h"

namespace deplo {

using namespace loop_to_tile;

namespace {

bool has_vectors(const Schedule& schedule) {
  return std::any_of(schedule.directives.begin(), schedule.directives.end(), [](const Directive& d) { return d.word == "vectorize"; });
}

tile_ir::Block apply_kind(const loop_ir::Kernel& given, const Schedule& schedule) {
  const loop_ir::Kernel kernel = join_scan_readers(given);
  if (schedule.kind == "gpu_tiles") return GpuTiles(kernel).apply(schedule);
  if (schedule.kind == "gpu_groups") return GpuGroups(kernel).apply(schedule);
  if (schedule.kind == "gpu_matrix") return GpuMatrix(kernel).apply(schedule);
  if (schedule.kind == "gpu_online") return GpuOnline(kernel).apply(schedule);
  if (schedule.kind == "gpu_chain") return GpuChain(kernel).apply(schedule);
  if (schedule.kind == "gpu_contraction") return GpuContraction(kernel).apply(schedule);
  if (schedule.kind == "gpu_stencil") return GpuStencil(kernel).apply(schedule);
  if (schedule.kind == "gpu_transpose") return GpuTranspose(kernel).apply(schedule);
  if (schedule.kind == "gpu_points" && has_vectors(schedule)) return GpuVectors(kernel).apply(schedule);
  if (schedule.kind == "gpu_rows" && has_vectors(schedule)) return GpuRowVectors(kernel).apply(schedule);
  return GpuNest(kernel).apply(schedule);
}

}  // namespace

std::string gpu_arch(const PassContext& ctx) { return ctx.target.features.empty() ? "sm_80" : *ctx.target.features.begin(); }

int64_t gpu_key_parts(const loop_ir::Kernel& kernel, const PassContext& ctx) { return GpuOnline(kernel).parts(ctx.hints, gpu_arch(ctx)); }

bool gpu_chains(const loop_ir::Kernel& kernel, const PassContext& ctx) { return GpuChain(kernel).fits(ctx.hints, gpu_arch(ctx)); }

Schedule propose_gpu(const loop_ir::Kernel& given, const PassContext& ctx) {
  const loop_ir::Kernel kernel = join_scan_readers(given);
  const std::string arch = gpu_arch(ctx);
  if (GpuTiles tiles(kernel); tiles.fits(ctx.hints, arch)) return tiles.propose(ctx.hints, arch);
  if (GpuGroups groups(kernel); groups.fits(ctx.hints, arch)) return groups.propose(ctx.hints, arch);
  if (GpuMatrix matrix(kernel); matrix.fits(arch)) return matrix.propose(ctx.hints, arch);
  if (GpuOnline online(kernel); online.fits(ctx.hints, arch)) return online.propose(ctx.hints, arch);
  if (GpuChain chain(kernel); chain.fits(ctx.hints, arch)) return chain.propose(ctx.hints, arch);
  if (GpuContraction contraction(kernel); contraction.fits()) return contraction.propose(ctx.hints);
  if (GpuStencil stencil(kernel); stencil.fits()) return stencil.propose(ctx.hints, arch);
  if (GpuVectors columns(kernel); columns.is_columns()) return columns.propose();
  if (GpuRowVectors rows(kernel); rows.fits()) return rows.propose();
  GpuNest nest(kernel);
  Schedule schedule = nest.propose();
  if (schedule.kind != "gpu_points") return schedule;
  if (GpuTranspose transpose(kernel); transpose.fits()) return transpose.propose();
  GpuVectors vectors(kernel);
  return vectors.fits() ? vectors.propose() : schedule;
}

tile_ir::Kernel apply_gpu(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& /*ctx*/) {
  tile_ir::Kernel out;
  out.name = kernel.name;
  out.params = kernel.params;
  out.symbols = kernel.symbols;
  out.provenance = kernel.provenance;
  out.schedule = schedule;
  out.body = apply_kind(kernel, schedule);
  return out;
}

}  // namespace deplo
