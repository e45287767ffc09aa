#include <ATen/Parallel.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/text.h"
#include "bindings/init.h"
#include "kernel_ir/interpret.h"
#include "library/aten/arrays.h"
#include "library/aten/check.h"
#include "loop_ir/interpret.h"
#include "lower/torch_to_tensor.h"
#include "pipeline.h"
#include "runtime/compile.h"
#include "runtime/owned.h"
#include "runtime/packed.h"
#include "runtime/resident.h"
#include "runtime/winners.h"
#include "target/target.h"
#include "tensor_ir/interpret.h"
#include "tile_ir/interpret.h"
#include "torch_ir/interpret.h"

namespace deplo::bindings {
namespace {

namespace py = pybind11;

std::vector<Array> run_level(const std::string& level, const std::string& text, const std::vector<Array>& inputs, Mode mode) {
  LibraryCall library = aten::aten_library(mode);
  if (level == "torch") return torch_ir::interpret(torch_ir::parse(text), inputs, {}, mode, library);
  if (level == "tensor") return tensor_ir::interpret(tensor_ir::parse(text), inputs, {}, mode, library);
  if (level == "loop") return loop_ir::interpret(loop_ir::parse(text), inputs, {}, mode, library);
  if (level == "tile") return tile_ir::interpret(tile_ir::parse(text), inputs, {}, mode, library);
  if (level == "kernel") return kernel_ir::interpret(kernel_ir::parse(text), inputs, {}, mode, library);
  throw UnsupportedError("no interpreter of level " + level);
}

Array scalar_input(int64_t value) {
  Array array = Array::zeros(DType::i64, {});
  array.ints[0] = value;
  return array;
}

std::vector<Array> to_arrays(const py::list& inputs) {
  std::vector<Array> arrays;
  for (const py::handle& item : inputs)
    arrays.push_back(THPVariable_Check(item.ptr()) ? aten::to_array(THPVariable_Unpack(item.ptr())) : scalar_input(item.cast<int64_t>()));
  return arrays;
}

py::list interpret(const std::string& text, const py::list& inputs, const std::string& mode) {
  DEPLO_CHECK(mode == "exact" || mode == "typed", "mode '{}' is neither exact nor typed", mode);
  std::vector<Array> arrays = to_arrays(inputs);
  std::vector<Array> results;
  {
    py::gil_scoped_release unlocked;
    results = run_level(level_of(text, "<text>"), text, arrays, mode == "exact" ? Mode::exact : Mode::typed);
  }
  py::list tensors;
  for (const Array& array : results)
    tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(mode == "exact" ? aten::to_exact_tensor(array) : aten::to_tensor(array))));
  return tensors;
}

}  // namespace

void init_tools(py::module_& module) {
  module.def(
      "lower",
      [](const std::string& text, const std::string& level, const std::string& options, const std::string& file) {
        CompileOptions parsed = parse_options(options);
        use_winners(parsed, parsed.target.threads > 0 ? parsed.target.threads : at::get_num_threads());
        if (level_of(text, file) == "torch") {
          verify_by_hand(text, file);
          aten::check_types(torch_ir::parse(text, file), file, parsed.context.hints);
          py::gil_scoped_acquire locked;
          PyErr_Clear();  // what kernels in Python refused was not for the caller
        }
        return lower_text(text, file, level, parsed);
      },
      py::arg("text"), py::arg("level"), py::arg("options") = "{}", py::arg("file") = "<text>", py::call_guard<py::gil_scoped_release>(),
      "IR text of any level lowered to torch, tensor, loop, tile, kernel or a text of the target's.");
  module.def(
      "check_options", [](const std::string& options) { check_options(parse_options(options)); }, py::arg("options"),
      "Raises UserError for options that no compilation takes.");
  module.def("level_of", &level_of, py::arg("text"), py::arg("file") = "<text>", "The level of IR text.");
  module.def("interpret", &interpret, py::arg("text"), py::arg("inputs"), py::arg("mode") = "typed",
             "Runs IR text of any level by its interpreter on tensors: the outputs, then the inputs that it wrote. mode 'exact' computes in float64 "
             "and returns float64.");
  module.def(
      "assemble",
      [](const std::string& text, const std::string& options) {
        CompileOptions parsed = parse_options(options);
        std::string code;
        {
          py::gil_scoped_release unlocked;
          code = target_of(parsed.context).assemble(text, parsed.target);
        }
        return py::bytes(code);
      },
      py::arg("text"), py::arg("options"),
      "Machine code that the target's own compiler makes of its text. Raises UnsupportedError where there is none.");
  module.def(
      "judge", [](const std::string& text, const std::string& options) { return judge_text(text, parse_options(options)); }, py::arg("text"),
      py::arg("options"), py::call_guard<py::gil_scoped_release>(),
      "JSON list of the kernels that IR text becomes: flops, bytes, and what their accesses do to memory. Raises UnsupportedError for targets "
      "without a "
      "model of that.");
  module.def(
      "device",
      [](const std::string& options) {
        CompileOptions parsed = parse_options(options);
        return target_of(parsed.context).find_device(parsed.target);
      },
      py::arg("options"), "The first device of a target that has some, as people call it. Raises UnsupportedError that says what is missing.");
  module.def(
      "targets", [] { return py::module_::import("json").attr("loads")(describe_targets()); },
      "The targets as dicts; deplo/targets.py says what is in them.");
  module.def("passes", [] { return py::module_::import("json").attr("loads")(describe_passes()); }, "The passes as dicts: level, name, doc.");
  module.def("overload_files", &overload_files, "The ATen overloads that deplo breaks down, with the file of each rule's row, sorted.");
  module.def("library_packets", &library_packets, "The ATen operators that are left to ATen on purpose, with the reason, sorted.");
  module.def(
      "interface", [] { return fmt::format("{} {}", DEPLO_INTERFACE, joined(option_names())); },
      "What the Python files must agree with: a number that changes with the bindings and Torch IR, and the options.");
  module.def(
      "env", [](const std::string& options) { return describe_environment(parse_options(options)); }, py::arg("options") = "{}",
      "JSON: versions, CPU features, topology.");
  module.def("topology", &describe_topology, py::arg("synthetic") = "", py::arg("xml") = "",
             "JSON: hwloc's tree of this machine, or of a synthetic text, or of an XML file. Raises UserError for what hwloc does not take.");
  module.def("build_id", &build_id, "An identifier of the extension's code; empty if it was linked without one.");
  module.def(
      "target", [](const std::string& options) { return describe_target(parse_options(options)); }, py::arg("options") = "{}",
      "JSON: what the passes know of the machine that the options name.");
  module.def(
      "offer_kernel",
      [](const py::bytes& image) {
        for (const Target* target : all_targets()) target->offer_kernel(image);
      },
      py::arg("image"), "Takes machine code of Program.images(), which programs with an equal kernel for the same CPU features then link.");
  module.def(
      "keep_kernel",
      [](const py::bytes& image, const std::string& folder) {
        for (const Target* target : all_targets()) target->keep_kernel(image, folder);
      },
      py::arg("image"), py::arg("folder"), "Stores machine code of Program.images() in a folder of compiled kernels.");
  module.def("forget_packed", &runtime::forget_packed, "Makes every program pack its static inputs again at its next call.");
  module.def("check_kernel_errors", &runtime::check_kernel_errors,
             "Raises what kernels on devices have reported and no call has raised yet: IndexError, RuntimeError. Waits for nothing.");
  module.def("packed_bytes", &runtime::packed_bytes, "Bytes of packed weights in this process.");
  module.def("owned_bytes", &runtime::owned_bytes, "Bytes of weights that are in memory as packed copies alone.");
  module.def("restore_weights", &runtime::restore_weights, py::call_guard<py::gil_scoped_release>(),
             "Makes all weights again that are in memory as packed copies alone, until the next call of a program that packs them.");
  module.def(
      "read_rows",
      [](uintptr_t data, int64_t row_bytes, uintptr_t rows, int64_t count, uintptr_t out) {
        // NOLINTBEGIN(performance-no-int-to-ptr): addresses that PyTorch gives
        runtime::read_rows(reinterpret_cast<const char*>(data), row_bytes, reinterpret_cast<const int64_t*>(rows), count,
                           reinterpret_cast<char*>(out));
        // NOLINTEND(performance-no-int-to-ptr)
      },
      py::arg("data"), py::arg("row_bytes"), py::arg("rows"), py::arg("count"), py::arg("out"), py::call_guard<py::gil_scoped_release>(),
      "Copies rows of a matrix at an address, whose numbers (int64) lie at another one, without bringing back a weight that is packed alone.");
  module.def("trim_memory", &trim_memory, "Gives what is kept for reuse back to the system: memory, and kernels that no program holds.");
}

}  // namespace deplo::bindings
