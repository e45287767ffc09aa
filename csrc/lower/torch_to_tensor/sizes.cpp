#include "lower/torch_to_tensor/sizes.h"

#include <algorithm>
#include <iterator>

#include "expr/facts.h"

namespace deplo::rules {
namespace {

struct Simplifier {
  const KnownSizes& known;

  void apply(Expr& e) const {
    if (!e.is_constant() && !e.is_symbol()) e = simplify_size(e, known);
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

/// What each of `zeros` is by the others: from s0 == 4*(s0 // 4) and s0 // 4 == 1 follows s0 == 4. They hold as the others do.
std::vector<Expr> consequences(const std::vector<Expr>& zeros, const Ranges& ranges) {
  std::vector<Expr> found;
  for (const Expr& zero : zeros) {
    std::vector<Expr> others;
    std::copy_if(zeros.begin(), zeros.end(), std::back_inserter(others), [&](const Expr& other) { return other != zero; });
    Expr reduced = simplify(rewrite_by_facts(zero, others), ranges);
    const bool known = std::find(zeros.begin(), zeros.end(), reduced) != zeros.end() || std::find(found.begin(), found.end(), reduced) != found.end();
    if (!reduced.is_constant() && !known) found.push_back(reduced);
  }
  return found;
}

}  // namespace

KnownSizes known_sizes(const torch_ir::Graph& graph) {
  KnownSizes known{graph.symbols, {}, {}};
  for (const Cond& fact : graph.facts) {
    Expr e = simplify(expand_mods(fact.expr), graph.symbols);
    if (e.is_constant()) continue;
    if (fact.kind == Cond::Kind::eq0) known.zeros.push_back(e);
    if (fact.kind == Cond::Kind::ge0) known.nonnegative.push_back(e);
  }
  const std::vector<Expr> more = consequences(known.zeros, known.ranges);
  known.zeros.insert(known.zeros.end(), more.begin(), more.end());
  return known;
}

Expr simplify_size(Expr e, const KnownSizes& known) {
  Expr simple = simplify(e, known.ranges);
  return known.zeros.empty() ? simple : simplify(rewrite_by_facts(simple, known.zeros), known.ranges);
}

bool provably_equal(Expr a, Expr b, const KnownSizes& known) {
  if (a == b) return true;
  Expr difference = simplify(a - b, known.ranges);
  if (difference.is(0) || decide(equal(a, b), known.ranges) == std::optional<bool>(true)) return true;
  if (difference.is_constant()) return false;
  // Sums of products cancel once no remainder hides what it is made of.
  return simplify_size(expand_mods(difference), known).is(0);
}

bool provably_nonnegative(Expr e, const KnownSizes& known) {
  if (deplo::provably_nonnegative(e, known.ranges)) return true;
  Expr simple = simplify_size(expand_mods(e), known);
  return std::any_of(known.nonnegative.begin(), known.nonnegative.end(),
                     [&](Expr fact) { return deplo::provably_nonnegative(simplify_size(simple - fact, known), known.ranges); });
}

torch_ir::Graph simplify_sizes(torch_ir::Graph graph, const KnownSizes& known) {
  if (graph.symbols.empty()) return graph;
  Simplifier simplifier{known};
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
