#include "target/cpu/target.h"

#include <nlohmann/json.hpp>

#include "base/processors.h"
#include "base/topology.h"
#include "target/cpu/codegen.h"
#include "target/cpu/cost/cost.h"
#include "target/cpu/features.h"
#include "target/cpu/schedule/contraction.h"
#include "target/cpu/schedule/online.h"
#include "target/cpu/schedule/rows.h"
#include "target/cpu/schedule/scheduler.h"

namespace deplo {
namespace {

using KernelText = std::string (*)(const kernel_ir::Kernel& kernel, const PassContext& context);

template <KernelText write>
std::string of_each(const kernel_ir::Module& module, const PassContext& context) {
  std::string text;
  for (const auto& kernel : module.kernels) text += write(*kernel, context) + "\n";
  return text;
}

TargetTraits traits() {
  TargetTraits made;
  made.name = "cpu";
  made.is_default = true;
  made.shuffles_lanes = true;
  made.own_functions = {Fn::reciprocal_near};
  made.has_disk_cache = true;
  made.options = {{"features"}};
  made.texts = {{"llvm", of_each<cpu_llvm_text>}, {"asm", of_each<cpu_assembly_text>}};
  return made;
}

cpu_cost::Figures read_figures(const std::string& text) {
  const auto given = nlohmann::json::parse(text);
  cpu_cost::Figures made;
  made.f32 = given.at("f32");
  made.bf16 = given.at("bf16");
  made.int8 = given.at("int8");
  made.l1 = given.at("l1");
  made.l2 = given.at("l2");
  made.l3 = given.at("l3");
  made.memory = given.at("dram");
  made.memory_all = given.at("dram_all");
  made.barrier = given.at("barrier");
  made.threads = given.at("threads");
  return made;
}

class CpuTarget final : public Target {
 public:
  CpuTarget() : Target(traits()) {}

  std::unique_ptr<Scheduler> make_scheduler(const loop_ir::Module& module, const PassContext& context) const override {
    return make_cpu_scheduler(module, context);
  }

  TargetInfo machine(const TargetOptions& options) const override {
    TargetInfo machine = cpu_target_info(options["features"]);
    machine.threads = options.threads > 0 ? options.threads : available_processors();
    const Topology& found = topology();
    if (found.l1_bytes > 0) machine.l1_bytes = found.l1_bytes;
    if (found.l2_bytes > 0) machine.l2_bytes = found.l2_bytes;
    if (found.l3_bytes > 0) machine.l3_bytes = found.l3_bytes;
    return machine;
  }

  KernelCode compile(const kernel_ir::Module& module, const PassContext& context, const TargetOptions& options, CodegenStats& stats) const override {
    CodegenOptions codegen;
    codegen.cache_dir = options.cache_dir;
    codegen.workers = available_processors();
    codegen.debug = options.debug;
    return {compile_cpu_kernels(module.kernels, context, codegen, &stats), nullptr, ""};
  }

  void offer_kernel(const std::string& image) const override { deplo::offer_kernel(image); }

  void keep_kernel(const std::string& image, const std::string& folder) const override {
    CodegenOptions codegen;
    codegen.cache_dir = folder;
    deplo::keep_kernel(image, codegen);
  }

  std::string estimate_times(const tile_ir::Module& module, const std::map<std::string, int64_t>& sizes, const PassContext& context,
                             const std::string& figures, double resident) const override {
    const cpu_cost::Figures machine = read_figures(figures);
    auto list = nlohmann::json::array();
    for (const auto& kernel : module.kernels) {
      const cpu_cost::Estimate e = cpu_cost::estimate(*kernel, sizes, context, machine, resident);
      list.push_back({{"name", kernel->name}, {"seconds", e.seconds}, {"core", e.core}, {"l2", e.second}, {"l3", e.third}, {"memory", e.memory}});
    }
    return list.dump();
  }

  bool multiplies_bytes(const TargetInfo& machine) const override { return deplo::multiplies_bytes(machine.features); }

  int64_t key_parts(const loop_ir::Kernel& kernel, const PassContext& context) const override { return cpu_key_parts(kernel, context); }

  bool multiplies(const loop_ir::Kernel& kernel, const PassContext& context) const override {
    return propose_cpu_contraction(kernel, {}, context) || !propose_cpu_contractions(kernel, {}, context).empty() ||
           propose_cpu_online(kernel, context) || cpu_rows_take_all(kernel, context);
  }

  std::string code_version() const override { return codegen_version(); }

  std::string describe(const TargetOptions& options) const override {
    TargetInfo found = cpu_target_info(options["features"]);
    nlohmann::json about{{"codegen", codegen_version().empty() ? "none (built without LLVM)" : codegen_version()},
                         {"cpu features", found.features},
                         {"vector bytes", found.vector_bytes},
                         {"vector registers", found.vector_registers}};
    return about.dump();
  }
};

}  // namespace

std::unique_ptr<const Target> make_cpu_target() { return std::make_unique<CpuTarget>(); }

}  // namespace deplo
