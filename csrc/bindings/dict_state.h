#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace deplo::bindings {

/// Dicts whose values must stay the objects that they were: the attributes, parts and tensors of modules, and single names among globals.
class __attribute__((visibility("hidden"))) DictState {
 public:
  /// Each is a dict and None (all its items, and no others) or a tuple of its keys.
  explicit DictState(const std::vector<std::pair<pybind11::dict, pybind11::object>>& dicts);

  /// Whether they are. Dicts that nobody wrote since they were found so are not looked into (Python 3.11, which counts their writes).
  bool holds();

 private:
  struct Item {
    pybind11::object key;
    pybind11::object value;  ///< null: the key is missing
  };
  struct Watched {
    pybind11::dict dict;
    uint64_t version;
    Py_ssize_t size;  ///< -1: any
    std::vector<Item> items;
  };
  static bool same(const Watched& watched);

  std::vector<Watched> dicts_;
};

}  // namespace deplo::bindings
