#include "lower/loop_to_tile/layers.h"

#include "analysis/contraction.h"
#include "loop_ir/build.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {

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

bool holds_inputs(const loop_ir::Module& module, const loop_ir::Kernel& kernel, const std::string& param) {
  for (const Step& step : module.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call || call->kernel != kernel.name) continue;
    for (size_t i = 0; i < kernel.params.size(); ++i) {
      if (kernel.params[i].name != param) continue;
      const Buffer* buffer = module.find_buffer(call->arguments[i]);
      if (!buffer || buffer->kind != BufferKind::input || !buffer->is_static) return false;
    }
  }
  return true;
}

loop_ir::Kernel with_row(const loop_ir::Kernel& kernel, const std::set<std::string>& statics) {
  if (!analysis::find_contractions(kernel).empty()) return kernel;
  loop_ir::Nest nest = loop_ir::peel(kernel.body);
  if (nest.axes.empty()) return kernel;
  bool found = false;
  for (auto& stmt : nest.body) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    if (!reduce) continue;
    loop_ir::Reduce copy = *reduce;
    for (auto& inner : copy.body) {
      const auto* load = std::get_if<loop_ir::Load>(&inner->node);
      const loop_ir::Param* param = load ? kernel.find_param(load->buffer) : nullptr;
      if (!param || statics.count(load->buffer) > 0) continue;
      loop_ir::Load with = *load;
      for (size_t d = 0; d < with.index.size(); ++d)
        if (with.index[d].is(0) && param->shape[d].is(1)) {
          with.index[d] = Expr::symbol(kOnlyRow);
          found = true;
          break;
        }
      inner = loop_ir::make_stmt(std::move(with));
    }
    stmt = loop_ir::make_stmt(std::move(copy));
  }
  if (!found) return kernel;
  nest.axes.insert(nest.axes.begin(), {kOnlyRow, 1});
  loop_ir::Kernel out = kernel;
  out.body = loop_ir::make_nest(nest.axes, nest.body);
  return analysis::find_contractions(out).empty() ? kernel : out;
}

}  // namespace deplo::loop_to_tile
