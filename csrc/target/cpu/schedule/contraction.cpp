#include "target/cpu/schedule/contraction.h"

#include "lower/loop_to_tile/merge_axes.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo {

using namespace loop_to_tile;

namespace {

struct Best {
  ProposedContraction proposed;
  double work = 0;
  bool plain = false;    ///< its packed operands are weights as they are
  bool in_rows = false;  ///< the other operand's vectors are packed once a call, and weights go by in rows
};

std::optional<Best> propose_best(const loop_ir::Kernel& merged, const std::set<std::string>& statics, const PassContext& ctx) {
  ContractionScheduler along(merged, statics, ctx);
  auto schedule = along.propose();
  if (!schedule) return std::nullopt;
  double best = along.padded_work();
  bool plain = along.keeps_plain_weights();
  bool in_rows = false;
  auto consider = [&](auto propose) {
    ContractionScheduler other(merged, statics, ctx);
    if (auto better = propose(other)) {
      schedule = better;
      best = other.padded_work();
      plain = other.keeps_plain_weights();
      in_rows = other.reads_rows();
    }
  };
  consider([&](ContractionScheduler& s) { return s.propose_across(best); });
  consider([&](ContractionScheduler& s) { return s.propose_apart(best); });
  const bool changing = along.lanes_change();
  for (bool across : {true, false})
    if (changing) consider([&](ContractionScheduler& s) { return s.propose_per_call(across, best); });
  for (bool across : {true, false})
    for (bool per_call : {false, changing}) consider([&](ContractionScheduler& s) { return s.propose_window(across, per_call, best); });
  return Best{{*schedule, *along.streamed()}, best, plain, in_rows};
}

}  // namespace

std::optional<ProposedContraction> propose_cpu_contraction(const loop_ir::Kernel& kernel, const std::set<std::string>& statics,
                                                           const PassContext& ctx) {
  constexpr double kSmallGain = 1.05;  // of packed weights, which is not worth a copy of them
  const loop_ir::Kernel merged = merge_outer_axes(kernel);
  auto best = propose_best(merged, statics, ctx);
  if (!best) return std::nullopt;
  if (ctx.weights == Weights::automatic && best->plain) {
    PassContext without = ctx;
    without.weights = Weights::original;
    auto original = propose_best(merged, statics, without);
    if (original && original->in_rows && original->work <= kSmallGain * best->work) return original->proposed;
  }
  return best->proposed;
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
