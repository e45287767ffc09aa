#include "pipeline.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "lower/lower.h"
#include "lower/torch_to_tensor.h"
#include "passes/kernel/expand_math.h"
#include "passes/loop/fuse_nests.h"
#include "passes/loop/fuse_producers.h"
#include "passes/loop/hoist_static.h"
#include "passes/loop/name_kernels.h"
#include "passes/loop/share_kernels.h"
#include "passes/loop/share_locals.h"
#include "passes/loop/split_axes.h"
#include "passes/loop/split_reductions.h"
#include "passes/loop/update_in_place.h"
#include "passes/tensor/compose_maps.h"
#include "passes/tensor/eliminate_common_subexpressions.h"
#include "passes/tensor/eliminate_dead_code.h"
#include "passes/tensor/fold_constants.h"
#include "passes/tensor/simplify_algebra.h"

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
    throw InternalError(fmt::format("[{}/{}] {}", level, pass, error.what()));
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

/// Throws InternalError unless the text of a module reads back as the same module.
template <class M>
void check_text(const M& module, const std::string& text) {
  try {
    std::string again = print(read_back(module, text));
    if (again != text) throw InternalError("the text reads back as another module: " + first_difference(text, again));
  } catch (const UserError& error) {
    throw InternalError(fmt::format("the text does not read back: {}", error.what()));
  }
}

class Runner {
 public:
  Runner(const PassContext& context, const PipelineOptions& options) : context_(context), options_(options) {}

  /// Verifies and shows what a lowering (or a parser) made, then runs the level's passes.
  template <class M>
  M level(std::string_view level, M module, const std::vector<Pass<M>>& passes) {
    check(level, "lower", module);
    if (options_.observer) options_.observer(std::string(level), "lower", print(module), true);
    if (options_.stop_after == "lower_to_" + std::string(level)) return stop(std::move(module));
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
      if (text != checked_) check_text(module, text);
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
  bool stopped_ = false;
};

/// Continues from `reached`, whose module `made` holds as a parser or lowering left it.
void run_from(Compiled& made, std::string reached, const PassContext& context, const PipelineOptions& options) {
  Runner runner(context, options);
  size_t start = depth(reached);
  auto enter = [&](std::string_view level, auto&& lower) {
    if (runner.stopped() || depth(level) < start) return false;
    if (depth(level) > start) guarded(level, "lower", lower);
    made.reached = level;
    return true;
  };
  if (enter("tensor", [] {})) made.tensor = runner.level("tensor", std::move(made.tensor), tensor_passes());
  if (enter("loop", [&] { made.loop = lower_tensor_to_loop(made.tensor, context); }))
    made.loop = runner.level("loop", std::move(made.loop), loop_passes());
  if (enter("tile", [&] { made.tile = lower_loop_to_tile(made.loop, context); }))
    made.tile = runner.level("tile", std::move(made.tile), tile_passes());
  if (enter("kernel", [&] { made.kernel = lower_tile_to_kernel(made.tile, context); }))
    made.kernel = runner.level("kernel", std::move(made.kernel), kernel_passes());
}

template <class M>
void append_names(std::vector<std::string>& names, const std::vector<Pass<M>>& passes) {
  for (const Pass<M>& pass : passes) names.push_back(pass.name);
}

/// Refuses a stop_after or a disabled pass that does not exist: a misspelt one would silently change nothing.
void check_names(const PassContext& context, const PipelineOptions& options) {
  std::vector<std::string> names;
  append_names(names, tensor_passes());
  append_names(names, loop_passes());
  append_names(names, tile_passes());
  append_names(names, kernel_passes());
  for (const std::string& name : context.disabled)
    DEPLO_CHECK(std::find(names.begin(), names.end(), name) != names.end(), "cannot disable '{}': the passes are {}", name, joined(names));
  for (std::string_view level : kLevels) {
    names.emplace_back(level);
    if (level != "torch") names.push_back("lower_to_" + std::string(level));
  }
  DEPLO_CHECK(options.dump.empty() || options.dump == "all" || std::find(names.begin(), names.end(), options.dump) != names.end(),
              "cannot dump '{}': the passes and levels are {}, and all", options.dump, joined(names));
  DEPLO_CHECK(options.stop_after.empty() || std::find(names.begin(), names.end(), options.stop_after) != names.end(),
              "cannot stop after '{}': the passes and levels are {}", options.stop_after, joined(names));
}

}  // namespace

const std::vector<Pass<tensor_ir::Graph>>& tensor_passes() {
  static const std::vector<Pass<tensor_ir::Graph>> passes{
      {"fold_constants", fold_constants, "evaluates ops of constants and of index expressions"},
      // Sees literals only where they are constants by now.
      {"simplify_algebra", simplify_algebra, "removes arithmetic that changes no bit"},
      // Only reads that matter count as uses of an op that a map may enter.
      {"eliminate_dead_code", eliminate_dead_code, "removes what nothing reads"},
      {"compose_maps", compose_maps, "joins maps, so that views vanish"},
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
      // While a reduction is still alone in its kernel; the phases fuse with what surrounds them.
      {"split_reductions", split_reductions, "make two parallel phases of long reductions with few results"},
      {"fuse_nests", fuse_nests, "put kernels under one nest where they can share outer axes"},
      // Fusion matches whole axes.
      {"split_axes", split_axes, "split axes so that coordinates become affine"},
      // Nothing asks any longer which loop made a row buffer's elements.
      {"share_locals", share_locals, "write row buffers over others that are read for the last time"},
      {"hoist_static", hoist_static, "run what depends on static inputs alone once per program"},
      {"name_kernels", name_kernels, "name kernels after the torch ops that they implement"},
      {"share_kernels", share_kernels, "let steps with equal kernels call one"},
  };
  return passes;
}

const std::vector<Pass<tile_ir::Module>>& tile_passes() {
  static const std::vector<Pass<tile_ir::Module>> passes{};
  return passes;
}

const std::vector<Pass<kernel_ir::Module>>& kernel_passes() {
  static const std::vector<Pass<kernel_ir::Module>> passes{
      {"expand_math", expand_math, "replaces float32 exp, log, tanh, erf, ... by vector sequences"},
  };
  return passes;
}

std::string level_of(const std::string& text, const std::string& file) {
  Lexer lexer(text, file, /*layout=*/false);
  for (std::string_view level : kLevels)
    if (lexer.at(level)) return std::string(level);
  if (!lexer.at("program")) lexer.fail("expected torch, tensor, loop, tile, kernel or program");
  // A program block says nothing about the level of its kernels; the first kernel after it does.
  while (!lexer.at_end()) {
    for (std::string_view level : {"loop", "tile", "kernel"})
      if (lexer.at(level) && lexer.peek(1).text.starts_with('@')) return std::string(level);
    lexer.next();
  }
  return "kernel";
}

namespace {

template <class Lower>
Compiled run_from_torch(const torch_ir::Graph& graph, const PassContext& context, const PipelineOptions& options, const Lower& lower) {
  Compiled made;
  made.reached = "torch";
  guarded("torch", "import", [&] {
    torch_ir::verify(graph);
    if (options.verify_each) check_text(graph, torch_ir::print(graph));
  });
  if (options.observer) options.observer("torch", "import", torch_ir::print(graph), true);
  if (options.stop_after == "torch") return made;
  made.tensor = guarded("tensor", "lower", lower);
  run_from(made, "tensor", context, options);
  return made;
}

/// "file:line:column: " of the name in `message` that is rarest in the text: the verifiers name what is wrong, not where it stands.
std::string place_of(const std::string& message, const std::string& text, const std::string& file) {
  Lexer words(text, file, /*layout=*/false);
  std::map<std::string, std::pair<Token, int>> seen;
  while (!words.at_end()) {
    Token token = words.next();
    if (token.kind == Token::Kind::identifier || token.kind == Token::Kind::integer)
      ++seen.emplace(token.text, std::pair(token, 0)).first->second.second;
  }
  // Words of the message itself are no names: one that could be no other than a name goes first.
  const std::pair<Token, int>* best = nullptr;
  bool best_is_name = false;
  auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '%'; };
  for (size_t at = 0; at < message.size(); ++at) {
    size_t start = at;
    while (at < message.size() && is_part(message[at])) ++at;
    std::string word = message.substr(start, at - start);
    while (word.ends_with('.')) word.pop_back();
    auto found = seen.find(word);
    if (found == seen.end()) continue;
    bool is_name = word.find_first_of("%_0123456789") != std::string::npos;
    if (best && (is_name < best_is_name || (is_name == best_is_name && found->second.second >= best->second))) continue;
    best = &found->second;
    best_is_name = is_name;
  }
  return best ? fmt::format("{}:{}:{}: ", file, best->first.line, best->first.column) : file + ":1:1: ";
}

/// A module that a person wrote: what its parser and verifier object to is a UserError.
template <class Parse>
auto parse_by_hand(const std::string& text, const std::string& file, const Parse& parse) {
  try {
    auto module = parse(text, file);
    verify(module);
    return module;
  } catch (const InternalError& error) {
    blame_text(error, text, file);
  } catch (const UnsupportedError& error) {
    blame_text(error, text, file);
  }
}

}  // namespace

void blame_text(const Error& error, const std::string& text, const std::string& file) {
  std::string message = error.what();
  if (size_t source = message.find(" (csrc/"); source != std::string::npos) message.resize(source);
  throw UserError(place_of(message, text, file) + message);
}

tensor_ir::Graph lower_torch_by_hand(const torch_ir::Graph& graph, const std::string& text, const std::string& file) {
  try {
    return lower_torch_to_tensor(graph);
  } catch (const InternalError& error) {
    blame_text(InternalError(fmt::format("this call does not fit its operands or its result, or its rule is wrong: {}", error.what())), text, file);
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
  return run_from_torch(graph, context, options, [&] { return lower_torch_to_tensor(graph); });
}

Compiled run_pipeline_from_text(const std::string& text, const std::string& file, const PassContext& context, const PipelineOptions& options) {
  if (options.by_hand) verify_by_hand(text, file);
  std::string level = level_of(text, file);
  check_names(context, options);
  if (level == "torch") {
    torch_ir::Graph graph = torch_ir::parse(text, file);
    return run_from_torch(graph, context, options,
                          [&] { return options.by_hand ? lower_torch_by_hand(graph, text, file) : lower_torch_to_tensor(graph); });
  }
  Compiled made;
  made.reached = level;
  if (level == "tensor") made.tensor = tensor_ir::parse(text, file);
  if (level == "loop") made.loop = loop_ir::parse(text, file);
  if (level == "tile") made.tile = tile_ir::parse(text, file);
  if (level == "kernel") made.kernel = kernel_ir::parse(text, file);
  run_from(made, level, context, options);
  return made;
}

}  // namespace deplo
