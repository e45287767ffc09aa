#include <ATen/Parallel.h>
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
#include "bindings/init.h"
#include "library/aten/host.h"
#include "runtime/binding.h"
#include "runtime/compile.h"
#include "target/target.h"

namespace deplo::bindings {
namespace {

namespace py = pybind11;

/// A compiled graph as Python calls it: a list of tensors and integers in, a list of tensors, integers and None out.
class PyProgram {
 public:
  PyProgram(CompileOptions options, CompiledGraph graph) : options_(std::move(options)), graph_(std::move(graph)) {
    if (options_.target.device >= 0) {
      device_ = c10::Device(target_of(options_.context).tensors);
      device_.set_index(static_cast<c10::DeviceIndex>(options_.target.device));
    }
    const runtime::Layout& layout = graph_.program->layout();
    argument_of_.resize(graph_.program->module().buffers.size(), 0);
    for (size_t i = 0; i < layout.input_order.size(); ++i)
      if (layout.input_order[i]) argument_of_[*layout.input_order[i]] = i;
    for (const runtime::Layout::Output& output : layout.outputs) {
      auto at = output.buffer ? std::find(layout.allocated.begin(), layout.allocated.end(), *output.buffer) : layout.allocated.end();
      allocated_at_.push_back(at == layout.allocated.end() ? std::nullopt : std::optional(static_cast<size_t>(at - layout.allocated.begin())));
    }
  }

  py::list run(const py::list& inputs) {
    auto count = static_cast<size_t>(PyList_GET_SIZE(inputs.ptr()));
    std::vector<const at::Tensor*> tensors(count, nullptr);
    std::vector<CallArgument> arguments(count);
    for (size_t i = 0; i < count; ++i) {
      PyObject* item = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i));
      if (THPVariable_Check(item)) {
        tensors[i] = &THPVariable_Unpack(item);
        arguments[i].tensor = aten::view_of(*tensors[i], device_.type());
      } else {
        arguments[i].is_tensor = false;
        arguments[i].integer = integer_of(item, i);
      }
    }
    aten::refuse_tangents(tensors);
    aten::TensorHost host(graph_.program->module(), tensors, argument_of_, graph_.program->layout().allocated, device_);
    int threads = options_.target.threads > 0 ? options_.target.threads : at::in_parallel_region() ? 1 : at::get_num_threads();
    std::shared_ptr<const runtime::Plan> plan;
    {
      py::gil_scoped_release unlocked;
      plan = graph_.program->run(arguments.data(), count, host, threads);
    }
    return results(inputs, host, *plan);
  }

  static std::unique_ptr<PyProgram> compile(const std::string& text, const std::string& options) {
    CompileOptions parsed = parse_options(options);
    CompiledGraph graph = compile_text(text, parsed, aten::make_library_op);
    return std::make_unique<PyProgram>(std::move(parsed), std::move(graph));
  }

  static std::unique_ptr<PyProgram> restore(const std::string& kernel_ir, const std::string& kernels, const std::string& options) {
    CompileOptions parsed = parse_options(options);
    CompiledGraph graph = restore_graph({kernel_ir, kernels}, parsed, aten::make_library_op);
    return std::make_unique<PyProgram>(std::move(parsed), std::move(graph));
  }

  std::pair<std::string, std::string> text() const {
    GraphText text = to_text(graph_);
    return {text.kernel_ir, text.kernels};
  }

  std::map<std::string, py::bytes> images() const {
    std::map<std::string, py::bytes> images;
    for (const auto& kernel : graph_.program->functions())
      if (!kernel->key().empty() && !images.count(kernel->key())) images.emplace(kernel->key(), kernel->image());
    return images;
  }

  const std::string& missing() const { return graph_.program->missing(); }
  std::string describe() const { return deplo::describe(graph_, options_); }
  void set_profiling(bool on) { graph_.program->set_profiling(on); }

 private:
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

  py::list results(const py::list& inputs, aten::TensorHost& host, const runtime::Plan& plan) const {
    const std::vector<runtime::Layout::Output>& outputs = graph_.program->layout().outputs;
    py::list list(outputs.size());
    for (size_t k = 0; k < outputs.size(); ++k) {
      PyObject* item = nullptr;
      if (outputs[k].integer) {
        item = PyLong_FromLongLong(plan.integers[k]);
      } else if (!outputs[k].buffer) {
        item = Py_NewRef(Py_None);
      } else if (allocated_at_[k]) {
        item = THPVariable_Wrap(host.allocated(*allocated_at_[k]));
      } else if (graph_.program->module().buffers[*outputs[k].buffer].kind == BufferKind::input) {
        item = Py_NewRef(PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(argument_of_[*outputs[k].buffer])));
      } else {
        item = THPVariable_Wrap(host.tensor(*outputs[k].buffer));
      }
      if (!item) throw py::error_already_set();
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(k), item);
    }
    return list;
  }

  CompileOptions options_;
  CompiledGraph graph_;
  c10::Device device_ = c10::kCPU;                   ///< where its tensors are
  std::vector<size_t> argument_of_;                  ///< place of each input buffer
  std::vector<std::optional<size_t>> allocated_at_;  ///< by output: its place among the allocated buffers
};

/// Finds inputs that share memory of which one is written: what programs compute only if nobody else sees the writes before their end.
class AliasCheck {
 public:
  /// `written` says which inputs are; inputs of one group other than 0 are not compared with each other. With `by_storage`, those that share a
  /// storage count as sharing memory wherever they lie in it.
  AliasCheck(std::vector<bool> written, std::vector<int> groups, bool by_storage)
      : written_(std::move(written)), groups_(std::move(groups)), by_storage_(by_storage) {
    DEPLO_CHECK(written_.size() == groups_.size(), "{} inputs are written or not, {} have groups", written_.size(), groups_.size());
  }

  /// A written input and another one with memory in common, or nothing.
  std::optional<std::pair<size_t, size_t>> operator()(const py::sequence& inputs) const {
    std::vector<Span> spans;
    for (size_t i = 0; i < std::min(written_.size(), inputs.size()); ++i) {
      py::object item = inputs[i];
      if (THPVariable_Check(item.ptr())) add_span(spans, THPVariable_Unpack(item.ptr()), i);
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::vector<Span> open;
    for (const Span& span : spans) {
      open.erase(std::remove_if(open.begin(), open.end(), [&](const Span& other) { return other.end <= span.begin; }), open.end());
      for (const Span& other : open)
        if (compares(span.place, other.place) && share(*span.tensor, *other.tensor))
          return written_[span.place] ? std::pair(span.place, other.place) : std::pair(other.place, span.place);
      open.push_back(span);
    }
    return std::nullopt;
  }

 private:
  struct Span {
    const char* begin;
    const char* end;
    size_t place;
    const at::Tensor* tensor;
  };

  void add_span(std::vector<Span>& spans, const at::Tensor& tensor, size_t place) const {
    if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.numel() == 0) return;
    const auto* data = static_cast<const char*>(tensor.storage().unsafeGetStorageImpl()->data());
    if (!data) return;
    if (by_storage_) {
      spans.push_back({data, data + tensor.storage().nbytes(), place, &tensor});
      return;
    }
    int64_t size = tensor.element_size();
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    data += tensor.storage_offset() * size;
    spans.push_back({data, data + (last + 1) * size, place, &tensor});
  }

  bool compares(size_t a, size_t b) const { return (written_[a] || written_[b]) && (groups_[a] == 0 || groups_[a] != groups_[b]); }

  /// Of tensors whose spans overlap. What the runtime cannot look at is taken to share.
  bool share(const at::Tensor& a, const at::Tensor& b) const {
    if (by_storage_ && a.is_alias_of(b)) return true;
    if (a.device() != b.device()) return false;
    try {
      return runtime::may_share_memory(aten::view_of(a, a.device().type()), aten::view_of(b, b.device().type()));
    } catch (const UnsupportedError&) {
      return true;
    }
  }

  std::vector<bool> written_;
  std::vector<int> groups_;
  bool by_storage_;
};

}  // namespace

void init_program(py::module_& module) {
  py::class_<PyProgram>(module, "Program", "A compiled graph.")
      .def("run", &PyProgram::run, py::arg("inputs"),
           "Runs the graph on a list of dense tensors, of the CPU or of the device that the options name (and integers for symbol inputs); the list "
           "of its outputs: new tensors, integers, None. "
           "Inputs that the graph writes are changed in place. Raises UserError for inputs of other types, sizes or strides than compiled for; "
           "IndexError and RuntimeError as eager mode would.")
      .def("__call__", &PyProgram::run, py::arg("inputs"))
      .def("missing", &PyProgram::missing, "What this machine lacks to run the graph; empty: nothing. run() then raises UnsupportedError.")
      .def("text", &PyProgram::text, "The program as text, for restore(): its Kernel IR, and JSON about its kernels.")
      .def("images", &PyProgram::images, "From key to machine code, as offer_kernel() takes it, of its kernels of this CPU.")
      .def("describe", &PyProgram::describe, "JSON: kernels, steps, library calls with reasons, memory plan, cache, times.")
      .def("set_profiling", &PyProgram::set_profiling, py::arg("on"), "Starts or stops measuring each step; describe() shows the times.");
  py::class_<AliasCheck>(module, "AliasCheck", "Finds inputs that share memory of which one is written.")
      .def(py::init<std::vector<bool>, std::vector<int>, bool>(), py::arg("written"), py::arg("groups"), py::arg("by_storage") = false,
           "`written`: whether each input is. Inputs of one group other than 0 are not compared with each other. `by_storage`: those of one storage "
           "share memory wherever they lie in it.")
      .def("__call__", &AliasCheck::operator(), py::arg("inputs"), "Places of a written input and of another one with memory in common, or None.");
  module.def("compile", &PyProgram::compile, py::arg("text"), py::arg("options") = "{}", py::call_guard<py::gil_scoped_release>(),
             "Compiles IR text of any level (Torch IR from the front) under options given as JSON.");
  module.def("restore", &PyProgram::restore, py::arg("kernel_ir"), py::arg("kernels"), py::arg("options") = "{}",
             py::call_guard<py::gil_scoped_release>(),
             "The program whose text() this is, made without a pass, under the options that it was compiled with.");
}

}  // namespace deplo::bindings
