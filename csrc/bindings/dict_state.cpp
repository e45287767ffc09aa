#include "bindings/dict_state.h"

namespace deplo::bindings {
namespace {

namespace py = pybind11;

/// Another number after every write; 0 where Python does not count them for others to see.
uint64_t version_of(const py::dict& dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict.ptr())->ma_version_tag;
#else
  return 0;
#endif
}

}  // namespace

DictState::DictState(const std::vector<std::pair<py::dict, py::object>>& dicts) {
  for (const auto& [dict, keys] : dicts) {
    Watched watched{dict, version_of(dict), -1, {}};
    if (keys.is_none()) {
      watched.size = PyDict_GET_SIZE(dict.ptr());
      for (auto [key, value] : dict) watched.items.push_back({py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value)});
    } else {
      for (py::handle key : keys)
        watched.items.push_back(
            {py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict.ptr(), key.ptr()))});
    }
    dicts_.push_back(std::move(watched));
  }
}

bool DictState::holds() {
  for (Watched& watched : dicts_) {
    uint64_t version = version_of(watched.dict);
    if (version == watched.version && version != 0) continue;
    if (!same(watched)) return false;
    watched.version = version;
  }
  return true;
}

bool DictState::same(const Watched& watched) {
  if (watched.size >= 0 && PyDict_GET_SIZE(watched.dict.ptr()) != watched.size) return false;
  for (const Item& item : watched.items)
    if (PyDict_GetItemWithError(watched.dict.ptr(), item.key.ptr()) != item.value.ptr()) return false;
  return true;
}

}  // namespace deplo::bindings
