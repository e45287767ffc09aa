#include "lower/torch_to_tensor/sizes.h"

#include "expr/facts.h"

namespace deplo::rules {
namespace {

struct Simplifier {
  const Ranges& ranges;

  void apply(Expr& e) const {
    if (!e.is_constant() && !e.is_symbol()) e = simplify_size(e, ranges);
  }

  void apply(torch_ir::TensorType& type) const {
    for (Expr& e : type.shape) apply(e);
    for (Expr& e : type.strides) apply(e);
  }

  void apply(Attribute& attribute) const {
    if (auto* e = std::get_if<Expr>(&attribute.value)) apply(*e);
    if (auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
      for (Attribute& item : *list) apply(item);
  }
};

}  // namespace

Expr simplify_size(Expr e, const Ranges& ranges) { return simplify(e, ranges); }

bool provably_equal(Expr a, Expr b, const Ranges& ranges) {
  if (a == b) return true;
  Expr difference = simplify(a - b, ranges);
  if (difference.is(0) || decide(equal(a, b), ranges) == std::optional<bool>(true)) return true;
  if (difference.is_constant()) return false;
  // Sums of products cancel once no remainder hides what it is made of.
  return simplify_size(expand_mods(difference), ranges).is(0);
}

torch_ir::Graph simplify_sizes(torch_ir::Graph graph) {
  if (graph.symbols.empty()) return graph;
  Simplifier simplifier{graph.symbols};
  for (auto& node : graph.nodes) {
    torch_ir::Node simple = *node;
    for (torch_ir::Result& result : simple.results)
      if (result.type) simplifier.apply(*result.type);
    for (auto& [name, value] : simple.arguments) simplifier.apply(value);
    if (simple != *node) node = std::make_shared<const torch_ir::Node>(std::move(simple));
  }
  return graph;
}

}  // namespace deplo::rules
