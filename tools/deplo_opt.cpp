// Reads IR text of any level, runs passes and lowerings by name, prints the IR that results: kUsage.

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "lower/lower.h"
#include "pipeline.h"
#include "target/target.h"
#include "target/targets.h"

namespace {

using namespace deplo;
using AnyModule = std::variant<torch_ir::Graph, tensor_ir::Graph, loop_ir::Module, tile_ir::Module, kernel_ir::Module>;

constexpr std::string_view kUsage = R"(deplo_opt reads IR text of any level, runs passes and lowerings by name, and prints the IR that results.

  deplo_opt FILE.ir|-                           parse, verify, print
  deplo_opt FILE.ir --pass NAME [--pass NAME]   only these, in this order; lower_to_LEVEL is the lowering alone
  deplo_opt FILE.ir --lower LEVEL               the whole pipeline down to LEVEL, also to a text of the target's
  deplo_opt --list                              the passes of each level

  --target NAME             what schedules are for
  --vector-bytes N          of a vector register (32)
  --vector-registers N      how many there are (16)
  --threads N               that a call has, for costs (1)
  --load-cost N             of a vector load among multiply-adds, in multiply-adds (0: loads keep up)
  --weights WHICH           pack or original: whether layers keep copies of weights (where they are much faster so)
  --deterministic           sums of floating-point numbers have one order
  --feature NAME            one that the CPU has, as avx512bf16
  --hint s0=32              an example size of a symbol, for costs
  --schedule KERNEL=TEXT    a schedule by hand
  --disable PASS            leave a pass out
  --dump                    print the IR after each pass on standard error

Exit status: 0, 1 for an error in the input, 2 for one in deplo, 3 for what deplo does not support.
)";

struct Arguments {
  std::string file;
  std::vector<std::string> passes;
  std::string lower;
  bool list = false;
  bool help = false;
  PassContext context;
  PipelineOptions options;
};

std::pair<std::string, std::string> split_pair(const std::string& option, const std::string& text) {
  size_t at = text.find('=');
  DEPLO_CHECK(at != std::string::npos, "{} takes NAME=VALUE, not '{}'", option, text);
  return {text.substr(0, at), text.substr(at + 1)};
}

/// All of `text` as a number.
template <class Number>
Number to_number(const std::string& option, const std::string& text) {
  Number value = 0;
  const char* end = text.data() + text.size();
  auto [stop, fault] = std::from_chars(text.data(), end, value);
  DEPLO_CHECK(fault == std::errc() && stop == end, "{} takes {}, not '{}'", option, std::is_integral_v<Number> ? "an integer" : "a number", text);
  return value;
}

Arguments parse_arguments(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    auto value = [&] {
      DEPLO_CHECK(i + 1 < words.size(), "{} needs a value", word);
      return words[++i];
    };
    if (word == "--pass") {
      arguments.passes.push_back(value());
    } else if (word == "--lower") {
      arguments.lower = value();
    } else if (word == "--list") {
      arguments.list = true;
    } else if (word == "--help" || word == "-h") {
      arguments.help = true;
    } else if (word == "--dump") {
      arguments.options.observer = [](const std::string& level, const std::string& pass, const std::string& text, bool changed) {
        std::cerr << "# " << level << '/' << pass << (changed ? "\n" + text : " (unchanged)\n");
      };
    } else if (word == "--target") {
      arguments.context.target.name = find_target(value()).name;
    } else if (word == "--vector-bytes") {
      const auto bytes = to_number<int64_t>(word, value());
      DEPLO_CHECK(bytes == 16 || bytes == 32 || bytes == 64, "{} {}: a vector has 16, 32 or 64 bytes", word, bytes);
      arguments.context.target.vector_bytes = static_cast<int>(bytes);
    } else if (word == "--vector-registers") {
      const auto registers = to_number<int64_t>(word, value());
      DEPLO_CHECK(registers >= 8 && registers <= 64, "{} {}: there are 8 to 64 vector registers", word, registers);
      arguments.context.target.vector_registers = static_cast<int>(registers);
    } else if (word == "--threads") {
      auto threads = to_number<int64_t>(word, value());
      DEPLO_CHECK(threads >= 1 && threads <= 4096, "{} {}: there are 1 to 4096 threads", word, threads);
      arguments.context.target.threads = static_cast<int>(threads);
    } else if (word == "--load-cost") {
      arguments.context.target.load_cost = to_number<double>(word, value());
    } else if (word == "--weights") {
      const std::string which = value();
      DEPLO_CHECK(which == "pack" || which == "original", "{} {}: it is pack or original", word, which);
      arguments.context.weights = which == "pack" ? Weights::packed : Weights::original;
    } else if (word == "--deterministic") {
      arguments.context.deterministic = true;
    } else if (word == "--feature") {
      arguments.context.target.features.insert(value());
    } else if (word == "--hint") {
      auto [name, size] = split_pair(word, value());
      arguments.context.hints[name] = to_number<int64_t>(word, size);
    } else if (word == "--disable") {
      arguments.context.disabled.insert(value());
    } else if (word == "--schedule") {
      auto [kernel, text] = split_pair(word, value());
      arguments.context.schedules[kernel] = text;
    } else {
      DEPLO_CHECK(word == "-" || !word.starts_with("-"), "unknown option '{}'", word);
      DEPLO_CHECK(arguments.file.empty(), "more than one file: {} and {}", arguments.file, word);
      arguments.file = word;
    }
  }
  DEPLO_CHECK(arguments.list || arguments.help || !arguments.file.empty(),
              "no file: deplo_opt FILE.ir|- [--pass NAME]... [--lower LEVEL]; more by --help");
  arguments.options.verify_each = true;
  return arguments;
}

std::string read_all(const std::string& file) {
  if (file == "-") return {std::istreambuf_iterator<char>(std::cin), {}};
  std::ifstream in(file);
  DEPLO_CHECK(in.good(), "cannot read {}", file);
  return {std::istreambuf_iterator<char>(in), {}};
}

AnyModule parse_any(const std::string& text, const std::string& file) {
  std::string level = level_of(text, file);
  if (level == "torch") return torch_ir::parse(text, file);
  if (level == "tensor") return tensor_ir::parse(text, file);
  if (level == "loop") return loop_ir::parse(text, file);
  if (level == "tile") return tile_ir::parse(text, file);
  return kernel_ir::parse(text, file);
}

template <class M>
std::optional<AnyModule> run_pass(const std::vector<Pass<M>>& passes, const std::string& name, const M& module, const PassContext& context) {
  auto row = std::find_if(passes.begin(), passes.end(), [&](const Pass<M>& pass) { return pass.name == name; });
  if (row == passes.end()) return std::nullopt;
  return row->run(module, context);
}

/// The pass or lowering `name` applied to a module of its level; nothing if this level has no such pass.
std::optional<AnyModule> apply(const AnyModule& module, const std::string& name, const Arguments& arguments) {
  const PassContext& context = arguments.context;
  using Result = std::optional<AnyModule>;
  return std::visit(Overloaded{[&](const torch_ir::Graph& m) -> Result {
                                 if (name == "lower_to_tensor") return lower_torch_by_hand(m, arguments.file);
                                 return run_pass(torch_passes(), name, m, context);
                               },
                               [&](const tensor_ir::Graph& m) -> Result {
                                 if (name == "lower_to_loop") return lower_tensor_to_loop(m, context);
                                 return run_pass(tensor_passes(), name, m, context);
                               },
                               [&](const loop_ir::Module& m) -> Result {
                                 if (name == "lower_to_tile") return lower_loop_to_tile(m, context);
                                 return run_pass(loop_passes(), name, m, context);
                               },
                               [&](const tile_ir::Module& m) -> Result {
                                 if (name == "lower_to_kernel") return lower_tile_to_kernel(m, context);
                                 return run_pass(tile_passes(), name, m, context);
                               },
                               [&](const kernel_ir::Module& m) -> Result { return run_pass(kernel_passes(), name, m, context); }},
                    module);
}

std::string print_any(const Compiled& made) {
  if (made.reached == "torch") return print(made.torch);
  if (made.reached == "tensor") return print(made.tensor);
  if (made.reached == "loop") return print(made.loop);
  if (made.reached == "tile") return print(made.tile);
  return print(made.kernel);
}

std::string lower(const std::string& text, const Arguments& arguments) {
  PipelineOptions options = arguments.options;
  options.by_hand = true;
  const std::vector<MachineText>& texts = target_of(arguments.context).texts;
  auto machine = std::find_if(texts.begin(), texts.end(), [&](const MachineText& each) { return each.level == arguments.lower; });
  if (machine == texts.end()) options.stop_after = arguments.lower;
  Compiled made = run_pipeline_from_text(text, arguments.file, arguments.context, options);
  return machine == texts.end() ? print_any(made) : machine->write(made.kernel, arguments.context);
}

std::string run(const Arguments& arguments) {
  std::string text = read_all(arguments.file);
  verify_by_hand(text, arguments.file);
  if (!arguments.lower.empty()) return lower(text, arguments);
  AnyModule module = parse_any(text, arguments.file);
  for (const std::string& name : arguments.passes) {
    std::optional<AnyModule> next = apply(module, name, arguments);
    DEPLO_CHECK(next, "no pass '{}' at this module's level ({})", name, level_of(text, arguments.file));
    module = std::move(*next);
    std::visit([](const auto& m) { verify(m); }, module);
  }
  return std::visit([](const auto& m) { return print(m); }, module);
}

template <class M>
void list(const char* level, const std::vector<Pass<M>>& passes) {
  for (const Pass<M>& pass : passes) std::cout << level << '\t' << pass.name << '\t' << pass.doc << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    register_targets();
    Arguments arguments = parse_arguments({argv + 1, argv + argc});
    if (arguments.help) {
      std::cout << kUsage;
    } else if (arguments.list) {
      list("torch", torch_passes());
      list("tensor", tensor_passes());
      list("loop", loop_passes());
      list("tile", tile_passes());
      list("kernel", kernel_passes());
    } else {
      std::cout << run(arguments);
    }
    return 0;
  } catch (const UserError& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  } catch (const UnsupportedError& error) {
    std::cerr << "unsupported: " << error.what() << '\n';
    return 3;
  } catch (const std::exception& error) {
    std::cerr << "internal error: " << error.what() << '\n';
    return 2;
  }
}
