#include "program_ir/interpret.h"

#include <set>

#include "base/error.h"

namespace deplo {
namespace {

Attribute evaluate_attribute(const Attribute& attribute, const std::map<std::string, int64_t>& symbols) {
  if (const auto* e = std::get_if<Expr>(&attribute.value)) return {Expr(evaluate(*e, symbols))};
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value)) {
    std::vector<Attribute> items;
    for (const Attribute& item : *list) items.push_back(evaluate_attribute(item, symbols));
    return {std::move(items)};
  }
  return attribute;
}

void collect_arrays(const Attribute& attribute, const std::map<std::string, Array>& memory, std::map<std::string, Array>& arrays) {
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
    for (const Attribute& item : *list) collect_arrays(item, memory, arrays);
  if (const auto* value = std::get_if<ValueName>(&attribute.value)) arrays[value->name] = memory.at(value->name);
}

Array integer_array(int64_t value) {
  Array array = Array::zeros(DType::i64, {});
  array.set(0, Scalar::of_int(DType::i64, value));
  return array;
}

// The program's memory while it runs.
struct Machine {
  const ProgramBody& program;
  const FindParams& find_params;
  const std::map<std::string, int64_t>& symbols;
  const KernelCall& kernel_call;
  Mode mode;
  const LibraryCall& library_call;
  std::map<std::string, Array> memory;
  std::set<std::string> written;

  void run(const CallStep& step) {
    std::vector<Array*> arguments;
    for (const std::string& name : step.arguments) arguments.push_back(&memory.at(name));
    kernel_call(step, arguments, symbols);
    auto params = find_params(step.kernel);
    for (size_t i = 0; params && i < params->size(); ++i)
      if ((*params)[i].writes) written.insert(step.arguments[i]);
  }

  void run(const LibraryStep& step) {
    std::map<std::string, Array> arrays;
    for (const auto& [name, value] : step.arguments) collect_arrays(value, memory, arrays);
    std::vector<Array> results = library_call(step.op, evaluate_arguments(step.arguments, symbols), arrays);
    DEPLO_ASSERT(results.size() >= step.results.size(), "library {} gave {} results for {}", step.op, results.size(), step.results.size());
    for (size_t k = 0; k < step.results.size(); ++k) {
      Array& place = memory.at(step.results[k]);
      accept_library_result(results[k], place.dtype, place.shape, step.op, step.results[k], mode);
      place = std::move(results[k]);
      written.insert(step.results[k]);
    }
  }
};

}  // namespace

LibraryCall no_library() {
  return [](const std::string& op, const auto&, const auto&) -> std::vector<Array> { throw UnsupportedError("no library can run " + op); };
}

std::vector<std::pair<std::string, Attribute>> evaluate_arguments(const std::vector<std::pair<std::string, Attribute>>& arguments,
                                                                  const std::map<std::string, int64_t>& symbols) {
  std::vector<std::pair<std::string, Attribute>> values;
  for (const auto& [name, value] : arguments) values.emplace_back(name, evaluate_attribute(value, symbols));
  return values;
}

void bind_symbols(const std::vector<Expr>& shape, const std::vector<int64_t>& sizes, const std::string& name,
                  std::map<std::string, int64_t>& symbols) {
  DEPLO_CHECK(shape.size() == sizes.size(), "{} must have {} dimensions, got {}", name, shape.size(), sizes.size());
  for (size_t d = 0; d < shape.size(); ++d)
    if (shape[d].is_symbol()) symbols.emplace(shape[d].name(), sizes[d]);
  for (size_t d = 0; d < shape.size(); ++d) {
    bool known = true;
    for (const std::string& symbol : symbols_of(shape[d])) known = known && symbols.count(symbol);
    if (known)
      DEPLO_CHECK(evaluate(shape[d], symbols) == sizes[d], "dimension {} of {} must be {}, got {}", d, name, evaluate(shape[d], symbols), sizes[d]);
  }
}

void accept_library_result(Array& result, DType dtype, const std::vector<int64_t>& shape, const std::string& op, const std::string& name, Mode mode) {
  if (mode == Mode::exact && is_float(result.dtype) && is_float(dtype)) result.dtype = dtype;
  DEPLO_ASSERT(result.dtype == dtype && result.shape == shape, "library {} gave {} another dtype or shape", op, name);
}

std::vector<Array> interpret(const ProgramBody& program, const FindParams& find_params, const std::vector<Array>& inputs,
                             std::map<std::string, int64_t> symbols, const KernelCall& call, Mode mode, const LibraryCall& library) {
  DEPLO_CHECK(inputs.size() == program.input_order.size(), "program @{} takes {} inputs, got {}", program.name, program.input_order.size(),
              inputs.size());
  Machine machine{program, find_params, symbols, call, mode, library, {}, {}};
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!program.find_buffer(program.input_order[i])) symbols[program.input_order[i]] = inputs[i].get(0).i;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string& name = program.input_order[i];
    const Buffer* buffer = program.find_buffer(name);
    if (!buffer) continue;
    DEPLO_CHECK(inputs[i].dtype == buffer->dtype, "input {} must be {}, got {}", name, to_string(buffer->dtype), to_string(inputs[i].dtype));
    bind_symbols(buffer->shape, inputs[i].shape, name, symbols);
    machine.memory[name] = inputs[i];
  }
  for (const Fact& fact : program.facts) {
    const Array& elements = machine.memory.at(fact.buffer);
    bool holds = true;
    for (int64_t i = 0; i < elements.count(); ++i) holds = holds && elements.get(i).i >= fact.lo && elements.get(i).i <= fact.hi;
    symbols[fact.symbol] = holds ? 1 : 0;
  }
  run_size_checks(program.checks, symbols);
  for (const Buffer& buffer : program.buffers)
    if (buffer.kind != BufferKind::input) machine.memory[buffer.name] = Array::undefined(buffer.dtype, evaluate_shape(buffer.shape, symbols));
  std::vector<bool> taken = taken_steps(program, symbols);
  for (size_t i = 0; i < program.steps.size(); ++i)
    if (taken[i]) std::visit([&](const auto& s) { machine.run(s); }, program.steps[i]);

  std::vector<Array> results;
  for (const Attribute& output : program.outputs) {
    if (const auto* value = std::get_if<ValueName>(&output.value))
      results.push_back(machine.memory.at(value->name));
    else if (const auto* e = std::get_if<Expr>(&output.value))
      results.push_back(integer_array(evaluate(*e, symbols)));
    else
      results.push_back(Array::zeros(DType::boolean, {0}));
  }
  for (const std::string& name : program.input_order)
    if (machine.written.count(name)) results.push_back(machine.memory.at(name));
  return results;
}

}  // namespace deplo
