#include "library/aten/call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/jit_type.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/ref.h"
#include "base/tf32.h"
#include "library/aten/types.h"

namespace deplo::aten {
namespace {

/// The one argument that is not ATen's, of products: whether operands of float32 are rounded to tf32.
constexpr std::string_view kTf32 = "tf32";

c10::OperatorHandle find_operator(const std::string& op) {
  size_t first = op.find('.');
  size_t last = op.rfind('.');
  DEPLO_SUPPORT(first != std::string::npos && first != last, "'{}' is not of the form namespace.name.overload", op);
  std::string name = op.substr(0, first) + "::" + op.substr(first + 1, last - first - 1);
  std::string overload = op.substr(last + 1);
  auto found = c10::Dispatcher::singleton().findSchema({name, overload == "default" ? "" : overload});
  DEPLO_SUPPORT(found.has_value(), "this PyTorch has no operator {}", op);
  return *found;
}

/// An enumeration spelt as a word: memory formats, layouts and devices.
c10::IValue word_value(const std::string& word) {
  if (word == "contiguous_format") return static_cast<int64_t>(c10::MemoryFormat::Contiguous);
  if (word == "preserve_format") return static_cast<int64_t>(c10::MemoryFormat::Preserve);
  if (word == "channels_last") return static_cast<int64_t>(c10::MemoryFormat::ChannelsLast);
  if (word == "channels_last_3d") return static_cast<int64_t>(c10::MemoryFormat::ChannelsLast3d);
  if (word == "strided") return static_cast<int64_t>(c10::Layout::Strided);
  if (word == "sparse_coo") return static_cast<int64_t>(c10::Layout::Sparse);
  try {
    return c10::Device(word);
  } catch (const c10::Error&) {
    throw UnsupportedError(fmt::format("'{}' names no memory format, layout or device", word));
  }
}

/// The state of the generator that random calls without one draw from.
at::Tensor generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

/// Converts attributes to the values of a schema's types.
class Converter {
 public:
  Converter(const std::string& op, const AtenCall::TensorOf& tensor_of, const AtenCall::SizeOf& size_of)
      : op_(op), tensor_of_(tensor_of), size_of_(size_of) {}

  c10::IValue convert(const Attribute& attribute, const c10::TypePtr& type, int32_t repeat) const {
    if (std::holds_alternative<None>(attribute.value)) return {};
    if (auto optional = type->cast<c10::OptionalType>()) return convert(attribute, optional->getElementType(), repeat);
    if (auto list = type->cast<c10::ListType>()) return convert_list(attribute, list->getElementType(), repeat);
    return convert_one(attribute, type);
  }

 private:
  c10::IValue convert_one(const Attribute& attribute, const c10::TypePtr& type) const {
    bool is_number = std::holds_alternative<bool>(attribute.value) || std::holds_alternative<Expr>(attribute.value) ||
                     std::holds_alternative<double>(attribute.value);
    if (is_number && type->kind() == c10::TypeKind::TensorType) return wrapped(attribute);
    return std::visit(
        Overloaded{[](const None&) -> c10::IValue { return {}; }, [&](const ValueName& v) -> c10::IValue { return tensor_or_other(v.name, type); },
                   [&](bool v) -> c10::IValue { return v; },
                   [&](const Expr& v) -> c10::IValue {
                     int64_t size = size_of_(v);
                     if (type->kind() == c10::TypeKind::FloatType) return static_cast<double>(size);
                     if (type->kind() == c10::TypeKind::BoolType) return size != 0;
                     return size;
                   },
                   [](double v) -> c10::IValue { return v; }, [](DType v) -> c10::IValue { return static_cast<int64_t>(to_scalar_type(v)); },
                   [&](const std::string& v) -> c10::IValue {
                     if (type->kind() == c10::TypeKind::DeviceObjType) return c10::Device(v);
                     return v;
                   },
                   [](const Word& v) -> c10::IValue { return word_value(v.text); },
                   [&](const std::vector<Attribute>&) -> c10::IValue {
                     throw UnsupportedError(fmt::format("{}: a list where the schema has {}", op_, type->str()));
                   }},
        attribute.value);
  }

  /// A number that follows from symbolic sizes is a 0-d value, also where the schema has a number; a generator is the state of one.
  c10::IValue tensor_or_other(const std::string& name, const c10::TypePtr& type) const {
    at::Tensor tensor = tensor_of_(name);
    if (type->kind() == c10::TypeKind::GeneratorType) {
      at::Generator generator = at::detail::createCPUGenerator();
      generator.set_state(tensor);
      return generator;
    }
    if (type->kind() == c10::TypeKind::NumberType) return tensor.item();
    if (type->kind() == c10::TypeKind::FloatType) return tensor.item().toDouble();
    return tensor;
  }

  /// A number where the schema has a tensor (mul.Tensor(x, 2)): a 0-d tensor that does not take part in promotion as tensors do.
  at::Tensor wrapped(const Attribute& attribute) const {
    at::Tensor number = at::detail::empty_cpu({}, c10::ScalarType::Double);
    if (const auto* flag = std::get_if<bool>(&attribute.value)) {
      number = at::detail::empty_cpu({}, c10::ScalarType::Bool);
      *static_cast<bool*>(number.mutable_data_ptr()) = *flag;
    } else if (const auto* size = std::get_if<Expr>(&attribute.value)) {
      number = at::detail::empty_cpu({}, c10::ScalarType::Long);
      *static_cast<int64_t*>(number.mutable_data_ptr()) = size_of_(*size);
    } else {
      *static_cast<double*>(number.mutable_data_ptr()) = std::get<double>(attribute.value);
    }
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }

  c10::IValue convert_list(const Attribute& attribute, const c10::TypePtr& element, int32_t repeat) const {
    c10::impl::GenericList list(element);
    if (const auto* items = std::get_if<std::vector<Attribute>>(&attribute.value)) {
      for (const Attribute& item : *items) list.push_back(convert(item, element, 0));
    } else {
      for (int32_t i = 0; i < std::max(1, repeat); ++i) list.push_back(convert(attribute, element, 0));
    }
    return typed(list, element);
  }

  /// Sizes travel as lists of plain integers, which every kernel takes.
  static c10::IValue typed(const c10::impl::GenericList& list, const c10::TypePtr& element) {
    if (element->kind() != c10::TypeKind::SymIntType) return list;
    c10::List<int64_t> sizes;
    for (size_t i = 0; i < list.size(); ++i) sizes.push_back(list.get(i).toInt());
    return sizes;
  }

  const std::string& op_;
  const AtenCall::TensorOf& tensor_of_;
  const AtenCall::SizeOf& size_of_;
};

bool is_constant(const Attribute& attribute) {
  if (std::holds_alternative<ValueName>(attribute.value)) return false;
  if (const auto* size = std::get_if<Expr>(&attribute.value)) return size->is_constant();
  if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value)) return std::all_of(list->begin(), list->end(), is_constant);
  return true;
}

void flatten(const c10::IValue& value, const std::string& op, std::vector<at::Tensor>& tensors) {
  if (value.isNone()) {
    tensors.emplace_back();
  } else if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
  } else {
    throw UnsupportedError(fmt::format("{} returns a {}", op, value.tagKind()));
  }
}

}  // namespace

AtenCall::AtenCall(const std::string& op, const std::vector<std::pair<std::string, Attribute>>& arguments)
    : op_(op), handle_(find_operator(op)), attributes_(arguments) {
  const c10::FunctionSchema& schema = handle_.schema();
  DEPLO_SUPPORT(!schema.is_mutable(), "{} writes its arguments", op);
  for (const auto& [name, attribute] : attributes_) {
    if (name == kTf32)
      rounds_ = attribute == Attribute{true};
    else
      DEPLO_SUPPORT(schema.argumentIndexWithName(name).has_value(), "{} has no argument '{}'", op, name);
  }
  const bool adds_self = schema.argumentIndexWithName("mat1") || schema.argumentIndexWithName("batch1");
  const SizeOf constant_size = [](Expr size) { return size.value(); };
  const TensorOf no_tensor = [](const std::string& name) -> at::Tensor { throw InternalError(name + " is no constant"); };
  Converter converter(op_, no_tensor, constant_size);
  for (const c10::Argument& expected : schema.arguments()) {
    Argument argument;
    argument.type = expected.type();
    argument.is_factor = expected.name() != "bias" && !(adds_self && expected.name() == "self");
    argument.repeat = expected.N().value_or(0);
    auto given = std::find_if(attributes_.begin(), attributes_.end(), [&](const auto& item) { return item.first == expected.name(); });
    if (given == attributes_.end()) {
      bool has_default = expected.default_value().has_value() || expected.type()->kind() == c10::TypeKind::OptionalType;
      DEPLO_SUPPORT(has_default, "{} needs the argument '{}'", op, expected.name());
      argument.value = expected.default_value().value_or(c10::IValue());
    } else if (is_constant(given->second)) {
      argument.value = converter.convert(given->second, argument.type, argument.repeat);
    } else {
      argument.given = &given->second;
    }
    arguments_.push_back(std::move(argument));
  }
}

namespace {

/// Nothing for what is no tensor of numbers with a point. On a device ATen's own kernels round.
std::optional<at::Tensor> rounded_to_tf32(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().is_floating_point()) return std::nullopt;
  const at::Tensor& given = value.toTensor();
  at::Tensor rounded = given.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  auto* numbers = rounded.mutable_data_ptr<float>();
  for (int64_t i = 0; i < rounded.numel(); ++i) numbers[i] = round_to_tf32(numbers[i]);
  return rounded.to(given.scalar_type());
}

bool is_device(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) return is_device(optional->getElementType());
  return type->kind() == c10::TypeKind::DeviceObjType;
}

}  // namespace

std::vector<at::Tensor> AtenCall::run(const TensorOf& tensor_of, const SizeOf& size_of, c10::Device device) const {
  Converter converter(op_, tensor_of, size_of);
  std::vector<c10::IValue> stack;
  stack.reserve(arguments_.size());
  for (const Argument& argument : arguments_) {
    stack.push_back(!device.is_cpu() && is_device(argument.type) ? c10::IValue(device)
                    : argument.given                             ? converter.convert(*argument.given, argument.type, argument.repeat)
                                                                 : argument.value);
    if (rounds_ && device.is_cpu() && argument.is_factor)
      if (auto rounded = rounded_to_tf32(stack.back())) stack.back() = *std::move(rounded);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  handle_.callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : stack) flatten(value, op_, results);
  return results;
}

}  // namespace deplo::aten

TORCH_LIBRARY_FRAGMENT(deplo, m) { m.def("generator_state() -> Tensor", &deplo::aten::generator_state); }
