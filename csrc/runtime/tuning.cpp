#include "runtime/tuning.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/dtype.h"
#include "base/error.h"
#include "lower/loop_to_tile/alone.h"
#include "lower/lower.h"
#include "pipeline.h"
#include "target/target.h"

namespace deplo {
namespace {

using nlohmann::json;

/// Values of the sizes, as the example has them.
std::map<std::string, int64_t> sizes_of(const loop_ir::Module& module, const PassContext& ctx) {
  std::map<std::string, int64_t> sizes;
  for (const auto& [symbol, range] : module.symbols) {
    auto hint = ctx.hints.find(symbol);
    if (hint == ctx.hints.end()) return {};
    sizes[symbol] = hint->second;
  }
  return sizes;
}

json numbers(const std::vector<Expr>& exprs, const std::map<std::string, int64_t>& sizes) {
  json list = json::array();
  for (Expr e : exprs) list.push_back(evaluate(e, sizes));
  return list;
}

json inputs_of(const loop_ir::Module& alone, const std::map<std::string, int64_t>& sizes) {
  json list = json::array();
  for (const std::string& name : alone.input_order) {
    const Buffer* buffer = alone.find_buffer(name);
    if (!buffer) {
      list.push_back({{"size", sizes.at(name)}});
      continue;
    }
    list.push_back({{"dtype", std::string(to_string(buffer->dtype))},
                    {"shape", numbers(buffer->shape, sizes)},
                    {"strides", numbers(buffer->strides, sizes)},
                    {"static", buffer->is_static},
                    {"written", alone.kernels[0]->find_param(name)->kind == loop_ir::ParamKind::inout}});
  }
  return list;
}

/// By the schedules that the context gives; nothing if they do not fit.
std::optional<tile_ir::Module> lowered(const loop_ir::Module& module, const PassContext& context) {
  try {
    return lower_loop_to_tile(module, context);
  } catch (const UserError&) {
    return std::nullopt;
  } catch (const UnsupportedError&) {
    return std::nullopt;
  }
}

/// The task of one kernel; null where there is nothing to search for.
json task_of(const loop_ir::Module& module, const loop_ir::Kernel& kernel, const PassContext& ctx) {
  const loop_ir::Module alone = loop_to_tile::alone(module, kernel);
  const auto sizes = sizes_of(alone, ctx);
  if (sizes.size() != alone.symbols.size()) return nullptr;
  auto scheduler = target_of(ctx).make_scheduler(alone, ctx);
  if (scheduler->proposals(*alone.kernels[0], "").empty()) return nullptr;
  PassContext untuned = ctx;
  untuned.tuned = nullptr;
  untuned.schedules.clear();
  const loop_ir::Kernel& same = *alone.kernels[0];
  const tile_ir::Module made = lower_loop_to_tile(alone, untuned);
  json task{{"kernel", kernel.name}, {"ops", kernel.provenance}, {"key", loop_to_tile::tuning_key(alone, ctx)}, {"text", loop_ir::print(alone)}};
  task["inputs"] = inputs_of(alone, sizes);
  for (const auto& each : made.kernels)
    if (each->name.starts_with(same.name)) task["schedules"][each->name.substr(same.name.size())] = print(each->schedule);
  const std::vector<bool> taken = taken_steps(made, sizes);
  std::string version;
  for (size_t s = 0; s < made.steps.size(); ++s)
    if (const auto* call = std::get_if<CallStep>(&made.steps[s]); call && taken[s] && call->kernel.starts_with(same.name))
      version = call->kernel.substr(same.name.size());
  task["version"] = version;
  task["proposals"] = json::array();
  for (const Schedule& s : scheduler->proposals(same, version)) task["proposals"].push_back(print(s));
  return task["proposals"].empty() ? json(nullptr) : task;
}

}  // namespace

std::string tuning_tasks(const std::string& text, const CompileOptions& options) {
  PipelineOptions pipeline;
  pipeline.stop_after = "loop";
  PassContext context = options.context;
  const Compiled made = run_pipeline_from_text(text, "<graph>", context, pipeline);
  json tasks = json::array();
  std::set<std::string> known;
  for (const auto& kernel : made.loop.kernels) {
    const bool by_hand = std::any_of(context.schedules.begin(), context.schedules.end(), [&](const auto& given) {
      return given.first.starts_with(kernel->name) || given.second.find("@" + kernel->name) != std::string::npos;
    });
    if (by_hand) continue;
    json task = task_of(made.loop, *kernel, context);
    if (!task.is_null() && known.insert(task["key"].get<std::string>()).second) tasks.push_back(std::move(task));
  }
  return tasks.dump();
}

std::string tuning_directions(const std::string& task_text, const std::string& version, const std::string& base, bool wide,
                              const CompileOptions& options) {
  const loop_ir::Module module = loop_ir::parse(task_text, "<task>");
  DEPLO_CHECK(module.kernels.size() == 1, "a task has {} kernels, expected 1", module.kernels.size());
  json list = json::array();
  auto scheduler = target_of(options.context).make_scheduler(module, options.context);
  for (const Direction& d : scheduler->directions(*module.kernels[0], version, parse_schedule(base), wide)) {
    json texts = json::array();
    for (const Schedule& s : d.schedules) texts.push_back(print(s));
    list.push_back({{"name", d.name}, {"schedules", std::move(texts)}});
  }
  return list.dump();
}

std::string tuning_estimates(const std::string& task_text, const std::string& version, const std::vector<std::string>& schedules,
                             const std::map<std::string, std::string>& others, const std::string& figures, double resident,
                             const CompileOptions& options) {
  const loop_ir::Module module = loop_ir::parse(task_text, "<task>");
  DEPLO_CHECK(module.kernels.size() == 1, "a task has {} kernels, expected 1", module.kernels.size());
  const std::string& name = module.kernels[0]->name;
  json list = json::array();
  for (const std::string& schedule : schedules) {
    PassContext context = options.context;
    for (const auto& [suffix, text] : others) context.schedules[name + suffix] = suffix == version ? schedule : text;
    json seconds = nullptr;
    if (const auto made = lowered(module, context)) {
      const auto sizes = sizes_of(module, context);
      std::map<std::string, double> times;
      for (const json& each : json::parse(target_of(context).estimate_times(*made, sizes, context, figures, resident)))
        times[each["name"].get<std::string>()] = each["seconds"];
      // Packing that every call does is part of it.
      const std::vector<bool> taken = taken_steps(*made, sizes);
      double sum = 0;
      for (size_t s = 0; s < made->steps.size(); ++s)
        if (const auto* call = std::get_if<CallStep>(&made->steps[s]); call && taken[s] && !call->once) sum += times[call->kernel];
      if (!times.empty()) seconds = sum;
    }
    list.push_back(std::move(seconds));
  }
  return list.dump();
}

std::string estimate_program(const std::string& text, const std::string& figures, const CompileOptions& options) {
  PipelineOptions pipeline;
  pipeline.stop_after = "tile";
  const Compiled made = run_pipeline_from_text(text, "<graph>", options.context, pipeline);
  std::map<std::string, int64_t> sizes;
  for (const auto& [symbol, range] : made.tile.symbols) {
    const auto hint = options.context.hints.find(symbol);
    sizes[symbol] = hint == options.context.hints.end() ? 64 : hint->second;
  }
  double resident = 0;
  for (const auto& buffer : made.tile.buffers) {
    double bytes = size_of(buffer.dtype);
    for (Expr e : buffer.shape) bytes *= static_cast<double>(std::max<int64_t>(0, evaluate(e, sizes)));
    resident += bytes;
  }
  return target_of(options.context).estimate_times(made.tile, sizes, options.context, figures, resident);
}

}  // namespace deplo
