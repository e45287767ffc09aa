#pragma once

#include <pybind11/pybind11.h>

namespace deplo::bindings {

void init_dispatch(pybind11::module_& module);
void init_errors(pybind11::module_& module);
void init_package(pybind11::module_& module);
void init_program(pybind11::module_& module);
void init_tools(pybind11::module_& module);
void init_tuning(pybind11::module_& module);

}  // namespace deplo::bindings
