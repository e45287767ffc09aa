#include "loop_ir/places.h"

#include <algorithm>
#include <set>

#include "loop_ir/rewrite.h"

namespace deplo::loop_ir {

int64_t count_uses(const Block& block, const std::string& buffer) {
  int64_t uses = 0;
  visit(block, [&](const Stmt& s, const auto&) {
    const auto* load = std::get_if<Load>(&s.node);
    const auto* store = std::get_if<Store>(&s.node);
    uses += (load && load->buffer == buffer) || (store && store->buffer == buffer) ? 1 : 0;
  });
  return uses;
}

bool one_place_each(const std::vector<Expr>& index, const std::vector<Axis>& axes) {
  std::set<std::string> left;
  for (const Axis& a : axes) left.insert(a.name);
  return index.size() == axes.size() &&
         std::all_of(index.begin(), index.end(), [&](Expr e) { return e.kind() == ExprKind::symbol && left.erase(e.name()) == 1; });
}

const Store* takes_place(const Ref<Stmt>& loop, const Local& old, const std::string& next) {
  Nest nest = peel({loop});
  const Store* store = nullptr;
  size_t place = 0;
  for (size_t i = 0; i < nest.body.size(); ++i)
    if (const auto* s = std::get_if<Store>(&nest.body[i]->node); s && s->buffer == next) {
      if (store) return nullptr;
      store = s;
      place = i;
    }
  if (!store || store->combiner != Combiner::set || !store->guard.empty() || store->index.size() < old.shape.size()) return nullptr;
  const std::vector<Expr> index(store->index.end() - static_cast<std::ptrdiff_t>(old.shape.size()), store->index.end());
  if (!one_place_each(index, nest.axes)) return nullptr;
  int64_t before = 0;
  for (size_t i = 0; i < place; ++i)
    if (const auto* load = std::get_if<Load>(&nest.body[i]->node); load && load->buffer == old.name) {
      if (load->index != index) return nullptr;
      ++before;
    }
  return before > 0 && before == count_uses(nest.body, old.name) && count_uses(nest.body, next) == 1 ? store : nullptr;
}

}  // namespace deplo::loop_ir
