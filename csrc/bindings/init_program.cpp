#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/init.h"
#include "bindings/program.h"
#include "library/aten/host.h"
#include "runtime/binding.h"

namespace deplo::bindings {
namespace {

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
      .def("run", &PyProgram::run, py::arg("inputs"), py::arg("holders") = 0,
           "Runs the graph on a list of dense tensors, of the CPU or of the device that the options name (and integers for symbol inputs); the list "
           "of its outputs: new tensors, integers, None. Inputs that the graph writes are changed in place. `holders` is how many references to each "
           "input the caller has: tensors without others go as soon as they were read, and the list is then empty after the call; 0: inputs stay. "
           "Raises UserError for inputs of other types, sizes or strides than compiled for; IndexError and RuntimeError as eager mode would.")
      .def("__call__", &PyProgram::run, py::arg("inputs"), py::arg("holders") = 0)
      .def("prepare", &PyProgram::prepare, py::arg("inputs"),
           "Packs static inputs and plans memory for a run with inputs like these, of which those that are not static need no values. Raises as "
           "run().")
      .def("adopt", &PyProgram::adopt, py::arg("other"),
           "From now on calls run what another program runs, which was compiled from the same text; those under way end as they began.")
      .def("want_example", &PyProgram::want_example, "Has the next call leave inputs like its own for prepare().")
      .def("take_example", &PyProgram::take_example, "Inputs like these, once; None before such a call, after which none leaves any.")
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
