#include "lower/loop_to_tile/merge_axes.h"

#include <map>

#include "loop_ir/params.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

struct Offsets {
  std::vector<Expr> accesses;  ///< in elements
  std::vector<Expr> others;    ///< guards, index values, extents: what must stay free of merged axes
};

using Strides = std::map<std::string, std::vector<Expr>>;

Strides strides_of(const Kernel& kernel) {
  Strides strides;
  for (const auto& p : kernel.params) strides[p.name] = p.strides;
  loop_to_tile::visit_all(kernel.body, [&](const Stmt& stmt) {
    if (const auto* local = std::get_if<Local>(&stmt.node)) strides[local->name] = contiguous_strides(local->shape);
  });
  return strides;
}

Offsets offsets_of(const Strides& strides, const Block& body, const Ranges& ranges) {
  Offsets out;
  auto access = [&](const std::string& buffer, const std::vector<Expr>& index) {
    Expr sum = 0;
    for (size_t d = 0; d < index.size(); ++d) sum = sum + index[d] * strides.at(buffer)[d];
    out.accesses.push_back(simplify(sum, ranges));
  };
  auto guards = [&](const std::vector<Cond>& conds) {
    for (const Cond& c : conds) out.others.push_back(c.expr);
  };
  loop_to_tile::visit_all(body, [&](const Stmt& stmt) {
    std::visit(Overloaded{[&](const Local& s) { out.others.insert(out.others.end(), s.shape.begin(), s.shape.end()); },
                          [&](const Load& s) {
                            access(s.buffer, s.index);
                            guards(s.guard);
                          },
                          [&](const Store& s) {
                            access(s.buffer, s.index);
                            guards(s.guard);
                          },
                          [&](const Let& s) {
                            if (s.fn == Fn::index) out.others.push_back(s.index);
                          },
                          [&](const Check& s) { out.others.push_back(s.cond.expr); }, [&](const For& s) { out.others.push_back(s.extent); },
                          [&](const Reduce& s) {
                            for (const Axis& a : s.axes) out.others.push_back(a.extent);
                          },
                          [&](const Scan& s) { out.others.push_back(s.axis.extent); }},
               stmt.node);
  });
  return out;
}

/// `some_stay`: accesses that do not use the inner axis may use the outer one alone.
bool mergeable(const Offsets& offsets, const Axis& outer, const Axis& inner, bool some_stay = false) {
  if (inner.extent.is(0)) return false;  // by which nothing can be divided
  for (Expr e : offsets.others)
    if (uses(e, outer.name) || uses(e, inner.name)) return false;
  for (Expr e : offsets.accesses) {
    if (some_stay && !uses(e, inner.name)) continue;
    auto along = linear_coefficient(e, inner.name);
    auto across = linear_coefficient(e, outer.name);
    if (!along || !across || *across != *along * inner.extent) return false;
  }
  return true;
}

/// Makes one axis of number `at` and the next one.
void merge_pair(std::vector<Axis>& axes, size_t at, Block& body) {
  const Axis outer = axes[at];
  const Axis inner = axes[at + 1];
  Axis merged{outer.name + "_" + inner.name, outer.extent * inner.extent};
  Renaming renaming;
  renaming.exprs[outer.name] = floordiv(Expr::symbol(merged.name), inner.extent);
  renaming.exprs[inner.name] = mod(Expr::symbol(merged.name), inner.extent);
  body = copy_block(body, renaming, nullptr);
  axes[at] = merged;
  axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(at) + 1);
}

/// Merges neighbours among the axes of a nest of loops, or of a reduction, over body. Returns whether any were.
bool merge(std::vector<Axis>& axes, Block& body, const Strides& strides, Ranges& ranges) {
  for (const Axis& a : axes) ranges[a.name] = axis_range(a.extent);
  bool changed = false;
  for (size_t i = axes.size(); i-- > 1;) {
    const Axis outer = axes[i - 1];
    const Axis inner = axes[i];
    if (!mergeable(offsets_of(strides, body, ranges), outer, inner)) continue;
    merge_pair(axes, i - 1, body);
    ranges[axes[i - 1].name] = axis_range(axes[i - 1].extent);
    changed = true;
  }
  return changed;
}

/// The block with the axes of its reductions and inner nests of loops merged.
Block with_merged_axes(const Block& block, const Strides& strides, Ranges ranges) {
  Block out;
  for (const auto& stmt : block) {
    if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
      Reduce merged = *reduce;
      for (const Axis& a : merged.axes) ranges[a.name] = axis_range(a.extent);
      merged.body = with_merged_axes(merged.body, strides, ranges);
      merge(merged.axes, merged.body, strides, ranges);
      out.push_back(std::make_shared<Stmt>(Stmt{std::move(merged)}));
    } else if (std::holds_alternative<For>(stmt->node)) {
      Nest nest = peel({stmt});
      for (const Axis& a : nest.axes) ranges[a.name] = axis_range(a.extent);
      nest.body = with_merged_axes(nest.body, strides, ranges);
      merge(nest.axes, nest.body, strides, ranges);
      for (auto& s : make_nest(nest.axes, nest.body)) out.push_back(std::move(s));
    } else {
      out.push_back(stmt);
    }
  }
  return out;
}

}  // namespace

Kernel merge_outer_axes(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  Ranges ranges = kernel.symbols;
  Kernel out = kernel;
  if (merge(nest.axes, nest.body, strides_of(kernel), ranges)) out.body = make_nest(nest.axes, nest.body);
  return out;
}

Kernel join_rows(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  if (nest.axes.size() < 2) return kernel;
  Ranges ranges = kernel.symbols;
  for (const Axis& a : nest.axes) ranges[a.name] = axis_range(a.extent);
  const size_t last = nest.axes.size() - 1;
  if (!mergeable(offsets_of(strides_of(kernel), nest.body, ranges), nest.axes[last - 1], nest.axes[last], true)) return kernel;
  merge_pair(nest.axes, last - 1, nest.body);
  Kernel out = kernel;
  out.body = make_nest(nest.axes, nest.body);
  return out;
}

Kernel join_short_rows(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  if (nest.axes.size() < 2) return kernel;
  const size_t last = nest.axes.size() - 1;
  const Axis& inner = nest.axes[last];
  if (!is_short(inner) || inner.extent.value() < 2) return kernel;
  Ranges ranges = kernel.symbols;
  for (const Axis& a : nest.axes) ranges[a.name] = axis_range(a.extent);
  const Strides strides = strides_of(kernel);
  for (const auto& stmt : nest.body) {
    if (std::holds_alternative<Let>(stmt->node) || std::holds_alternative<Load>(stmt->node)) continue;
    const auto* store = std::get_if<Store>(&stmt->node);
    if (!store || !store->guard.empty()) return kernel;
    Expr at = 0;
    for (size_t d = 0; d < store->index.size(); ++d) at = at + store->index[d] * strides.at(store->buffer)[d];
    at = simplify(at, ranges);
    const auto along = linear_coefficient(at, inner.name);
    const auto across = linear_coefficient(at, nest.axes[last - 1].name);
    if (!along || !across || !along->is(1) || *across != inner.extent) return kernel;
  }
  merge_pair(nest.axes, last - 1, nest.body);
  Kernel out = kernel;
  out.body = make_nest(nest.axes, nest.body);
  return out;
}

Kernel merge_inner_axes(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  Ranges ranges = kernel.symbols;
  for (const Axis& a : nest.axes) ranges[a.name] = axis_range(a.extent);
  Kernel out = kernel;
  out.body = make_nest(nest.axes, with_merged_axes(nest.body, strides_of(kernel), ranges));
  return out;
}

}  // namespace deplo::loop_to_tile
