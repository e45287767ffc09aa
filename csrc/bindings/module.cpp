// deplo._C: the compiler and its runtime for Python. deplo/core.py imports it, after torch.

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <vector>

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

/// The places that OpenMP binds its threads to, none if it does not. The threads themselves are not asked: that would start OpenMP's pool, whose
/// workers a forked child waits for in vain.
std::vector<std::vector<int>> openmp_places() {
  auto bind = reinterpret_cast<int (*)()>(find_in_openmp("omp_get_proc_bind"));
  auto count = reinterpret_cast<int (*)()>(find_in_openmp("omp_get_num_places"));
  auto size = reinterpret_cast<int (*)(int)>(find_in_openmp("omp_get_place_num_procs"));
  auto read = reinterpret_cast<void (*)(int, int*)>(find_in_openmp("omp_get_place_proc_ids"));
  if (!bind || !count || !size || !read || bind() == 0) return {};
  std::vector<std::vector<int>> places(static_cast<size_t>(std::max(0, count())));
  for (size_t i = 0; i < places.size(); ++i) {
    const int place = static_cast<int>(i);
    places[i].resize(static_cast<size_t>(std::max(0, size(place))));
    read(place, places[i].data());
  }
  return places;
}

void init_threads() {
  if (auto pool = reinterpret_cast<runtime::HostPool>(find_in_openmp("GOMP_parallel"))) runtime::use_host_pool(pool);
  use_places(openmp_places());
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
