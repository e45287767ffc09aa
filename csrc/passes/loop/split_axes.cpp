#include "passes/loop/split_axes.h"

#include <algorithm>
#include <set>
#include <string>

#include "analysis/product_chain.h"
#include "analysis/weighted_sum.h"
#include "expr/node.h"
#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr int kMostSplits = 16;  ///< per kernel; each removes a division, so this only bounds the unforeseen

void collect_divisions(Expr e, std::vector<Expr>& found) {
  if ((e.kind() == ExprKind::floordiv || e.kind() == ExprKind::mod) && std::find(found.begin(), found.end(), e) == found.end()) found.push_back(e);
  for (const Expr& part : e.operands()) collect_divisions(part, found);
}

std::vector<Expr> divisions(const Block& body) {
  std::vector<Expr> found;
  for_each_expr(body, [&](const Expr& e) { collect_divisions(e, found); });
  return found;
}

struct Split {
  std::string axis;
  Expr inner;  ///< extent of the inner part
};

// A split that turns a division of `e` into a choice of parts.
std::optional<Split> split_for(Expr e, const std::vector<Axis>& axes, const Ranges& symbols) {
  Expr divisor = e.operands()[1];
  for (const Term& term : terms_of(e.operands()[0])) {
    if (term.atoms.empty()) continue;
    for (const Axis& axis : axes) {
      auto coefficient = linear_coefficient(from_terms({term}), axis.name);
      if (!coefficient || coefficient->is(0)) continue;
      auto inner = exact_quotient(divisor, *coefficient);
      if (inner && !provably_nonnegative(*inner, symbols)) inner = Expr(0) - *inner;  // an axis that runs backward
      if (!inner || inner->is(1) || *inner == axis.extent || !provably_nonnegative(*inner - 1, symbols)) continue;
      auto outer = exact_quotient(axis.extent, *inner);
      if (outer && !outer->is(1)) return Split{axis.name, *inner};
    }
  }
  return std::nullopt;
}

Block apply_split(const Block& block, const Split& split, Names& names) {
  std::string outer = names.fresh(split.axis);
  std::string inner = names.fresh(split.axis);
  Renaming renaming;
  renaming.exprs[split.axis] = Expr::symbol(outer) * split.inner + Expr::symbol(inner);
  auto parts = [&](Expr extent) { return std::vector<Axis>{{outer, *exact_quotient(extent, split.inner)}, {inner, split.inner}}; };
  return rewrite(block, [&](const Ref<Stmt>& stmt) -> Block {
    if (const auto* s = std::get_if<For>(&stmt->node); s && s->axis == split.axis)
      return make_nest(parts(s->extent), copy_block(s->body, renaming, nullptr));
    const auto* s = std::get_if<Reduce>(&stmt->node);
    if (!s) return {stmt};
    auto at = std::find_if(s->axes.begin(), s->axes.end(), [&](const Axis& axis) { return axis.name == split.axis; });
    if (at == s->axes.end()) return {stmt};
    Reduce copy = *s;
    std::vector<Axis> two = parts(at->extent);
    auto place = copy.axes.begin() + (at - s->axes.begin());
    *place = two[0];
    copy.axes.insert(place + 1, two[1]);
    copy.body = copy_block(s->body, renaming, nullptr);
    return {make_stmt(std::move(copy))};
  });
}

}  // namespace

namespace {

/// Those along keys, which attention and chains of products are known by, and along rows, whose blocks are theirs.
std::set<std::string> axes_of_products(const Kernel& kernel) {
  std::set<std::string> found;
  auto add_rows = [&](const analysis::ContractionOperand& rows, const analysis::ContractionOperand& moving) {
    for (const std::string& axis : rows.axes)
      if (moving.axes.count(axis) == 0) found.insert(axis);
  };
  const Block& inner = peel(kernel.body).body;
  if (const auto sum = analysis::find_weighted_sum(kernel, inner, true)) {
    for (const Stmt* stmt : sum->over_keys) {
      if (const auto* loop = std::get_if<For>(&stmt->node)) found.insert(loop->axis);
      if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) found.insert(reduce->axes[0].name);
    }
    if (sum->contractions) add_rows(sum->contractions->queries, sum->contractions->keys);
  } else if (const auto chain = analysis::find_product_chain(kernel, inner)) {
    for (const auto& product : chain->inner) add_rows(product.rows, product.moving);
  }
  return found;
}

}  // namespace

Block split_axes_of(Block body, const Ranges& symbols, Names& names, const std::set<std::string>& whole) {
  for (int round = 0; round < kMostSplits; ++round) {
    std::vector<Expr> before = divisions(body);
    if (before.empty()) break;
    std::vector<Axis> axes;
    visit(body, [&](const Stmt& stmt, const auto&) {
      if (const auto* s = std::get_if<For>(&stmt.node)) axes.push_back({s->axis, s->extent});
      if (const auto* s = std::get_if<Reduce>(&stmt.node)) axes.insert(axes.end(), s->axes.begin(), s->axes.end());
    });
    std::erase_if(axes, [&](const Axis& a) { return whole.count(a.name) > 0; });
    bool progress = false;
    for (const Expr& e : before) {
      const auto split = split_for(e, axes, symbols);
      if (!split) continue;
      Block next = clean(apply_split(body, *split, names), symbols);
      if (divisions(next).size() >= before.size()) continue;
      body = std::move(next);
      progress = true;
      break;
    }
    if (!progress) break;
  }
  return body;
}

Module split_axes(Module module, const PassContext&) {
  for (auto& kernel : module.kernels) {
    if (divisions(kernel->body).empty()) continue;
    Kernel copy = *kernel;
    Names names;
    names.reserve(copy);
    copy.body = split_axes_of(copy.body, copy.symbols, names, axes_of_products(copy));
    kernel = std::make_shared<Kernel>(std::move(copy));
  }
  return module;
}

}  // namespace deplo
