#include "passes/tensor/eliminate_common_subexpressions.h"

#include <unordered_map>

#include "tensor_ir/rewrite.h"

namespace deplo {

using namespace tensor_ir;

namespace {

/// Text that is equal for ops that compute the same.
std::string key_of(const Op& op) {
  Op anonymous = op;
  anonymous.provenance.clear();
  for (size_t k = 0; k < anonymous.results.size(); ++k) anonymous.results[k].name = "%" + std::to_string(k);
  return print(anonymous);
}

}  // namespace

Graph eliminate_common_subexpressions(Graph graph, const PassContext&) {
  std::unordered_map<std::string, Ref<Op>> seen;
  return Editor(std::move(graph)).run([&](Editor& editor, const Ref<Op>& op) {
    if (std::holds_alternative<Library>(op->node)) {
      editor.emit(op);
      return;
    }
    auto [it, first] = seen.emplace(key_of(*op), op);
    bool merges = !first;
    for (size_t k = 0; merges && k < op->results.size(); ++k) merges = editor.may_replace(op->results[k].name, it->second->results[k].name);
    if (!merges) {
      editor.emit(op);
      return;
    }
    for (size_t k = 0; k < op->results.size(); ++k) editor.replace(op->results[k].name, it->second->results[k].name);
  });
}

}  // namespace deplo
