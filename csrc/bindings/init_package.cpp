#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/init.h"
#include "bindings/program.h"
#include "library/aten/host.h"
#include "library/aten/types.h"
#include "package/checksum.h"
#include "package/link.h"
#include "package/package.h"
#include "package/split.h"

namespace deplo::bindings {
namespace {

using package::Package;

CompiledGraph graph_of(std::unique_ptr<runtime::Program> program) {
  CompiledGraph graph;
  for (const auto& kernel : program->module().kernels) graph.report.kernels.push_back({kernel->name, kernel->provenance, 0, 0, 0, ""});
  graph.program = std::move(program);
  return graph;
}

std::vector<std::shared_ptr<CompiledKernel>> code_of(const kernel_ir::Module& part, const runtime::Program& whole) {
  std::map<std::string, std::shared_ptr<CompiledKernel>> by_name;
  for (size_t k = 0; k < whole.module().kernels.size(); ++k) by_name[whole.module().kernels[k]->name] = whole.functions().at(k);
  std::vector<std::shared_ptr<CompiledKernel>> code;
  for (const auto& kernel : part.kernels) code.push_back(by_name.at(kernel->name));
  return code;
}

/// What a program takes for granted of its static inputs where it holds: symbol, place of the input, and the range of its elements.
py::list package_facts(const PyProgram& compiled) {
  py::list facts;
  const kernel_ir::Module& module = compiled.program().module();
  for (const Fact& fact : module.facts) {
    const auto at = std::find(module.input_order.begin(), module.input_order.end(), fact.buffer);
    facts.append(py::make_tuple(fact.symbol, at - module.input_order.begin(), fact.lo, fact.hi));
  }
  return facts;
}

/// What a package holds of a program for one set of features, where these facts hold.
py::dict package_parts(const PyProgram& compiled, const std::set<std::string>& holding) {
  const runtime::Program& whole = compiled.program();
  DEPLO_SUPPORT(!whole.device() && whole.missing().empty(), "packages hold programs for this machine's processors");
  package::SplitProgram split = package::split_once(whole.module(), holding);
  package::LinkedCode code = package::link_code(code_of(split.serving, whole));
  py::list arguments;
  for (const auto& argument : split.arguments) arguments.append(py::make_tuple(argument.is_packed, argument.place));
  py::list library;
  for (const Step& step : split.serving.steps)
    if (const auto* call = std::get_if<LibraryStep>(&step)) library.append(call->op);
  py::dict parts;
  parts["program"] = print(split.serving);
  parts["arguments"] = arguments;
  parts["library"] = library;
  parts["code"] = py::bytes(code.bytes);
  parts["text_bytes"] = code.text_bytes;
  parts["entries"] = code.entries;
  parts["externals"] = code.externals;
  parts["packs_from"] = split.packs_from;
  parts["packing"] = py::none();
  if (split.packing.steps.empty()) return parts;
  KernelCode kernels;
  kernels.functions = code_of(split.packing, whole);
  auto packing = std::make_unique<runtime::Program>(std::move(split.packing), std::move(kernels), nullptr, runtime::Program::Options{});
  parts["packing"] = py::cast(std::make_unique<PyProgram>(compiled.options(), graph_of(std::move(packing))));
  return parts;
}

package::Check parse_check(const std::string& text) {
  if (text == "code") return package::Check::code;
  if (text == "quick") return package::Check::quick;
  DEPLO_CHECK(text == "full", "check is '{}', expected one of code, quick, full", text);
  return package::Check::full;
}

std::shared_ptr<Package> open_package(const std::string& path, const std::string& features, const std::string& check) {
  return std::make_shared<Package>(path, features, parse_check(check));
}

std::unique_ptr<PyProgram> program_of(const Package& package, const std::string& text) {
  CompileOptions options = parse_options(text);
  runtime::Program::Options program;
  program.memory_limit = options.memory_limit;
  program.guard = options.guard;
  return std::make_unique<PyProgram>(std::move(options), graph_of(package.make_program(aten::make_library_op, program)));
}

py::object tensor_of(const std::shared_ptr<Package>& package, size_t place) {
  DEPLO_CHECK(place < package->manifest().tensors.size(), "{} has {} tensors, not {}", package->path(), package->manifest().tensors.size(), place);
  const package::PackedTensor& tensor = package->manifest().tensors[place];
  auto keep = [package](void* /*data*/) {};
  at::Tensor made = at::from_blob(const_cast<char*>(package->data_of(tensor)), tensor.sizes, tensor.strides, keep,
                                  at::TensorOptions().dtype(aten::to_scalar_type(tensor.dtype)));
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(made));
}

uint32_t checksum_of(const py::object& tensor) {
  DEPLO_CHECK(THPVariable_Check(tensor.ptr()), "quick_checksum takes a tensor");
  const at::Tensor& bytes = THPVariable_Unpack(tensor.ptr());
  DEPLO_CHECK(bytes.scalar_type() == at::kByte && bytes.is_contiguous() && bytes.is_cpu(), "quick_checksum takes contiguous bytes");
  return package::quick_checksum(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel()));
}

}  // namespace

void init_package(py::module_& module) {
  py::class_<Package, std::shared_ptr<Package>>(module, "Package", "A package file, mapped into memory.")
      .def(py::init(&open_package), py::arg("path"), py::arg("features"), py::arg("check"), py::call_guard<py::gil_scoped_release>(),
           "Opens a file for this CPU, with no more than `features`; `check`: code, quick or full. Raises UserError that begins with the path.")
      .def(
          "manifest", [](const Package& package) { return package.manifest().text; }, "JSON.")
      .def(
          "variant", [](const Package& package) { return package.variant().name; }, "The set of features whose code runs.")
      .def(
          "arguments",
          [](const Package& package) {
            py::list arguments;
            for (const auto& argument : package.variant().arguments) arguments.append(py::make_tuple(argument.is_tensor, argument.index));
            return arguments;
          },
          "Of the program's inputs, in order: whether it is a tensor of the package, and its place among these, or among the user's inputs.")
      .def("tensor", &tensor_of, py::arg("place"), "A constant in the mapping, which nobody may write.")
      .def("program", &program_of, py::arg("options") = "{}", py::call_guard<py::gil_scoped_release>(), "The program, its code loaded.");
  module.def("package_facts", &package_facts, py::arg("program"), "Symbol, place of an input, least and most: what may hold of constants' elements.");
  module.def("package_parts", &package_parts, py::arg("program"), py::arg("holding") = std::set<std::string>(),
             "What a package holds of a program that was compiled for one set of features.");
  module.def("package_format", [] { return package::kFormat; }, "The format of package files that this build reads.");
  module.def(
      "package_manifest", [](const std::string& path) { return package::read_manifest(package::Mapping(path), path); }, py::arg("path"),
      "JSON: what a package says of itself. Raises UserError that begins with the path.");
  module.def("quick_checksum", &checksum_of, py::arg("tensor"), "The checksum of a contiguous tensor of bytes that packages are checked by.");
}

}  // namespace deplo::bindings
