#include "analysis/tf32.h"

#include <map>

#include "base/tf32.h"

namespace deplo::analysis {

using loop_ir::Let;

std::optional<Tf32Rounding> tf32_rounding(const loop_ir::Block& statements, const std::string& rounded) {
  std::map<std::string, const Let*> lets;
  for (const auto& stmt : statements)
    if (const auto* let = std::get_if<Let>(&stmt->node)) lets[let->name] = let;
  const auto find = [&](const std::string& name, Fn fn) -> const Let* {
    const auto at = lets.find(name);
    return at != lets.end() && at->second->fn == fn ? at->second : nullptr;
  };
  const auto is_number = [&](const std::string& name, int64_t value) {
    const Let* let = find(name, Fn::constant);
    return let && let->dtype == DType::i32 && let->literal.i == value;
  };
  /// fn(what this gives, value)
  const auto beside = [&](const std::string& name, Fn fn, int64_t value) -> std::optional<std::string> {
    const Let* let = find(name, fn);
    if (!let || let->dtype != DType::i32) return std::nullopt;
    for (const size_t other : {1, 0})
      if (is_number(let->operands[other], value)) return let->operands[1 - other];
    return std::nullopt;
  };
  const Let* choice = find(rounded, Fn::where);
  if (!choice || choice->dtype != DType::f32) return std::nullopt;
  const std::string& x = choice->operands[1];
  const Let* is_nan = find(choice->operands[0], Fn::ne);
  if (!is_nan || is_nan->operands[0] != x || is_nan->operands[1] != x) return std::nullopt;
  const Let* made = find(choice->operands[2], Fn::bitcast);
  const auto up = made ? beside(made->operands[0], Fn::bit_and, kTf32Mask) : std::nullopt;
  const auto from = up ? beside(*up, Fn::add, kTf32Half) : std::nullopt;
  const Let* bits = from ? find(*from, Fn::bitcast) : nullptr;
  if (!bits || bits->operands[0] != x) return std::nullopt;
  return Tf32Rounding{x, {bits->name, *up, made->operands[0], made->name, is_nan->name, rounded}};
}

std::set<std::string> tf32_steps(const loop_ir::Block& statements) {
  std::set<std::string> steps;
  for (const auto& stmt : statements)
    if (const auto* let = std::get_if<Let>(&stmt->node); let && let->fn == Fn::where)
      if (const auto rounding = tf32_rounding(statements, let->name)) steps.insert(rounding->steps.begin(), rounding->steps.end());
  return steps;
}

}  // namespace deplo::analysis
