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
#include "target/cuda/schedule/stencil_chain.h"
#include "target/cuda/schedule/taps.h"
#include "target/cuda/schedule/tiles.h"
#include "target/cuda/schedule/transpose.h"
#include "target/cuda/schedule/vectors.h"

namespace deplo {

using namespace loop_to_tile;

namespace {

constexpr const char* kOldest = "sm_80";

bool has_vectors(const Schedule& schedule) {
  return std::any_of(schedule.directives.begin(), schedule.directives.end(), [](const Directive& d) { return d.word == "vectorize"; });
}

tile_ir::Block apply_kind(const loop_ir::Kernel& given, const Schedule& schedule) {
  const loop_ir::Kernel kernel = join_scan_readers(given);
  if (schedule.kind == "gpu_tiles") return GpuTiles(kernel).apply(schedule);
  if (schedule.kind == "gpu_groups") return GpuGroups(kernel).apply(schedule);
  if (schedule.kind == "gpu_taps") return GpuTaps(kernel).apply(schedule);
  if (schedule.kind == "gpu_matrix") return GpuMatrix(kernel).apply(schedule);
  if (schedule.kind == "gpu_online") return GpuOnline(kernel).apply(schedule);
  if (schedule.kind == "gpu_chain") return GpuChain(kernel).apply(schedule);
  if (schedule.kind == "gpu_contraction") return GpuContraction(kernel).apply(schedule);
  if (schedule.kind == "gpu_stencil") return GpuStencil(kernel).apply(schedule);
  if (schedule.kind == "gpu_stencils") return GpuStencilChain(kernel).apply(schedule);
  if (schedule.kind == "gpu_transpose") return GpuTranspose(kernel).apply(schedule);
  if (schedule.kind == "gpu_points" && has_vectors(schedule)) return GpuVectors(kernel).apply(schedule);
  if (schedule.kind == "gpu_rows" && has_vectors(schedule)) return GpuRowVectors(kernel).apply(schedule);
  return GpuNest(kernel).apply(schedule);
}

/// Proposals of the forms that a kernel fits, the best one first: those of matrix units, or, where there is none, all others.
class Forms {
 public:
  Forms(const loop_ir::Kernel& given, const PassContext& ctx, bool only_first)
      : kernel_(join_scan_readers(given)), hints_(ctx.hints), arch_(gpu_arch(ctx)), deterministic_(ctx.deterministic), only_first_(only_first) {}

  std::vector<Schedule> all() {
    on_matrix_units();
    if (found_.empty()) products_and_windows();
    if (!is_enough()) points_and_rows();
    return std::move(found_);
  }

 private:
  bool is_enough() const { return !found_.empty() && (only_first_ || is_product_); }
  void add(Schedule schedule) {
    if (std::find(found_.begin(), found_.end(), schedule) == found_.end()) found_.push_back(std::move(schedule));
  }

  void on_matrix_units() {
    if (GpuTiles tiles(kernel_); tiles.fits(hints_, arch_)) add(tiles.propose(hints_, arch_));
    if (only_first_ && !found_.empty()) return;
    if (GpuTaps taps(kernel_); taps.fits(hints_, arch_)) add(taps.propose(hints_, arch_));
    if (only_first_ && !found_.empty()) return;
    if (GpuGroups groups(kernel_); groups.fits(hints_, arch_)) add(groups.propose(hints_, arch_));
    if (only_first_ && !found_.empty()) return;
    if (GpuMatrix matrix(kernel_); matrix.fits(arch_)) add(matrix.propose(hints_, arch_));
    if (only_first_ && !found_.empty()) return;
    if (GpuOnline online(kernel_); online.fits(hints_, arch_)) {
      add(online.propose(hints_, arch_));
      // By warps, as devices without groups do.
      if (!only_first_ && online.fits(hints_, kOldest)) add(online.propose(hints_, kOldest));
    }
    if (only_first_ && !found_.empty()) return;
    if (GpuChain chain(kernel_); chain.fits(hints_, arch_)) add(chain.propose(hints_, arch_));
    is_product_ = !found_.empty();
  }

  void products_and_windows() {
    if (GpuContraction contraction(kernel_); contraction.fits()) {
      add(contraction.propose(hints_));
      is_product_ = true;
    } else if (GpuStencil stencil(kernel_); stencil.fits()) {
      add(stencil.propose(hints_, arch_));
    } else if (GpuStencilChain chain(kernel_); chain.fits()) {
      add(chain.propose(hints_, arch_));
    }
  }

  void points_and_rows() {
    if (GpuVectors columns(kernel_); columns.is_columns()) add(columns.propose());
    if (is_enough()) return;
    if (GpuRowVectors rows(kernel_); rows.fits()) add(rows.propose());
    if (is_enough()) return;
    GpuNest nest(kernel_);
    const Schedule schedule = nest.propose(deterministic_);
    if (schedule.kind == "gpu_points") {
      if (GpuTranspose transpose(kernel_); transpose.fits()) add(transpose.propose());
      if (is_enough()) return;
      if (GpuVectors vectors(kernel_); vectors.fits()) add(vectors.propose());
      if (is_enough()) return;
    }
    add(schedule);
  }

  const loop_ir::Kernel kernel_;
  const SizeHints& hints_;
  const std::string arch_;
  const bool deterministic_;
  const bool only_first_;
  bool is_product_ = false;
  std::vector<Schedule> found_;
};

}  // namespace

std::string gpu_arch(const PassContext& ctx) { return ctx.target.features.empty() ? "sm_80" : *ctx.target.features.begin(); }

int64_t gpu_key_parts(const loop_ir::Kernel& kernel, const PassContext& ctx) { return GpuOnline(kernel).parts(ctx.hints, gpu_arch(ctx)); }

bool gpu_chains(const loop_ir::Kernel& kernel, const PassContext& ctx) {
  if (GpuChain(kernel).fits(ctx.hints, gpu_arch(ctx))) return true;
  const GpuStencilChain stencils(kernel);
  return stencils.fits() && stencils.is_worth(ctx.hints, gpu_arch(ctx));
}

bool gpu_multiplies(const loop_ir::Kernel& kernel, const PassContext& ctx) {
  const std::string kind = propose_gpu(kernel, ctx).kind;
  return kind != "gpu_points" && kind != "gpu_rows" && kind != "gpu_serial";
}

Schedule propose_gpu(const loop_ir::Kernel& kernel, const PassContext& ctx) { return Forms(kernel, ctx, true).all().front(); }

std::vector<Schedule> propose_gpu_forms(const loop_ir::Kernel& kernel, const PassContext& ctx) { return Forms(kernel, ctx, false).all(); }

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
