#include "passes/tensor/simplify_algebra.h"

#include <cmath>

#include "tensor_ir/rewrite.h"

namespace deplo {

using namespace tensor_ir;

namespace {

/// Digits of the significand, the leading one included; of an integer, its value bits.
int precision(DType dtype) {
  switch (dtype) {
    case DType::boolean: return 1;
    case DType::u8: return 8;
    case DType::i8: return 7;
    case DType::i16: return 15;
    case DType::i32: return 31;
    case DType::i64: return 63;
    case DType::f8: return 4;
    case DType::f16: return 11;
    case DType::bf16: return 8;
    case DType::f32: return 24;
    case DType::f64: return 53;
  }
  return 0;
}

/// Whether every value of `from` is a value of `to`.
bool holds_all(DType to, DType from) {
  if (to == from) return true;
  if (is_float(from)) return is_float(to) && (to == DType::f64 || (to == DType::f32 && from != DType::f64));
  if (from == DType::boolean) return true;
  if (is_float(to)) return precision(to) >= precision(from);
  if (to == DType::boolean) return false;
  if (!is_signed(to)) return false;
  return precision(to) >= precision(from);
}

const Elementwise* elementwise(const Editor& editor, const std::string& name, Fn fn) {
  const Op* op = editor.definition(name);
  const auto* node = op ? std::get_if<Elementwise>(&op->node) : nullptr;
  return node && node->fn == fn ? node : nullptr;
}

bool is_number(const Scalar* literal, double value) { return literal && literal->as_double() == value; }
bool is_zero(const Scalar* literal, bool negative) {
  return literal && literal->as_double() == 0 && (!is_float(literal->dtype) || std::signbit(literal->f) == negative);
}

/// The reciprocal of a power of two whose product is the quotient, bit by bit.
std::optional<Scalar> exact_reciprocal(const Scalar* literal) {
  if (!literal || !is_float(literal->dtype) || literal->f == 0 || !std::isfinite(literal->f)) return std::nullopt;
  int exponent = 0;
  if (std::fabs(std::frexp(literal->f, &exponent)) != 0.5) return std::nullopt;
  int limit = literal->dtype == DType::f64 ? 1000 : literal->dtype == DType::f16 ? 12 : 120;
  if (std::abs(exponent) > limit) return std::nullopt;
  return Scalar{literal->dtype, 1 / literal->f, 0};
}

/// The operand that the op returns unchanged, or "".
std::string same_as(const Editor& editor, const Elementwise& node, DType dtype) {
  if (node.operands.empty()) return "";
  const std::string& x = node.operands[0];
  std::string y = node.operands.size() > 1 ? node.operands[1] : "";
  const Scalar* left = editor.literal(x);
  const Scalar* right = y.empty() ? nullptr : editor.literal(y);
  bool floating = is_float(dtype);
  switch (node.fn) {
    case Fn::add:
      // -0 + 0 is +0: only -0 adds nothing to every float.
      if (is_zero(right, floating)) return x;
      return is_zero(left, floating) ? y : "";
    case Fn::sub: return is_zero(right, false) ? x : "";
    case Fn::mul: return is_number(right, 1) ? x : is_number(left, 1) ? y : "";
    case Fn::div:
    case Fn::trunc_div:
    case Fn::floor_div: return is_number(right, 1) ? x : "";
    case Fn::min:
    case Fn::max: return x == y ? x : "";
    case Fn::bit_and:
    case Fn::bit_or:
      if (x == y) return x;
      if (dtype != DType::boolean) return "";
      // true and x, false or x
      if (right && (right->i != 0) == (node.fn == Fn::bit_and)) return x;
      if (left && (left->i != 0) == (node.fn == Fn::bit_and)) return y;
      if (right) return y;
      return left ? x : "";
    case Fn::where:
      if (y == node.operands[2]) return y;
      return left ? node.operands[left->i ? 1 : 2] : "";
    case Fn::neg:
    case Fn::bit_not: {
      const Elementwise* inner = elementwise(editor, x, node.fn);
      return inner ? inner->operands[0] : "";
    }
    case Fn::cast: {
      const Elementwise* inner = elementwise(editor, x, Fn::cast);
      if (!inner) return "";
      DType from = editor.value(inner->operands[0]).type.dtype;
      return from == dtype && holds_all(editor.value(x).type.dtype, from) ? inner->operands[0] : "";
    }
    default: return "";
  }
}

/// A number that all elements reach, unless they are NaN; nothing where none is known.
std::optional<double> least(const Editor& editor, const std::string& name) {
  const Op* op = editor.definition(name);
  const auto* node = op ? std::get_if<Elementwise>(&op->node) : nullptr;
  if (!node || !is_float(op->results[0].type.dtype) || node->operands.empty()) return std::nullopt;
  const auto below = least(editor, node->operands[0]);
  const Scalar* right = node->operands.size() > 1 ? editor.literal(node->operands[1]) : nullptr;
  switch (node->fn) {
    case Fn::max: return right && !std::isnan(right->f) ? std::optional(std::max(right->f, below.value_or(right->f))) : std::nullopt;
    case Fn::mul: return right && right->f > 0 && std::isfinite(right->f) && below && *below >= 0 ? std::optional(0.0) : std::nullopt;
    case Fn::add: return right && right->f >= 0 && std::isfinite(right->f) ? below : std::nullopt;
    case Fn::round: return below ? std::optional(std::floor(*below)) : std::nullopt;
    default: return std::nullopt;
  }
}

/// What lies between two numbers and becomes an integer, without the lower one if that is known; signs of zeros do not show.
Ref<Op> without_lower_bound(Editor& editor, const Op& op, const Elementwise& cast) {
  const Value& result = op.results[0];
  const Elementwise* upper = elementwise(editor, cast.operands[0], Fn::min);
  const Elementwise* lower = upper ? elementwise(editor, upper->operands[0], Fn::max) : nullptr;
  const Scalar* bound = lower ? editor.literal(lower->operands[1]) : nullptr;
  if (!bound || !is_float(bound->dtype) || is_float(result.type.dtype) || result.type.dtype == DType::boolean) return nullptr;
  const auto known = least(editor, lower->operands[0]);
  if (!known || *known < bound->f) return nullptr;
  const Value x = editor.value(lower->operands[0]);
  const Value limit = editor.value(upper->operands[1]);
  const Value bounded = editor.emit(make_elementwise(editor.fresh(), Fn::min, x.type.dtype, {x, limit}, op.provenance));
  return make_elementwise(result.name, Fn::cast, result.type.dtype, {bounded}, op.provenance);
}

/// The op in a cheaper form with the same bits, or null.
Ref<Op> cheaper(Editor& editor, const Op& op, const Elementwise& node) {
  const Value& result = op.results[0];
  if (node.fn == Fn::div) {
    auto reciprocal = exact_reciprocal(editor.literal(node.operands[1]));
    if (!reciprocal) return nullptr;
    Value factor = editor.emit(make_constant(editor.fresh(), result.type, *reciprocal, op.provenance));
    return make_elementwise(result.name, Fn::mul, result.type.dtype, {editor.value(node.operands[0]), factor}, op.provenance);
  }
  if (node.fn == Fn::where) {
    const Elementwise* inner = elementwise(editor, node.operands[0], Fn::bit_not);
    if (!inner) return nullptr;
    return make_elementwise(result.name, Fn::where, result.type.dtype,
                            {editor.value(inner->operands[0]), editor.value(node.operands[2]), editor.value(node.operands[1])}, op.provenance);
  }
  if (node.fn == Fn::cast) {
    const Elementwise* inner = elementwise(editor, node.operands[0], Fn::cast);
    if (!inner) return without_lower_bound(editor, op, node);
    Value x = editor.value(inner->operands[0]);
    DType through = editor.value(node.operands[0]).type.dtype;
    // NaN to bool or integer is decided by the source's own rule, so only conversions that keep every value are skipped.
    if (!holds_all(through, x.type.dtype)) return nullptr;
    return make_elementwise(result.name, Fn::cast, result.type.dtype, {x}, op.provenance);
  }
  return nullptr;
}

}  // namespace

Graph simplify_algebra(Graph graph, const PassContext&) {
  return Editor(std::move(graph)).run([](Editor& editor, const Ref<Op>& op) {
    const auto* node = std::get_if<Elementwise>(&op->node);
    if (node) {
      std::string same = same_as(editor, *node, op->results[0].type.dtype);
      if (!same.empty() && editor.replace(op->results[0].name, same)) return;
      if (Ref<Op> better = cheaper(editor, *op, *node)) {
        editor.emit(std::move(better));
        return;
      }
    }
    editor.emit(op);
  });
}

}  // namespace deplo
