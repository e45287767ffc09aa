#include "passes/tensor/fold_constants.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tensor_ir/rewrite.h"

namespace deplo {

using namespace tensor_ir;

namespace {

std::optional<Scalar> fold(const Editor& editor, const Elementwise& node, DType dtype) {
  if (node.fn == Fn::constant || node.fn == Fn::index) return std::nullopt;
  std::vector<Scalar> operands;
  for (const std::string& name : node.operands) {
    const Scalar* literal = editor.literal(name);
    if (!literal) return std::nullopt;
    operands.push_back(*literal);
  }
  bool error = false;
  Scalar value = apply(node.fn, dtype, operands.data(), Mode::typed, &error);
  return error ? std::nullopt : std::optional<Scalar>(value);
}

/// Every source that can be reached is the same literal, and so is the fill.
std::optional<Scalar> fold(const Editor& editor, const IndexMap& node) {
  std::optional<Scalar> value;
  // An indirect coordinate may be out of range: its error is part of the map's meaning.
  if (std::any_of(node.indirects.begin(), node.indirects.end(), [](const Indirect& j) { return j.checked; })) return std::nullopt;
  for (const Source& source : node.sources) {
    const Scalar* literal = editor.literal(source.operand);
    if (!literal || (value && !same_literal(*value, *literal))) return std::nullopt;
    value = *literal;
  }
  bool total = !node.sources.empty() && node.sources.back().guard.empty();
  if (!total && value && !same_literal(*value, node.fill)) return std::nullopt;
  return value ? value : node.fill;
}

/// The index expression that an op of one is: a cast (not to bool), or a sum, difference or product with an integer.
std::optional<std::pair<std::vector<std::string>, Expr>> fold_index(const Editor& editor, const Elementwise& node, DType dtype) {
  auto index_of = [&](const std::string& name) -> const Elementwise* {
    const Op* op = editor.definition(name);
    const auto* n = op ? std::get_if<Elementwise>(&op->node) : nullptr;
    return n && n->fn == Fn::index && op->results[0].type.dtype == DType::i64 ? n : nullptr;
  };
  if (node.fn == Fn::cast) {
    const Elementwise* n = index_of(node.operands[0]);
    if (!n || dtype == DType::boolean) return std::nullopt;
    return {{n->axes, n->index}};
  }
  if (dtype != DType::i64 || (node.fn != Fn::add && node.fn != Fn::sub && node.fn != Fn::mul)) return std::nullopt;
  std::vector<std::string> axes;
  Expr sides[2];
  for (size_t k = 0; k < 2; ++k) {
    if (const Elementwise* n = index_of(node.operands[k])) {
      Substitution renamed;
      if (axes.empty()) axes = n->axes;
      for (size_t d = 0; d < axes.size(); ++d) renamed[n->axes[d]] = Expr::symbol(axes[d]);
      sides[k] = substitute(n->index, renamed);
    } else if (const Scalar* literal = editor.literal(node.operands[k]); literal && std::abs(literal->i) < (int64_t{1} << 31)) {
      sides[k] = literal->i;
    } else {
      return std::nullopt;
    }
  }
  if (axes.empty()) return std::nullopt;
  if (node.fn == Fn::mul && !sides[0].is_constant() && !sides[1].is_constant()) return std::nullopt;
  Expr e = node.fn == Fn::add ? sides[0] + sides[1] : node.fn == Fn::sub ? sides[0] - sides[1] : sides[0] * sides[1];
  return {{axes, e}};
}

}  // namespace

Graph fold_constants(Graph graph, const PassContext&) {
  return Editor(std::move(graph)).run([](Editor& editor, const Ref<Op>& op) {
    const Value* result = op->results.empty() ? nullptr : op->results.data();
    std::optional<Scalar> literal;
    if (const auto* node = std::get_if<Elementwise>(&op->node)) {
      literal = fold(editor, *node, result->type.dtype);
      if (!literal) {
        if (auto index = fold_index(editor, *node, result->type.dtype)) {
          editor.emit(make_index(result->name, result->type, index->first, index->second, op->provenance));
          return;
        }
      }
    } else if (const auto* map = std::get_if<IndexMap>(&op->node)) {
      literal = fold(editor, *map);
    }
    editor.emit(literal ? make_constant(result->name, result->type, *literal, op->provenance) : op);
  });
}

}  // namespace deplo
