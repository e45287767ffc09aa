#include "library/aten/check.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "library/aten/call.h"
#include "library/aten/types.h"
#include "lower/torch_to_tensor.h"
#include "program_ir/text.h"

namespace deplo::aten {
namespace {

/// Sizes of symbols to judge by: sizes that a program asks to be divisible mostly are multiples of 64.
std::map<std::string, int64_t> sample_sizes(const Ranges& symbols, const SizeHints& hints) {
  std::map<std::string, int64_t> sizes;
  int64_t place = 0;
  for (const auto& [name, range] : symbols) {
    Interval limits = bounds(Expr::symbol(name), symbols);
    int64_t size = 64 * ++place;
    if (limits.lo) size += (std::max<int64_t>(*limits.lo, 0) + 63) / 64 * 64;
    if (limits.hi) size = std::min(size, *limits.hi);
    auto hint = hints.find(name);
    sizes[name] = hint == hints.end() ? size : hint->second;
  }
  return sizes;
}

/// Thrown where no tensor is of the sample's sizes: they do not fit together, as a kernel that is longer than what it runs over.
struct NoSample {};

/// What batch norms and embedding bags give beside their first result, their kernels keep for the gradient: each device's has sizes of its own.
bool keeps_for_gradient(const std::string& op, size_t result) {
  auto has = [&](std::string_view part) { return op.find(part) != std::string::npos; };
  return result > 0 && (has("batch_norm") || has("embedding_bag")) && !has("backward");
}

struct Checker {
  const torch_ir::Graph& graph;
  std::map<std::string, int64_t> sizes;
  std::map<std::string, at::Tensor> values = {};
  std::set<std::string> used = {};

  std::vector<int64_t> evaluated(const std::vector<Expr>& exprs) const {
    std::vector<int64_t> result;
    for (const Expr& e : exprs) result.push_back(evaluate(e, sizes));
    return result;
  }

  void define(const std::string& name, const torch_ir::TensorType& type) {
    for (int64_t size : evaluated(type.shape))
      if (size < 0) throw NoSample{};
    values[name] = at::detail::empty_strided_meta(evaluated(type.shape), evaluated(type.strides), to_scalar_type(type.dtype));
  }

  /// The arguments for tensors without data: what a call makes is of the device `meta`. How exact products are is not ATen's to know.
  static std::vector<std::pair<std::string, Attribute>> on_meta(const torch_ir::Node& node, const c10::FunctionSchema& schema) {
    std::vector<std::pair<std::string, Attribute>> arguments;
    for (const auto& argument : node.arguments)
      if (argument.first != "device" && argument.first != "tf32") arguments.push_back(argument);
    if (schema.argumentIndexWithName("device")) arguments.emplace_back("device", Attribute{Word{"meta"}});
    return arguments;
  }

  /// Unless other sizes may do, or the op asks for data.
  void refuse(const torch_ir::Node& node, const std::string& why) const {
    std::string packet = node.op.substr(0, node.op.rfind('.'));
    for (const auto& [left, reason] : library_packets())
      if (left == packet) return;
    if (graph.symbols.empty()) throw InternalError(fmt::format("{}: {}", node.op, why));
  }

  /// What PyTorch gives; nothing where it cannot say.
  std::vector<at::Tensor> infer(const torch_ir::Node& node) const {
    size_t first = node.op.find('.');
    size_t last = node.op.rfind('.');
    // The memory under a value is not known here: as_strided may reach beyond it.
    if (!node.op.starts_with("aten.") || first == last || node.op.starts_with("aten.as_strided")) return {};
    std::string overload = node.op.substr(last + 1);
    auto found =
        c10::Dispatcher::singleton().findSchema({"aten::" + node.op.substr(first + 1, last - first - 1), overload == "default" ? "" : overload});
    DEPLO_SUPPORT(found.has_value(), "this PyTorch has no operator {}", node.op);
    AtenCall call(node.op, on_meta(node, found->schema()));
    // Modes of a compilation that is under way would take these tensors for theirs.
    c10::impl::ExcludeDispatchKeyGuard without_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher}));
    try {
      return call.run([&](const std::string& name) { return values.at(name); }, [&](Expr size) { return evaluate(size, sizes); });
    } catch (const c10::NotImplementedError&) {
      return {};
    } catch (const Error&) {  // results that are no tensors
      return {};
    } catch (const c10::Error& error) {
      refuse(node, error.what_without_backtrace());
    } catch (const std::exception& error) {  // of a kernel that PyTorch wrote in Python: "RuntimeError: why", and where
      std::string_view why = error.what();
      for (std::string_view kind : {"RuntimeError: ", "IndexError: ", "ValueError: ", "TypeError: "})
        if (why.starts_with(kind)) refuse(node, std::string(why.substr(kind.size(), why.find("\n\n") - kind.size())));
    }
    return {};
  }

  void check(const torch_ir::Node& node) {
    std::vector<at::Tensor> results = infer(node);
    for (size_t k = 0; k < node.results.size(); ++k) {
      const auto& [name, type] = node.results[k];
      if (!type) continue;
      define(name, *type);
      if (results.empty()) continue;
      if (k >= results.size()) throw InternalError(fmt::format("{} gives {} results, not {}", node.op, results.size(), node.results.size()));
      // PyTorch's own traces say wrong sizes for some results that nothing takes.
      if (!results[k].defined() || !used.count(name) || keeps_for_gradient(node.op, k)) continue;
      const at::Tensor& wanted = values.at(name);
      if (results[k].scalar_type() != wanted.scalar_type() || results[k].sizes() != wanted.sizes())
        throw InternalError(fmt::format("{} gives {} the type {}{}, not {}", node.op, name, to_string(from_scalar_type(results[k].scalar_type())),
                                        shape_text(results[k]), torch_ir::print(*type)));
    }
  }

  std::string shape_text(const at::Tensor& tensor) const {
    std::vector<Expr> shape(tensor.sizes().begin(), tensor.sizes().end());
    std::string text = print_shape(shape);
    if (sizes.empty()) return text;
    std::vector<std::string> parts;
    for (const auto& [name, size] : sizes) parts.push_back(fmt::format("{} = {}", name, size));
    return fmt::format("{} for {}", text, joined(parts));
  }

  void use(const Attribute& attribute) {
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) used.insert(value->name);
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
      for (const Attribute& item : *list) use(item);
  }

  void run() {
    for (const auto& node : graph.nodes)
      for (const auto& [name, value] : node->arguments) use(value);
    for (const torch_ir::Write& write : graph.writes) used.insert(write.value);
    for (const Attribute& output : graph.outputs) use(output);
    for (const Cond& fact : graph.facts)
      if (!evaluate(fact, sizes)) throw NoSample{};
    for (const torch_ir::Input& input : graph.inputs)
      if (input.kind != torch_ir::InputKind::symbol) define(input.name, input.type);
    for (const auto& node : graph.nodes) located(node->location, [&] { check(*node); });
  }
};

}  // namespace

void check_types(const torch_ir::Graph& graph, const std::string& file, const SizeHints& hints) {
  try {
    Checker{graph, sample_sizes(graph.symbols, hints)}.run();
  } catch (const NoSample&) {
    return;  // nothing to run the calls with
  } catch (const InternalError& error) {
    throw UserError(fmt::format("{}:{}:{}: {}", file, error.location().line, error.location().column, error.what()));
  } catch (const UnsupportedError& error) {
    throw UserError(fmt::format("{}:{}:{}: {}", file, error.location().line, error.location().column, error.what()));
  }
}

}  // namespace deplo::aten
