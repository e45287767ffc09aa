// deplo._C.Dispatcher: calls of a compiled function that look at arguments alone. deplo/dispatch.py fills it.

#include <pybind11/stl.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "bindings/dispatcher.h"
#include "bindings/init.h"

namespace deplo::bindings {
namespace {

struct Hash {
  size_t operator()(const std::vector<uint64_t>& words) const {
    uint64_t hash = words.size();
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Table {
  std::unordered_map<std::vector<uint64_t>, std::shared_ptr<Entry>, Hash> entries;
  const std::vector<uint64_t>* latest_key = nullptr;
  std::shared_ptr<Entry> latest;
  py::dict frames;  ///< of torch._dynamo.eval_frame
  py::str stance{"_stance"};
  py::object missed;  ///< missed(key, why, leaves, named, args, kwargs): the call by Dynamo
  py::object plain;   ///< given: every call goes there
  uint64_t hits = 0;
  uint64_t misses = 0;
};

/// What entries hold may call the dispatcher when it goes, and other threads may meanwhile: the table is empty by then.
void forget_entries(Table& table) {
  const std::shared_ptr<Entry> latest = std::move(table.latest);
  const auto entries = std::exchange(table.entries, {});
}

struct Dispatcher {
  PyObject_HEAD vectorcallfunc vectorcall;
  Table* table;
};

/// The thread's keys, one for each call that it is in.
class BorrowedKey {
 public:
  BorrowedKey() {
    auto& all = keys();
    if (depth() == all.size()) all.push_back(std::make_unique<CallKey>());
    key_ = all[depth()++].get();
    key_->clear();
  }
  ~BorrowedKey() { --depth(); }
  BorrowedKey(const BorrowedKey&) = delete;
  BorrowedKey& operator=(const BorrowedKey&) = delete;
  CallKey& operator*() { return *key_; }

 private:
  static std::vector<std::unique_ptr<CallKey>>& keys() {
    thread_local std::vector<std::unique_ptr<CallKey>> keys;
    return keys;
  }
  static size_t& depth() {
    thread_local size_t depth = 0;
    return depth;
  }
  CallKey* key_;
};

py::list list_of(const std::vector<PyObject*>& objects) {
  py::list list(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(objects[i]));
  return list;
}

PyObject* call_missed(Table& table, const CallKey* key, const std::string& why, PyObject* const* arguments, size_t positional, PyObject* names) {
  py::tuple args(positional);
  for (size_t i = 0; i < positional; ++i) PyTuple_SET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(arguments[i]));
  py::dict keywords;
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i)
    if (PyDict_SetItem(keywords.ptr(), PyTuple_GET_ITEM(names, i), arguments[positional + static_cast<size_t>(i)]) != 0) return nullptr;
  py::object words = py::none();
  py::list leaves;
  py::list named;
  if (key) {
    words = py::bytes(reinterpret_cast<const char*>(key->words.data()), key->words.size() * sizeof(uint64_t));
    leaves = list_of(key->leaves);
    named = list_of(key->named);
  }
  py::str reason(why);
  std::array<PyObject*, 6> given{words.ptr(), reason.ptr(), leaves.ptr(), named.ptr(), args.ptr(), keywords.ptr()};
  py::object missed = table.missed;
  return PyObject_Vectorcall(missed.ptr(), given.data(), given.size(), nullptr);
}

PyObject* call_dispatcher(Table& table, PyObject* const* arguments, size_t positional, PyObject* names) {
  BorrowedKey borrowed;
  CallKey& key = *borrowed;
  std::string why;
  PyObject* stance = PyDict_GetItemWithError(table.frames.ptr(), table.stance.ptr());
  if (!key.add_state(stance, why) || !key.add_arguments(arguments, positional, names, why)) {
    ++table.misses;
    return call_missed(table, nullptr, why, arguments, positional, names);
  }
  std::shared_ptr<Entry> entry;
  if (table.latest && *table.latest_key == key.words) {
    entry = table.latest;
  } else if (auto found = table.entries.find(key.words); found != table.entries.end()) {
    entry = table.latest = found->second;
    table.latest_key = &found->first;
  }
  if (entry && entry->holds()) {
    PyObject* result = entry->call(key.leaves.data());
    if (result || PyErr_Occurred()) {
      ++table.hits;
      return result;
    }
  }
  ++table.misses;
  return call_missed(table, &key, "", arguments, positional, names);
}

PyObject* vectorcall(PyObject* self, PyObject* const* arguments, size_t flagged, PyObject* names) {
  Table& table = *reinterpret_cast<Dispatcher*>(self)->table;
  if (table.plain) {
    ++table.misses;
    py::object plain = table.plain;
    return PyObject_Vectorcall(plain.ptr(), arguments, flagged, names);
  }
  // The frames dict is there once the dispatcher is made by its constructor.
  try {
    return call_dispatcher(table, arguments, static_cast<size_t>(PyVectorcall_NARGS(flagged)), names);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

Table& table_of(py::handle self) { return *reinterpret_cast<Dispatcher*>(self.ptr())->table; }

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* /*keywords*/) {
  PyObject* missed = nullptr;
  if (!PyArg_ParseTuple(args, "O", &missed)) return nullptr;
  PyObject* frames = PyImport_ImportModule("torch._dynamo.eval_frame");
  if (!frames) return nullptr;
  auto* self = reinterpret_cast<Dispatcher*>(type->tp_alloc(type, 0));
  if (self) {
    self->vectorcall = vectorcall;
    self->table = new Table;
    self->table->missed = py::reinterpret_borrow<py::object>(missed);
    self->table->frames = py::reinterpret_borrow<py::dict>(PyModule_GetDict(frames));
  }
  Py_DECREF(frames);
  return reinterpret_cast<PyObject*>(self);
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Dispatcher*>(self)->table;
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  // What entries hold are compiled graphs and the modules they belong to; `missed` is what leads back to the dispatcher.
  if (Table* table = reinterpret_cast<Dispatcher*>(self)->table) {
    Py_VISIT(table->missed.ptr());
    Py_VISIT(table->plain.ptr());
  }
  return 0;
}

int clear(PyObject* self) {
  if (Table* table = reinterpret_cast<Dispatcher*>(self)->table) {
    forget_entries(*table);
    table->missed = py::none();
    table->plain = py::none();
  }
  return 0;
}

py::object dispatcher_type() {
  static std::array<PyMemberDef, 2> members{{{"__vectorcalloffset__", T_PYSSIZET, offsetof(Dispatcher, vectorcall), READONLY, nullptr}, {}}};
  static std::array<PyType_Slot, 8> slots{{{Py_tp_new, reinterpret_cast<void*>(create)},
                                           {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                           {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                           {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                           {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                           {Py_tp_members, members.data()},
                                           {Py_tp_doc, const_cast<char*>("Dispatcher(missed): calls that look at their arguments alone.")},
                                           {0, nullptr}}};
  static PyType_Spec spec{"deplo._C.Dispatcher", sizeof(Dispatcher), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
                          slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(type);
}

/// Whether it takes the place of another entry.
bool add(py::handle self, const py::bytes& key, std::shared_ptr<Entry> entry, size_t most) {
  Table& table = table_of(self);
  std::string_view bytes = key;
  std::vector<uint64_t> words(bytes.size() / sizeof(uint64_t));
  std::memcpy(words.data(), bytes.data(), bytes.size());
  if (table.entries.size() >= most) forget_entries(table);
  table.latest.reset();
  return !table.entries.insert_or_assign(std::move(words), std::move(entry)).second;
}

}  // namespace

void init_dispatch(py::module_& module) {
  py::class_<DictState, std::shared_ptr<DictState>>(module, "DictState", "Dicts whose values must stay the objects that they were.")
      .def(py::init<const std::vector<std::pair<py::dict, py::object>>&>(), py::arg("dicts"), "Pairs of a dict and a tuple of its keys (None: all).")
      .def("holds", &DictState::holds, "Whether they are.");
  py::class_<Entry, std::shared_ptr<Entry>>(module, "Entry", "One compiled graph for calls of one key.")
      .def(py::init<const py::list&, py::object, py::object, const py::tuple&, py::list, py::object, const std::vector<std::shared_ptr<DictState>>&,
                    const std::vector<std::pair<py::object, py::object>>&, const py::list&>(),
           py::arg("given"), py::arg("program"), py::arg("function"), py::arg("outputs"), py::arg("named"), py::arg("global_state"),
           py::arg("states"), py::arg("cells"), py::arg("fixed"))
      .def("holds", &Entry::holds, "Whether what the key does not hold is as it was.");
  module.attr("Dispatcher") = dispatcher_type();
  module.def("add_entry", &add, py::arg("dispatcher"), py::arg("key"), py::arg("entry"), py::arg("most"),
             "Calls of this key go to this entry from now on; of `most` entries all are forgotten first. Whether it replaces one.");
  module.def(
      "call_plainly",
      [](py::handle self, py::object plain) {
        Table& table = table_of(self);
        table.plain = std::move(plain);
        forget_entries(table);
      },
      py::arg("dispatcher"), py::arg("plain"), "Every call goes to `plain` from now on.");
  module.def(
      "dispatch_counts",
      [](py::handle self) {
        const Table& table = table_of(self);
        return py::make_tuple(table.hits, table.misses, table.entries.size());
      },
      py::arg("dispatcher"), "How many calls went to an entry, how many did not, and how many entries there are.");
}

}  // namespace deplo::bindings
