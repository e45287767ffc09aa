#include "pipeline.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/closest.h"
#include "base/error.h"
#include "base/text.h"
#include "lower/lower.h"
#include "lower/torch_to_tensor.h"
#include "passes/kernel/expand_math.h"
#include "passes/kernel/merge_stores.h"
#include "passes/kernel/simplify_casts.h"
#include "passes/loop/chain_products.h"
#include "passes/loop/chain_windows.h"
#include "passes/loop/choose_layouts.h"
#include "passes/loop/forward_copies.h"
#include "passes/loop/fuse_nests.h"
#include "passes/loop/fuse_producers.h"
#include "passes/loop/hoist_checks.h"
#include "passes/loop/hoist_static.h"
#include "passes/loop/keep_factors.h"
#include "passes/loop/keep_places.h"
#include "passes/loop/keep_windows.h"
#include "passes/loop/name_kernels.h"
#include "passes/loop/narrow_buffers.h"
#include "passes/loop/repeats.h"
#include "passes/loop/share_kernels.h"
#include "passes/loop/share_locals.h"
#include "passes/loop/split_axes.h"
#include "passes/loop/split_keys.h"
#include "passes/loop/split_loops.h"
#include "passes/loop/split_reductions.h"
#include "passes/loop/sum_in_integers.h"
#include "passes/loop/unroll_layers.h"
#include "passes/loop/update_in_place.h"
#include "passes/tensor/compose_maps.h"
#include "passes/tensor/eliminate_common_subexpressions.h"
#include "passes/tensor/eliminate_dead_code.h"
#include "passes/tensor/fold_constants.h"
#include "passes/tensor/simplify_algebra.h"
#include "passes/tensor/simplify_softmax.h"
#include "passes/tensor/sum_taps.h"
#include "passes/torch/roll_layers.h"
#include "passes/torch/share_calls.h"

namespace deplo {
namespace {

constexpr std::array<std::string_view, 5> kLevels{"torch", "tensor", "loop", "tile", "kernel"};

size_t depth(std::string_view level) {
  auto at = std::find(kLevels.begin(), kLevels.end(), level);
  DEPLO_ASSERT(at != kLevels.end(), "'{}' is not a level", level);
  return static_cast<size_t>(at - kLevels.begin());
}

/// Runs one step and adds level and pass to whatever goes wrong in it.
template <class F>
auto guarded(std::string_view level, std::string_view pass, F&& run) {
  try {
    return run();
  } catch (const InternalError& error) {
    throw InternalError(fmt::format("[{}/{}] {}", level, pass, error.what()), error.location());
  } catch (const std::logic_error& error) {  // of the standard library: an index or a length that is out of range
    throw InternalError(fmt::format("[{}/{}] {}", level, pass, error.what()));
  }
}

torch_ir::Graph read_back(const torch_ir::Graph& /*level*/, const std::string& text) { return torch_ir::parse(text); }
tensor_ir::Graph read_back(const tensor_ir::Graph& /*level*/, const std::string& text) { return tensor_ir::parse(text); }
loop_ir::Module read_back(const loop_ir::Module& /*level*/, const std::string& text) { return loop_ir::parse(text); }
tile_ir::Module read_back(const tile_ir::Module& /*level*/, const std::string& text) { return tile_ir::parse(text); }
kernel_ir::Module read_back(const kernel_ir::Module& /*level*/, const std::string& text) { return kernel_ir::parse(text); }

/// The first line in which two texts differ, as "line 3: '...' became '...'".
std::string first_difference(const std::string& before, const std::string& after) {
  std::istringstream a(before);
  std::istringstream b(after);
  std::string was;
  std::string is;
  for (int line = 1;; ++line) {
    bool more_a = static_cast<bool>(std::getline(a, was));
    bool more_b = static_cast<bool>(std::getline(b, is));
    if (!more_a) was.clear();
    if (!more_b) is.clear();
    if (was != is || (!more_a && !more_b)) return fmt::format("line {}: '{}' became '{}'", line, was, is);
  }
}

template <class T>
size_t first_difference(const Refs<T>& a, const Refs<T>& b) {
  size_t at = 0;
  while (at < a.size() && at < b.size() && *a[at] == *b[at]) ++at;
  return at;
}

std::string unprinted_part(const torch_ir::Graph& was, const torch_ir::Graph& is) {
  size_t at = first_difference(was.nodes, is.nodes);
  return at < was.nodes.size() ? print(*was.nodes[at]) : "the head, the writes or the outputs";
}
std::string unprinted_part(const tensor_ir::Graph& was, const tensor_ir::Graph& is) {
  size_t at = first_difference(was.ops, is.ops);
  return at < was.ops.size() ? print(*was.ops[at]) : "the head, the writes or the outputs";
}
template <class Kernel>
std::string unprinted_part(const ModuleOf<Kernel>& was, const ModuleOf<Kernel>& is) {
  size_t at = first_difference(was.kernels, is.kernels);
  return at < was.kernels.size() ? print(*was.kernels[at]) : "the program";
}

/// What the text of a module reads back as; InternalError unless that is the same module.
template <class M>
M check_text(const M& module, const std::string& text) {
  try {
    M again = read_back(module, text);
    if (again == module) return again;
    std::string now = print(again);
    if (now != text) throw InternalError("the text reads back as another module: " + first_difference(text, now));
    throw InternalError("the text leaves out a part of " + unprinted_part(module, again));
  } catch (const UserError& error) {
    throw InternalError(fmt::format("the text does not read back: {}", error.what()));
  }
}

class Runner {
 public:
  Runner(const PassContext& context, const PipelineOptions& options) : context_(context), options_(options) {}

  /// Shows what a lowering (or a parser) made, runs the level's passes, and verifies what comes out of them; where every pass is verified or nobody
  /// has seen the module yet, what came in as well.
  template <class M>
  M level(std::string_view level, M module, const std::vector<Pass<M>>& passes) {
    const char* entry = level == "torch" ? "import" : "lower";
    const bool stops_here = options_.stop_after == "lower_to_" + std::string(level);
    if (options_.verify_each || std::exchange(is_first_, false) || passes.empty() || stops_here) check(level, entry, module);
    if (options_.observer) options_.observer(std::string(level), entry, print(module), true);
    if (stops_here) return stop(std::move(module));
    return rest(level, std::move(module), passes);
  }

  /// Runs further passes of a level.
  template <class M>
  M rest(std::string_view level, M module, const std::vector<Pass<M>>& passes) {
    for (const Pass<M>& pass : passes) {
      if (stopped_) break;
      if (!context_.disabled.contains(pass.name)) module = run(level, pass, std::move(module));
      if (options_.stop_after == pass.name) stopped_ = true;
    }
    if (!options_.verify_each && !passes.empty()) check(level, passes.back().name, module);
    if (options_.stop_after == level) stopped_ = true;
    return module;
  }

  bool stopped() const { return stopped_; }

 private:
  template <class M>
  M stop(M module) {
    stopped_ = true;
    return module;
  }

  template <class M>
  void check(std::string_view level, std::string_view pass, const M& module) {
    guarded(level, pass, [&] {
      verify(module);
      if (!options_.verify_each) return;
      std::string text = print(module);
      M& again = std::get<M>(read_back_);
      if (text == checked_ && again == module) return;
      again = check_text(module, text);
      checked_ = std::move(text);
    });
  }

  template <class M>
  M run(std::string_view level, const Pass<M>& pass, M module) {
    std::string before = options_.observer ? print(module) : std::string();
    module = guarded(level, pass.name, [&] { return pass.run(std::move(module), context_); });
    if (options_.verify_each) check(level, pass.name, module);
    if (options_.observer) {
      std::string after = print(module);
      options_.observer(std::string(level), pass.name, after, after != before);
    }
    return module;
  }

  const PassContext& context_;
  const PipelineOptions& options_;
  std::string checked_;  ///< the text that was read back last: most passes change nothing
  std::tuple<torch_ir::Graph, tensor_ir::Graph, loop_ir::Module, tile_ir::Module, kernel_ir::Module> read_back_;
  bool stopped_ = false;
  bool is_first_ = true;  ///< level, whose module a parser or an importer made
};

using LowerTorch = std::function<tensor_ir::Graph(const torch_ir::Graph&)>;

constexpr std::string_view kFirstOfAllLayers = "name_kernels";  ///< the first pass for which layers that are worked on once are there again

/// The passes of Loop IR on what was kept of equal layers, then on all of them; nothing if those cannot be put back.
std::optional<loop_ir::Module> run_loop_passes(Runner& runner, loop_ir::Module module, const torch_ir::Rolled& rolled) {
  const std::vector<Pass<loop_ir::Module>>& passes = loop_passes();
  const auto split = std::ranges::find(passes, kFirstOfAllLayers, &Pass<loop_ir::Module>::name);
  module = runner.level("loop", std::move(module), {passes.begin(), split});
  auto all = guarded("loop", "unroll_layers", [&] { return unroll_layers(module, rolled); });
  if (!all) return std::nullopt;
  std::vector<Pass<loop_ir::Module>> rest{{"unroll_layers", [&](loop_ir::Module&&, const PassContext&) { return *std::move(all); }, ""}};
  rest.insert(rest.end(), split, passes.end());
  return runner.rest("loop", std::move(module), rest);
}

/// Continues from `reached`, whose module `made` holds as a parser or an importer left it.
/// `rolled`: equal layers are worked on once; false if that did not do.
bool run_from(Compiled& made, const std::string& reached, const PassContext& context, const PipelineOptions& options, const LowerTorch& lower_torch,
              const torch_ir::Rolled* rolled) {
  Runner runner(context, options);
  size_t start = depth(reached);
  auto enter = [&](std::string_view level, auto&& lower) {
    if (runner.stopped() || depth(level) < start) return false;
    if (depth(level) > start) guarded(level, "lower", lower);
    made.reached = level;
    return true;
  };
  if (enter("torch", [] {})) made.torch = runner.level("torch", std::move(made.torch), torch_passes());
  if (enter("tensor", [&] { made.tensor = lower_torch(made.torch); })) made.tensor = runner.level("tensor", std::move(made.tensor), tensor_passes());
  if (enter("loop", [&] { made.loop = lower_tensor_to_loop(made.tensor, context); })) {
    auto all = rolled ? run_loop_passes(runner, std::move(made.loop), *rolled) : runner.level("loop", std::move(made.loop), loop_passes());
    if (!all) return false;
    made.loop = *std::move(all);
  }
  if (enter("tile", [&] { made.tile = lower_loop_to_tile(made.loop, context); }))
    made.tile = runner.level("tile", std::move(made.tile), tile_passes());
  if (enter("kernel", [&] { made.kernel = lower_tile_to_kernel(made.tile, context); }))
    made.kernel = runner.level("kernel", std::move(made.kernel), kernel_passes());
  return true;
}

/// The same, of equal layers once where nobody looks at what passes make of them.
void run_from(Compiled& made, const std::string& reached, const PassContext& context, const PipelineOptions& options,
              const LowerTorch& lower_torch = lower_torch_to_tensor) {
  const bool stops_early = !options.stop_after.empty() && options.stop_after != "tile" && options.stop_after != "kernel";
  if (reached == "torch" && !options.whole && !stops_early && Repeats::are_shared(context)) {
    guarded("torch", "import", [&] { verify(made.torch); });
    if (const auto rolled = guarded("torch", "roll_layers", [&] { return roll_layers(made.torch); })) {
      Compiled of_few;
      of_few.torch = rolled->graph;
      if (run_from(of_few, reached, context, options, lower_torch, &*rolled)) {
        made = std::move(of_few);
        return;
      }
    }
  }
  run_from(made, reached, context, options, lower_torch, nullptr);
}

template <class M>
void append_names(std::vector<std::string>& names, const std::vector<Pass<M>>& passes) {
  for (const Pass<M>& pass : passes) names.push_back(pass.name);
}

/// Every pass, once.
std::vector<std::string> pass_names() {
  std::vector<std::string> all;
  append_names(all, torch_passes());
  append_names(all, tensor_passes());
  append_names(all, loop_passes());
  append_names(all, tile_passes());
  append_names(all, kernel_passes());
  all.emplace_back("share_repeats");  // no pass: what passes do for equal parts of a program (passes/loop/repeats.h)
  std::vector<std::string> names;
  for (const std::string& name : all)
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

void check_name(const std::string& action, const std::string& name, const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), name) != known.end()) return;
  std::string close = closest(name, known);
  throw UserError(fmt::format("cannot {} '{}'{} one of {}", action, name, close.empty() ? ": expected" : ", did you mean '" + close + "'? Expected",
                              joined(known)));
}

}  // namespace

const std::vector<Pass<torch_ir::Graph>>& torch_passes() {
  static const std::vector<Pass<torch_ir::Graph>> passes{
      // Tensor IR no longer knows which calls of a library may run once.
      {"share_calls", share_calls, "runs equal calls once"},
  };
  return passes;
}

const std::vector<Pass<tensor_ir::Graph>>& tensor_passes() {
  static const std::vector<Pass<tensor_ir::Graph>> passes{
      {"fold_constants", fold_constants, "evaluates ops of constants and of index expressions"},
      // Sees literals only where they are constants by now.
      {"simplify_algebra", simplify_algebra, "removes arithmetic that changes no bit"},
      // Only reads that matter count as uses of an op that a map may enter.
      {"eliminate_dead_code", eliminate_dead_code, "removes what nothing reads"},
      {"compose_maps", compose_maps, "joins maps, so that views vanish"},
      // Maps lead to maxima and to parts of concatenations directly.
      {"simplify_softmax", simplify_softmax, "computes softmaxes of concatenations by their parts, with one maximum"},
      // Maps say which taps read one point.
      {"sum_taps", sum_taps, "sums weights that multiply the same points of an enlarged image"},
      // Joined maps of one source are equal; views between them would hide it.
      {"eliminate_common_subexpressions", eliminate_common_subexpressions, "computes equal ops once"},
      {"eliminate_dead_code", eliminate_dead_code, "removes what nothing reads"},
  };
  return passes;
}

const std::vector<Pass<loop_ir::Module>>& loop_passes() {
  static const std::vector<Pass<loop_ir::Module>> passes{
      // Before fusion hides which element an update keeps.
      {"update_in_place", update_in_place, "turn functional updates that are written back to an input into stores in place"},
      {"fuse_producers", fuse_producers, "substitute pointwise producers and index maps into the kernels that read them"},
      // What reads the original of a copy no longer keeps it in memory.
      {"forward_copies", forward_copies, "store temporaries where they would be copied to"},
      // While a reduction is still alone in its kernel; the phases fuse with what surrounds them.
      {"keep_windows", keep_windows, "compute images that windows overlap by kernels of their own where their places are crooked"},
      {"keep_factors", keep_factors, "compute factors of products that no schedule multiplies in blocks from where they lie by kernels of their own"},
      {"split_reductions", split_reductions, "make two parallel phases of long reductions with few results"},
      {"fuse_nests", fuse_nests, "put kernels under one nest where they can share outer axes"},
      // What fusion left between kernels.
      {"chain_products", chain_products, "compute factors of products, which are sums of products, where they are summed"},
      // Fusion made attention one kernel; keys of a block have one place as long as their axis is whole.
      {"keep_places", keep_places, "keep where attention finds keys, by integers that say so, in kernels of their own"},
      // Fusion matches whole axes.
      {"split_axes", split_axes, "split axes so that coordinates become affine"},
      // Fusion matches whole axes here, too.
      {"split_loops", split_loops, "split innermost loops where their guards turn"},
      // Nothing asks any longer which loop made a row buffer's elements.
      {"share_locals", share_locals, "write row buffers over others that are read for the last time"},
      // Nothing moves loops any longer; who looks at loads from here on sees how they lie.
      {"hoist_checks", hoist_checks, "check indices in front of the loops that they do not depend on"},
      // What fusion left between kernels.
      {"narrow_buffers", narrow_buffers, "keep temporaries that follow from something narrower as that"},
      // Operands are bytes by now.
      {"sum_in_integers", sum_in_integers, "sum products of dequantised numbers as bytes"},
      // Fusion made attention one kernel; what cuts it in two comes after all that could take it for something else.
      {"split_keys", split_keys, "sum parts of the keys of attention on blocks of their own"},
      // Once it is known what each kernel reads.
      {"choose_layouts", choose_layouts, "let temporaries, and copies of parameters, lie along the lanes of the kernels around them"},
      // Arrays between kernels lie as their readers' lanes do, and are nothing's operands any longer.
      {"chain_windows", chain_windows, "compute what kernels reach of their neighbours' results where they read it"},
      {"hoist_static", hoist_static, "run what depends on static inputs alone once per program"},
      {"name_kernels", name_kernels, "name kernels after the torch ops that they implement"},
      {"share_kernels", share_kernels, "let steps with equal kernels call one"},
  };
  return passes;
}

const std::vector<Pass<tile_ir::Module>>& tile_passes() {
  static const std::vector<Pass<tile_ir::Module>> passes{};  // none: applying a schedule leaves nothing to do
  return passes;
}

const std::vector<Pass<kernel_ir::Module>>& kernel_passes() {
  static const std::vector<Pass<kernel_ir::Module>> passes{
      {"merge_stores", merge_stores, "stores vectors that lie at even and odd places of one stretch as whole vectors"},
      {"simplify_casts", simplify_casts, "leaves out casts of whole numbers that change nothing, rounds factors by one instruction"},
      {"expand_math", expand_math, "replaces float32 exp, log, tanh, erf, ... by vector sequences"},
  };
  return passes;
}

void check_names(const PassContext& context, const PipelineOptions& options) {
  std::vector<std::string> names = pass_names();
  for (const std::string& name : context.disabled) check_name("disable", name, names);
  for (std::string_view level : kLevels) {
    names.emplace_back(level);
    if (level != "torch") names.push_back("lower_to_" + std::string(level));
  }
  if (!options.stop_after.empty()) check_name("stop after", options.stop_after, names);
  names.emplace_back("all");
  if (!options.dump.empty()) check_name("dump", options.dump, names);
}

std::string level_of(const std::string& text, const std::string& file) {
  // Mostly the first word says it, and a large graph has many more.
  for (std::string_view level : kLevels)
    if (text.starts_with(std::string(level) + " ")) return std::string(level);
  Lexer lexer(text, file, /*layout=*/false);
  for (std::string_view level : kLevels)
    if (lexer.at(level)) return std::string(level);
  if (lexer.at("schedule")) return "tile";
  if (!lexer.at("program")) lexer.fail("expected torch, tensor, loop, tile, kernel, program or schedule");
  // A program block says nothing about the level of its kernels; the first kernel after it does.
  while (!lexer.at_end()) {
    for (std::string_view level : {"loop", "tile", "kernel"})
      if (lexer.at(level) && lexer.peek(1).text.starts_with('@')) return std::string(level);
    lexer.next();
  }
  return "kernel";
}

namespace {

/// What a verifier or a lowering objects to, as "file:line:column: ..." and without the place in deplo's own source.
std::string complaint(const Error& error, const std::string& file) {
  std::string message = error.what();
  if (size_t source = message.find(" (csrc/"); source != std::string::npos) message.resize(source);
  Location at = error.location();
  return at.known() ? fmt::format("{}:{}:{}: {}", file, at.line, at.column, message) : fmt::format("{}: {}", file, message);
}

/// A module that a person wrote: what its parser and verifier object to is a UserError.
template <class Parse>
auto parse_by_hand(const std::string& text, const std::string& file, const Parse& parse) {
  auto module = parse(text, file);
  try {
    verify(module);
  } catch (const InternalError& error) {
    throw UserError(complaint(error, file));
  } catch (const UnsupportedError& error) {  // a size that does not fit in 64 bits
    throw UserError(complaint(error, file));
  }
  return module;
}

}  // namespace

tensor_ir::Graph lower_torch_by_hand(const torch_ir::Graph& graph, const std::string& file) {
  try {
    tensor_ir::Graph lowered = lower_torch_to_tensor(graph);
    verify(lowered);  // results of other sizes than their operands allow
    return lowered;
  } catch (const InternalError& error) {
    throw UserError(complaint(error, file));
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(complaint(error, file));
  }
}

void verify_by_hand(const std::string& text, const std::string& file) {
  std::string level = level_of(text, file);
  if (level == "torch") parse_by_hand(text, file, torch_ir::parse);
  if (level == "tensor") parse_by_hand(text, file, tensor_ir::parse);
  if (level == "loop") parse_by_hand(text, file, loop_ir::parse);
  if (level == "tile") parse_by_hand(text, file, tile_ir::parse);
  if (level == "kernel") parse_by_hand(text, file, kernel_ir::parse);
}

Compiled run_pipeline(const torch_ir::Graph& graph, const PassContext& context, const PipelineOptions& options) {
  check_names(context, options);
  Compiled made;
  made.torch = graph;
  run_from(made, "torch", context, options);
  return made;
}

Compiled run_pipeline_from_text(const std::string& text, const std::string& file, const PassContext& context, const PipelineOptions& options) {
  if (options.by_hand) verify_by_hand(text, file);
  std::string level = level_of(text, file);
  check_names(context, options);
  Compiled made;
  if (level == "torch") made.torch = torch_ir::parse(text, file);
  if (level == "tensor") made.tensor = tensor_ir::parse(text, file);
  if (level == "loop") made.loop = loop_ir::parse(text, file);
  if (level == "tile") made.tile = tile_ir::parse(text, file);
  if (level == "kernel") made.kernel = kernel_ir::parse(text, file);
  if (options.by_hand)
    run_from(made, level, context, options, [&](const torch_ir::Graph& graph) { return lower_torch_by_hand(graph, file); });
  else
    run_from(made, level, context, options);
  return made;
}

}  // namespace deplo
