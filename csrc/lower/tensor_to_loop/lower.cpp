#include "lower/lower.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "loop_ir/params.h"
#include "lower/tensor_to_loop/lift.h"
#include "program_ir/names.h"

namespace deplo {
namespace {

using loop_ir::Kernel;
using loop_ir::Module;
using tensor_ir::Graph;
using tensor_ir::TensorType;

void collect_words(const Attribute& attribute, std::set<std::string>& words) {
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) collect_words(item, words);
  if (const auto* word = std::get_if<Word>(&attribute.value)) words.insert(word->text);
}

// Keywords of the text of the kernel levels, which a buffer may not be called.
constexpr const char* kKeywords[] = {"in",  "out", "inout", "if",   "else",  "and", "over", "for",
                                     "min", "max", "none",  "true", "false", "inf", "nan",  "return"};

struct Lowering {
  const Graph& graph;
  Module module;
  std::unordered_map<std::string, const TensorType*> types;
  std::unordered_map<std::string, std::string> buffer_of;
  std::unordered_map<std::string, size_t> places;  ///< of buffers
  std::unordered_map<std::string, std::vector<Expr>> wanted_by_outputs;
  std::unordered_map<std::string, std::vector<Expr>> wanted_by_calls;
  loop_ir::Names names;
  std::set<std::string> reserved;
  std::map<std::string, std::vector<std::string>> operand_copies;  ///< of a value, in strides that calls want
  std::map<std::string, std::vector<std::string>> output_copies;   ///< of a value: outputs that alias it share one

  // Names of buffers must differ from symbols, keywords and the bare words of library arguments.
  void reserve_names() {
    std::set<std::string> taken(std::begin(kKeywords), std::end(kKeywords));
    for (const auto& [name, range] : graph.symbols) taken.insert(name);
    for (const auto& op : graph.ops) {
      const auto* library = std::get_if<tensor_ir::Library>(&op->node);
      if (!library) continue;
      for (const auto& [name, value] : library->arguments) collect_words(value, taken);
    }
    for (const std::string& name : taken) {
      names.reserve(name);
      reserved.insert(name);
    }
  }

  std::string new_buffer_name(const std::string& value) {
    const std::string stem = buffer_stem(value);
    // An input keeps its name if it is free; the digit makes fresh() keep it.
    std::string name = std::isdigit(static_cast<unsigned char>(stem.back())) || reserved.count(stem) ? names.fresh(stem) : stem;
    names.reserve(name);
    reserved.insert(name);
    return name;
  }

  std::string add_buffer(const std::string& value, const TensorType& type, std::vector<Expr> strides, BufferKind kind) {
    std::string name = new_buffer_name(value);
    places.emplace(name, module.buffers.size());
    module.buffers.push_back({name, type.dtype, type.shape, std::move(strides), kind, torch_ir::InputKind::user, false});
    return name;
  }

  void add_inputs() {
    for (const tensor_ir::Input& input : graph.inputs) {
      if (input.kind == torch_ir::InputKind::symbol) {
        module.symbol_inputs.push_back(input.name);
        module.input_order.push_back(input.name);
        continue;
      }
      std::string name = add_buffer(input.name, input.type, input.strides, BufferKind::input);
      module.buffers.back().input_kind = input.kind;
      module.buffers.back().is_static = input.is_static;
      module.input_order.push_back(name);
      types[input.name] = &input.type;
      buffer_of[input.name] = name;
    }
  }

  const Buffer* find_buffer(const std::string& name) const {
    auto it = places.find(name);
    return it == places.end() ? nullptr : &module.buffers[it->second];
  }

  /// The strides that the first output holding a value, and the first call that wants some, want of it.
  void find_wanted_strides() {
    for (const tensor_ir::Output& output : graph.outputs)
      if (const auto* name = std::get_if<ValueName>(&output.value.value)) wanted_by_outputs.emplace(name->name, output.strides);
    for (const auto& op : graph.ops) {
      const auto* library = std::get_if<tensor_ir::Library>(&op->node);
      if (!library || library->operands.empty()) continue;
      const std::vector<std::string> names = tensor_ir::operands_of(*op);
      for (size_t k = 0; k < names.size(); ++k)
        if (library->operands[k]) wanted_by_calls.emplace(names[k], *library->operands[k]);
    }
  }

  // Row-major if the value is no output.
  std::vector<Expr> strides_of(const std::string& value, const TensorType& type, bool& is_output) const {
    auto wanted = wanted_by_outputs.find(value);
    is_output = wanted != wanted_by_outputs.end();
    return is_output && wanted->second.size() == type.shape.size() ? wanted->second : contiguous_strides(type.shape);
  }

  std::optional<std::vector<Expr>> wanted_by_call(const std::string& value) const {
    auto wanted = wanted_by_calls.find(value);
    return wanted == wanted_by_calls.end() ? std::nullopt : std::optional(wanted->second);
  }

  void add_values() {
    find_wanted_strides();
    for (const auto& op : graph.ops) {
      const auto* library = std::get_if<tensor_ir::Library>(&op->node);
      for (size_t k = 0; k < op->results.size(); ++k) {
        const tensor_ir::Value& value = op->results[k];
        types[value.name] = &value.type;
        bool is_output = false;
        std::vector<Expr> strides = strides_of(value.name, value.type, is_output);
        if (library && k < library->strides.size()) {
          // ATen chooses the layout; an output that wants another one is a copy.
          is_output = is_output && library->strides[k] == strides;
          strides = library->strides[k];
        } else if (!is_output) {
          strides = wanted_by_call(value.name).value_or(strides);
        }
        buffer_of[value.name] = add_buffer(value.name, value.type, strides, is_output ? BufferKind::output : BufferKind::temp);
      }
    }
  }

  lift::Tensors tensors() const {
    return {[this](const std::string& value) -> const TensorType& { return *types.at(value); },
            [this](const std::string& value) { return buffer_of.at(value); }, graph.symbols, reserved};
  }

  void add_kernel(lift::Nest nest, const std::string& provenance) {
    Kernel kernel;
    kernel.name = fmt::format("k{}", module.kernels.size());
    kernel.body = loop_ir::make_nest(nest.axes, std::move(nest.body));
    kernel.params = loop_ir::make_params(
        kernel.body, [this](const std::string& b) { return find_buffer(b); }, nest.updates ? nest.written : std::vector<std::string>{});
    kernel.symbols = loop_ir::used_symbols(kernel, graph.symbols);
    if (!provenance.empty()) kernel.provenance.push_back(provenance);
    CallStep step{kernel.name, {}, false};
    for (const loop_ir::Param& p : kernel.params) step.arguments.push_back(p.name);
    module.kernels.push_back(std::make_shared<Kernel>(std::move(kernel)));
    module.steps.emplace_back(std::move(step));
  }

  using Layouts = std::vector<std::optional<std::vector<Expr>>>;

  /// A call's argument with buffers in place of values; `at` counts operands.
  Attribute argument(const Attribute& attribute, const Layouts& layouts, size_t& at) {
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) {
      const size_t k = at++;
      return {ValueName{operand(value->name, k < layouts.size() ? layouts[k] : std::nullopt)}};
    }
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value)) {
      std::vector<Attribute> items;
      for (const Attribute& item : *list) items.push_back(argument(item, layouts, at));
      return {std::move(items)};
    }
    return attribute;
  }

  /// The value's buffer, or a copy where the call wants other strides, or says nothing about a value that lies as another call wants it.
  std::string operand(const std::string& value, std::optional<std::vector<Expr>> strides) {
    const Buffer& buffer = *find_buffer(buffer_of.at(value));
    if (!strides && wanted_by_call(value) == buffer.strides && buffer.kind == BufferKind::temp) strides = contiguous_strides(buffer.shape);
    if (!strides || *strides == buffer.strides) return buffer.name;
    std::vector<std::string>& copies = operand_copies[value];
    auto copy = std::find_if(copies.begin(), copies.end(), [&](const std::string& b) { return find_buffer(b)->strides == *strides; });
    if (copy != copies.end()) return *copy;
    copies.push_back(add_copy(value, *strides, BufferKind::temp));
    return copies.back();
  }

  void add_steps() {
    for (const auto& op : graph.ops) {
      if (const auto* library = std::get_if<tensor_ir::Library>(&op->node)) {
        LibraryStep step{library->op, {}, {}, library->reason};
        size_t at = 0;
        for (const auto& [name, value] : library->arguments) step.arguments.emplace_back(name, argument(value, library->operands, at));
        for (const auto& result : op->results) step.results.push_back(buffer_of.at(result.name));
        module.steps.emplace_back(std::move(step));
        continue;
      }
      for (lift::Nest& nest : lift::lift(*op, tensors())) add_kernel(std::move(nest), op->provenance);
    }
  }

  bool is_input(const std::string& value) const {
    return std::any_of(graph.inputs.begin(), graph.inputs.end(), [&](const auto& input) { return input.name == value; });
  }

  bool is_written(const std::string& input) const {
    return std::any_of(graph.writes.begin(), graph.writes.end(), [&](const auto& w) { return w.input == input && w.value != input; });
  }

  std::string add_copy(const std::string& value, std::vector<Expr> strides, BufferKind kind) {
    const TensorType& type = *types.at(value);
    std::string target = add_buffer(value + "_copy", type, std::move(strides), kind);
    add_kernel(lift::lift_copy(buffer_of.at(value), target, type, tensors()), "");
    return target;
  }

  std::string output_copy(const std::string& value, const std::vector<Expr>& strides) {
    for (const std::string& copy : output_copies[value])
      if (find_buffer(copy)->strides == strides) return copy;
    output_copies[value].push_back(add_copy(value, strides, BufferKind::output));
    return output_copies[value].back();
  }

  // Outputs before writes: an output that is an input denotes what the input held when the call began.
  void add_outputs() {
    for (const tensor_ir::Output& output : graph.outputs) {
      const auto* name = std::get_if<ValueName>(&output.value.value);
      if (!name) {
        module.outputs.push_back(output.value);
        continue;
      }
      const std::string& value = name->name;
      const Buffer* buffer = find_buffer(buffer_of.at(value));
      std::vector<Expr> strides = output.strides.size() == buffer->shape.size() ? output.strides : buffer->strides;
      bool as_is = buffer->strides == strides && (buffer->kind == BufferKind::output || (buffer->kind == BufferKind::input && !is_written(value)));
      module.outputs.push_back({ValueName{as_is ? buffer->name : output_copy(value, strides)}});
    }
  }

  void add_writes() {
    // A value that is itself an input some write overwrites is read before any of them.
    std::map<std::string, std::string> source;
    for (const auto& write : graph.writes) {
      bool snapshot = write.value != write.input && is_input(write.value) && is_written(write.value);
      if (snapshot && !source.count(write.value))
        source[write.value] = add_copy(write.value, contiguous_strides(types.at(write.value)->shape), BufferKind::temp);
    }
    for (const auto& write : graph.writes) {
      if (write.value == write.input) continue;
      std::string from = source.count(write.value) ? source.at(write.value) : buffer_of.at(write.value);
      add_kernel(lift::lift_copy(from, buffer_of.at(write.input), *types.at(write.input), tensors()), "");
    }
  }

  Module run() {
    module.name = graph.name;
    module.symbols = graph.symbols;
    module.checks = graph.checks;
    reserve_names();
    add_inputs();
    add_values();
    add_steps();
    add_outputs();
    add_writes();
    return std::move(module);
  }
};

}  // namespace

loop_ir::Module lower_tensor_to_loop(const Graph& graph, const PassContext&) { return Lowering{graph, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}.run(); }

}  // namespace deplo
