#include "runtime/compile.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "analysis/cost.h"
#include "analysis/weighted_sum.h"
#include "analysis/work.h"
#include "base/error.h"
#include "kernel_ir/rewrite.h"
#include "lower/loop_to_tile/alone.h"
#include "pipeline.h"
#include "runtime/winners.h"
#include "schedule/schedule.h"
#include "target/target.h"

namespace deplo {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Shows what passes make, as the options ask: on standard error, in numbered files, and with times.
class Dumper {
 public:
  explicit Dumper(const CompileOptions& options) : options_(options), last_(Clock::now()) {
    if (options.dump_dir.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(options.dump_dir, error);
    DEPLO_CHECK(!error, "cannot make the folder {}: {}", options.dump_dir, error.message());
  }

  bool wanted() const { return !options_.dump.empty() || !options_.dump_dir.empty() || options_.time; }

  void show(const std::string& level, const std::string& pass, const std::string& text, bool changed) {
    // A program is compiled to its end: what comes after stop_after is just not shown.
    if (reached_stop_ && level != options_.stop_after) return;
    reached_stop_ = reached_stop_ || options_.stop_after == level || options_.stop_after == (pass == "lower" ? "lower_to_" + level : pass);
    double elapsed = seconds_since(last_);
    if (options_.time) fmt::print(stderr, "deplo: {:8.2f} ms  {}/{}{}\n", elapsed * 1e3, level, pass, changed ? "" : " (unchanged)");
    if (options_.dump == "all" || options_.dump == level || options_.dump == pass)
      fmt::print(stderr, "# {}/{}{}\n{}", level, pass, changed ? "" : " (unchanged)", changed ? text : "\n");
    if (!options_.dump_dir.empty()) write(fmt::format("{}_{}{}.ir", level, pass, changed ? "" : "_unchanged"), text);
    ++count_;
    last_ = Clock::now();
  }

  /// Text below Kernel IR, unless the dumps have stopped.
  void show(const MachineText& machine, const std::string& text) {
    if (reached_stop_) return;
    if (options_.dump == "all" || options_.dump == machine.level) fmt::print(stderr, "# {}\n{}", machine.level, text);
    if (!options_.dump_dir.empty()) write(fmt::format("kernels.{}", machine.suffix), text);
  }

 private:
  void write(const std::string& name, const std::string& text) {
    std::string path = fmt::format("{}/{:02}_{}", options_.dump_dir, count_, name);
    std::ofstream out(path);
    out << text;
    out.close();  // what is still buffered may not fit on the disk
    DEPLO_CHECK(out.good(), "cannot write {}", path);
  }

  const CompileOptions& options_;
  Clock::time_point last_;
  int count_ = 0;
  bool reached_stop_ = false;
};

/// Whether the dumps of programs show this level, which lies below Kernel IR.
bool is_dumped(const std::string& level, const CompileOptions& options) {
  const std::vector<MachineText>& texts = target_of(options.context).texts;
  return std::any_of(texts.begin(), texts.end(), [&](const MachineText& text) { return text.level == level && !text.suffix.empty(); });
}

PipelineOptions checked_pipeline(const CompileOptions& options) {
  PipelineOptions pipeline;
  pipeline.stop_after = options.stop_after;
  pipeline.dump = is_dumped(options.dump, options) ? "" : options.dump;
  pipeline.verify_each = options.verify;
  check_names(options.context, pipeline);
  return pipeline;
}

Compiled run_levels(const std::string& text, const std::string& file, const CompileOptions& options, const std::string& stop_after, bool by_hand,
                    Dumper& dumper) {
  PipelineOptions pipeline = checked_pipeline(options);
  pipeline.by_hand = by_hand;
  pipeline.stop_after = stop_after;
  pipeline.whole = !options.dump.empty() || !options.dump_dir.empty();
#ifndef NDEBUG
  pipeline.verify_each = true;
#endif
  if (dumper.wanted())
    pipeline.observer = [&](const std::string& level, const std::string& pass, const std::string& shown, bool changed) {
      dumper.show(level, pass, shown, changed);
    };
  return run_pipeline_from_text(text, file, options.context, pipeline);
}

/// Each buffer once, in full.
void add_bytes(const std::vector<loop_ir::Param>& params, KernelSummary& summary) {
  for (const loop_ir::Param& p : params) {
    Expr bytes = product(p.shape) * size_of(p.dtype);
    if (p.kind != loop_ir::ParamKind::out) summary.bytes_read = summary.bytes_read + bytes;
    if (p.kind != loop_ir::ParamKind::in) summary.bytes_written = summary.bytes_written + bytes;
  }
}

/// Notes what was measured of a kernel that has the winner's schedules.
void add_winner(const loop_ir::Module& module, const loop_ir::Kernel& kernel, const CompileOptions& options,
                std::map<std::string, KernelSummary>& summaries) {
  const auto winner = options.winners->load(loop_to_tile::tuning_key(loop_to_tile::alone(module, kernel), options.context));
  if (!winner) return;
  for (const auto& [version, schedule] : winner->schedules) {
    auto summary = summaries.find(kernel.name + version);
    if (summary == summaries.end() || summary->second.schedule != schedule) continue;
    summary->second.tuned_seconds = winner->seconds;
    summary->second.usual_seconds = winner->usual_seconds;
  }
}

/// Summaries in the order of the Kernel IR's kernels; figures come from the loop level, where the nests are still in view.
std::vector<KernelSummary> summarize(const Compiled& made, const CompileOptions& options) {
  std::map<std::string, KernelSummary> known;
  for (const auto& kernel : made.loop.kernels) {
    analysis::KernelCost cost = analysis::cost_of(*kernel);
    KernelSummary& summary = known[kernel->name];
    summary.flops = floordiv(cost.flops, analysis::parts_of_keys(*kernel));
    summary.bytes_read = cost.bytes_read;
    summary.bytes_written = cost.bytes_written;
  }
  // The version of a kernel for other sizes does the same work; it precedes its alternative.
  for (size_t k = made.tile.steps.size(); k-- > 1;) {
    const auto* alternative = std::get_if<CallStep>(&made.tile.steps[k]);
    const auto* version = std::get_if<CallStep>(&made.tile.steps[k - 1]);
    if (alternative && version && alternative->is_alternative && known.count(alternative->kernel))
      known.try_emplace(version->kernel, known.at(alternative->kernel));
  }
  for (const auto& kernel : made.tile.kernels) {
    auto [it, is_new] = known.try_emplace(kernel->name);
    it->second.schedule = print(kernel->schedule);
    if (is_new) add_bytes(kernel->params, it->second);  // what schedules add: it copies operands into panels
  }
  for (const auto& kernel : made.loop.kernels)
    if (options.winners) add_winner(made.loop, *kernel, options, known);
  std::vector<KernelSummary> summaries;
  for (const auto& kernel : made.kernel.kernels) {
    KernelSummary summary = known[kernel->name];
    summary.name = kernel->name;
    summary.provenance = kernel->provenance;
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

/// The text of this level, if it lies below Kernel IR.
const MachineText* machine_text(const std::string& level, const Target& target) {
  for (const MachineText& text : target.texts)
    if (text.level == level) return &text;
  for (const Target* other : all_targets())
    for (const MachineText& text : other->texts) DEPLO_CHECK(text.level != level, "level {} needs the option target = {}", level, other->name);
  return nullptr;
}

}  // namespace

void check_options(const CompileOptions& options) {
  checked_pipeline(options);
  for (const auto& [kernel, text] : options.context.schedules)
    parse_schedules(text, kernel.empty() ? "<schedule>" : fmt::format("<schedule of {}>", kernel));
}

namespace {

CompiledGraph make_graph(kernel_ir::Module module, const CompileOptions& options, LibraryFactory library) {
  CompiledGraph graph;
  KernelCode code = target_of(options.context).compile(module, options.context, options.target, graph.report.codegen);
  runtime::Program::Options program;
  program.sampled = options.sampled;
  program.own = options.own && !options.context.training;
  program.memory_limit = options.memory_limit;
  program.guard = options.guard;
  program.device = options.target.device;
  program.replay = options.replay;
  graph.program = std::make_unique<runtime::Program>(std::move(module), std::move(code), library, program);
  return graph;
}

}  // namespace

CompiledGraph compile_text(const std::string& text, const CompileOptions& options, LibraryFactory library) {
  const Target& target = target_of(options.context);
  auto start = Clock::now();
  Dumper dumper(options);
  Compiled made = run_levels(text, "<graph>", options, "", /*by_hand=*/false, dumper);
  std::vector<KernelSummary> kernels = summarize(made, options);
  double lowering_seconds = seconds_since(start);
  for (const MachineText& machine : target.texts)
    if (!machine.suffix.empty() && dumper.wanted() && !made.kernel.kernels.empty()) dumper.show(machine, machine.write(made.kernel, options.context));
  CompiledGraph graph = make_graph(std::move(made.kernel), options, library);
  graph.report.kernels = std::move(kernels);
  graph.report.lowering_seconds = lowering_seconds;
  graph.report.total_seconds = seconds_since(start);
  return graph;
}

GraphText to_text(const CompiledGraph& graph) {
  json kernels = json::array();
  for (const KernelSummary& kernel : graph.report.kernels)
    kernels.push_back({{"flops", print(kernel.flops)},
                       {"bytes_read", print(kernel.bytes_read)},
                       {"bytes_written", print(kernel.bytes_written)},
                       {"schedule", kernel.schedule},
                       {"tuned_seconds", kernel.tuned_seconds},
                       {"usual_seconds", kernel.usual_seconds}});
  return {print(graph.program->module()), kernels.dump()};
}

CompiledGraph restore_graph(const GraphText& text, const CompileOptions& options, LibraryFactory library) {
  auto start = Clock::now();
  kernel_ir::Module module = kernel_ir::parse(text.kernel_ir, "<stored graph>");
  std::vector<KernelSummary> summaries;
  try {
    json kernels = json::parse(text.kernels);
    DEPLO_CHECK(kernels.size() == module.kernels.size(), "a stored graph has {} kernels, and a report of {}", module.kernels.size(), kernels.size());
    for (size_t k = 0; k < kernels.size(); ++k) {
      auto expr = [&](const char* name) { return parse_expr(kernels[k].at(name).get<std::string>()); };
      summaries.push_back({module.kernels[k]->name, module.kernels[k]->provenance, expr("flops"), expr("bytes_read"), expr("bytes_written"),
                           kernels[k].at("schedule").get<std::string>(), kernels[k].at("tuned_seconds").get<double>(),
                           kernels[k].at("usual_seconds").get<double>()});
    }
  } catch (const json::exception& error) {
    throw UserError(fmt::format("the report of a stored graph does not read: {}", error.what()));
  }
  double lowering_seconds = seconds_since(start);
  CompiledGraph graph = make_graph(std::move(module), options, library);
  graph.report.kernels = std::move(summaries);
  graph.report.lowering_seconds = lowering_seconds;
  graph.report.total_seconds = seconds_since(start);
  return graph;
}

std::string lower_text(const std::string& text, const std::string& file, const std::string& level, const CompileOptions& options) {
  const MachineText* machine = machine_text(level, target_of(options.context));
  DEPLO_CHECK(level != "torch" || level_of(text, file) == "torch", "{}: {} IR cannot be raised to Torch IR", file, level_of(text, file));
  std::string stop = !options.stop_after.empty() ? options.stop_after : machine ? std::string("kernel") : level;
  Dumper dumper(options);
  Compiled made = run_levels(text, file, options, stop, /*by_hand=*/true, dumper);
  if (made.reached == "torch") return print(made.torch);
  if (made.reached == "tensor") return print(made.tensor);
  if (made.reached == "loop") return print(made.loop);
  if (made.reached == "tile") return print(made.tile);
  return machine ? machine->write(made.kernel, options.context) : print(made.kernel);
}

/// A kernel's own text, the same for kernels that differ in nothing but their names.
std::string text_alone(const kernel_ir::Kernel& kernel, const CompileOptions& options) {
  auto renamed = std::make_shared<kernel_ir::Kernel>(kernel);
  renamed->name = "kernel";
  renamed->provenance.clear();
  kernel_ir::Module module;
  module.kernels.push_back(std::move(renamed));
  return target_of(options.context).texts.back().write(module, options.context);
}

std::string judge_text(const std::string& text, const CompileOptions& options) {
  DEPLO_SUPPORT(!target_of(options.context).texts.empty(), "target {} has no text of its kernels", target_of(options.context).name);
  Dumper dumper(options);
  Compiled made = run_levels(text, "<graph>", options, "", /*by_hand=*/false, dumper);
  const std::vector<KernelSummary> summaries = summarize(made, options);
  std::map<std::string, analysis::Work> work;
  for (const auto& kernel : made.loop.kernels) work[kernel->name] = analysis::work_of(*kernel);
  std::map<std::pair<std::string, std::map<std::string, int64_t>>, json> traffic;  // of equal kernels once
  json list = json::array();
  for (size_t k = 0; k < summaries.size(); ++k) {
    const kernel_ir::Kernel& kernel = *made.kernel.kernels[k];
    std::map<std::string, int64_t> sizes;
    for (const std::string& s : kernel.symbols) {
      auto hint = options.context.hints.find(s);
      sizes[s] = hint == options.context.hints.end() ? 64 : hint->second;
    }
    int64_t threads = 1;
    int64_t blocks = 1;
    for (Expr e : kernel.block) threads *= evaluate(e, sizes);
    for (Expr e : kernel.grid) blocks *= evaluate(e, sizes);
    int64_t shared_bytes = 0;
    kernel_ir::visit_all(kernel.body, [&](const kernel_ir::Stmt& stmt) {
      const auto* array = std::get_if<kernel_ir::Alloc>(&stmt.node);
      if (array && array->space == kernel_ir::Space::shared) shared_bytes += evaluate(array->count, sizes) * size_of(array->dtype);
    });
    const KernelSummary& summary = summaries[k];
    auto number = [&](Expr e) { return analysis::estimate(e, options.context.hints, made.kernel.symbols); };
    json buffers = json::object();
    int64_t calls = 0;
    bool once = true;
    for (const Step& step : made.kernel.steps) {
      const auto* call = std::get_if<CallStep>(&step);
      if (!call || call->kernel != kernel.name) continue;
      ++calls;
      once = once && call->once;
      for (size_t p = 0; p < call->arguments.size(); ++p) {
        const Buffer& buffer = *made.kernel.find_buffer(call->arguments[p]);
        buffers[kernel.params[p].name] = number(product(buffer.shape)) * static_cast<double>(size_of(buffer.dtype));
      }
    }
    std::string alone = text_alone(kernel, options);
    json& memory = traffic[{alone, sizes}];
    if (memory.is_null()) memory = json::parse(target_of(options.context).measure_traffic(kernel, sizes));
    list.push_back({{"name", summary.name},
                    {"schedule", summary.schedule},
                    {"work", work.count(kernel.name) ? analysis::to_string(work.at(kernel.name)) : ""},
                    {"operators", summary.provenance},
                    {"calls", calls},
                    {"once", once},
                    {"text", std::move(alone)},
                    {"buffers", std::move(buffers)},
                    {"flops", number(summary.flops)},
                    {"bytes", number(summary.bytes_read) + number(summary.bytes_written)},
                    {"threads", threads},
                    {"blocks", blocks},
                    {"scratch_bytes", evaluate(kernel.scratch_bytes, sizes)},
                    {"shared_bytes", shared_bytes},
                    {"memory", memory}});
  }
  return list.dump();
}

}  // namespace deplo
