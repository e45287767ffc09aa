#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {

Call::Call(const torch_ir::Node& node, const std::map<std::string, Value>& values, const TorchValues& torch_values)
    : node_(node), values_(values), torch_values_(torch_values) {}

const std::string& Call::op() const { return node_.op; }

const Attribute* Call::find(std::string_view name) const {
  used_.emplace_back(name);
  for (const auto& [key, value] : node_.arguments)
    if (key == name) return std::holds_alternative<None>(value.value) ? nullptr : &value;
  return nullptr;
}

void Call::fail(std::string_view name, std::string_view expected) const {
  for (const auto& [key, value] : node_.arguments)
    if (key == name) throw UnsupportedError(fmt::format("{}: argument {} must be {}, got {}", node_.op, name, expected, print(value)));
  throw UnsupportedError(fmt::format("{}: argument {} ({}) is missing", node_.op, name, expected));
}

bool Call::has(std::string_view name) const {
  return std::any_of(node_.arguments.begin(), node_.arguments.end(),
                     [&](const auto& argument) { return argument.first == name && !std::holds_alternative<None>(argument.second.value); });
}

namespace {

template <class T>
const T* peek(const torch_ir::Node& node, std::string_view name) {
  for (const auto& [key, value] : node.arguments)
    if (key == name) return std::get_if<T>(&value.value);
  return nullptr;
}

}  // namespace

bool Call::is_tensor(std::string_view name) const { return peek<ValueName>(node_, name) != nullptr; }

bool Call::is_symbolic(std::string_view name) const {
  const Expr* e = peek<Expr>(node_, name);
  return e && !e->is_constant();
}

void Call::ignore(std::string_view name) const { used_.emplace_back(name); }

const std::string& Call::value_name(std::string_view name) const {
  const ValueName* value = peek<ValueName>(node_, name);
  if (!value) fail(name, "a tensor");
  return value->name;
}

std::vector<Expr> Call::strides(std::string_view name) const { return torch_values_.at(value_name(name)).type.strides; }

Value Call::tensor(std::string_view name) const {
  const Attribute* attribute = find(name);
  const auto* value = attribute ? std::get_if<ValueName>(&attribute->value) : nullptr;
  if (!value) fail(name, "a tensor");
  return values_.at(value->name);
}

std::optional<Value> Call::optional_tensor(std::string_view name) const {
  return has(name) ? std::optional<Value>(tensor(name)) : (ignore(name), std::nullopt);
}

std::vector<std::optional<Value>> Call::optional_tensors(std::string_view name) const {
  const Attribute* attribute = find(name);
  const auto* list = attribute ? std::get_if<std::vector<Attribute>>(&attribute->value) : nullptr;
  if (!list) fail(name, "a list of tensors");
  std::vector<std::optional<Value>> values;
  for (const Attribute& item : *list) {
    const auto* value = std::get_if<ValueName>(&item.value);
    if (!value && !std::holds_alternative<None>(item.value)) fail(name, "a list of tensors");
    values.push_back(value ? std::optional<Value>(values_.at(value->name)) : std::nullopt);
  }
  return values;
}

std::vector<Value> Call::tensors(std::string_view name) const {
  std::vector<Value> values;
  for (const auto& value : optional_tensors(name)) {
    if (!value) fail(name, "a list of tensors");
    values.push_back(*value);
  }
  return values;
}

Expr Call::size(std::string_view name, std::optional<Expr> fallback) const {
  const Attribute* attribute = find(name);
  if (!attribute && fallback) return *fallback;
  const auto* e = attribute ? std::get_if<Expr>(&attribute->value) : nullptr;
  if (!e) fail(name, "an integer");
  return *e;
}

std::optional<Expr> Call::optional_size(std::string_view name) const {
  return has(name) ? std::optional<Expr>(size(name)) : (ignore(name), std::nullopt);
}

int64_t Call::integer(std::string_view name, std::optional<int64_t> fallback) const {
  auto c = size(name, fallback ? std::optional<Expr>(*fallback) : std::nullopt).as_constant();
  if (!c) fail(name, "a constant integer");
  return *c;
}

std::vector<Expr> Call::sizes(std::string_view name, std::optional<std::vector<Expr>> fallback) const {
  const Attribute* attribute = find(name);
  if (!attribute && fallback) return *fallback;
  if (!attribute) fail(name, "a list of integers");
  if (const auto* single = std::get_if<Expr>(&attribute->value)) return {*single};
  const auto* list = std::get_if<std::vector<Attribute>>(&attribute->value);
  if (!list) fail(name, "a list of integers");
  std::vector<Expr> sizes;
  for (const Attribute& item : *list) {
    const auto* e = std::get_if<Expr>(&item.value);
    if (!e) fail(name, "a list of integers");
    sizes.push_back(*e);
  }
  return sizes;
}

std::vector<int64_t> Call::integers(std::string_view name, std::optional<std::vector<int64_t>> fallback) const {
  std::optional<std::vector<Expr>> expressions;
  if (fallback) expressions.emplace(fallback->begin(), fallback->end());
  std::vector<int64_t> values;
  for (Expr e : sizes(name, expressions)) {
    auto c = e.as_constant();
    if (!c) fail(name, "a list of constant integers");
    values.push_back(*c);
  }
  return values;
}

Scalar Call::number(std::string_view name, std::optional<double> fallback) const {
  const Attribute* attribute = find(name);
  if (!attribute && fallback) return {DType::f64, *fallback, 0};
  if (!attribute) fail(name, "a number");
  if (const auto* flag = std::get_if<bool>(&attribute->value)) return {DType::boolean, 0, *flag ? 1 : 0};
  if (const auto* real = std::get_if<double>(&attribute->value)) return {DType::f64, *real, 0};
  const auto* e = std::get_if<Expr>(&attribute->value);
  if (!e || !e->is_constant()) fail(name, "a constant number");
  return {DType::i64, 0, e->value()};
}

double Call::real(std::string_view name, std::optional<double> fallback) const { return number(name, fallback).as_double(); }

bool Call::boolean(std::string_view name, std::optional<bool> fallback) const {
  const Attribute* attribute = find(name);
  if (!attribute && fallback) return *fallback;
  const auto* flag = attribute ? std::get_if<bool>(&attribute->value) : nullptr;
  if (!flag) fail(name, "true or false");
  return *flag;
}

std::string Call::word(std::string_view name, std::string fallback) const {
  const Attribute* attribute = find(name);
  if (!attribute) return fallback;
  if (const auto* text = std::get_if<std::string>(&attribute->value)) return *text;
  const auto* word = std::get_if<Word>(&attribute->value);
  if (!word) fail(name, "a word");
  return word->text;
}

std::optional<DType> Call::dtype(std::string_view name) const {
  const Attribute* attribute = find(name);
  if (!attribute) return std::nullopt;
  const auto* dtype = std::get_if<DType>(&attribute->value);
  if (!dtype) fail(name, "a dtype");
  return *dtype;
}

TensorType Call::result(int k) const {
  const auto& result = node_.results.at(static_cast<size_t>(k));
  DEPLO_ASSERT(result.type, "{}: result {} is none", node_.op, k);
  return {result.type->dtype, result.type->shape};
}

int Call::result_count() const { return static_cast<int>(node_.results.size()); }
bool Call::result_used(int k) const { return node_.results.at(static_cast<size_t>(k)).type.has_value(); }

std::vector<Expr> Call::result_strides(int k) const {
  const auto& result = node_.results.at(static_cast<size_t>(k));
  DEPLO_ASSERT(result.type, "{}: result {} is none", node_.op, k);
  return result.type->strides;
}

std::vector<std::string> Call::unused_arguments() const {
  std::vector<std::string> unused;
  for (const auto& [name, value] : node_.arguments) {
    bool none = std::holds_alternative<None>(value.value);
    if (!none && std::find(used_.begin(), used_.end(), name) == used_.end()) unused.push_back(name);
  }
  return unused;
}

}  // namespace deplo::rules
