#include "analysis/scaled.h"

#include <algorithm>
#include <map>
#include <set>

namespace deplo::analysis {
namespace {

using loop_ir::Let;
using loop_ir::Load;

class Values {
 public:
  Values(const loop_ir::Block& body, const std::string& axis) {
    std::set<std::string> varying{axis};
    for (const auto& stmt : body) {
      const auto* let = std::get_if<Let>(&stmt->node);
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!let && !load) continue;
      const std::string& name = let ? let->name : load->name;
      definitions_[name] = stmt.get();
      auto reads = [&](Expr e) { return std::any_of(varying.begin(), varying.end(), [&](const auto& v) { return uses(e, v); }); };
      bool varies =
          let ? reads(let->index) || std::any_of(let->operands.begin(), let->operands.end(), [&](const auto& o) { return varying.count(o) > 0; })
              : std::any_of(load->index.begin(), load->index.end(), reads) ||
                    std::any_of(load->guard.begin(), load->guard.end(), [&](const Cond& c) { return reads(c.expr); });
      if (varies) varying.insert(name);
    }
    varying_ = std::move(varying);
  }

  bool varies(const std::string& value) const { return varying_.count(value) > 0; }

  const Let* let(const std::string& value) const {
    auto it = definitions_.find(value);
    return it == definitions_.end() ? nullptr : std::get_if<Let>(&it->second->node);
  }

  /// Whether the value is made of bytes by casts, sums and differences.
  bool of_bytes(const std::string& value) const {
    auto it = definitions_.find(value);
    if (it == definitions_.end()) return false;
    if (const auto* load = std::get_if<Load>(&it->second->node)) return load->dtype == DType::i8 || load->dtype == DType::u8;
    const Let& made = std::get<Let>(it->second->node);
    if (made.fn != Fn::cast && made.fn != Fn::sub && made.fn != Fn::add) return false;
    return std::all_of(made.operands.begin(), made.operands.end(), [&](const auto& operand) { return of_bytes(operand); });
  }

 private:
  std::map<std::string, const loop_ir::Stmt*> definitions_;
  std::set<std::string> varying_;
};

}  // namespace

std::optional<std::string> scaled_whole_number(const loop_ir::Block& body, const std::string& value, const std::string& axis) {
  const Values values(body, axis);
  const Let* wide = values.let(value);
  if (!wide || wide->fn != Fn::cast || wide->dtype != DType::f32) return std::nullopt;
  const Let* rounded = values.let(wide->operands[0]);
  if (!rounded || rounded->fn != Fn::cast || (rounded->dtype != DType::bf16 && rounded->dtype != DType::f16)) return std::nullopt;
  const Let* product = values.let(rounded->operands[0]);
  if (!product || product->fn != Fn::mul || product->dtype != DType::f32) return std::nullopt;
  for (size_t n : {0, 1})
    if (values.varies(product->operands[n]) && values.of_bytes(product->operands[n]) && !values.varies(product->operands[1 - n]))
      return product->name;
  return std::nullopt;
}

}  // namespace deplo::analysis
