#include "target/cuda/schedule/merged.h"

#include <optional>
#include <set>
#include <vector>

#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"
#include "tile_ir/rewrite.h"

namespace deplo::loop_to_tile {

namespace {

constexpr int64_t kMostMerged = 16;  ///< elements of what is taken in
constexpr int64_t kHalfVector = 8;   ///< elements of 16 bits, of which whole numbers are vectors of their own

std::optional<MergedKernel::Dimensions> find_dimensions(const loop_ir::Param& param) {
  if (param.kind != loop_ir::ParamKind::in) return std::nullopt;
  for (size_t inner = 0; inner < param.shape.size(); ++inner) {
    const Expr elements = param.shape[inner];
    if (!elements.is_constant() || elements.value() < 2 || elements.value() > kMostMerged || elements.value() % kHalfVector == 0 ||
        !param.strides[inner].is(1))
      continue;
    for (size_t outer = 0; outer < param.shape.size(); ++outer)
      if (outer != inner && param.strides[outer] == elements) return MergedKernel::Dimensions{outer, inner, elements.value()};
  }
  return std::nullopt;
}

/// A condition of the outer coordinate as one of both; nothing where it is none. What does not mention the axes of that stays.
std::optional<Cond> merged_guard(const Cond& cond, Expr outer, Expr inner, int64_t elements, const Ranges& symbols) {
  const auto is_fixed = [&](Expr e) {
    for (const std::string& name : symbols_of(e))
      if (symbols.count(name) == 0) return false;
    return true;
  };
  bool mentions = false;
  for (const std::string& name : symbols_of(outer)) mentions = mentions || (symbols.count(name) == 0 && uses(cond.expr, name));
  for (const std::string& name : symbols_of(inner)) mentions = mentions || (symbols.count(name) == 0 && uses(cond.expr, name));
  if (!mentions) return cond;
  if (cond.kind != Cond::Kind::ge0) return std::nullopt;
  if (is_fixed(cond.expr - outer)) return Cond{cond.kind, cond.expr * elements + inner};
  if (is_fixed(cond.expr + outer)) return Cond{cond.kind, cond.expr * elements + (elements - 1) - inner};
  return std::nullopt;
}

std::optional<loop_ir::Load> merged_load(const loop_ir::Load& load, const MergedKernel::Dimensions& d, const Ranges& symbols) {
  loop_ir::Load out = load;
  const Expr outer = load.index[d.outer];
  const Expr inner = load.index[d.inner];
  out.index[d.outer] = outer * d.elements + inner;
  out.index.erase(out.index.begin() + static_cast<std::ptrdiff_t>(d.inner));
  for (Cond& cond : out.guard) {
    const auto found = merged_guard(cond, outer, inner, d.elements, symbols);
    if (!found) return std::nullopt;
    cond = *found;
  }
  return out;
}

}  // namespace

MergedKernel::MergedKernel(const loop_ir::Kernel& given) : merged(given) {
  for (loop_ir::Param& param : merged.params) {
    const auto d = find_dimensions(param);
    if (!d) continue;
    bool all = true;
    const loop_ir::Block body = loop_ir::rewrite(merged.body, [&](const Ref<loop_ir::Stmt>& stmt) -> loop_ir::Block {
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      if (!load || load->buffer != param.name) return {stmt};
      auto moved = merged_load(*load, *d, merged.symbols);
      all = all && moved;
      return moved ? loop_ir::Block{std::make_shared<loop_ir::Stmt>(loop_ir::Stmt{std::move(*moved)})} : loop_ir::Block{stmt};
    });
    if (!all) continue;
    merged.body = body;
    dimensions[param.name] = *d;
    param.shape[d->outer] = param.shape[d->outer] * d->elements;
    param.strides[d->outer] = 1;
    param.shape.erase(param.shape.begin() + static_cast<std::ptrdiff_t>(d->inner));
    param.strides.erase(param.strides.begin() + static_cast<std::ptrdiff_t>(d->inner));
  }
}

tile_ir::Block MergedKernel::apart(const tile_ir::Block& block) const {
  const auto split = [](std::vector<Expr>& index, const Dimensions& d) {
    const size_t at = d.outer - (d.inner < d.outer ? 1 : 0);
    const Expr both = index[at];
    index[at] = floordiv(both, d.elements);
    index.insert(index.begin() + static_cast<std::ptrdiff_t>(d.inner), mod(both, d.elements));
  };
  return tile_ir::rewrite(block, [&](const Ref<tile_ir::Stmt>& stmt) -> tile_ir::Block {
    if (const auto* load = std::get_if<tile_ir::Load>(&stmt->node)) {
      const auto found = dimensions.find(load->buffer);
      if (found == dimensions.end()) return {stmt};
      tile_ir::Load moved = *load;
      split(moved.index, found->second);
      return {make(std::move(moved))};
    }
    if (const auto* copy = std::get_if<tile_ir::CopyAsync>(&stmt->node)) {
      const auto found = dimensions.find(copy->from);
      if (found == dimensions.end()) return {stmt};
      const Dimensions& d = found->second;
      tile_ir::CopyAsync moved = *copy;
      split(moved.from_index, d);
      // What runs is the inner dimension, behind whose end the outer one goes on.
      const auto along = static_cast<size_t>(copy->along);
      const size_t at = d.outer - (d.inner < d.outer ? 1 : 0);
      moved.along = static_cast<int64_t>(along == at ? d.inner : along >= d.inner ? along + 1 : along);
      return {make(std::move(moved))};
    }
    return {stmt};
  });
}

}  // namespace deplo::loop_to_tile
