#include "target/cpu/schedule/scheduler.h"

#include <algorithm>

#include "analysis/cost.h"
#include "base/error.h"
#include "lower/loop_to_tile/convert.h"
#include "lower/loop_to_tile/layers.h"
#include "lower/loop_to_tile/masked_keys.h"
#include "program_ir/facts.h"
#include "schedule/reader.h"
#include "target/cpu/schedule/contraction.h"
#include "target/cpu/schedule/nest.h"
#include "target/cpu/schedule/online.h"
#include "target/cpu/schedule/rows.h"
#include "target/cpu/schedule/variants.h"

namespace deplo {
namespace {

constexpr size_t kSharedSteps = 16;    // after which nobody reads what a step packed: it stays in memory meanwhile
constexpr double kMostStreamed = 4e6;  // multiply-adds of a contraction beyond which one without packing is no candidate

using Given = std::map<std::string, Schedule>;

/// A kernel that does nothing at sizes of which one of `conditions` holds: its only loop has no iterations there.
tile_ir::Kernel empty_where(tile_ir::Kernel kernel, const std::vector<Cond>& conditions) {
  auto loop = std::get<tile_ir::For>(kernel.body.at(0)->node);
  for (const Cond& c : conditions) {
    DEPLO_ASSERT(c.kind == Cond::Kind::ge0, "a version for sizes at which {}", print(std::vector<Cond>{c}));
    loop.axis.hi = loop.axis.hi * min(1, max(0, Expr(0) - c.expr));
  }
  kernel.body = {loop_to_tile::make(std::move(loop))};
  return kernel;
}

/// Refuses a schedule that takes for granted of weights what nobody looks at for this version of the kernel: that they fit 4 bits, or have no zero
/// points.
void check_assumptions(const std::string& kernel, const Schedule& schedule, bool few_bits, bool centered) {
  for (const Directive& d : schedule.directives)
    for (const Argument& a : d.arguments)
      if ((!few_bits && a == Argument{"bits", int64_t{4}}) || (!centered && a == Argument{"centered", {}}))
        ScheduleReader(kernel, schedule)
            .fail(d,
                  fmt::format("'{}' is for versions of a kernel that run where weights allow it: NAME_few_bits takes bits=4, NAME_few_bits_centered "
                              "takes centered, too",
                              a.name));
}

class CpuScheduler final : public Scheduler {
 public:
  CpuScheduler(const loop_ir::Module& module, const PassContext& context) : module_(module), ctx_(context) {}

  void add_kernel(const loop_ir::Kernel& kernel, const Given& given, tile_ir::Module& out) override {
    std::set<std::string> statics = loop_to_tile::static_params(module_, kernel);
    auto contraction = propose_cpu_contraction(kernel, statics, ctx_);
    if (contraction && !contraction->unless.empty()) {
      loop_ir::Kernel small = kernel;
      small.name = kernel.name + "_small";
      auto streamed = given.find(small.name);
      apply(small, streamed != given.end() ? streamed->second : propose_streamed(small), statics, out);
      versions_[kernel.name] = {small.name, contraction->unless};
    }
    const auto rows = contraction ? std::nullopt : propose_cpu_online_few(kernel, ctx_);
    if (rows) {
      loop_ir::Kernel small = kernel;
      small.name = kernel.name + "_small";
      auto of_few = given.find(small.name);
      apply(small, of_few != given.end() ? of_few->second : rows->schedule, statics, out);
      versions_[kernel.name] = {small.name, rows->when};
    }
    auto found = given.find(kernel.name);
    const auto is_input = [&](const AssumedRange& range) { return loop_to_tile::holds_inputs(module_, kernel, range.param); };
    for (const FewBits& few_bits : propose_few_bits(kernel, statics, ctx_)) {
      loop_ir::Kernel few = kernel;
      few.name = kernel.name + few_bits.version;
      const bool wanted = found == given.end() || given.count(few.name) > 0;
      if (!wanted || !std::all_of(few_bits.ranges.begin(), few_bits.ranges.end(), is_input)) continue;
      if (given.count(few.name) > 0) check_assumptions(few.name, given.at(few.name), true, few_bits.version == kCenteredVersion);
      apply(few, given.count(few.name) > 0 ? given.at(few.name) : few_bits.schedule, statics, out);
      few_[kernel.name].push_back({few.name, few_bits.ranges});
    }
    if (found != given.end()) check_assumptions(kernel.name, found->second, false, false);
    apply(kernel,
          found != given.end() ? found->second
          : contraction        ? contraction->schedule
                               : propose_streamed(kernel),
          statics, out, contraction ? contraction->unless : std::vector<Cond>{});
  }

  /// The call, by the version for its sizes where its kernel has two.
  void add_call(const CallStep& call, tile_ir::Module& out) override {
    // Versions follow one another, each instead of those before it: what they pack is made ahead of them all.
    const CallStep main = with_packed(call, out);
    std::vector<CallStep> calls;
    for (const FewBitsVersion& few : few_[call.kernel]) {
      CallStep with_few = call;
      with_few.kernel = few.kernel;
      with_few = with_packed(with_few, out);
      const tile_ir::Kernel& kernel = *out.find_kernel(with_few.kernel);
      for (const AssumedRange& range : few.ranges) {
        const auto param = std::find_if(kernel.params.begin(), kernel.params.end(), [&](const auto& p) { return p.name == range.param; });
        const std::string fact = add_fact(out, call.arguments[static_cast<size_t>(param - kernel.params.begin())], range.lo, range.hi);
        with_few.when.push_back({Cond::Kind::ge0, Expr::symbol(fact) - 1});
      }
      calls.push_back(std::move(with_few));
    }
    if (auto version = versions_.find(call.kernel); version != versions_.end()) {
      CallStep small = call;
      small.kernel = version->second.kernel;
      small = with_packed(small, out);
      for (const Cond& c : version->second.when) {
        small.when = {c};
        calls.push_back(small);
      }
    }
    calls.push_back(main);
    for (CallStep& each : calls) {
      each.is_alternative = &each != &calls.front();
      out.steps.emplace_back(std::move(each));
    }
  }

  std::vector<Schedule> proposals(const loop_ir::Kernel& kernel, const std::string& version) const override {
    std::vector<Schedule> all;
    auto add = [&](const Schedule& s) {
      if (std::find(all.begin(), all.end(), s) == all.end()) all.push_back(s);
    };
    if (version.empty()) {
      const std::set<std::string> statics = loop_to_tile::static_params(module_, kernel);
      if (auto chosen = propose_cpu_contraction(kernel, statics, ctx_)) add(chosen->schedule);
      for (const Schedule& s : propose_cpu_contractions(kernel, statics, ctx_)) add(s);
    } else if (version != "_small") {
      return {};
    } else if (auto few = propose_cpu_online_few(kernel, ctx_)) {
      add(few->schedule);
    }
    const bool is_packed = !all.empty();
    if (!is_packed) add(propose_streamed(kernel));
    if (auto online = propose_cpu_online(kernel, ctx_)) add(*online);
    if (auto rows = propose_cpu_rows(kernel, ctx_)) add(*rows);
    if (!is_packed || multiply_adds(kernel) <= kMostStreamed) add(propose_cpu_nest(kernel, ctx_));
    return all;
  }

  std::vector<Direction> directions(const loop_ir::Kernel& kernel, const std::string& version, const Schedule& base, bool wide) const override {
    const Extents extents = extents_of(kernel, ctx_);
    std::map<std::string, int64_t> longest;
    for (const Schedule& s : proposals(kernel, version))
      for (const auto& [name, sum] : longest_sums(s, extents)) longest[name] = std::max(longest[name], sum);
    return cpu_directions(base, extents, longest, wide, ctx_);
  }

 private:
  double multiply_adds(const loop_ir::Kernel& kernel) const {
    return analysis::estimate(analysis::cost_of(kernel).flops, ctx_.hints, kernel.symbols) / 2;
  }

  Schedule propose_streamed(const loop_ir::Kernel& kernel) const {
    if (auto online = propose_cpu_online(kernel, ctx_)) return *online;
    // Few rows pay less for reading keys twice than for packing those that a mask leaves out.
    if (loop_to_tile::has_masked_keys(kernel)) return propose_cpu_nest(kernel, ctx_);
    if (auto rows = propose_cpu_rows(kernel, ctx_)) return *rows;
    return propose_cpu_nest(kernel, ctx_);
  }

  /// `unless`: the sizes at which another version runs in this one's place.
  void apply(const loop_ir::Kernel& kernel, const Schedule& schedule, const std::set<std::string>& statics, tile_ir::Module& out,
             const std::vector<Cond>& unless = {}) {
    if (schedule.kind == "contraction") {
      ScheduledContraction contraction = apply_cpu_contraction(kernel, schedule, statics, ctx_);
      for (const PackedOperand& p : contraction.packed) add(p.once ? p.kernel : empty_where(p.kernel, unless), out);
      if (!contraction.packed.empty()) packed_[kernel.name] = contraction.packed;
      add(std::move(contraction.kernel), out);
    } else if (schedule.kind == "rows") {
      add(apply_cpu_rows(kernel, schedule, ctx_), out);
    } else if (schedule.kind == "online") {
      add(apply_cpu_online(kernel, schedule, ctx_), out);
    } else {
      if (schedule.kind != "nest")
        ScheduleReader(kernel.name, schedule).fail("unknown kind; a CPU kernel is allowed to be contraction, rows, online or nest");
      add(apply_cpu_nest(kernel, schedule, ctx_), out);
    }
  }

  static void add(tile_ir::Kernel kernel, tile_ir::Module& out) { out.kernels.push_back(std::make_shared<tile_ir::Kernel>(std::move(kernel))); }

  /// The call with its packed operands, which steps before it make.
  CallStep with_packed(const CallStep& call, tile_ir::Module& out) {
    auto packed = packed_.find(call.kernel);
    if (packed == packed_.end()) return call;
    const tile_ir::Kernel& kernel = *out.find_kernel(call.kernel);
    std::map<std::string, std::string> bound;
    for (size_t i = 0; i < call.arguments.size(); ++i) bound[kernel.params[i].name] = call.arguments[i];
    CallStep extended = call;
    for (const PackedOperand& p : packed->second) {
      std::vector<std::string> sources;
      for (const std::string& source : p.sources) sources.push_back(bound.at(source));
      // As it was added: one that packs nothing at the sizes of another version is another kernel.
      const std::string text = p.once ? "" : text_of(*out.find_kernel(p.kernel.name));
      if (const Made* made = p.once ? nullptr : made_before(text, sources, out)) {
        extended.arguments.push_back(made->buffer);
        continue;
      }
      Buffer buffer;
      buffer.name = fresh_buffer(out);
      buffer.dtype = p.dtype;
      buffer.shape = p.shape;
      buffer.strides = contiguous_strides(p.shape);
      buffer.kind = p.once ? BufferKind::packed : BufferKind::temp;
      CallStep make{p.kernel.name, sources, p.once};
      make.arguments.push_back(buffer.name);
      if (!p.once) made_.push_back({text, std::move(sources), buffer.name, out.steps.size()});
      extended.arguments.push_back(buffer.name);
      out.buffers.push_back(std::move(buffer));
      out.steps.emplace_back(std::move(make));
    }
    return extended;
  }

  /// What a step of each call packed.
  struct Made {
    std::string kernel;  ///< its text, without a name
    std::vector<std::string> sources;
    std::string buffer;
    size_t step = 0;
  };

  /// A step not long ago that packed the same: layers that read the same rows share what is packed of them.
  const Made* made_before(const std::string& text, const std::vector<std::string>& sources, const tile_ir::Module& out) {
    std::erase_if(made_, [&](const Made& made) { return made.step + kSharedSteps < out.steps.size() || changed_since(made, out); });
    const auto same = std::find_if(made_.begin(), made_.end(), [&](const Made& made) { return made.sources == sources && made.kernel == text; });
    return same == made_.end() ? nullptr : &*same;
  }

  /// Whether a later step may have written what was packed.
  static bool changed_since(const Made& made, const tile_ir::Module& out) {
    auto is_source = [&](const std::string& buffer) { return std::find(made.sources.begin(), made.sources.end(), buffer) != made.sources.end(); };
    for (size_t s = made.step + 1; s < out.steps.size(); ++s) {
      const auto* call = std::get_if<CallStep>(&out.steps[s]);
      if (!call) return true;
      const tile_ir::Kernel& kernel = *out.find_kernel(call->kernel);
      for (size_t i = 0; i < call->arguments.size(); ++i)
        if (kernel.params[i].kind != loop_ir::ParamKind::in && is_source(call->arguments[i])) return true;
    }
    return false;
  }

  static std::string text_of(const tile_ir::Kernel& kernel) {
    tile_ir::Kernel anonymous = kernel;
    anonymous.name = "@k";
    anonymous.provenance.clear();
    return tile_ir::print(anonymous);
  }

  std::string fresh_buffer(const tile_ir::Module& out) {
    while (true) {
      std::string name = "panel" + std::to_string(next_++);
      if (!out.find_buffer(name)) return name;
    }
  }

  const loop_ir::Module& module_;
  const PassContext& ctx_;
  std::map<std::string, std::vector<PackedOperand>> packed_;
  std::vector<Made> made_;
  struct Version {
    std::string kernel;
    std::vector<Cond> when;  ///< any of them
  };
  std::map<std::string, Version> versions_;  ///< for small sizes, by the kernel for all others
  struct FewBitsVersion {
    std::string kernel;
    std::vector<AssumedRange> ranges;
  };
  std::map<std::string, std::vector<FewBitsVersion>> few_;  ///< for weights that fit 4 bits, likewise
  int next_ = 0;
};

}  // namespace

std::unique_ptr<Scheduler> make_cpu_scheduler(const loop_ir::Module& module, const PassContext& context) {
  return std::make_unique<CpuScheduler>(module, context);
}

}  // namespace deplo
