#include "lower/torch_to_tensor/foreach.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace deplo::rules {
namespace {

using Attributes = std::vector<Attribute>;
constexpr std::string_view kPrefix = "aten._foreach_";

/// `_foreach` overloads that end in `suffix`, as overloads of single tensors. Arguments keep their order: the n-th name is that of the n-th.
struct Form {
  std::string_view names;   ///< of operators, each between bars
  std::string_view suffix;  ///< of the `_foreach` overload
  std::string_view packet;  ///< of the single overload; empty: the operator's own name
  std::string_view overload;
  std::vector<std::string_view> arguments;
};

const std::vector<Form>& forms() {
  constexpr std::string_view kArithmetic = "|add|sub|mul|div|";
  static const std::vector<Form> all{
      {kArithmetic, "Scalar", "", "Scalar", {"self", "other"}},
      {kArithmetic, "ScalarList", "", "Scalar", {"self", "other"}},
      {kArithmetic, "List", "", "Tensor", {"self", "other", "alpha"}},
      {kArithmetic, "Tensor", "", "Tensor", {"self", "other", "alpha"}},
      {"|addcmul|addcdiv|", "Scalar", "", "default", {"self", "tensor1", "tensor2", "value"}},
      {"|addcmul|addcdiv|", "ScalarList", "", "default", {"self", "tensor1", "tensor2", "value"}},
      {"|clamp_max|minimum|", "Scalar", "clamp_max", "default", {"self", "max"}},
      {"|clamp_max|minimum|", "ScalarList", "clamp_max", "default", {"self", "max"}},
      {"|clamp_max|minimum|", "List", "minimum", "default", {"self", "other"}},
      {"|clamp_min|maximum|", "Scalar", "clamp_min", "default", {"self", "min"}},
      {"|clamp_min|maximum|", "ScalarList", "clamp_min", "default", {"self", "min"}},
      {"|clamp_min|maximum|", "List", "maximum", "default", {"self", "other"}},
      {"|lerp|", "List", "", "Tensor", {"self", "end", "weight"}},
      {"|lerp|", "Scalar", "", "Scalar", {"self", "end", "weight"}},
      {"|lerp|", "ScalarList", "", "Scalar", {"self", "end", "weight"}},
      {"|pow|", "List", "", "Tensor_Tensor", {"self", "exponent"}},
      {"|pow|", "Scalar", "", "Tensor_Scalar", {"self", "exponent"}},
      {"|pow|", "ScalarList", "", "Tensor_Scalar", {"self", "exponent"}},
      {"|pow|", "ScalarAndTensor", "", "Scalar", {"self", "exponent"}},
      {"|norm|", "Scalar", "linalg_vector_norm", "default", {"self", "ord"}},
      {"|copy|", "default", "", "default", {"self", "src"}},
      {"|mm|", "default", "", "default", {"self", "mat2"}},
      {"|abs|acos|asin|atan|ceil|clone|cos|cosh|erf|erfc|exp|expm1|floor|frac|lgamma|log|log10|log1p|log2|max|neg|reciprocal|round|rsqrt|"
       "sigmoid|sign|sin|sinh|sqrt|tan|tanh|trunc|zero|",
       "default",
       "",
       "default",
       {"self"}},
  };
  return all;
}

const Form* find_form(std::string_view name, std::string_view suffix) {
  std::string barred = "|" + std::string(name) + "|";
  for (const Form& form : forms())
    if (form.suffix == suffix && form.names.find(barred) != std::string_view::npos) return &form;
  return nullptr;
}

}  // namespace

std::vector<torch_ir::Node> single_calls(const torch_ir::Node& node) {
  if (!std::string_view(node.op).starts_with(kPrefix)) return {};
  std::string_view overload = std::string_view(node.op).substr(kPrefix.size());
  size_t dot = overload.find('.');
  const Form* form = find_form(overload.substr(0, dot), overload.substr(dot + 1));
  if (!form) return {};
  std::string op = "aten." + std::string(form->packet.empty() ? overload.substr(0, dot) : form->packet) + "." + std::string(form->overload);
  std::vector<torch_ir::Node> calls;
  for (size_t k = 0; k < node.results.size(); ++k) {
    torch_ir::Node call{{node.results[k]}, op, {}, node.source, node.module};
    for (size_t a = 0; a < node.arguments.size(); ++a) {
      const auto& [name, value] = node.arguments[a];
      const auto* list = std::get_if<Attributes>(&value.value);
      if (list && list->size() != node.results.size()) return {};
      bool by_place = a < form->arguments.size() && name != "alpha" && name != "dtype";
      call.arguments.emplace_back(by_place ? std::string(form->arguments[a]) : name, list ? (*list)[k] : value);
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

}  // namespace deplo::rules
