#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

namespace deplo::bindings {

/// What tells one call from another as far as its arguments and the state of PyTorch go: equal keys mean that one compiled graph serves both.
///
/// A key holds the structure of the arguments (tuples, lists, dicts and their keys), of each tensor its class, dispatch keys, dtype, device, sizes,
/// strides, whether it needs a gradient and which earlier tensor it is or shares a storage with; numbers and strings by value; modules and words of
/// PyTorch (dtypes, devices) by identity; and grad mode, inference mode, autocast, the default dtype, the number of threads and torch.compile's
/// stance.
struct CallKey {
  std::vector<uint64_t> words;
  std::vector<PyObject*> leaves;  ///< borrowed: tensors, numbers, strings and objects, in order
  std::vector<PyObject*> named;   ///< borrowed: what the words hold the address of

  void clear();
  /// Adds PyTorch's state. False, with the reason in `refusal`, where calls do not go by their arguments alone (a mode of Python's is on).
  bool add_state(PyObject* stance, std::string& refusal);
  /// Adds positional arguments and, named by `names` (null: none), those after them. False, with the reason in `refusal`, for what keys cannot tell.
  bool add_arguments(PyObject* const* arguments, size_t positional, PyObject* names, std::string& refusal);

 private:
  bool add(PyObject* value, int depth, std::string& refusal);
  bool add_tensor(PyObject* value, std::string& refusal);
  bool add_dict(PyObject* value, int depth, std::string& refusal);
  void add_address(PyObject* value);
  bool add_text(PyObject* value);

  std::vector<size_t> tensors_;  ///< places among the leaves
};

/// Whether the class is a torch.nn.Module; remembered by class.
bool is_module_class(PyTypeObject* type);

}  // namespace deplo::bindings
