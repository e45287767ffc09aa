#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "analysis/cost.h"
#include "base/processors.h"
#include "base/text.h"
#include "base/topology.h"
#include "pipeline.h"
#include "runtime/compile.h"
#include "target/target.h"

namespace deplo {
namespace {

using nlohmann::json;

/// Values of the latest call's sizes; hints before the first call.
SizeHints sizes_of(const CompiledGraph& graph, const CompileOptions& options) {
  SizeHints sizes = options.context.hints;
  auto plan = graph.program->latest_plan();
  size_t i = 0;
  for (const auto& [name, range] : graph.program->module().symbols) {
    if (plan) sizes[name] = plan->symbols[i];
    ++i;
  }
  return sizes;
}

struct KernelTime {
  int64_t steps = 0;   ///< places in the program that call it at the latest call's sizes
  double seconds = 0;  ///< in one run of the program, measured; 0: not measured
};

std::map<std::string, KernelTime> times_by_kernel(const runtime::Program& program) {
  std::vector<runtime::StepTime> times = program.step_times();
  auto plan = program.latest_plan();
  std::map<std::string, KernelTime> by_kernel;
  for (size_t s = 0; s < times.size(); ++s) {
    const auto* call = std::get_if<CallStep>(&program.module().steps[s]);
    if (!call || (plan && !plan->steps[s].runs)) continue;
    KernelTime& time = by_kernel[call->kernel];
    ++time.steps;
    if (times[s].calls > 0) time.seconds += 1e-9 * static_cast<double>(times[s].nanoseconds) / static_cast<double>(times[s].calls);
  }
  return by_kernel;
}

json describe_kernels(const CompiledGraph& graph, const SizeHints& sizes) {
  const Ranges& ranges = graph.program->module().symbols;
  std::map<std::string, KernelTime> times = times_by_kernel(*graph.program);
  json kernels = json::array();
  for (const KernelSummary& kernel : graph.report.kernels) {
    auto estimate = [&](Expr e) { return analysis::estimate(e, sizes, ranges); };
    const KernelTime& time = times[kernel.name];
    auto steps = static_cast<double>(time.steps);
    kernels.push_back({{"name", kernel.name},
                       {"calls", time.steps},
                       {"ops", kernel.provenance},
                       {"schedule", kernel.schedule},
                       {"tuned_seconds", kernel.tuned_seconds},
                       {"usual_seconds", kernel.usual_seconds},
                       {"flops", steps * estimate(kernel.flops)},
                       {"bytes", steps * (estimate(kernel.bytes_read) + estimate(kernel.bytes_written))},
                       {"seconds", time.seconds}});
  }
  return kernels;
}

json describe_steps(const CompiledGraph& graph) {
  const runtime::Program& program = *graph.program;
  std::vector<runtime::StepTime> times = program.step_times();
  auto plan = program.latest_plan();
  json steps = json::array();
  for (size_t s = 0; s < program.module().steps.size(); ++s) {
    json step{{"calls", times[s].calls}, {"nanoseconds", times[s].nanoseconds}};
    if (const auto* call = std::get_if<CallStep>(&program.module().steps[s])) {
      step["kernel"] = call->kernel;
      step["arguments"] = call->arguments;
      step["once"] = call->once;
      if (!call->when.empty()) step["when"] = print(call->when);
      if (plan) step["chunks"] = plan->steps[s].chunks;
      if (plan) step["runs"] = plan->steps[s].runs;
    } else {
      const auto& library = std::get<LibraryStep>(program.module().steps[s]);
      step["library"] = library.op;
      step["reason"] = library.reason;
      step["results"] = library.results;
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

json describe_memory(const CompiledGraph& graph, const CompileOptions& options) {
  const runtime::Program& program = *graph.program;
  json memory{{"packed_bytes", program.packed_bytes()}, {"temporaries", program.layout().temporaries.size()}};
  if (options.own) memory["kept_twice"] = program.kept_twice();
  auto plan = program.latest_plan();
  if (!plan) return memory;
  memory["arena_bytes"] = plan->arena_bytes;
  memory["peak_bytes"] = plan->peak_bytes;
  memory["scratch_bytes_per_thread"] = plan->scratch_bytes;
  int64_t total = 0;
  for (const auto& temporary : program.layout().temporaries) total += plan->shapes[temporary.buffer].bytes;
  memory["bytes_without_reuse"] = total;
  return memory;
}

/// Where each temporary lies in the arena, and from which step to which.
json describe_places(const runtime::Program& program) {
  json places = json::array();
  auto plan = program.latest_plan();
  for (size_t t = 0; plan && t < program.layout().temporaries.size(); ++t) {
    const auto& temporary = program.layout().temporaries[t];
    places.push_back({{"buffer", program.module().buffers[temporary.buffer].name},
                      {"offset", plan->offsets[t]},
                      {"bytes", plan->shapes[temporary.buffer].bytes},
                      {"first_step", temporary.first},
                      {"last_step", temporary.last}});
  }
  return places;
}

json to_json(const TopologyNode& node) {
  json about{{"kind", node.kind}, {"index", node.index}, {"bytes", node.bytes}, {"children", json::array()}, {"memory", json::array()}};
  for (const TopologyNode& child : node.children) about["children"].push_back(to_json(child));
  for (const TopologyNode& child : node.memory) about["memory"].push_back(to_json(child));
  return about;
}

std::string caches_text(const Topology& machine) {
  return fmt::format("L1 {} KiB, L2 {} KiB a core, L3 {} MiB", machine.l1_bytes >> 10, machine.l2_bytes >> 10, machine.l3_bytes >> 20);
}

template <class M>
void append_passes(json& list, const char* level, const std::vector<Pass<M>>& passes) {
  for (const Pass<M>& pass : passes) list.push_back({{"level", level}, {"name", pass.name}, {"doc", pass.doc}});
}

}  // namespace

std::string describe(const CompiledGraph& graph, const CompileOptions& options) {
  SizeHints sizes = sizes_of(graph, options);
  const CompileReport& report = graph.report;
  json about{{"name", graph.program->module().name},
             {"target", options.context.target.name},
             {"missing", graph.program->missing()},
             {"sizes", sizes},
             {"kernels", describe_kernels(graph, sizes)},
             {"steps", describe_steps(graph)},
             {"memory", describe_memory(graph, options)},
             {"memory_plan", describe_places(*graph.program)},
             {"cache",
              {{"compiled", report.codegen.compiled},
               {"memory_hits", report.codegen.memory_hits},
               {"disk_hits", report.codegen.disk_hits},
               {"directory", options.target.cache_dir}}},
             {"seconds", {{"lowering", report.lowering_seconds}, {"codegen", report.codegen.seconds}, {"total", report.total_seconds}}}};
  if (const DeviceKernels* device = graph.program->device()) {
    about["device"] = device->describe_device();
    about["copies"] = options.target.device < 0;
  }
  json libraries = json::array();
  for (const Step& step : graph.program->module().steps)
    if (const auto* library = std::get_if<LibraryStep>(&step)) libraries.push_back({{"op", library->op}, {"reason", library->reason}});
  about["library"] = std::move(libraries);
  return about.dump();
}

std::string describe_topology(const std::string& synthetic, const std::string& xml) { return to_json(topology_tree(synthetic, xml)).dump(); }

std::string describe_environment(const CompileOptions& options) {
  const Topology& machine = topology();
  json about{{"core", DEPLO_VERSION},
             {"built with", "gcc or clang " __VERSION__},
             {"cpu", machine.cpu},
             {"topology", fmt::format("{} packages, {} NUMA nodes, {} cores, {} processors, of which {} may be used (from {})", machine.packages,
                                      machine.numa_nodes, machine.cores, machine.processors, available_processors(), machine.source)},
             {"caches", caches_text(machine)}};
  for (const Target* target : all_targets()) about.update(json::parse(target->describe(options.target)));
  return about.dump();
}

std::string describe_targets() {
  json list = json::array();
  for (const Target* target : all_targets()) {
    json about{{"name", target->name},       {"is_default", target->is_default}, {"device", target->device},
               {"tensors", target->tensors}, {"has_tf32", target->has_tf32},     {"has_disk_cache", target->has_disk_cache},
               {"levels", json::array()},    {"packages", json::object()},       {"devices", json::parse(target->known_devices())}};
    for (const MachineText& text : target->texts) about["levels"].push_back(text.level);
    for (const TargetOption& option : target->options) about["packages"][option.name] = option.packages;
    list.push_back(std::move(about));
  }
  return list.dump();
}

std::string describe_target(const CompileOptions& options) {
  const TargetInfo& target = options.context.target;
  json about{{"name", target.name},
             {"features", target.features},
             {"vector_bytes", target.vector_bytes},
             {"vector_registers", target.vector_registers},
             {"load_cost", target.load_cost},
             {"l1_bytes", target.l1_bytes},
             {"l2_bytes", target.l2_bytes},
             {"l3_bytes", target.l3_bytes},
             {"codegen", target_of(options.context).code_version()}};
  return about.dump();
}

std::string describe_passes() {
  json list = json::array();
  append_passes(list, "torch", torch_passes());
  append_passes(list, "tensor", tensor_passes());
  append_passes(list, "loop", loop_passes());
  append_passes(list, "tile", tile_passes());
  append_passes(list, "kernel", kernel_passes());
  return list.dump();
}

}  // namespace deplo
