#include "bindings/dispatcher.h"

#include <torch/csrc/autograd/python_variable.h>

#include <array>

namespace deplo::bindings {
namespace {

/// Room for a call's inputs and outputs: on the stack if they are few.
class Pointers {
 public:
  explicit Pointers(size_t count) : many_(count > kFew ? count : 0) { data_ = count > kFew ? many_.data() : few_.data(); }
  PyObject** data() { return data_; }

 private:
  static constexpr size_t kFew = 32;
  std::array<PyObject*, kFew> few_;
  std::vector<PyObject*> many_;
  PyObject** data_;
};

/// Drops references when it goes.
class Owned {
 public:
  Owned(PyObject** items, size_t count) : items_(items), count_(count) {}
  ~Owned() {
    for (size_t i = 0; i < count_; ++i) Py_XDECREF(items_[i]);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

 private:
  PyObject** items_;
  size_t count_;
};

/// While it lives, Dynamo looks at no frame of this thread: those of AOTAutograd's wrappers are not to be compiled.
class WithoutDynamo {
 public:
  WithoutDynamo() : before_(PyObject_CallOneArg(setter(), Py_None)) {
    if (!before_) throw py::error_already_set();
  }
  ~WithoutDynamo() {
    if (before_ != Py_None) {
      PyObject* type = nullptr;
      PyObject* value = nullptr;
      PyObject* trace = nullptr;
      PyErr_Fetch(&type, &value, &trace);
      Py_XDECREF(PyObject_CallOneArg(setter(), before_));
      PyErr_Restore(type, value, trace);
    }
    Py_DECREF(before_);
  }
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  static PyObject* setter() {
    static PyObject* found = py::object(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")).release().ptr();
    return found;
  }
  PyObject* before_;
};

}  // namespace

OutputTree OutputTree::from(const py::tuple& text) {
  OutputTree tree;
  auto kind = text[0].cast<std::string>();
  if (kind == "output" || kind == "leaf") {
    tree.kind = kind == "leaf" ? Kind::leaf : Kind::output;
    tree.index = text[1].cast<size_t>();
    return tree;
  }
  if (kind == "constant") {
    tree.object = text[1];
    return tree;
  }
  tree.kind = kind == "tuple" ? Kind::tuple : kind == "list" ? Kind::list : Kind::dict;
  if (tree.kind == Kind::dict) tree.object = text[1];
  for (py::handle item : text[text.size() - 1]) tree.items.push_back(from(item.cast<py::tuple>()));
  return tree;
}

PyObject* OutputTree::make(PyObject* const* outputs, PyObject* const* leaves) const {
  switch (kind) {
    case Kind::output: return Py_NewRef(outputs[index]);
    case Kind::leaf: return Py_NewRef(leaves[index]);
    case Kind::constant: return Py_NewRef(object.ptr());
    default: break;
  }
  auto size = static_cast<Py_ssize_t>(items.size());
  PyObject* made = kind == Kind::tuple ? PyTuple_New(size) : kind == Kind::list ? PyList_New(size) : PyDict_New();
  for (Py_ssize_t i = 0; made && i < size; ++i) {
    PyObject* item = items[static_cast<size_t>(i)].make(outputs, leaves);
    if (!item) {
      Py_CLEAR(made);
    } else if (kind == Kind::tuple) {
      PyTuple_SET_ITEM(made, i, item);
    } else if (kind == Kind::list) {
      PyList_SET_ITEM(made, i, item);
    } else {
      if (PyDict_SetItem(made, PyTuple_GET_ITEM(object.ptr(), i), item) != 0) Py_CLEAR(made);
      Py_DECREF(item);
    }
  }
  return made;
}

FixedTensor::FixedTensor(py::object tensor) : object(std::move(tensor)) {
  c10::TensorImpl* impl = THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl();
  keys = impl->key_set();
  dtype = c10::typeMetaToScalarType(impl->dtype());
  requires_grad = impl->requires_grad();
  layout.assign(impl->sizes().begin(), impl->sizes().end());
  layout.insert(layout.end(), impl->strides().begin(), impl->strides().end());
}

bool FixedTensor::holds() const {
  c10::TensorImpl* impl = THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl();
  auto rank = static_cast<size_t>(impl->dim());
  return impl->key_set() == keys && rank * 2 == layout.size() && c10::typeMetaToScalarType(impl->dtype()) == dtype &&
         impl->requires_grad() == requires_grad &&
         std::equal(layout.begin(), layout.begin() + static_cast<std::ptrdiff_t>(rank), impl->sizes().data()) &&
         std::equal(layout.begin() + static_cast<std::ptrdiff_t>(rank), layout.end(), impl->strides().data());
}

Entry::Entry(const py::list& given, py::object program, py::object function, const py::tuple& outputs, py::list named, py::object global_state,
             const std::vector<std::shared_ptr<DictState>>& states, const std::vector<std::pair<py::object, py::object>>& cells,
             const py::list& fixed)
    : program_object_(std::move(program)),
      function_(std::move(function)),
      outputs_(OutputTree::from(outputs)),
      named_(std::move(named)),
      global_state_(std::move(global_state)),
      states_(states),
      cells_(cells) {
  if (!program_object_.is_none()) program_ = program_object_.cast<PyProgram*>();
  for (py::handle input : given) {
    auto [leaf, object] = input.cast<std::pair<int64_t, py::object>>();
    leaf_of_.push_back(leaf);
    objects_.push_back(object);
  }
  for (py::handle tensor : fixed) fixed_.emplace_back(py::reinterpret_borrow<py::object>(tensor));
}

bool Entry::holds() const {
  for (const auto& [cell, value] : cells_)
    if (PyCell_GET(cell.ptr()) != value.ptr()) return false;
  for (const auto& state : states_)
    if (!state->holds()) return false;
  for (const FixedTensor& tensor : fixed_)
    if (!tensor.holds()) return false;
  PyObject* same = PyObject_CallNoArgs(global_state_.ptr());
  Py_XDECREF(same);
  if (!same) PyErr_Clear();
  return same == Py_True;
}

PyObject* Entry::call(PyObject* const* leaves) const {
  Pointers inputs(leaf_of_.size());
  for (size_t i = 0; i < leaf_of_.size(); ++i) inputs.data()[i] = Py_NewRef(leaf_of_[i] >= 0 ? leaves[leaf_of_[i]] : objects_[i].ptr());
  Owned owned(inputs.data(), leaf_of_.size());
  return program_ ? call_program(leaves, inputs.data()) : call_function(leaves, inputs.data());
}

PyObject* Entry::call_program(PyObject* const* leaves, PyObject** inputs) const {
  size_t count = program_->outputs();
  Pointers outputs(count);
  try {
    program_->call(inputs, leaf_of_.size(), outputs.data());
  } catch (const std::exception&) {  // who calls otherwise meets it again, and tells it in eager mode's words
    PyErr_Clear();
    return nullptr;
  }
  Owned owned(outputs.data(), count);
  return outputs_.make(outputs.data(), leaves);
}

PyObject* Entry::call_function(PyObject* const* leaves, PyObject** inputs) const {
  WithoutDynamo outside;
  PyObject* results = PyObject_Vectorcall(function_.ptr(), inputs, leaf_of_.size(), nullptr);
  if (!results) return nullptr;
  PyObject* items = PySequence_Fast(results, "a graph returns a tuple or a list");
  Py_DECREF(results);
  if (!items) return nullptr;
  PyObject* made = outputs_.make(PySequence_Fast_ITEMS(items), leaves);
  Py_DECREF(items);
  return made;
}

}  // namespace deplo::bindings
