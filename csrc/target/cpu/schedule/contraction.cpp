#include "target/cpu/schedule/contraction.h"

#include "lower/loop_to_tile/merge_axes.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo {

using namespace loop_to_tile;

std::optional<ProposedContraction> propose_cpu_contraction(const loop_ir::Kernel& kernel, const std::set<std::string>& statics,
                                                           const PassContext& ctx) {
  loop_ir::Kernel merged = merge_outer_axes(kernel);
  ContractionScheduler along(merged, statics, ctx);
  auto schedule = along.propose();
  if (!schedule) return std::nullopt;
  double best = along.padded_work();
  auto consider = [&](ContractionScheduler&& other, auto propose) {
    if (auto better = propose(other)) {
      schedule = better;
      best = other.padded_work();
    }
  };
  consider(ContractionScheduler(merged, statics, ctx), [&](ContractionScheduler& s) { return s.propose_across(best); });
  consider(ContractionScheduler(merged, statics, ctx), [&](ContractionScheduler& s) { return s.propose_apart(best); });
  const bool changing = !along.lanes_static();
  for (bool across : {true, false})
    if (changing) consider(ContractionScheduler(merged, statics, ctx), [&](ContractionScheduler& s) { return s.propose_per_call(across, best); });
  for (bool across : {true, false})
    for (bool per_call : {false, changing})
      consider(ContractionScheduler(merged, statics, ctx), [&](ContractionScheduler& s) { return s.propose_window(across, per_call, best); });
  return ProposedContraction{*schedule, *along.streamed()};
}

ScheduledContraction apply_cpu_contraction(const loop_ir::Kernel& kernel, const Schedule& schedule, const std::set<std::string>& statics,
                                           const PassContext& ctx) {
  return ContractionScheduler(merge_outer_axes(kernel), statics, ctx).apply(schedule);
}

int64_t contraction_rows(int64_t rows, const PassContext& ctx) { return round_up(rows, register_rows(rows, kBlockVectors, ctx)); }

std::optional<std::vector<Directive>> propose_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const PassContext& ctx) {
  return ContractionScheduler(kernel, {}, ctx).propose_rows(rows);
}

tile_ir::Block apply_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const Schedule& schedule, const PassContext& ctx) {
  return ContractionScheduler(kernel, {}, ctx).apply_rows(rows, schedule);
}

}  // namespace deplo
