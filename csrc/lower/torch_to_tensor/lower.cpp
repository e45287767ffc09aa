#include <algorithm>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "lower/torch_to_tensor.h"
#include "lower/torch_to_tensor/builder.h"
#include "lower/torch_to_tensor/dtypes.h"
#include "lower/torch_to_tensor/foreach.h"
#include "lower/torch_to_tensor/sizes.h"

namespace deplo {
namespace {

using rules::Builder;
using rules::Call;
using rules::Rule;
using tensor_ir::Graph;
using tensor_ir::Value;

/// The one argument that is not ATen's, of products: operands of float32 are rounded to tf32.
constexpr std::string_view kTf32 = "tf32";

/// "aten.native_layer_norm.default" as "native_layer_norm".
std::string base_name(const std::string& overload) {
  size_t first = overload.find('.');
  size_t last = overload.rfind('.');
  return first < last ? overload.substr(first + 1, last - first - 1) : overload;
}

struct Lowering {
  const torch_ir::Graph& source;
  Builder builder;
  std::map<std::string, Value> values;
  Call::TorchValues torch_values;
  std::set<std::string> given;                          ///< inputs and results of calls: they lie as Torch IR says
  std::map<std::string, std::string> memory_of_output;  ///< the root of the first output that has a value

  void add_inputs(Graph& graph) {
    for (const torch_ir::Input& input : source.inputs) {
      builder.reserve(input.name);
      tensor_ir::Input made{input.name, {input.type.dtype, input.type.shape}, input.type.strides, input.kind, input.is_static};
      if (input.kind != torch_ir::InputKind::symbol) {
        values[input.name] = {input.name, made.type};
        // An input may be a view of memory that the graph does not show; only AOTAutograd knows.
        torch_values[input.name] = {input.type, ""};
        given.insert(input.name);
      }
      graph.inputs.push_back(std::move(made));
    }
    for (const auto& node : source.nodes)
      for (const torch_ir::Result& result : node->results) {
        builder.reserve(result.name);
        if (result.type) torch_values[result.name] = {*result.type, base_of(*node, result.name)};
      }
  }

  /// The value whose memory a result shows.
  std::string base_of(const torch_ir::Node& node, const std::string& result) const {
    if (!rules::is_view(node.op) || node.arguments.empty()) return result;
    const auto* source_value = std::get_if<ValueName>(&node.arguments[0].second.value);
    return source_value ? source_value->name : result;
  }

  // What deplo keeps of the result is its meaning, so arguments that only place it in memory play no part.
  static void ignore_placement(const Call& call) {
    for (const char* name : {"device", "memory_format", "non_blocking"}) call.ignore(name);
    if (call.has("layout") && call.word("layout", "") != "strided") throw UnsupportedError("layout " + call.word("layout", ""));
    if (call.has("pin_memory") && call.boolean("pin_memory")) throw UnsupportedError("pinned memory");
  }

  void check_results(const torch_ir::Node& node, const std::vector<Value>& results) const {
    for (size_t k = 0; k < node.results.size(); ++k) {
      const auto& type = node.results[k].type;
      if (!type) continue;
      DEPLO_ASSERT(k < results.size(), "the rule of {} gave {} results of {}", node.op, results.size(), node.results.size());
      const tensor_ir::TensorType& made = results[k].type;
      DEPLO_ASSERT(made.dtype == type->dtype, "the rule of {} gave {} for result {}, which is {}", node.op, to_string(made.dtype), k,
                   to_string(type->dtype));
      DEPLO_ASSERT(made.shape.size() == type->shape.size(), "the rule of {} gave {} dimensions for result {}, which has {}", node.op,
                   made.shape.size(), k, type->shape.size());
      for (size_t d = 0; d < made.shape.size(); ++d) {
        if (builder.same_size(made.shape[d], type->shape[d])) continue;
        bool differs = decide(equal(made.shape[d], type->shape[d]), source.symbols) == std::optional<bool>(false);
        DEPLO_ASSERT(!differs, "the rule of {} gave size {} in dimension {} of result {}, which is {}", node.op, print(made.shape[d]), d, k,
                     print(type->shape[d]));
        throw UnsupportedError(fmt::format("size {} of result {} is not provably {}", print(made.shape[d]), k, print(type->shape[d])));
      }
    }
  }

  /// The values of a node's results by its rule, or by those of the calls that it stands for.
  std::vector<Value> apply_rule(const torch_ir::Node& node) {
    std::vector<Value> singles;
    for (const torch_ir::Node& single : rules::single_calls(node)) singles.push_back(apply_rule(single).at(0));
    if (!singles.empty()) return singles;
    Rule rule = rules::find_rule(node.op);
    if (!rule) {
      std::string_view reason = rules::library_reason(node.op);
      throw UnsupportedError(reason.empty() ? "no decomposition rule" : std::string(reason));
    }
    rules::refuse_dtypes(node, torch_values);
    Call call(node, values, torch_values);
    ignore_placement(call);
    builder.set_tf32(call.boolean(kTf32, false));
    std::vector<Value> results = rule(builder, call);
    std::vector<std::string> unused = call.unused_arguments();
    DEPLO_SUPPORT(unused.empty(), "the rule does not handle {}", joined(unused));
    check_results(node, results);
    return results;
  }

  // Values that this node defined take the names that Torch IR gave its results.
  void take_names(const torch_ir::Node& node, size_t mark, std::vector<Value>& results) {
    std::map<std::string, std::string> names;
    for (size_t k = 0; k < node.results.size(); ++k) {
      if (!node.results[k].type) continue;
      bool defined_here = false;
      for (size_t i = mark; i < builder.ops().size(); ++i)
        for (const Value& value : builder.ops()[i]->results) defined_here = defined_here || value.name == results[k].name;
      if (defined_here) names.emplace(results[k].name, node.results[k].name);
    }
    builder.rename_since(mark, names);
    for (Value& value : results)
      if (names.count(value.name)) value.name = names[value.name];
  }

  /// The strides in which a call must see an operand, or nothing where it lies so already: as eager mode has it, for random numbers fill memory in
  /// order, and some kernels of ATen read theirs as contiguous without a look at the strides. Gaps and overlaps vanish, as in what is made like it.
  std::optional<std::vector<Expr>> operand_strides(const std::string& name) const {
    const Value& value = values.at(name);
    if (value.name == name && is_given(name)) return std::nullopt;
    const torch_ir::TensorType& type = torch_values.at(name).type;
    const auto order = builder.order_like(type.shape, type.strides);
    if (!order) return std::nullopt;
    std::vector<Expr> strides(type.shape.size(), Expr(1));
    Expr stride = 1;
    for (size_t d : *order) {
      strides[d] = stride;
      if (!type.shape[d].is(0)) stride = stride * type.shape[d];
    }
    const std::vector<Expr> now = is_given(value.name) ? torch_values.at(value.name).type.strides : torch_ir::default_strides(type.shape);
    for (size_t d = 0; d < strides.size(); ++d)
      if (!builder.same_size(type.shape[d], 1) && !builder.same_size(strides[d], now[d])) return strides;
    return std::nullopt;
  }

  /// An input, or what a call gave: its strides are those that Torch IR says.
  bool is_given(const std::string& value) const { return given.count(value) > 0; }

  Attribute renamed(const Attribute& attribute, std::vector<std::optional<std::vector<Expr>>>& layouts) {
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) {
      layouts.push_back(operand_strides(value->name));
      return {ValueName{values.at(value->name).name}};
    }
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value)) {
      std::vector<Attribute> items;
      for (const Attribute& item : *list) items.push_back(renamed(item, layouts));
      return {std::move(items)};
    }
    return attribute;
  }

  std::vector<Value> call_library(const torch_ir::Node& node, const std::string& reason) {
    if (rules::needs_layout(node.op)) throw UnsupportedError(fmt::format("{}: {}", node.op, reason));
    tensor_ir::Library library{node.op, {}, reason, {}, {}};
    for (const auto& [name, value] : node.arguments)
      if (name != kTf32) library.arguments.emplace_back(name, renamed(value, library.operands));
    if (std::none_of(library.operands.begin(), library.operands.end(), [](const auto& strides) { return strides.has_value(); }))
      library.operands.clear();
    std::vector<Value> results;
    for (const torch_ir::Result& result : node.results) {
      if (!result.type) throw UnsupportedError(fmt::format("{}: a result that is none ({})", node.op, reason));
      results.push_back({result.name, {result.type->dtype, result.type->shape}});
      library.strides.push_back(result.type->strides);
      given.insert(result.name);
    }
    builder.append(tensor_ir::make_library(results, std::move(library), provenance(node)));
    return results;
  }

  /// "addmm:addmm_1 of linear": the op, its first result, and what the user called, which follows the colon of `in "layers.0.fc:linear"`.
  static std::string provenance(const torch_ir::Node& node) {
    std::string op = base_name(node.op);
    std::string value = node.results.empty() ? "" : ":" + node.results[0].name.substr(1);
    size_t colon = node.module.rfind(':');
    return op + value + (colon == std::string::npos ? "" : " of " + node.module.substr(colon + 1));
  }

  void lower(const torch_ir::Node& node) {
    builder.set_provenance(provenance(node));
    size_t mark = builder.mark();
    std::vector<Value> results;
    try {
      results = apply_rule(node);
      take_names(node, mark, results);
    } catch (const UnsupportedError& error) {
      builder.roll_back(mark);
      results = call_library(node, error.what());
    } catch (const InternalError& error) {
      throw InternalError(fmt::format("{}: {}", torch_ir::print(node), error.what()));
    }
    builder.locate_since(mark, node.location);
    for (size_t k = 0; k < node.results.size(); ++k)
      if (node.results[k].type) values[node.results[k].name] = results.at(k);
  }

  // The value whose memory `name` shows, through chains of views.
  std::string root_of(std::string name) const {
    while (true) {
      const std::string& base = torch_values.at(name).base;
      if (base.empty() || base == name) return name;
      name = base;
    }
  }

  /// An output has memory of its own unless Torch IR says that it shares: a clone of an input or of another output is a copy.
  tensor_ir::Output tensor_output(const std::string& name) {
    Value value = values.at(name);
    bool is_other_input = torch_values.count(value.name) && torch_values.at(value.name).base.empty() && value.name != name;
    auto [holder, first] = memory_of_output.emplace(value.name, root_of(name));
    if (is_other_input || (!first && holder->second != root_of(name))) value = copy_of(value);
    return {{ValueName{value.name}}, torch_values.at(name).type.strides};
  }

  Value copy_of(const Value& value) {
    tensor_ir::IndexMap map;
    tensor_ir::Source from{value.name, {}, {}};
    for (size_t d = 0; d < value.type.shape.size(); ++d) {
      from.index.push_back(rules::axis(static_cast<int64_t>(d)));
      map.axes.push_back(from.index.back().name());
    }
    map.sources.push_back(std::move(from));
    builder.set_provenance("clone");
    return builder.map(value.type, std::move(map));
  }

  Graph run() {
    Graph graph;
    graph.name = source.name;
    graph.symbols = source.symbols;
    add_inputs(graph);
    for (const auto& node : source.nodes) located(node->location, [&] { lower(*node); });
    for (const torch_ir::Write& write : source.writes) graph.writes.push_back({values.at(write.value).name, write.input});
    for (const Attribute& output : source.outputs) {
      const auto* value = std::get_if<ValueName>(&output.value);
      graph.outputs.push_back(value ? tensor_output(value->name) : tensor_ir::Output{output, {}});
    }
    graph.ops = builder.take();
    return graph;
  }
};

}  // namespace

Graph lower_torch_to_tensor(const torch_ir::Graph& graph) {
  rules::KnownSizes known = rules::known_sizes(graph);
  std::vector<SizeCheck> checks = rules::needed_checks(graph, known);
  torch_ir::Graph simple = rules::simplify_sizes(graph, known);
  Lowering lowering{simple, {}, {}, {}, {}, {}};
  lowering.builder.set_known_sizes(std::move(known));
  Graph lowered = lowering.run();
  lowered.checks = std::move(checks);
  return lowered;
}

}  // namespace deplo
