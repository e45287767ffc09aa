#include "lower/loop_to_tile/alone.h"

#include <bit>

#include "base/sha256.h"
#include "base/text.h"

namespace deplo::loop_to_tile {
namespace {

constexpr const char* kName = "alone";

bool is_fixed(const loop_ir::Module& module, const loop_ir::Kernel& kernel, size_t param) {
  bool called = false;
  for (const Step& step : module.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call || call->kernel != kernel.name) continue;
    called = true;
    const Buffer* buffer = module.find_buffer(call->arguments[param]);
    if (!buffer || !((buffer->kind == BufferKind::input && buffer->is_static) || buffer->kind == BufferKind::packed)) return false;
  }
  return called;
}

}  // namespace

loop_ir::Module alone(const loop_ir::Module& module, const loop_ir::Kernel& kernel) {
  loop_ir::Module out;
  out.name = kName;
  out.symbols = kernel.symbols;
  CallStep call{kName, {}};
  std::vector<Buffer> results;
  for (size_t i = 0; i < kernel.params.size(); ++i) {
    const loop_ir::Param& p = kernel.params[i];
    Buffer buffer{p.name, p.dtype, p.shape, p.strides};
    call.arguments.push_back(p.name);
    if (p.kind == loop_ir::ParamKind::out) {
      buffer.kind = BufferKind::output;
      results.push_back(std::move(buffer));
      out.outputs.emplace_back(ValueName{p.name});
      continue;
    }
    buffer.kind = BufferKind::input;
    buffer.is_static = p.kind == loop_ir::ParamKind::in && is_fixed(module, kernel, i);
    out.input_order.push_back(p.name);
    out.buffers.push_back(std::move(buffer));
  }
  out.buffers.insert(out.buffers.end(), results.begin(), results.end());
  for (const auto& [symbol, range] : kernel.symbols) {
    out.symbol_inputs.push_back(symbol);
    out.input_order.push_back(symbol);
  }
  loop_ir::Kernel same = kernel;
  same.name = kName;
  same.provenance.clear();
  out.kernels.push_back(std::make_shared<loop_ir::Kernel>(std::move(same)));
  out.steps.emplace_back(std::move(call));
  return out;
}

std::string tuning_key(const loop_ir::Module& alone, const PassContext& ctx) {
  std::string text = loop_ir::print(alone);
  for (const auto& [symbol, range] : alone.symbols) {
    const auto hint = ctx.hints.find(symbol);
    const int64_t size = hint == ctx.hints.end() ? 0 : std::max<int64_t>(0, hint->second);
    text += fmt::format("{} {}\n", symbol, std::bit_width(static_cast<uint64_t>(size)));
  }
  text += fmt::format("{} {} {}\n", ctx.target.name, ctx.target.vector_bytes, joined({ctx.target.features.begin(), ctx.target.features.end()}));
  text += fmt::format("training {} weights {}\n", ctx.training, static_cast<int>(ctx.weights));
  return sha256_hex(text);
}

}  // namespace deplo::loop_to_tile
