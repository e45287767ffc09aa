#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/options.h"
#include "runtime/program.h"
#include "target/kernels.h"

namespace deplo {

/// What a kernel does, for people and for rooflines. Expressions over the program's symbols.
struct KernelSummary {
  std::string name;
  std::vector<std::string> provenance;
  Expr flops = 0;
  Expr bytes_read = 0;
  Expr bytes_written = 0;
  std::string schedule;
  double tuned_seconds = 0;  ///< of the kernel alone by a schedule that measurements chose, which it has; 0: it has none
  double usual_seconds = 0;  ///< by the schedule in whose place that came
};

/// What one compilation did.
struct CompileReport {
  std::vector<KernelSummary> kernels;
  CodegenStats codegen;
  double lowering_seconds = 0;  ///< parsing, passes and lowerings
  double total_seconds = 0;
};

struct CompiledGraph {
  std::unique_ptr<runtime::Program> program;
  CompileReport report;
};

/// Compiles IR text of any level for the options' target. A machine that lacks what running needs is no error: Program::missing() tells. Throws
/// UserError (malformed text, bad options), UnsupportedError, InternalError.
CompiledGraph compile_text(const std::string& text, const CompileOptions& options, LibraryFactory library);

/// A compiled graph as text: its Kernel IR, and what its report says of the kernels, as JSON.
struct GraphText {
  std::string kernel_ir;
  std::string kernels;
};
GraphText to_text(const CompiledGraph& graph);
/// The graph again, without a pass. `options` are those that it was compiled with; only threads, cache_dir, guard, debug and memory_limit, of which
/// the text holds nothing, may be others. Throws UserError for text that to_text did not write.
CompiledGraph restore_graph(const GraphText& text, const CompileOptions& options, LibraryFactory library);

/// Refuses names of passes and levels that do not exist, and schedules that do not parse. Throws UserError.
void check_options(const CompileOptions& options);

/// IR text of any level lowered to `level`: tensor, loop, tile, kernel or a text of the target's (torch for Torch IR itself).
std::string lower_text(const std::string& text, const std::string& file, const std::string& level, const CompileOptions& options);

/// JSON list of the kernels that IR text becomes, each with what it must do (flops, bytes) and what its accesses do to memory, for the hints' sizes.
/// UnsupportedError for a target without a model of that.
std::string judge_text(const std::string& text, const CompileOptions& options);

/// JSON about a compiled graph: kernels, steps, library calls with reasons, memory plan, packed bytes, cache, times.
std::string describe(const CompiledGraph& graph, const CompileOptions& options);

/// JSON about what the passes know of the machine that the options name, but for the number of its threads, which changes costs alone.
std::string describe_target(const CompileOptions& options);
/// The linker's identifier of this code (the GNU build id, in hexadecimal): another for other code. Empty if it was linked without one.
std::string build_id();

/// JSON about this machine and build, name to text: versions, CPU features, topology.
std::string describe_environment(const CompileOptions& options);
/// JSON of base/topology's tree: kind, index, bytes, children, memory. Throws as topology_tree does.
std::string describe_topology(const std::string& synthetic, const std::string& xml);
/// JSON list of targets, with what they are.
std::string describe_targets();
/// JSON list of passes: level, name, doc.
std::string describe_passes();

}  // namespace deplo
