#include <set>

#include "base/error.h"
#include "expr/check.h"
#include "torch_ir/ir.h"

namespace deplo::torch_ir {
namespace {

class Verifier {
 public:
  explicit Verifier(const Graph& graph) : graph_(graph) {}

  void run() {
    bind_symbols();
    for (const Input& input : graph_.inputs) located(input.location, [&] { check_input(input); });
    for (const Cond& fact : graph_.facts) located(graph_.where_location, [&] { check_expr(fact.expr, "fact " + print(fact)); });
    for (const SizeCheck& check : graph_.checks) located(check.location, [&] { check_expr(check.cond.expr, print(check)); });
    for (const auto& node : graph_.nodes) located(node->location, [&] { check_node(*node); });
    for (const Write& write : graph_.writes) located(write.location, [&] { check_write(write); });
    for (const Attribute& output : graph_.outputs) located(graph_.return_location, [&] { check_output(output); });
  }

 private:
  /// Finds the symbols whose values follow from the inputs: given as such, or the only unknown of a linear extent or stride.
  void bind_symbols() {
    std::vector<Expr> known_values;
    for (const Input& input : graph_.inputs) {
      if (input.kind == InputKind::symbol) bound_.insert(input.name);
      known_values.insert(known_values.end(), input.type.shape.begin(), input.type.shape.end());
      known_values.insert(known_values.end(), input.type.strides.begin(), input.type.strides.end());
    }
    bool changed = true;
    while (changed) {
      changed = false;
      for (const Expr& value : known_values) {
        std::set<std::string> unknown;
        for (const auto& name : symbols_of(value))
          if (!bound_.count(name)) unknown.insert(name);
        if (unknown.size() != 1) continue;
        auto coefficient = linear_coefficient(value, *unknown.begin());
        if (!coefficient) continue;
        bound_.insert(*unknown.begin());
        changed = true;
      }
    }
  }

  void check_expr(const Expr& e, const std::string& where) {
    for (const auto& name : symbols_of(e)) {
      DEPLO_ASSERT(graph_.symbols.count(name), "[torch] {}: symbol {} has no range (where {} in ..)", where, name, name);
      DEPLO_ASSERT(bound_.count(name), "[torch] {}: symbol {} follows from no input", where, name);
    }
    check_divisors(e, graph_.symbols);
  }

  void check_size(const Expr& e, const std::string& name, const char* what) {
    check_expr(e, name);
    DEPLO_ASSERT(decide(less(e, 0), graph_.symbols) != std::optional<bool>(true), "[torch] {} has the negative {} {}", name, what, print(e));
  }

  void check_type(const TensorType& type, const std::string& name) {
    DEPLO_ASSERT(type.shape.size() == type.strides.size(), "[torch] {} has {} dimensions but {} strides", name, type.shape.size(),
                 type.strides.size());
    for (const Expr& e : type.shape) check_size(e, name, "extent");
    for (const Expr& e : type.strides) check_size(e, name, "stride");
    bytes_of(type.dtype, type.shape);
    bytes_of(type.dtype, type.shape, type.strides);
  }

  void define(const std::string& name) { DEPLO_ASSERT(values_.insert(name).second, "[torch] {} is defined twice", name); }

  void check_input(const Input& input) {
    define(input.name);
    if (input.kind == InputKind::symbol) {
      DEPLO_ASSERT(graph_.symbols.count(input.name), "[torch] symbol {} has no range (where {} in ..)", input.name, input.name);
      return;
    }
    check_type(input.type, input.name);
    inputs_.insert(input.name);
  }

  void check_attribute(const Attribute& attribute, const std::string& where) {
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) {
      DEPLO_ASSERT(values_.count(value->name), "[torch] {} uses {}, which is not defined above", where, value->name);
      DEPLO_ASSERT(!absent_.count(value->name), "[torch] {} uses {}, which is none", where, value->name);
    }
    if (const auto* e = std::get_if<Expr>(&attribute.value)) check_expr(*e, where);
    if (const auto* word = std::get_if<Word>(&attribute.value))
      DEPLO_ASSERT(is_word(word->text), "[torch] {}: '{}' is not a memory format, layout or device", where, word->text);
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
      for (const Attribute& item : *list) check_attribute(item, where);
  }

  void check_node(const Node& node) {
    std::set<std::string> names;
    for (const auto& [name, value] : node.arguments) {
      DEPLO_ASSERT(names.insert(name).second, "[torch] {} is given {} twice", node.op, name);
      check_attribute(value, node.op);
    }
    for (const Result& result : node.results) {
      define(result.name);
      if (result.type)
        check_type(*result.type, result.name);
      else
        absent_.insert(result.name);
    }
  }

  void check_write(const Write& write) {
    DEPLO_ASSERT(values_.count(write.value), "[torch] write of {}, which no node or input defines", write.value);
    DEPLO_ASSERT(inputs_.count(write.input), "[torch] write to {}, which is no tensor input", write.input);
  }

  void check_output(const Attribute& output) {
    check_attribute(output, "return");
    bool allowed =
        std::holds_alternative<ValueName>(output.value) || std::holds_alternative<Expr>(output.value) || std::holds_alternative<None>(output.value);
    DEPLO_ASSERT(allowed, "[torch] returns {}, which is no tensor, integer or none", print(output));
  }

  const Graph& graph_;
  std::set<std::string> values_;
  std::set<std::string> absent_;
  std::set<std::string> inputs_;
  std::set<std::string> bound_;
};

}  // namespace

void verify(const Graph& graph) { Verifier(graph).run(); }

}  // namespace deplo::torch_ir
