#include "target/cuda/schedule/scheduler.h"

#include <algorithm>

#include "lower/loop_to_tile/layers.h"
#include "program_ir/facts.h"
#include "target/cuda/schedule/four_bits.h"
#include "target/cuda/schedule/kernel.h"
#include "target/cuda/schedule/matrix.h"
#include "target/cuda/schedule/truths.h"
#include "target/cuda/schedule/variants.h"

namespace deplo {
namespace {

using loop_to_tile::FourBits;
using loop_to_tile::GpuMatrix;

using Given = std::map<std::string, Schedule>;

class CudaScheduler final : public Scheduler {
 public:
  CudaScheduler(const loop_ir::Module& module, const PassContext& context) : module_(module), context_(context) {}

  void add_kernel(const loop_ir::Kernel& kernel, const Given& given, tile_ir::Module& out) override {
    const loop_ir::Kernel layer = as_layer(kernel);
    const bool is_given = given.count(kernel.name) > 0;
    if (FourBits four = four_bits(layer); !four.packed.empty() && (!is_given || given.count(four.kernel.name) > 0)) {
      for (const FourBits::Packed& packed : four.packed) apply(packed.pack, given, out);
      apply(four.kernel, given, out);
      four_[kernel.name] = std::move(four);
    }
    apply(layer, given, out);
  }

  void add_call(const CallStep& call, tile_ir::Module& out) override {
    CallStep main = call;
    if (auto found = four_.find(call.kernel); found != four_.end()) {
      const FourBits& four = found->second;
      CallStep few = call;
      few.kernel = four.kernel.name;
      for (const FourBits::Packed& packed : four.packed) {
        const auto& params = four.kernel.params;
        const auto param = std::find_if(params.begin(), params.end(), [&](const auto& p) { return p.name == packed.param; });
        std::string& argument = few.arguments[static_cast<size_t>(param - params.begin())];
        const std::string fact = add_fact(out, argument, packed.lo, packed.hi);
        few.when.push_back({Cond::Kind::ge0, Expr::symbol(fact) - 1});
        argument = packed_copy(argument, packed, out);
      }
      out.steps.emplace_back(std::move(few));
      main.is_alternative = true;
    }
    out.steps.emplace_back(std::move(main));
  }

  std::vector<Schedule> proposals(const loop_ir::Kernel& kernel, const std::string& version) const override {
    return version.empty() ? propose_gpu_forms(as_layer(kernel), context_) : std::vector<Schedule>{};
  }

  std::vector<Direction> directions(const loop_ir::Kernel& kernel, const std::string& version, const Schedule& base, bool wide) const override {
    return gpu_directions(base, proposals(kernel, version), wide);
  }

 private:
  void apply(const loop_ir::Kernel& kernel, const Given& given, tile_ir::Module& out) const {
    const auto found = given.find(kernel.name);
    const Schedule schedule = found != given.end() ? found->second : propose_gpu(kernel, context_);
    out.kernels.push_back(std::make_shared<tile_ir::Kernel>(apply_gpu(kernel, schedule, context_)));
  }

  /// With an axis for a layer's only row, where matrix units then read its weights as bytes, and with truths as numbers.
  loop_ir::Kernel as_layer(const loop_ir::Kernel& given) const {
    loop_ir::Kernel kernel = loop_to_tile::with_counted_truths(given);
    loop_ir::Kernel rows = loop_to_tile::with_row(kernel, loop_to_tile::static_params(module_, kernel));
    if (rows == kernel) return kernel;
    const GpuMatrix matrix(rows);
    return matrix.has_bytes() && matrix.fits(gpu_arch(context_)) ? rows : kernel;
  }

  FourBits four_bits(const loop_ir::Kernel& layer) const {
    if (context_.training || context_.weights == Weights::original) return {};
    const GpuMatrix matrix(layer);
    if (!matrix.fits(gpu_arch(context_))) return {};
    FourBits four = loop_to_tile::with_four_bits(layer, matrix.codes());
    // An axis of one row does not outlast what cleans its body.
    four.kernel = loop_to_tile::with_row(four.kernel, loop_to_tile::static_params(module_, layer));
    const auto is_input = [&](const FourBits::Packed& p) { return loop_to_tile::holds_inputs(module_, layer, p.param); };
    const bool packs = !four.packed.empty() && std::all_of(four.packed.begin(), four.packed.end(), is_input);
    return packs && GpuMatrix(four.kernel).has_bytes() ? std::move(four) : FourBits{};
  }

  /// The buffer of codes two a byte, once for all calls that read the same codes.
  std::string packed_copy(const std::string& codes, const FourBits::Packed& packed, tile_ir::Module& out) {
    auto [at, is_new] = copies_.emplace(codes, "");
    if (!is_new) return at->second;
    Buffer buffer;
    for (size_t number = copies_.size() - 1; buffer.name.empty() || out.find_buffer(buffer.name); ++number)
      buffer.name = "four_bits" + std::to_string(number);
    buffer.dtype = DType::u8;
    buffer.shape = packed.shape;
    buffer.strides = contiguous_strides(packed.shape);
    buffer.kind = BufferKind::packed;
    at->second = buffer.name;
    out.buffers.push_back(std::move(buffer));
    out.steps.emplace_back(CallStep{packed.pack.name, {codes, at->second}, true});
    return at->second;
  }

  const loop_ir::Module& module_;
  const PassContext& context_;
  std::map<std::string, FourBits> four_;       ///< by the kernel for all other weights
  std::map<std::string, std::string> copies_;  ///< by what they are made of
};

}  // namespace

std::unique_ptr<Scheduler> make_cuda_scheduler(const loop_ir::Module& module, const PassContext& context) {
  return std::make_unique<CudaScheduler>(module, context);
}

}  // namespace deplo
