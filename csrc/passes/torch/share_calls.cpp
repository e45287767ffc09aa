#include "passes/torch/share_calls.h"

#include <algorithm>
#include <set>

#include "lower/torch_to_tensor.h"
#include "torch_ir/rewrite.h"

namespace deplo {

using namespace torch_ir;

namespace {

/// Text that is equal for calls that compute the same.
std::string key_of(const Node& node) {
  Node anonymous = node;
  anonymous.source.clear();
  anonymous.module.clear();
  for (size_t k = 0; k < anonymous.results.size(); ++k) anonymous.results[k].name = "%" + std::to_string(k);
  return print(anonymous);
}

/// The values whose memory the outputs show: the outputs, and what they are views of.
std::set<std::string> shown_values(const Graph& graph) {
  std::set<std::string> shown;
  for (const Attribute& output : graph.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value)) shown.insert(value->name);
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (!is_view((*node)->op) || (*node)->arguments.empty()) continue;
    const auto* base = std::get_if<ValueName>(&(*node)->arguments[0].second.value);
    for (const Result& result : (*node)->results)
      if (base && shown.count(result.name)) shown.insert(base->name);
  }
  return shown;
}

}  // namespace

Graph share_calls(Graph graph, const PassContext&) {
  std::set<std::string> shown = shown_values(graph);
  std::map<std::string, Ref<Node>> seen;
  Renaming names;
  Refs<Node> kept;
  for (const auto& node : graph.nodes) {
    Ref<Node> renamed = rename_operands(node, names);
    bool apart = renamed->results.empty() || !is_deterministic(renamed->op);
    for (const Result& result : renamed->results) apart = apart || shown.count(result.name);
    auto first = apart ? seen.end() : seen.emplace(key_of(*renamed), renamed).first;
    if (apart || first->second == renamed) {
      kept.push_back(renamed);
      continue;
    }
    for (size_t k = 0; k < renamed->results.size(); ++k) names[renamed->results[k].name] = first->second->results[k].name;
  }
  if (names.empty()) return graph;
  graph.nodes = std::move(kept);
  for (Write& write : graph.writes) rename(write.value, names);
  return graph;
}

}  // namespace deplo
