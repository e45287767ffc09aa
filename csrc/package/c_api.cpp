#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/processors.h"
#include "deplo_runtime.h"
#include "package/package.h"

using deplo::package::Package;
using deplo::package::UserInput;
using deplo::package::UserOutput;

static_assert(static_cast<int>(deplo::DType::boolean) == DEPLO_BOOL && static_cast<int>(deplo::DType::i64) == DEPLO_I64 &&
              static_cast<int>(deplo::DType::bf16) == DEPLO_BF16 && static_cast<int>(deplo::DType::f64) == DEPLO_F64 &&
              static_cast<int>(deplo::DType::f8) == DEPLO_F8E4M3);

/// Results and all that their values point to.
struct deplo_results {
  std::vector<deplo_value> values;
  std::vector<deplo::Memory> memory;                 ///< of the program's outputs, in the order in which it allocates them
  std::shared_ptr<const deplo::runtime::Plan> plan;  ///< holds sizes and strides
  std::shared_ptr<const Package> package;            ///< holds constants
  std::vector<std::vector<int64_t>> strides;         ///< of the inputs
};

struct deplo_model {
  std::shared_ptr<Package> package;
  std::unique_ptr<deplo::runtime::Program> program;
  std::vector<deplo::Memory> buffers;  ///< that calls write, by tensor of the package; null for the others
  std::vector<size_t> allocated_at;    ///< by buffer of the program: its place among those that are allocated
  bool writes_buffers = false;
  int threads = 1;
  std::mutex mutex;  ///< of calls that write buffers
};

namespace {

using deplo::TensorView;

thread_local std::string last_error;

/// f(), or a null pointer and last_error.
template <class F>
auto guarded(const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an unknown error";
  }
  return nullptr;
}

/// One call's memory.
class PointerHost final : public deplo::Host {
 public:
  PointerHost(const std::shared_ptr<Package>& package, std::vector<deplo::Memory>& memory) : package_(package), memory_(memory) {}

  char* allocate(size_t /*buffer*/, deplo::DType /*dtype*/, const deplo::BufferShape& shape) override {
    // One byte at least: programs and callers tell an empty tensor by its sizes, not by its pointer.
    memory_.emplace_back(std::max<int64_t>(shape.bytes, 1));
    return memory_.back().data();
  }
  std::shared_ptr<void> watch(size_t /*input*/) override { return package_; }

 private:
  std::shared_ptr<Package> package_;
  std::vector<deplo::Memory>& memory_;
};

/// An input as the runtime sees it; `strides` holds those that the caller leaves out.
deplo::CallArgument argument_of(const deplo_value& value, const UserInput& wanted, std::vector<int64_t>& strides) {
  DEPLO_CHECK((value.kind == DEPLO_TENSOR) == wanted.is_tensor && value.kind != DEPLO_CONSTANT, "input {}: expected {}", wanted.name,
              wanted.is_tensor ? "a tensor" : "an integer");
  deplo::CallArgument argument;
  argument.is_tensor = wanted.is_tensor;
  argument.integer = value.integer;
  if (!wanted.is_tensor) return argument;
  DEPLO_CHECK(value.rank >= 0 && (value.rank == 0 || value.sizes) && value.dtype >= DEPLO_BOOL && value.dtype <= DEPLO_F8E4M3,
              "input {}: rank {}, dtype {}, sizes at {}", wanted.name, value.rank, static_cast<int>(value.dtype),
              static_cast<const void*>(value.sizes));
  int64_t count = 1;
  strides.resize(static_cast<size_t>(value.rank));
  for (int d = value.rank; d-- > 0;) {
    strides[d] = value.strides ? value.strides[d] : count;
    count *= std::max<int64_t>(value.sizes[d], 1);
  }
  const bool is_empty = std::any_of(value.sizes, value.sizes + value.rank, [](int64_t size) { return size == 0; });
  DEPLO_CHECK(value.data || is_empty, "input {}: no memory", wanted.name);
  TensorView& view = argument.tensor;
  view.data = static_cast<char*>(value.data);
  view.dtype = static_cast<deplo::DType>(value.dtype);
  view.rank = value.rank;
  view.sizes = value.sizes;
  view.strides = strides.data();
  view.storage = value.data;
  return argument;
}

deplo::CallArgument constant_of(const deplo_model& model, size_t place) {
  const deplo::package::PackedTensor& tensor = model.package->manifest().tensors[place];
  deplo::CallArgument argument;
  TensorView& view = argument.tensor;
  // Programs write no constant: those that they write are in `buffers`.
  view.data = tensor.is_written ? model.buffers[place].data() : const_cast<char*>(model.package->data_of(tensor));
  view.dtype = tensor.dtype;
  view.rank = static_cast<int>(tensor.sizes.size());
  view.sizes = tensor.sizes.data();
  view.strides = tensor.strides.data();
  view.storage = view.data;
  return argument;
}

deplo_value value_of(deplo::DType dtype, void* data, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  deplo_value value{};
  value.kind = DEPLO_TENSOR;
  value.dtype = static_cast<deplo_dtype>(dtype);
  value.rank = static_cast<int32_t>(sizes.size());
  value.data = data;
  value.sizes = sizes.data();
  value.strides = strides.data();
  return value;
}

/// Result `place` of the program.
deplo_value result_of(const deplo_model& model, const deplo_results& results, const std::vector<deplo::CallArgument>& arguments, size_t place) {
  const deplo::runtime::Layout& layout = model.program->layout();
  const deplo::runtime::Layout::Output& output = layout.outputs[place];
  deplo_value value{};
  if (output.integer) {
    value.kind = DEPLO_INTEGER;
    value.integer = results.plan->integers[place];
    return value;
  }
  if (!output.buffer) {
    value.kind = DEPLO_CONSTANT;
    value.json = "null";
    return value;
  }
  const deplo::Buffer& buffer = model.program->module().buffers[*output.buffer];
  const deplo::BufferShape& shape = results.plan->shapes[*output.buffer];
  if (buffer.kind != deplo::BufferKind::input)
    return value_of(buffer.dtype, results.memory[model.allocated_at[*output.buffer]].data(), shape.sizes, shape.strides);
  for (size_t i = 0; i < arguments.size(); ++i)
    if (layout.input_order[i] == output.buffer) return value_of(buffer.dtype, arguments[i].tensor.data, shape.sizes, shape.strides);
  throw deplo::InternalError(fmt::format("result {} is no output", place));
}

std::unique_ptr<deplo_model> opened(const char* path, const deplo_options& options) {
  const std::string check = options.check ? options.check : "quick";
  DEPLO_CHECK(check == "quick" || check == "full" || check == "code", "check is '{}', expected one of code, quick, full", check);
  auto model = std::make_unique<deplo_model>();
  model->package = std::make_shared<Package>(path, options.features ? options.features : "",
                                             check == "quick"  ? deplo::package::Check::quick
                                             : check == "full" ? deplo::package::Check::full
                                                               : deplo::package::Check::code);
  deplo::runtime::Program::Options program;
  program.memory_limit = options.memory_limit;
  model->program = model->package->make_program(nullptr, program);
  model->threads = options.threads > 0 ? options.threads : deplo::available_processors();
  const auto& tensors = model->package->manifest().tensors;
  model->buffers.resize(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (!tensors[t].is_written) continue;
    model->writes_buffers = true;
    model->buffers[t] = deplo::Memory(std::max<int64_t>(static_cast<int64_t>(tensors[t].section.bytes), 1));
    std::memcpy(model->buffers[t].data(), model->package->data_of(tensors[t]), tensors[t].section.bytes);
  }
  model->allocated_at.resize(model->program->module().buffers.size());
  const std::vector<size_t>& allocated = model->program->layout().allocated;
  for (size_t k = 0; k < allocated.size(); ++k) model->allocated_at[allocated[k]] = k;
  return model;
}

std::unique_ptr<deplo_results> run(deplo_model& model, const deplo_value* inputs, size_t count) {
  const deplo::package::Manifest& manifest = model.package->manifest();
  DEPLO_CHECK(count == manifest.inputs.size(), "{} takes {} inputs, got {}", model.package->path(), manifest.inputs.size(), count);
  auto results = std::make_unique<deplo_results>();
  results->package = model.package;
  results->strides.resize(count);
  std::vector<deplo::CallArgument> given;
  for (size_t i = 0; i < count; ++i) given.push_back(argument_of(inputs[i], manifest.inputs[i], results->strides[i]));
  std::vector<deplo::CallArgument> arguments;
  for (const deplo::package::Variant::Argument& place : model.package->variant().arguments)
    arguments.push_back(place.is_tensor ? constant_of(model, place.index) : given[place.index]);
  PointerHost host(model.package, results->memory);
  {
    std::unique_lock lock(model.mutex, std::defer_lock);
    if (model.writes_buffers) lock.lock();
    results->plan = model.program->run(arguments.data(), arguments.size(), host, model.threads);
  }
  for (const UserOutput& output : manifest.outputs) {
    if (output.kind == UserOutput::Kind::result) {
      results->values.push_back(result_of(model, *results, arguments, output.index));
    } else if (output.kind == UserOutput::Kind::input) {
      results->values.push_back(inputs[output.index]);
      results->values.back().strides = results->strides[output.index].data();
    } else {
      deplo_value value{};
      value.kind = DEPLO_CONSTANT;
      value.json = output.constant.c_str();
      results->values.push_back(value);
    }
  }
  return results;
}

const UserInput& input_of(const deplo_model* model, size_t input) { return model->package->manifest().inputs[input]; }

}  // namespace

extern "C" {

deplo_model* deplo_open(const char* path, const deplo_options* options) {
  return guarded([&] { return opened(path, options ? *options : deplo_options{}).release(); });
}

void deplo_close(deplo_model* model) { delete model; }

size_t deplo_input_count(const deplo_model* model) { return model->package->manifest().inputs.size(); }
const char* deplo_input_name(const deplo_model* model, size_t input) { return input_of(model, input).name.c_str(); }
deplo_kind deplo_input_kind(const deplo_model* model, size_t input) { return input_of(model, input).is_tensor ? DEPLO_TENSOR : DEPLO_INTEGER; }
deplo_dtype deplo_input_dtype(const deplo_model* model, size_t input) { return static_cast<deplo_dtype>(input_of(model, input).dtype); }
int32_t deplo_input_rank(const deplo_model* model, size_t input) { return static_cast<int32_t>(input_of(model, input).sizes.size()); }
int64_t deplo_input_size(const deplo_model* model, size_t input, int32_t dimension) {
  const std::vector<std::string>& sizes = input_of(model, input).sizes;
  if (dimension < 0 || static_cast<size_t>(dimension) >= sizes.size()) return -1;
  const std::string& size = sizes[static_cast<size_t>(dimension)];
  return size.find_first_not_of("0123456789") == std::string::npos ? std::strtoll(size.c_str(), nullptr, 10) : -1;
}
int deplo_input_is_written(const deplo_model* model, size_t input) { return input_of(model, input).is_written ? 1 : 0; }
size_t deplo_output_count(const deplo_model* model) { return model->package->manifest().outputs.size(); }
const char* deplo_features(const deplo_model* model) { return model->package->variant().name.c_str(); }
const char* deplo_manifest(const deplo_model* model) { return model->package->manifest().text.c_str(); }

deplo_results* deplo_run(deplo_model* model, const deplo_value* inputs, size_t count) {
  return guarded([&] { return run(*model, inputs, count).release(); });
}

const deplo_value* deplo_result(const deplo_results* results, size_t output) { return &results->values[output]; }
void deplo_free_results(deplo_results* results) { delete results; }
const char* deplo_last_error(void) { return last_error.c_str(); }

}  // extern "C"
