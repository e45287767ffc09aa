#include <nlohmann/json.hpp>

#include "analysis/cost.h"
#include "base/text.h"
#include "pipeline.h"
#include "runtime/compile.h"
#include "runtime/topology.h"

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

json describe_kernels(const CompiledGraph& graph, const SizeHints& sizes) {
  const Ranges& ranges = graph.program->module().symbols;
  json kernels = json::array();
  for (const KernelSummary& kernel : graph.report.kernels)
    kernels.push_back({{"name", kernel.name},
                       {"provenance", kernel.provenance},
                       {"schedule", kernel.schedule},
                       {"flops", analysis::estimate(kernel.flops, sizes, ranges)},
                       {"bytes_read", analysis::estimate(kernel.bytes_read, sizes, ranges)},
                       {"bytes_written", analysis::estimate(kernel.bytes_written, sizes, ranges)},
                       {"flops_expression", print(kernel.flops)}});
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
      if (plan) step["chunks"] = plan->steps[s].chunks;
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

json describe_memory(const CompiledGraph& graph) {
  const runtime::Program& program = *graph.program;
  json memory{{"packed_bytes", program.packed_bytes()}, {"temporaries", program.layout().temporaries.size()}};
  auto plan = program.latest_plan();
  if (!plan) return memory;
  memory["arena_bytes"] = plan->arena_bytes;
  memory["peak_bytes"] = plan->peak_bytes;
  memory["scratch_bytes_per_thread"] = plan->scratch_bytes;
  int64_t total = 0;
  json places = json::array();
  for (size_t t = 0; t < program.layout().temporaries.size(); ++t) {
    const auto& temporary = program.layout().temporaries[t];
    int64_t bytes = plan->shapes[temporary.buffer].bytes;
    total += bytes;
    places.push_back({{"buffer", program.module().buffers[temporary.buffer].name},
                      {"offset", plan->offsets[t]},
                      {"bytes", bytes},
                      {"first_step", temporary.first},
                      {"last_step", temporary.last}});
  }
  memory["bytes_without_reuse"] = total;
  memory["places"] = std::move(places);
  return memory;
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
             {"sizes", sizes},
             {"kernels", describe_kernels(graph, sizes)},
             {"steps", describe_steps(graph)},
             {"memory", describe_memory(graph)},
             {"cache",
              {{"compiled", report.codegen.compiled},
               {"memory_hits", report.codegen.memory_hits},
               {"disk_hits", report.codegen.disk_hits},
               {"directory", options.cache_dir}}},
             {"seconds", {{"lowering", report.lowering_seconds}, {"codegen", report.codegen.seconds}, {"total", report.total_seconds}}}};
  json libraries = json::array();
  for (const Step& step : graph.program->module().steps)
    if (const auto* library = std::get_if<LibraryStep>(&step)) libraries.push_back({{"op", library->op}, {"reason", library->reason}});
  about["library_calls"] = std::move(libraries);
  return about.dump();
}

std::string describe_environment(const std::string& features) {
  const Topology& machine = topology();
  TargetInfo target = cpu_target_info(features);
  json about{
      {"deplo", DEPLO_VERSION},
      {"codegen", codegen_version()},
      {"compiler", __VERSION__},
      {"cpu",
       {{"model", machine.cpu}, {"features", target.features}, {"vector_bytes", target.vector_bytes}, {"vector_registers", target.vector_registers}}},
      {"topology",
       {{"source", machine.source},
        {"packages", machine.packages},
        {"numa_nodes", machine.numa_nodes},
        {"cores", machine.cores},
        {"processors", machine.processors},
        {"available_processors", available_processors()},
        {"memory_bytes", machine.memory_bytes},
        {"l1_bytes", machine.l1_bytes},
        {"l2_bytes", machine.l2_bytes},
        {"l3_bytes", machine.l3_bytes}}},
      {"cache_dir", resolve_cache_dir("")}};
  return about.dump();
}

std::string describe_passes() {
  json list = json::array();
  append_passes(list, "tensor", tensor_passes());
  append_passes(list, "loop", loop_passes());
  append_passes(list, "tile", tile_passes());
  append_passes(list, "kernel", kernel_passes());
  return list.dump();
}

}  // namespace deplo
