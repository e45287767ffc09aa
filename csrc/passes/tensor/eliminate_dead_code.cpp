#include "passes/tensor/eliminate_dead_code.h"

#include <algorithm>
#include <unordered_set>

namespace deplo {

using namespace tensor_ir;

Graph eliminate_dead_code(Graph graph, const PassContext&) {
  std::unordered_set<std::string> read;
  for (const auto& write : graph.writes) read.insert(write.value);
  for (const Output& output : graph.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value.value)) read.insert(value->name);
  std::vector<Ref<Op>> kept;
  for (size_t k = graph.ops.size(); k-- > 0;) {
    const Ref<Op>& op = graph.ops[k];
    bool alive = std::holds_alternative<Library>(op->node) ||
                 std::any_of(op->results.begin(), op->results.end(), [&](const Value& v) { return read.count(v.name) > 0; });
    if (!alive) continue;
    for (const std::string& name : operands_of(*op)) read.insert(name);
    kept.push_back(op);
  }
  std::reverse(kept.begin(), kept.end());
  graph.ops = std::move(kept);
  return graph;
}

}  // namespace deplo
