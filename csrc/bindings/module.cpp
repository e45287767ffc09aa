// deplo._C: the compiler and its runtime for Python. deplo/core.py imports it, after torch.

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>

#include "base/error.h"
#include "bindings/init.h"
#include "runtime/thread_team.h"
#include "target/targets.h"

namespace deplo::bindings {
namespace {

/// A class of deplo/errors.py; kept for the life of the process.
PyObject* error_class(const char* name) { return pybind11::object(pybind11::module_::import("deplo.errors").attr(name)).release().ptr(); }

struct ErrorClasses {
  PyObject* user = error_class("UserError");
  PyObject* unsupported = error_class("UnsupportedError");
  PyObject* internal = error_class("InternalError");
};

const ErrorClasses* classes = nullptr;

}  // namespace

void init_errors(pybind11::module_& /*module*/) {
  classes = new ErrorClasses;
  pybind11::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const UserError& error) {
      PyErr_SetString(classes->user, error.what());
    } catch (const UnsupportedError& error) {
      PyErr_SetString(classes->unsupported, error.what());
    } catch (const InternalError& error) {
      PyErr_SetString(classes->internal, error.what());
    } catch (const IndexError& error) {
      PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const ExecutionError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(pointer);
    }
  });
}

/// The OpenMP that torch is linked with: looked up in torch's own library, as a process may hold several.
void init_threads() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (void* parallel = torch ? dlsym(torch, "GOMP_parallel") : nullptr) runtime::use_host_pool(reinterpret_cast<runtime::HostPool>(parallel));
}

}  // namespace deplo::bindings

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled core of deplo.";
  deplo::register_targets();
  deplo::bindings::init_errors(module);
  deplo::bindings::init_threads();
  deplo::bindings::init_program(module);
  deplo::bindings::init_dispatch(module);
  deplo::bindings::init_package(module);
  deplo::bindings::init_tools(module);
  deplo::bindings::init_tuning(module);
}
