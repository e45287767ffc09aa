#include "lower/loop_to_tile/merge_axes.h"

#include <map>

#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

struct Offsets {
  std::vector<Expr> accesses;  ///< in elements
  std::vector<Expr> others;    ///< guards, index values, extents: what must stay free of merged axes
};

Offsets offsets_of(const Kernel& kernel, const Block& body, const Ranges& ranges) {
  std::map<std::string, std::vector<Expr>> strides;
  for (const auto& p : kernel.params) strides[p.name] = p.strides;
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
    std::visit(Overloaded{[&](const Local& s) {
                            strides[s.name] = contiguous_strides(s.shape);
                            out.others.insert(out.others.end(), s.shape.begin(), s.shape.end());
                          },
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

bool mergeable(const Offsets& offsets, const Axis& outer, const Axis& inner) {
  for (Expr e : offsets.others)
    if (uses(e, outer.name) || uses(e, inner.name)) return false;
  for (Expr e : offsets.accesses) {
    auto along = linear_coefficient(e, inner.name);
    auto across = linear_coefficient(e, outer.name);
    if (!along || !across || *across != *along * inner.extent) return false;
  }
  return true;
}

}  // namespace

Kernel merge_outer_axes(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  Kernel out = kernel;
  Ranges ranges = kernel.symbols;
  for (const Axis& a : nest.axes) ranges[a.name] = axis_range(a.extent);
  bool changed = false;
  for (size_t i = nest.axes.size(); i-- > 1;) {
    const Axis outer = nest.axes[i - 1];
    const Axis inner = nest.axes[i];
    if (!mergeable(offsets_of(kernel, nest.body, ranges), outer, inner)) continue;
    Axis merged{outer.name + "_" + inner.name, outer.extent * inner.extent};
    ranges[merged.name] = axis_range(merged.extent);
    Renaming renaming;
    renaming.exprs[outer.name] = floordiv(Expr::symbol(merged.name), inner.extent);
    renaming.exprs[inner.name] = mod(Expr::symbol(merged.name), inner.extent);
    nest.body = copy_block(nest.body, renaming, nullptr);
    nest.axes[i - 1] = merged;
    nest.axes.erase(nest.axes.begin() + static_cast<std::ptrdiff_t>(i));
    changed = true;
  }
  if (changed) out.body = make_nest(nest.axes, nest.body);
  return out;
}

}  // namespace deplo::loop_to_tile
