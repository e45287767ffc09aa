#include "lower/lower.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/text.h"
#include "lower/loop_to_tile/cpu_contraction.h"
#include "lower/loop_to_tile/cpu_nest.h"
#include "lower/loop_to_tile/cpu_rows.h"
#include "lower/loop_to_tile/gpu.h"
#include "schedule/reader.h"

namespace deplo {
namespace {

/// Params that are bound to static inputs, or to what `once` steps made, at every call of the kernel.
std::set<std::string> static_params(const loop_ir::Module& module, const loop_ir::Kernel& kernel) {
  std::set<std::string> names;
  for (const auto& p : kernel.params)
    if (p.kind == loop_ir::ParamKind::in) names.insert(p.name);
  for (const Step& step : module.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call || call->kernel != kernel.name) continue;
    for (size_t i = 0; i < kernel.params.size(); ++i) {
      const Buffer* buffer = module.find_buffer(call->arguments[i]);
      bool fixed = buffer && ((buffer->kind == BufferKind::input && buffer->is_static) || buffer->kind == BufferKind::packed);
      if (!fixed) names.erase(kernel.params[i].name);
    }
  }
  return names;
}

class Lowering {
 public:
  Lowering(const loop_ir::Module& module, const PassContext& ctx) : module_(module), ctx_(ctx) {}

  tile_ir::Module run() {
    static_cast<ProgramBody&>(out_) = module_;
    out_.steps.clear();
    read_given();
    for (const auto& kernel : module_.kernels) schedule(*kernel);
    check_given();
    for (const Step& step : module_.steps) {
      if (const auto* call = std::get_if<CallStep>(&step))
        add_call(*call);
      else
        out_.steps.push_back(step);
    }
    return std::move(out_);
  }

 private:
  /// The schedules that the options give: every entry is one kernel's, or text that names its kernels.
  void read_given() {
    for (const auto& [key, text] : ctx_.schedules)
      for (auto& [name, schedule] : parse_schedules(text, key.empty() ? "<schedule>" : fmt::format("<schedule of {}>", key))) {
        DEPLO_CHECK(!name.empty() || !key.empty(), "schedule '{}' names no kernel; write 'schedule @name: ...' or give a dict from kernel name",
                    print(schedule));
        DEPLO_CHECK(name.empty() || key.empty() || name == key, "the schedule given for kernel {} is one of @{}", key, name);
        const std::string& kernel = name.empty() ? key : name;
        DEPLO_CHECK(given_.emplace(kernel, schedule).second, "two schedules are given for kernel {}", kernel);
      }
  }

  /// Schedules for no kernel of the program, and those of packing kernels, which follow from the kernels that they pack for.
  void check_given() const {
    std::vector<std::string> names;
    for (const auto& kernel : out_.kernels) names.push_back(kernel->name);
    for (const auto& [name, schedule] : given_) {
      DEPLO_CHECK(out_.find_kernel(name), "a schedule is given for kernel {}, which the program does not have; its kernels are {}", name,
                  joined(names));
      const Schedule& applied = out_.find_kernel(name)->schedule;
      DEPLO_CHECK(applied == schedule,
                  "schedule of kernel {}: it packs an operand, so that its schedule follows from that of the kernel that it "
                  "packs for: '{}', not '{}'",
                  name, print(applied), print(schedule));
    }
  }

  void schedule(const loop_ir::Kernel& kernel) {
    if (ctx_.target.name == "cuda") {
      const Schedule* given = given_schedule(kernel.name);
      add(apply_gpu(kernel, given ? *given : propose_gpu(kernel, ctx_), ctx_));
      return;
    }
    std::set<std::string> statics = static_params(module_, kernel);
    const Schedule* given = given_schedule(kernel.name);
    auto contraction = propose_cpu_contraction(kernel, statics, ctx_);
    if (contraction && !contraction->unless.empty()) {
      loop_ir::Kernel small = kernel;
      small.name = kernel.name + "_small";
      const Schedule* given_small = given_schedule(small.name);
      apply(small, given_small ? *given_small : propose_streamed(small), statics);
      versions_[kernel.name] = {small.name, contraction->unless};
    }
    apply(kernel, given ? *given : contraction ? contraction->schedule : propose_streamed(kernel), statics);
  }

  const Schedule* given_schedule(const std::string& kernel) const {
    auto given = given_.find(kernel);
    return given == given_.end() ? nullptr : &given->second;
  }

  Schedule propose_streamed(const loop_ir::Kernel& kernel) const {
    if (auto rows = propose_cpu_rows(kernel, ctx_)) return *rows;
    return propose_cpu_nest(kernel, ctx_);
  }

  void apply(const loop_ir::Kernel& kernel, const Schedule& schedule, const std::set<std::string>& statics) {
    if (schedule.kind == "contraction") {
      ScheduledContraction contraction = apply_cpu_contraction(kernel, schedule, statics, ctx_);
      for (const PackedOperand& p : contraction.packed) add(p.kernel);
      if (!contraction.packed.empty()) packed_[kernel.name] = contraction.packed;
      add(std::move(contraction.kernel));
    } else if (schedule.kind == "rows") {
      add(apply_cpu_rows(kernel, schedule, ctx_));
    } else {
      if (schedule.kind != "nest")
        ScheduleReader(kernel.name, schedule).fail("unknown kind; a CPU kernel is allowed to be contraction, rows or nest");
      add(apply_cpu_nest(kernel, schedule, ctx_));
    }
  }

  void add(tile_ir::Kernel kernel) { out_.kernels.push_back(std::make_shared<tile_ir::Kernel>(std::move(kernel))); }

  /// The call, by the version for its sizes where its kernel has two.
  void add_call(const CallStep& call) {
    CallStep main = with_packed(call);
    if (auto version = versions_.find(call.kernel); version != versions_.end()) {
      CallStep small = call;
      small.kernel = version->second.kernel;
      small = with_packed(small);
      for (const Cond& c : version->second.when) {
        small.when = {c};
        out_.steps.emplace_back(small);
        small.is_alternative = true;
      }
      main.is_alternative = true;
    }
    out_.steps.emplace_back(std::move(main));
  }

  /// The call with its packed operands, which `once` steps before it make.
  CallStep with_packed(const CallStep& call) {
    auto packed = packed_.find(call.kernel);
    if (packed == packed_.end()) return call;
    const tile_ir::Kernel& kernel = *out_.find_kernel(call.kernel);
    std::map<std::string, std::string> bound;
    for (size_t i = 0; i < call.arguments.size(); ++i) bound[kernel.params[i].name] = call.arguments[i];
    CallStep extended = call;
    for (const PackedOperand& p : packed->second) {
      Buffer buffer;
      buffer.name = fresh_buffer();
      buffer.dtype = p.dtype;
      buffer.shape = p.shape;
      buffer.strides = contiguous_strides(p.shape);
      buffer.kind = BufferKind::packed;
      CallStep make{p.kernel.name, {}, true};
      for (const std::string& source : p.sources) make.arguments.push_back(bound.at(source));
      make.arguments.push_back(buffer.name);
      extended.arguments.push_back(buffer.name);
      out_.buffers.push_back(std::move(buffer));
      out_.steps.emplace_back(std::move(make));
    }
    return extended;
  }

  std::string fresh_buffer() {
    while (true) {
      std::string name = "panel" + std::to_string(next_++);
      if (!out_.find_buffer(name)) return name;
    }
  }

  const loop_ir::Module& module_;
  const PassContext& ctx_;
  tile_ir::Module out_;
  std::map<std::string, Schedule> given_;
  std::map<std::string, std::vector<PackedOperand>> packed_;
  struct Version {
    std::string kernel;
    std::vector<Cond> when;  ///< any of them
  };
  std::map<std::string, Version> versions_;  ///< for small sizes, by the kernel for all others
  int next_ = 0;
};

}  // namespace

tile_ir::Module lower_loop_to_tile(const loop_ir::Module& module, const PassContext& ctx) { return Lowering(module, ctx).run(); }

}  // namespace deplo
