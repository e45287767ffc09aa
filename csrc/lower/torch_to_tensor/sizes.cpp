#include "lower/torch_to_tensor/sizes.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <unordered_set>

#include "base/error.h"
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

struct CheckCollector {
  const KnownSizes& known;
  std::vector<SizeCheck> checks;
  std::unordered_set<Expr> seen_sizes;
  std::unordered_set<Expr> seen_parts;  ///< whose divisors were looked at
  std::map<std::string, const std::vector<Expr>*> shapes;

  void add(Cond cond, const std::string& error) {
    cond.expr = simplify_size(cond.expr, known);
    const bool holds = cond.kind == Cond::Kind::ge0 ? provably_nonnegative(cond.expr, known)
                       : cond.kind == Cond::Kind::ne0
                           ? provably_nonnegative(cond.expr - 1, known) || provably_nonnegative(Expr(-1) - cond.expr, known)
                           : false;
    if (holds || decide(cond, known.ranges) == std::optional<bool>(true)) return;
    if (std::none_of(checks.begin(), checks.end(), [&](const SizeCheck& check) { return check.cond == cond; })) checks.push_back({cond, error});
  }

  void divisors(Expr e) {
    if (e.operands().empty() || !seen_parts.insert(e).second) return;
    for (const Expr& operand : e.operands()) divisors(operand);
    if (e.kind() != ExprKind::floordiv && e.kind() != ExprKind::mod) return;
    const Expr divisor = e.operands()[1];
    if (!divisor.is_constant()) add(not_equal(divisor, 0), "integer division or modulo by zero");
  }

  void divisors(const Attribute& attribute) {
    if (const auto* e = std::get_if<Expr>(&attribute.value)) divisors(*e);
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
      for (const Attribute& item : *list) divisors(item);
  }

  // A padding below 0 crops, what is before the tensor first: what it crops must be there.
  void padding(const torch_ir::Node& node) {
    const std::vector<Expr>* shape = nullptr;
    const std::vector<Attribute>* pad = nullptr;
    for (const auto& [name, value] : node.arguments) {
      if (name == "self")
        if (const auto* self = std::get_if<ValueName>(&value.value); self && shapes.count(self->name)) shape = shapes.at(self->name);
      if (name == "pad") pad = std::get_if<std::vector<Attribute>>(&value.value);
    }
    if (!shape || !pad || pad->size() > 2 * shape->size()) return;
    for (size_t k = 0; k + 1 < pad->size(); k += 2) {
      const auto* before = std::get_if<Expr>(&(*pad)[k].value);
      const auto* after = std::get_if<Expr>(&(*pad)[k + 1].value);
      if (!before || !after) continue;
      const Expr left = (*shape)[shape->size() - 1 - k / 2] + min(*before, 0) + min(*after, 0);
      if (!left.is_constant()) add({Cond::Kind::ge0, left}, "narrow(): length must be non-negative.");
    }
  }

  void node(const torch_ir::Node& node) {
    for (const auto& [name, value] : node.arguments) divisors(value);
    if (node.op == "aten.constant_pad_nd.default") padding(node);
    for (const torch_ir::Result& result : node.results) {
      if (!result.type) continue;
      shapes[result.name] = &result.type->shape;
      for (const Expr& size : result.type->shape) {
        divisors(size);
        if (!size.is_constant() && seen_sizes.insert(size).second)
          add({Cond::Kind::ge0, size}, fmt::format("{} gives a tensor of a size below 0", node.op));
      }
    }
  }
};

}  // namespace

std::vector<SizeCheck> needed_checks(const torch_ir::Graph& graph, const KnownSizes& known) {
  CheckCollector collector{known, {}, {}, {}, {}};
  for (const torch_ir::Input& input : graph.inputs) collector.shapes[input.name] = &input.type.shape;
  for (const SizeCheck& check : graph.checks) {
    collector.divisors(check.cond.expr);
    collector.add(check.cond, check.error);
  }
  for (const auto& node : graph.nodes) collector.node(*node);
  for (const Attribute& output : graph.outputs) collector.divisors(output);
  return std::move(collector.checks);
}

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
