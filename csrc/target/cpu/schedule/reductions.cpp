#include "target/cpu/schedule/reductions.h"

namespace deplo::loop_to_tile {

std::string defined_by(const loop_ir::Stmt& stmt) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return let->name;
  if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) return load->name;
  return "";
}

void collect_reads(const loop_ir::Stmt& stmt, std::set<std::string>& reads) {
  std::visit(Overloaded{[&](const loop_ir::Let& s) {
                          reads.insert(s.operands.begin(), s.operands.end());
                          collect_symbols(s.index, reads);
                        },
                        [&](const loop_ir::Load& s) {
                          reads.insert(s.buffer);
                          for (const Expr& e : s.index) collect_symbols(e, reads);
                          for (const Cond& c : s.guard) collect_symbols(c.expr, reads);
                        },
                        [&](const loop_ir::Check& s) { collect_symbols(s.cond.expr, reads); },
                        [&](const loop_ir::Reduce& s) {
                          for (const auto& inner : s.body) collect_reads(*inner, reads);
                        },
                        [](const auto&) {}},
             stmt.node);
}

loop_ir::Block needed_before(const loop_ir::Block& block, const loop_ir::Reduce& sum) {
  std::set<std::string> reads;
  for (const auto& stmt : sum.body) collect_reads(*stmt, reads);
  loop_ir::Block needed;
  bool before = false;
  for (size_t at = block.size(); at-- > 0;) {
    if (std::get_if<loop_ir::Reduce>(&block[at]->node) == &sum) {
      before = true;
      continue;
    }
    if (!before || !reads.count(defined_by(*block[at]))) continue;
    collect_reads(*block[at], reads);
    needed.insert(needed.begin(), block[at]);
  }
  return needed;
}

const loop_ir::Let* product_of(const loop_ir::Reduce& sum) {
  const loop_ir::Let* product = nullptr;
  std::set<std::string> reads;
  for (const auto& stmt : sum.body) {
    collect_reads(*stmt, reads);
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node); let && let->name == sum.operands[0] && let->fn == Fn::mul) product = let;
  }
  return reads.count(sum.operands[0]) > 0 ? nullptr : product;
}

}  // namespace deplo::loop_to_tile
