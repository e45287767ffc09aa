// deplo._C: the compiler and its runtime for Python. deplo/core.py imports it, after torch.

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>

#include "base/error.h"
#include "base/processors.h"
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

/// A function of the OpenMP that torch calls: of one that was loaded before everything else (LD_PRELOAD), which takes the place of the one that torch
/// is linked with, or of that; a process may hold several.
void* find_in_openmp(const char* name) {
  if (void* preloaded = dlsym(RTLD_DEFAULT, name)) return preloaded;
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch ? dlsym(torch, name) : nullptr;
}

void init_threads() {
  auto pool = reinterpret_cast<runtime::HostPool>(find_in_openmp("GOMP_parallel"));
  if (!pool) return;
  runtime::use_host_pool(pool);
  auto asked = [](const char* name) {
    auto function = reinterpret_cast<int (*)()>(find_in_openmp(name));
    return function ? function() : 0;
  };
  const int threads = asked("omp_get_max_threads");
  if (asked("omp_get_proc_bind") != 0 && threads > available_processors()) runtime::learn_processors(pool, threads);
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
