#include "target/cpu/schedule/contraction.h"

#include <algorithm>
#include <limits>

#include "loop_ir/build.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/forward_taps.h"
#include "lower/loop_to_tile/layers.h"
#include "lower/loop_to_tile/merge_axes.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo {

using namespace loop_to_tile;

namespace {

/// The kernel as schedules see it.
loop_ir::Kernel prepared(const loop_ir::Kernel& kernel, const std::set<std::string>& statics) {
  return with_row(with_forward_taps(merge_outer_axes(kernel)), statics);
}

struct Best {
  ProposedContraction proposed;
  double work = 0;
  bool plain = false;    ///< its packed operands are weights as they are
  bool in_rows = false;  ///< the other operand's vectors are packed once a call, and weights go by in rows
  double reading = 0;    ///< what reading weights as they lie costs beyond `work`
};

std::optional<Best> propose_best(const loop_ir::Kernel& merged, const std::set<std::string>& statics, const PassContext& ctx) {
  ContractionScheduler along(merged, statics, ctx);
  auto schedule = along.propose();
  if (!schedule) return std::nullopt;
  double best = along.padded_work();
  bool plain = along.keeps_plain_weights();
  bool in_rows = false;
  double reading = 0;
  auto consider = [&](auto propose) {
    ContractionScheduler other(merged, statics, ctx);
    if (auto better = propose(other)) {
      schedule = better;
      best = other.padded_work();
      plain = other.keeps_plain_weights();
      in_rows = other.reads_rows();
      reading = in_rows ? other.reading_rows() : 0;
    }
  };
  consider([&](ContractionScheduler& s) { return s.propose_across(best); });
  consider([&](ContractionScheduler& s) { return s.propose_apart(best); });
  const bool changing = along.lanes_change();
  for (bool across : {true, false})
    if (changing) consider([&](ContractionScheduler& s) { return s.propose_per_call(across, best); });
  for (bool across : {true, false})
    for (bool per_call : {false, changing}) consider([&](ContractionScheduler& s) { return s.propose_window(across, per_call, best); });
  return Best{{*schedule, *along.streamed()}, best, plain, in_rows, reading};
}

}  // namespace

std::optional<ProposedContraction> propose_cpu_contraction(const loop_ir::Kernel& kernel, const std::set<std::string>& statics,
                                                           const PassContext& ctx) {
  constexpr double kSmallGain = 1.05;  // of packed weights, which is not worth a copy of them
  const loop_ir::Kernel merged = prepared(kernel, statics);
  auto best = propose_best(merged, statics, ctx);
  if (!best) return std::nullopt;
  if (ctx.weights == Weights::automatic && best->plain) {
    PassContext without = ctx;
    without.weights = Weights::original;
    auto original = propose_best(merged, statics, without);
    if (original && original->in_rows && original->work + original->reading <= kSmallGain * best->work) return original->proposed;
  }
  return best->proposed;
}

std::vector<Schedule> propose_cpu_contractions(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx) {
  constexpr double kAny = std::numeric_limits<double>::max();
  const loop_ir::Kernel merged = prepared(kernel, statics);
  std::vector<Schedule> all;
  auto add = [&](const PassContext& context, auto propose) {
    ContractionScheduler scheduler(merged, statics, context);
    if (auto schedule = propose(scheduler)) all.push_back(std::move(*schedule));
  };
  auto add_all = [&](const PassContext& context) {
    add(context, [](ContractionScheduler& s) { return s.propose(); });
    add(context, [](ContractionScheduler& s) { return s.propose_across(kAny); });
    add(context, [](ContractionScheduler& s) { return s.propose_apart(kAny); });
    for (bool across : {true, false}) {
      add(context, [&](ContractionScheduler& s) { return s.propose_per_call(across, kAny); });
      for (bool per_call : {false, true}) add(context, [&](ContractionScheduler& s) { return s.propose_window(across, per_call, kAny); });
    }
  };
  const auto chosen = propose_cpu_contraction(kernel, statics, ctx);
  if (!chosen) return {};
  PassContext original = ctx;
  original.weights = Weights::original;
  const Argument program{"at", "program"};
  const auto& words = chosen->schedule.directives;
  const bool packs = std::any_of(words.begin(), words.end(), [&](const Directive& d) {
    return d.word == "pack" && std::find(d.arguments.begin(), d.arguments.end(), program) != d.arguments.end();
  });
  if (packs || ctx.weights == Weights::packed) add_all(ctx);
  add_all(original);
  return all;
}

std::vector<FewBits> propose_few_bits(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx) {
  const loop_ir::Kernel merged = prepared(kernel, statics);
  std::vector<FewBits> out;
  for (bool centered : {false, true}) {
    ContractionScheduler scheduler(merged, statics, ctx, /*bits=*/4, centered);
    auto schedule = scheduler.propose();
    if (!schedule) return out;
    FewBits found{centered ? kCenteredVersion : "_few_bits", *schedule, scheduler.few_bits()};
    if (found.ranges.empty() || !scheduler.streamed()->empty()) return out;
    const bool has_centers = out.empty() || found.ranges.size() > out.front().ranges.size();
    if (has_centers) out.insert(out.begin(), std::move(found));
  }
  return out;
}

ScheduledContraction apply_cpu_contraction(const loop_ir::Kernel& kernel, const Schedule& schedule, const std::set<std::string>& statics,
                                           const PassContext& ctx) {
  return ContractionScheduler(prepared(kernel, statics), statics, ctx).apply(schedule);
}

int64_t contraction_rows(int64_t rows, const PassContext& ctx) { return round_up(rows, register_rows(rows, kBlockVectors, ctx)); }

std::optional<std::vector<Directive>> propose_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const PassContext& ctx) {
  return ContractionScheduler(kernel, {}, ctx).propose_rows(rows);
}

tile_ir::Block apply_contraction_rows(const loop_ir::Kernel& kernel, const ContractionRows& rows, const Schedule& schedule, const PassContext& ctx) {
  return ContractionScheduler(kernel, {}, ctx).apply_rows(rows, schedule);
}

}  // namespace deplo
