#include "bindings/call_key.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <fmt/format.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <bit>
#include <cstring>
#include <unordered_map>

namespace deplo::bindings {
namespace {

enum Tag : uint8_t { kNone, kTensor, kInteger, kTrue, kFalse, kFloat, kText, kTuple, kList, kDict, kObject, kDevice, kEllipsis };

constexpr int kDeepest = 32;

uint64_t tagged(Tag tag, uint64_t value = 0) { return static_cast<uint64_t>(tag) | value << 8; }

PyObject* module_class() {
  static PyObject* found = [] {
    PyObject* nn = PyImport_ImportModule("torch.nn");
    PyObject* found = nn ? PyObject_GetAttrString(nn, "Module") : nullptr;
    Py_XDECREF(nn);
    return found;
  }();
  return found;
}

PyObject* parameter_class() {
  static PyObject* found = [] {
    PyObject* nn = PyImport_ImportModule("torch.nn");
    PyObject* found = nn ? PyObject_GetAttrString(nn, "Parameter") : nullptr;
    Py_XDECREF(nn);
    return found;
  }();
  return found;
}

bool is_size_or_named_tuple(PyTypeObject* type) {
  static PyObject* const fields = PyUnicode_InternFromString("_fields");
  return PyType_IsSubtype(type, &PyTuple_Type) && type->tp_base == &PyTuple_Type && PyDict_Contains(type->tp_dict, fields) == 1;
}

}  // namespace

bool is_module_class(PyTypeObject* type) {
  // Classes are kept: another one could take the address of one that is gone.
  static auto* known = new std::unordered_map<PyTypeObject*, bool>;
  auto found = known->find(type);
  if (found != known->end()) return found->second;
  PyObject* module = module_class();
  bool is_module = module && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(module));
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known->emplace(type, is_module);
  return is_module;
}

void CallKey::clear() {
  words.clear();
  leaves.clear();
  named.clear();
  tensors_.clear();
}

bool CallKey::add_state(PyObject* stance, std::string& refusal) {
  if (at::impl::PythonTorchFunctionTLS::stack_len() > 0) {
    refusal = "a mode of __torch_function__ is on";
    return false;
  }
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    refusal = "a mode of __torch_dispatch__ is on";
    return false;
  }
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  if (!hooks.stack.empty() || hooks.disabled_error_message) {
    refusal = "hooks of saved tensors are on";
    return false;
  }
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) {
    refusal = "forward-mode differentiation is on";
    return false;
  }
  c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  uint64_t flags = static_cast<uint64_t>(c10::GradMode::is_enabled()) | static_cast<uint64_t>(c10::InferenceMode::is_enabled()) << 1 |
                   static_cast<uint64_t>(at::autocast::is_autocast_cache_enabled()) << 2;
  bool autocast = at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA);
  auto dtype_of = [&](at::DeviceType device) { return autocast ? static_cast<uint64_t>(at::autocast::get_autocast_dtype(device)) : 0; };
  words.push_back(flags | static_cast<uint64_t>(autocast) << 3 | dtype_of(at::kCPU) << 8 | dtype_of(at::kCUDA) << 16 |
                  static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 24 | static_cast<uint64_t>(at::get_num_threads()) << 32);
  words.push_back(local.included_.raw_repr());
  words.push_back(local.excluded_.raw_repr());
  add_address(stance);
  return true;
}

bool CallKey::add_arguments(PyObject* const* arguments, size_t positional, PyObject* names, std::string& refusal) {
  size_t count = names ? static_cast<size_t>(PyTuple_GET_SIZE(names)) : 0;
  words.push_back(positional << 32 | count);
  for (size_t i = 0; i < positional; ++i)
    if (!add(arguments[i], 0, refusal)) return false;
  for (size_t i = 0; i < count; ++i) {
    if (!add_text(PyTuple_GET_ITEM(names, static_cast<Py_ssize_t>(i)))) return false;
    if (!add(arguments[positional + i], 0, refusal)) return false;
  }
  return true;
}

void CallKey::add_address(PyObject* value) {
  words.push_back(reinterpret_cast<uintptr_t>(value));
  named.push_back(value);
}

/// Equal strings are one object once interned.
bool CallKey::add_text(PyObject* value) {
  if (!PyUnicode_CHECK_INTERNED(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) {
      PyErr_Clear();
      return false;
    }
    // By its bytes: interning a copy would leave nobody to keep it.
    words.push_back(tagged(kText, static_cast<uint64_t>(size) + 1));
    for (Py_ssize_t at = 0; at < size; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text + at, static_cast<size_t>(std::min<Py_ssize_t>(8, size - at)));
      words.push_back(word);
    }
    return true;
  }
  words.push_back(tagged(kText));
  add_address(value);
  return true;
}

bool CallKey::add(PyObject* value, int depth, std::string& refusal) {
  PyTypeObject* type = Py_TYPE(value);
  if (THPVariable_Check(value)) return add_tensor(value, refusal);
  if (value == Py_None) {
    words.push_back(tagged(kNone));
    return true;
  }
  if (depth > kDeepest) {
    refusal = "arguments are nested too deep";
    return false;
  }
  if (type == &PyTuple_Type || type == &PyList_Type || is_size_or_named_tuple(type)) {
    bool is_list = type == &PyList_Type;
    auto size = static_cast<uint64_t>(PySequence_Fast_GET_SIZE(value));
    words.push_back(tagged(is_list ? kList : kTuple, size));
    if (!is_list && type != &PyTuple_Type) add_address(reinterpret_cast<PyObject*>(type));
    for (uint64_t i = 0; i < size; ++i)
      if (!add(PySequence_Fast_GET_ITEM(value, static_cast<Py_ssize_t>(i)), depth + 1, refusal)) return false;
    return true;
  }
  if (type == &PyDict_Type) return add_dict(value, depth, refusal);
  leaves.push_back(value);
  if (type == &PyLong_Type) {
    int overflow = 0;
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    words.push_back(tagged(kInteger));
    words.push_back(static_cast<uint64_t>(number));
    if (overflow != 0) refusal = "an argument is an integer of more than 64 bits";
    return overflow == 0;
  }
  if (type == &PyBool_Type) {
    words.push_back(tagged(value == Py_True ? kTrue : kFalse));
    return true;
  }
  if (type == &PyFloat_Type) {
    words.push_back(tagged(kFloat));
    words.push_back(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    return true;
  }
  if (type == &PyUnicode_Type) {
    if (!add_text(value)) refusal = "an argument is a string that is no UTF-8";
    return refusal.empty();
  }
  if (type == &PyEllipsis_Type) {
    words.push_back(tagged(kEllipsis));
    return true;
  }
  if (THPDevice_Check(value)) {
    const c10::Device& device = reinterpret_cast<THPDevice*>(value)->device;
    words.push_back(tagged(kDevice, static_cast<uint64_t>(device.type()) << 16 | static_cast<uint16_t>(device.index())));
    return true;
  }
  if (THPDtype_Check(value) || THPLayout_Check(value) || THPMemoryFormat_Check(value) || is_module_class(type)) {
    words.push_back(tagged(kObject));
    add_address(value);
    return true;
  }
  refusal = fmt::format("an argument is a {}, which may change unseen", type->tp_name);
  return false;
}

bool CallKey::add_dict(PyObject* value, int depth, std::string& refusal) {
  words.push_back(tagged(kDict, static_cast<uint64_t>(PyDict_GET_SIZE(value))));
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(value, &at, &key, &item)) {
    if (!PyUnicode_CheckExact(key) || !add_text(key)) {
      refusal = "an argument is a dict of keys that are no strings";
      return false;
    }
    if (!add(item, depth + 1, refusal)) return false;
  }
  return true;
}

bool CallKey::add_tensor(PyObject* value, std::string& refusal) {
  PyTypeObject* type = Py_TYPE(value);
  const at::Tensor& tensor = THPVariable_Unpack(value);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  bool plain = reinterpret_cast<PyObject*>(type) == THPVariableClass || reinterpret_cast<PyObject*>(type) == parameter_class();
  if (!plain || impl->layout() != c10::kStrided || !impl->has_storage() || impl->has_symbolic_sizes_strides() || impl->is_python_dispatch()) {
    refusal = plain ? "an argument is a tensor without strides or memory" : fmt::format("an argument is a tensor of class {}", type->tp_name);
    return false;
  }
  const void* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  uint64_t same = 0;    // 1 + the place of the first tensor before that is this one
  uint64_t memory = 0;  // and of the first one with its storage
  for (size_t k = 0; k < tensors_.size() && (same == 0 || memory == 0); ++k) {
    const at::Tensor& other = THPVariable_Unpack(leaves[tensors_[k]]);
    if (same == 0 && other.unsafeGetTensorImpl() == impl) same = k + 1;
    if (memory == 0 && other.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage) memory = k + 1;
  }
  auto rank = static_cast<uint64_t>(impl->dim());
  auto device = static_cast<uint16_t>(impl->device().index());
  auto dtype = static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype()));
  bool is_parameter = reinterpret_cast<PyObject*>(type) != THPVariableClass;
  words.push_back(tagged(kTensor, rank | dtype << 8 | static_cast<uint64_t>(device) << 16 | static_cast<uint64_t>(impl->requires_grad()) << 32 |
                                      static_cast<uint64_t>(is_parameter) << 33));
  words.push_back(impl->key_set().raw_repr());
  words.push_back(same << 32 | memory);
  const int64_t* sizes = impl->sizes().data();
  const int64_t* strides = impl->strides().data();
  words.insert(words.end(), sizes, sizes + rank);
  words.insert(words.end(), strides, strides + rank);
  tensors_.push_back(leaves.size());
  leaves.push_back(value);
  return true;
}

}  // namespace deplo::bindings
