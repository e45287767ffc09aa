#pragma once

#include <Python.h>
#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/call_key.h"
#include "bindings/dict_state.h"
#include "bindings/program.h"

namespace deplo::bindings {

/// How a call's result is made of a graph's outputs and of the call's own arguments.
struct OutputTree {
  enum class Kind : uint8_t { output, leaf, constant, tuple, list, dict };
  Kind kind = Kind::constant;
  size_t index = 0;   ///< of an output of the graph, or of a leaf of the arguments
  py::object object;  ///< a constant, or the keys of a dict (a tuple)
  std::vector<OutputTree> items;

  /// From nested tuples: ("output", k), ("leaf", i), ("constant", object), ("tuple", [...]), ("list", [...]), ("dict", keys, [...]).
  static OutputTree from(const py::tuple& text);
  /// A new reference; null with an exception set where Python has no memory.
  PyObject* make(PyObject* const* outputs, PyObject* const* leaves) const;
};

/// A tensor that is no argument of the call: a parameter, say. It was looked up when the entry was made.
struct FixedTensor {
  explicit FixedTensor(py::object tensor);
  /// Whether it is as it was, but for its values and where they lie.
  bool holds() const;

  py::object object;
  c10::DispatchKeySet keys;
  c10::ScalarType dtype;
  bool requires_grad;
  std::vector<int64_t> layout;  ///< sizes, strides
};

/// One compiled graph for calls of one key.
class __attribute__((visibility("hidden"))) Entry {
 public:
  /// `given` are the graph's inputs: places of leaves, or objects. Either `program` (the graph itself) or `function` (with AOTAutograd's code around
  /// it, called with the inputs) runs. `named` keeps alive what the key holds the address of, `states` and `cells` say what must be as it was.
  Entry(const py::list& given, py::object program, py::object function, const py::tuple& outputs, py::list named, py::object global_state,
        const std::vector<std::shared_ptr<DictState>>& states, const std::vector<std::pair<py::object, py::object>>& cells, const py::list& fixed);

  /// Whether what the key does not hold is as it was.
  bool holds() const;
  /// The call's result. Null where the program refuses: no input is written then, and the caller may call otherwise; null with a Python exception set
  /// where the call failed.
  PyObject* call(PyObject* const* leaves) const;

 private:
  PyObject* call_program(PyObject* const* leaves, PyObject** inputs) const;
  PyObject* call_function(PyObject* const* leaves, PyObject** inputs) const;

  std::vector<int64_t> leaf_of_;  ///< by input of the graph; -1: an object
  std::vector<py::object> objects_;
  py::object program_object_;
  PyProgram* program_ = nullptr;
  py::object function_;
  OutputTree outputs_;
  py::list named_;
  py::object global_state_;
  std::vector<std::shared_ptr<DictState>> states_;
  std::vector<std::pair<py::object, py::object>> cells_;
  std::vector<FixedTensor> fixed_;
};

}  // namespace deplo::bindings
