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

std::string name_of(const Stmt& stmt) {
  if (const auto* let = std::get_if<Let>(&stmt.node)) return let->name;
  if (const auto* load = std::get_if<Load>(&stmt.node)) return load->name;
  return "";
}

bool is_straight(const Stmt& stmt) { return std::holds_alternative<Let>(stmt.node) || std::holds_alternative<Load>(stmt.node); }

bool divides_integers(const Let& let) {
  return !is_float(let.dtype) && (let.fn == Fn::trunc_div || let.fn == Fn::floor_div || let.fn == Fn::fmod || let.fn == Fn::remainder);
}

void collect_uses(const Stmt& stmt, std::set<std::string>& into) {
  auto add = [&](const std::vector<Expr>& index, const std::vector<Cond>& guard) {
    for (Expr e : index) collect_symbols(e, into);
    for (const Cond& c : guard) collect_symbols(c.expr, into);
  };
  if (const auto* let = std::get_if<Let>(&stmt.node)) {
    into.insert(let->operands.begin(), let->operands.end());
    collect_symbols(let->index, into);
  } else if (const auto* load = std::get_if<Load>(&stmt.node)) {
    add(load->index, load->guard);
  } else if (const auto* store = std::get_if<Store>(&stmt.node)) {
    into.insert(store->value);
    add(store->index, store->guard);
  }
}

Block statements_for(const Block& pool, std::set<std::string> names) {
  Block found;
  for (size_t i = pool.size(); i-- > 0;) {
    if (names.count(name_of(*pool[i])) == 0) continue;
    collect_uses(*pool[i], names);
    found.insert(found.begin(), pool[i]);
  }
  return found;
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
