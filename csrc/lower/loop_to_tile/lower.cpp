#include "lower/lower.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "lower/loop_to_tile/cpu_contraction.h"
#include "lower/loop_to_tile/cpu_nest.h"
#include "lower/loop_to_tile/cpu_rows.h"
#include "lower/loop_to_tile/gpu.h"

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
    for (const auto& kernel : module_.kernels) schedule(*kernel);
    for (const Step& step : module_.steps) {
      const auto* call = std::get_if<CallStep>(&step);
      auto packed = call ? packed_.find(call->kernel) : packed_.end();
      if (packed == packed_.end())
        out_.steps.push_back(step);
      else
        add_call(*call, packed->second);
    }
    return std::move(out_);
  }

 private:
  void schedule(const loop_ir::Kernel& kernel) {
    if (ctx_.target.name == "cuda") {
      add(schedule_gpu(kernel, ctx_));
      return;
    }
    std::set<std::string> statics = static_params(module_, kernel);
    auto proposed = propose_cpu_contraction(kernel, statics, ctx_);
    if (!proposed) {
      auto rows = schedule_cpu_rows(kernel, ctx_);
      add(rows ? std::move(*rows) : schedule_cpu_nest(kernel, ctx_));
      return;
    }
    ScheduledContraction contraction = apply_cpu_contraction(kernel, *proposed, statics, ctx_);
    for (const PackedOperand& p : contraction.packed) add(p.kernel);
    if (!contraction.packed.empty()) packed_[kernel.name] = contraction.packed;
    add(std::move(contraction.kernel));
  }

  void add(tile_ir::Kernel kernel) { out_.kernels.push_back(std::make_shared<tile_ir::Kernel>(std::move(kernel))); }

  /// The call with its packed operands made before it, by `once` steps.
  void add_call(const CallStep& call, const std::vector<PackedOperand>& packed) {
    const loop_ir::Kernel& kernel = *module_.find_kernel(call.kernel);
    std::map<std::string, std::string> bound;
    for (size_t i = 0; i < kernel.params.size(); ++i) bound[kernel.params[i].name] = call.arguments[i];
    CallStep extended = call;
    for (const PackedOperand& p : packed) {
      Buffer buffer;
      buffer.name = fresh_buffer();
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
    out_.steps.emplace_back(std::move(extended));
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
  std::map<std::string, std::vector<PackedOperand>> packed_;
  int next_ = 0;
};

}  // namespace

tile_ir::Module lower_loop_to_tile(const loop_ir::Module& module, const PassContext& ctx) {
  // Better refused than ignored: the text that is printed cannot be read back yet.
  DEPLO_CHECK(ctx.schedules.empty(), "schedule: schedules given by hand are not applied yet; leave the option out ('{}' was given)",
              ctx.schedules.begin()->second);
  return Lowering(module, ctx).run();
}

}  // namespace deplo
