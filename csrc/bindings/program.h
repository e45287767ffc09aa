#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/python_lock.h"
#include "library/aten/host.h"
#include "runtime/compile.h"
#include "runtime/winners.h"
#include "target/target.h"

namespace deplo::bindings {

namespace py = pybind11;

/// A compiled graph as Python calls it: a list of tensors and integers in, a list of tensors, integers and None out.
class __attribute__((visibility("hidden"))) PyProgram {
 public:
  PyProgram(CompileOptions options, CompiledGraph graph) : options_(std::move(options)), linked_(std::make_shared<Linked>(std::move(graph))) {
    if (options_.target.device >= 0) {
      device_ = c10::Device(target_of(options_.context).tensors);
      device_.set_index(static_cast<c10::DeviceIndex>(options_.target.device));
    }
  }

  /// `holders` is how many references to each input the caller knows of: the memory of a tensor that has no others goes as soon as the program has
  /// read it, and the list is empty afterwards. 0: inputs stay.
  py::list run(const py::list& inputs, int holders) {
    auto count = static_cast<size_t>(PyList_GET_SIZE(inputs.ptr()));
    py::list list(outputs());
    PyObject** items = PySequence_Fast_ITEMS(inputs.ptr());
    std::vector<size_t> ends = holders == 0 ? std::vector<size_t>() : inputs_of_nobody_else(items, count, holders);
    try {
      call(items, count, PySequence_Fast_ITEMS(list.ptr()), ends, holders);
    } catch (...) {
      const bool is_too_late = std::any_of(ends.begin(), ends.end(), [&](size_t i) { return THPVariable_Unpack(items[i]).storage().nbytes() == 0; });
      if (is_too_late) PyList_SetSlice(inputs.ptr(), 0, PyList_GET_SIZE(inputs.ptr()), nullptr);
      throw;
    }
    if (!ends.empty()) PyList_SetSlice(inputs.ptr(), 0, PyList_GET_SIZE(inputs.ptr()), nullptr);
    return list;
  }

  size_t outputs() const { return linked_->layout().outputs.size(); }

  /// From now on, calls run what `other` runs, which was compiled from the same text; calls under way end as they began.
  void adopt(const PyProgram& other) {
    DEPLO_CHECK(other.outputs() == outputs() && other.linked_->layout().input_order.size() == linked_->layout().input_order.size(),
                "a program takes the place of one with other inputs or outputs");
    linked_ = other.linked_;
  }

  /// Has the next call leave an example of its inputs, which takes none of them along: those that keep their memory, and layouts of others.
  void want_example() { wants_example_ = true; }
  /// Inputs like those, once, tensors that were never touched in place of others; None before such a call, after which none leaves any.
  py::object take_example() {
    wants_example_ = false;
    const std::vector<Example> found = std::exchange(example_, {});
    if (found.empty()) return py::none();
    py::list list(found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      const Example& one = found[i];
      if (one.number) {
        list[i] = one.number;
        continue;
      }
      at::Tensor tensor = one.tensor.defined() ? one.tensor : at::empty_strided(one.sizes, one.strides, one.options);
      list[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
    }
    return list;
  }

  /// Runs the program on `count` tensors and integers, and puts new references to its outputs into `results`, which has room for all. Leaves it
  /// alone where it throws. `ends` are places of tensors that nobody else holds, which have
  /// `holders` references.
  void call(PyObject* const* inputs, size_t count, PyObject** results, const std::vector<size_t>& ends = {}, int holders = 0) {
    CallSample sample;
    Arguments borrowed;
    Buffers& at = *borrowed;
    read(inputs, count, at);
    for (size_t place : ends) at.arguments[place].is_last = true;
    aten::refuse_tangents(at.tensors);
    const std::shared_ptr<Linked> linked = linked_;  // other threads may have the program adopt another one meanwhile
    if (wants_example_ && count == linked->layout().input_order.size()) leave_example(*linked, inputs, count, at);
    PythonHost host(linked->program().module(), at.tensors, linked->argument_of, linked->layout().allocated, device_);
    host.lets_go(inputs, holders);
    int threads = options_.target.threads > 0 ? options_.target.threads : at::in_parallel_region() ? 1 : at::get_num_threads();
    std::shared_ptr<const runtime::Plan> plan = linked->program().run(at.arguments.data(), count, host, threads);
    sample.program_ended();
    host.return_lock();
    wrap(*linked, inputs, host, *plan, results);
  }

  /// Packs static inputs and makes the plan for a call with such inputs; other threads of Python run meanwhile.
  void prepare(const py::list& inputs) {
    Arguments borrowed;
    Buffers& at = *borrowed;
    auto count = static_cast<size_t>(PyList_GET_SIZE(inputs.ptr()));
    read(PySequence_Fast_ITEMS(inputs.ptr()), count, at);
    const std::shared_ptr<Linked> linked = linked_;
    PythonHost host(linked->program().module(), at.tensors, linked->argument_of, linked->layout().allocated, device_);
    linked->program().prepare(at.arguments.data(), count, host);
  }

  static std::unique_ptr<PyProgram> compile(const std::string& text, const std::string& options) {
    CompileOptions parsed = parse_options(options);
    use_winners(parsed, parsed.target.threads > 0 ? parsed.target.threads : at::get_num_threads());
    CompiledGraph graph = compile_text(text, parsed, aten::make_library_op);
    return std::make_unique<PyProgram>(std::move(parsed), std::move(graph));
  }

  static std::unique_ptr<PyProgram> restore(const std::string& kernel_ir, const std::string& kernels, const std::string& options) {
    CompileOptions parsed = parse_options(options);
    CompiledGraph graph = restore_graph({kernel_ir, kernels}, parsed, aten::make_library_op);
    return std::make_unique<PyProgram>(std::move(parsed), std::move(graph));
  }

  std::pair<std::string, std::string> text() const {
    GraphText text = to_text(linked_->graph);
    return {text.kernel_ir, text.kernels};
  }

  std::map<std::string, py::bytes> images() const {
    std::map<std::string, py::bytes> images;
    for (const auto& kernel : linked_->program().functions())
      if (!kernel->key().empty() && !images.count(kernel->key())) images.emplace(kernel->key(), kernel->image());
    return images;
  }

  const runtime::Program& program() const { return linked_->program(); }
  const CompileOptions& options() const { return options_; }
  const std::string& missing() const { return linked_->program().missing(); }
  std::string describe() const { return deplo::describe(linked_->graph, options_); }
  void set_profiling(bool on) { linked_->program().set_profiling(on); }

 private:
  /// A graph with what calls look up of it.
  struct Linked {
    explicit Linked(CompiledGraph compiled) : graph(std::move(compiled)) {
      argument_of.resize(program().module().buffers.size(), 0);
      for (size_t i = 0; i < layout().input_order.size(); ++i)
        if (layout().input_order[i]) argument_of[*layout().input_order[i]] = i;
      const std::vector<size_t>& allocated = layout().allocated;
      for (const runtime::Layout::Output& output : layout().outputs) {
        auto at = output.buffer ? std::find(allocated.begin(), allocated.end(), *output.buffer) : allocated.end();
        allocated_at.push_back(at == allocated.end() ? std::nullopt : std::optional(static_cast<size_t>(at - allocated.begin())));
      }
    }
    runtime::Program& program() const { return *graph.program; }
    const runtime::Layout& layout() const { return graph.program->layout(); }

    CompiledGraph graph;
    std::vector<size_t> argument_of;                  ///< place of each input buffer
    std::vector<std::optional<size_t>> allocated_at;  ///< by output: its place among the allocated buffers
  };

  /// An input of a call: a number, a tensor that keeps its memory, or the layout of another one.
  struct Example {
    py::object number;
    at::Tensor tensor;
    std::vector<int64_t> sizes, strides;
    at::TensorOptions options;
  };

  struct Buffers {
    std::vector<const at::Tensor*> tensors;
    std::vector<CallArgument> arguments;
  };

  void read(PyObject* const* inputs, size_t count, Buffers& at) const {
    at.tensors.assign(count, nullptr);
    at.arguments.resize(count);
    for (size_t i = 0; i < count; ++i) {
      PyObject* item = inputs[i];
      CallArgument& argument = at.arguments[i];
      argument.is_tensor = THPVariable_Check(item);
      argument.is_last = false;
      if (argument.is_tensor) {
        at.tensors[i] = &THPVariable_Unpack(item);
        argument.tensor = aten::view_of(*at.tensors[i], device_.type());
      } else {
        argument.integer = integer_of(item, i);
      }
    }
  }

  /// Places of large inputs that are of no use after the program's last step that reads them.
  std::vector<size_t> inputs_of_nobody_else(PyObject* const* inputs, size_t count, int holders) const {
    constexpr size_t kLeast = 1 << 16;  // bytes
    std::vector<size_t> found;
    for (const runtime::Layout::Ending& ending : linked_->layout().endings) {
      if (!ending.argument || *ending.argument >= count) continue;
      PyObject* item = inputs[*ending.argument];
      if (Py_REFCNT(item) != holders || !THPVariable_Check(item)) continue;
      const at::Tensor& tensor = THPVariable_Unpack(item);
      const bool is_alone = tensor.device() == device_ && tensor.has_storage() && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
      if (is_alone && tensor.storage().nbytes() >= kLeast) found.push_back(*ending.argument);
    }
    return found;
  }

  int64_t integer_of(PyObject* item, size_t place) const {
    PyObject* index = PyNumber_Index(item);
    if (!index) {
      PyErr_Clear();
      throw UserError(fmt::format("input {} is a {}, expected a tensor or an integer", place, Py_TYPE(item)->tp_name));
    }
    int64_t value = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  /// Lets other threads of Python run from when the program says that it will take long.
  class PythonHost final : public aten::TensorHost {
   public:
    using aten::TensorHost::TensorHost;
    ~PythonHost() override { return_lock(); }
    PythonHost(const PythonHost&) = delete;
    PythonHost& operator=(const PythonHost&) = delete;
    void will_take_long() override {
      if (!state_) state_ = release_python();
    }
    /// Of inputs whose objects have so many references, and no others.
    void lets_go(PyObject* const* inputs, int holders) { inputs_ = inputs, holders_ = holders; }
    void release(size_t buffer) override {
      if (!is_input(buffer) || (inputs_ && Py_REFCNT(inputs_[argument_of(buffer)]) == holders_)) TensorHost::release(buffer);
    }
    void return_lock() {
      if (state_) take_python(state_);
      state_ = nullptr;
    }

   private:
    PyThreadState* state_ = nullptr;
    PyObject* const* inputs_ = nullptr;
    int holders_ = 0;
  };

  /// The thread's, which later calls use again; a call inside another one (of a library call in Python) gets its own.
  class Arguments {
   public:
    Arguments() : buffers_(kept() ? std::move(kept()) : std::make_unique<Buffers>()) {}
    ~Arguments() { kept() = std::move(buffers_); }
    Arguments(const Arguments&) = delete;
    Arguments& operator=(const Arguments&) = delete;
    Buffers& operator*() { return *buffers_; }

   private:
    static std::unique_ptr<Buffers>& kept() {
      thread_local std::unique_ptr<Buffers> buffers;
      return buffers;
    }
    std::unique_ptr<Buffers> buffers_;
  };

  /// Modes of PyTorch's see detach(): Python, and other threads with it, may run meanwhile, take the example, and want none any more.
  void leave_example(const Linked& linked, PyObject* const* inputs, size_t count, const Buffers& at) {
    std::vector<Example> left(count);
    for (size_t i = 0; i < count; ++i) {
      Example& one = left[i];
      if (!at.tensors[i]) {
        one.number = py::reinterpret_borrow<py::object>(inputs[i]);
        continue;
      }
      const at::Tensor& tensor = *at.tensors[i];
      const std::optional<size_t> buffer = linked.layout().input_order[i];
      if (buffer && linked.program().module().buffers[*buffer].is_static)
        one.tensor = tensor.detach();
      else
        one.sizes = tensor.sizes().vec(), one.strides = tensor.strides().vec(), one.options = tensor.options();
    }
    if (std::exchange(wants_example_, false)) example_ = std::move(left);
  }

  void wrap(const Linked& linked, PyObject* const* inputs, aten::TensorHost& host, const runtime::Plan& plan, PyObject** results) const {
    const std::vector<runtime::Layout::Output>& outputs = linked.layout().outputs;
    for (size_t k = 0; k < outputs.size(); ++k) {
      PyObject* item = nullptr;
      if (outputs[k].integer) {
        item = PyLong_FromLongLong(plan.integers[k]);
      } else if (!outputs[k].buffer) {
        item = Py_NewRef(Py_None);
      } else if (linked.allocated_at[k]) {
        item = THPVariable_Wrap(host.allocated(*linked.allocated_at[k]));
      } else if (linked.program().module().buffers[*outputs[k].buffer].kind == BufferKind::input) {
        item = Py_NewRef(inputs[linked.argument_of[*outputs[k].buffer]]);
      } else {
        item = THPVariable_Wrap(host.tensor(*outputs[k].buffer));
      }
      if (!item) {
        for (size_t made = 0; made < k; ++made) Py_CLEAR(results[made]);
        throw py::error_already_set();
      }
      results[k] = item;
    }
  }

  CompileOptions options_;
  std::shared_ptr<Linked> linked_;
  c10::Device device_ = c10::kCPU;  ///< where its tensors are
  bool wants_example_ = false;
  std::vector<Example> example_;
};

}  // namespace deplo::bindings
