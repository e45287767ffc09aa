#include "target/cuda/target.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "target/cuda/devices.h"
#include "target/cuda/launch.h"
#include "target/cuda/nvrtc.h"
#include "target/cuda/schedule/kernel.h"
#include "target/cuda/schedule/scheduler.h"
#include "target/cuda/text.h"
#include "target/cuda/traffic.h"

namespace deplo {
namespace {

constexpr const char* kUsualArch = "sm_80";

/// What kernels are for: this machine's GPU, or the option where there is none, or where it names another architecture than the usual one.
std::string find_arch(const TargetOptions& options) {
  try {
    const int capability = CudaDevice::open(options["cuda_driver"], std::max(options.device, 0))->capability();
    return capability < cuda_generation(kUsualArch) || options["arch"] == kUsualArch ? cuda_arch(capability) : options["arch"];
  } catch (const UnsupportedError&) {
    return options["arch"];
  } catch (const ExecutionError&) {
    return options["arch"];
  }
}

std::string module_text(const kernel_ir::Module& module, const PassContext& /*context*/) { return cuda_text(module); }

TargetTraits traits() {
  TargetTraits made;
  made.name = "cuda";
  made.has_grid = true;
  // By the CUDA C++ Programming Guide 1 ulp, 2 of sin and cos, 4 of pow; ex2.approx and rcp.approx; the prelude's own.
  made.own_functions = {Fn::exp,       Fn::expm1,           Fn::log,     Fn::log1p, Fn::log2, Fn::sin,       Fn::cos,      Fn::pow,
                        Fn::exp2_near, Fn::reciprocal_near, Fn::sigmoid, Fn::silu,  Fn::gelu, Fn::gelu_tanh, Fn::softplus, Fn::mish};
  made.most_vector_bytes = 16;
  made.device = "gpu";
  made.tensors = "cuda";
  made.has_tf32 = true;
  made.has_disk_cache = true;
  made.options = {
      {"arch", kUsualArch}, {"cuda_driver"}, {"nvrtc", "", {{"nvidia.cu13", "lib/libnvrtc.so.13"}, {"nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"}}}};
  made.texts = {{"cuda", module_text, "cu"}};
  return made;
}

class CudaTarget final : public Target {
 public:
  CudaTarget() : Target(traits()) {}

  std::unique_ptr<Scheduler> make_scheduler(const loop_ir::Module& module, const PassContext& context) const override {
    return make_cuda_scheduler(module, context);
  }

  TargetInfo machine(const TargetOptions& options) const override {
    TargetInfo machine;
    machine.features = {find_arch(options)};
    return machine;
  }

  KernelCode compile(const kernel_ir::Module& module, const PassContext& /*context*/, const TargetOptions& options,
                     CodegenStats& stats) const override {
    if (module.kernels.empty()) return {};
    auto start = std::chrono::steady_clock::now();
    try {
      auto kernels = std::make_shared<CudaKernels>(CudaDevice::open(options["cuda_driver"], std::max(options.device, 0)), module, options["nvrtc"],
                                                   options.cache_dir, options.debug);
      stats = kernels->stats();
      stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      return {{}, std::move(kernels), ""};
    } catch (const UnsupportedError& error) {
      return {{}, nullptr, error.what()};
    } catch (const ExecutionError& error) {
      return {{}, nullptr, error.what()};
    }
  }

  std::string assemble(const std::string& text, const TargetOptions& options) const override {
    return nvrtc_compile(text, options["arch"], options["nvrtc"]).image;
  }

  std::string known_devices() const override {
    std::string list;
    for (const CudaModel& m : kCudaModels)
      list += fmt::format(
          R"({}{{"name": "{}", "arch": "{}", "sms": {}, "ghz": {}, "dram_gb_s": {}, "l2_mb": {}, "shared_kb_sm": {}, "shared_kb_block": {}, )"
          R"("warps_sm": {}, "float32_tflops": {}, "bf16_tflops": {}}})",
          list.empty() ? "" : ", ", m.name, m.arch, m.sms, m.boost_ghz, m.dram_gb_s, m.l2_mb, m.shared_kb_sm, m.shared_kb_block, m.warps_sm,
          m.float32_tflops, m.bf16_tflops);
    return "[" + list + "]";
  }

  std::string measure_traffic(const kernel_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes) const override {
    const Traffic t = deplo::measure_traffic(kernel, sizes);
    std::string buffers;
    for (const auto& [name, bytes] : t.of_buffers) buffers += fmt::format(R"({}"{}": {})", buffers.empty() ? "" : ", ", name, bytes);
    return fmt::format(
        R"({{"global_bytes": {}, "global_sectors": {}, "least_sectors": {}, "global_requests": {}, "shared_requests": {}, "shared_ways": {}, "barriers": {}, )"
        R"("wide_bytes": {}, "instructions": {}, "clocks": {}, "complete": {}, "of_buffers": {{{}}}}})",
        t.global_bytes, t.global_sectors, t.least_sectors, t.global_requests, t.shared_requests, t.shared_ways, t.barriers, t.wide_bytes,
        t.instructions, t.clocks, t.complete, buffers);
  }

  bool multiplies_bytes(const TargetInfo& machine) const override {
    return cuda_generation(machine.features.empty() ? kUsualArch : *machine.features.begin()) >= 80;
  }

  int64_t key_parts(const loop_ir::Kernel& kernel, const PassContext& context) const override { return gpu_key_parts(kernel, context); }

  bool chains(const loop_ir::Kernel& kernel, const PassContext& context) const override { return gpu_chains(kernel, context); }

  bool multiplies(const loop_ir::Kernel& kernel, const PassContext& context) const override { return gpu_multiplies(kernel, context); }

  std::string find_device(const TargetOptions& options) const override { return CudaDevice::open(options["cuda_driver"])->description(); }
};

}  // namespace

std::unique_ptr<const Target> make_cuda_target() { return std::make_unique<CudaTarget>(); }

}  // namespace deplo
