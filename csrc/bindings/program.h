#pragma once

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
#include "library/aten/host.h"
#include "runtime/compile.h"
#include "target/target.h"

namespace deplo::bindings {

namespace py = pybind11;

/// A compiled graph as Python calls it: a list of tensors and integers in, a list of tensors, integers and None out.
class __attribute__((visibility("hidden"))) PyProgram {
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

  const runtime::Program& program() const { return *graph_.program; }
  const CompileOptions& options() const { return options_; }
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

}  // namespace deplo::bindings
