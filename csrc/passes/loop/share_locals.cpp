#include "passes/loop/share_locals.h"

#include <algorithm>
#include <map>
#include <set>

#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"

namespace deplo {

using namespace loop_ir;

namespace {

int64_t count_uses(const Block& block, const std::string& name) {
  int64_t uses = 0;
  visit(block, [&](const Stmt& s, const auto&) {
    const auto* load = std::get_if<Load>(&s.node);
    const auto* store = std::get_if<Store>(&s.node);
    uses += (load && load->buffer == name) || (store && store->buffer == name) ? 1 : 0;
  });
  return uses;
}

/// Whether each index is one of the axes, and all of them occur: every iteration has a place of its own.
bool one_place_each(const std::vector<Expr>& index, const std::vector<Axis>& axes) {
  std::set<std::string> left;
  for (const Axis& a : axes) left.insert(a.name);
  return index.size() == axes.size() &&
         std::all_of(index.begin(), index.end(), [&](Expr e) { return e.kind() == ExprKind::symbol && left.erase(e.name()) == 1; });
}

/// Whether the loop is where `next` may take the place of `old`: it reads each element of `old` only just before it stores the same one.
bool takes_place(const Ref<Stmt>& loop, const std::string& old, const std::string& next) {
  Nest nest = peel({loop});
  const Store* store = nullptr;
  size_t place = 0;
  for (size_t i = 0; i < nest.body.size(); ++i)
    if (const auto* s = std::get_if<Store>(&nest.body[i]->node); s && s->buffer == next) {
      if (store) return false;
      store = s;
      place = i;
    }
  if (!store || store->combiner != Combiner::set || !store->guard.empty() || !one_place_each(store->index, nest.axes)) return false;
  int64_t before = 0;
  for (size_t i = 0; i < place; ++i)
    if (const auto* load = std::get_if<Load>(&nest.body[i]->node); load && load->buffer == old) {
      if (load->index != store->index) return false;
      ++before;
    }
  return before > 0 && before == count_uses(nest.body, old) && count_uses(nest.body, next) == 1;
}

/// Buffers by the names of those that take their place, and no declaration of them.
Block renamed(const Block& block, const std::map<std::string, std::string>& instead) {
  Block kept;
  for (const auto& stmt : block)
    if (const auto* local = std::get_if<Local>(&stmt->node); !local || !instead.count(local->name)) kept.push_back(stmt);
  return rewrite(kept, [&](const Ref<Stmt>& stmt) -> Block {
    auto changed = [&](auto access) -> Block {
      access.buffer = instead.at(access.buffer);
      return {make_stmt(std::move(access))};
    };
    if (const auto* load = std::get_if<Load>(&stmt->node); load && instead.count(load->buffer)) return changed(*load);
    if (const auto* store = std::get_if<Store>(&stmt->node); store && instead.count(store->buffer)) return changed(*store);
    return {stmt};
  });
}

/// For each buffer, the statement that first uses it, and the one that last does.
std::map<std::string, std::pair<size_t, size_t>> find_spans(const Block& block) {
  std::map<std::string, std::pair<size_t, size_t>> spans;
  for (size_t i = 0; i < block.size(); ++i)
    for (const Access& access : accesses({block[i]})) spans.emplace(access.buffer, std::pair(i, i)).first->second.second = i;
  return spans;
}

/// Locals by the ones that they are written over, which end where they begin.
std::map<std::string, std::string> find_places(const Block& block) {
  auto spans = find_spans(block);
  std::vector<const Local*> locals;
  std::map<size_t, std::vector<const Local*>> ending;  ///< by the statement that uses them last
  for (const auto& stmt : block)
    if (const auto* local = std::get_if<Local>(&stmt->node); local && spans.count(local->name)) {
      locals.push_back(local);
      ending[spans.at(local->name).second].push_back(local);
    }
  std::map<std::string, std::string> places;
  std::set<std::string> taken;
  for (const Local* next : locals) {
    size_t first = spans.at(next->name).first;
    for (const Local* old : ending[first]) {
      bool fits = next->name != old->name && next->dtype == old->dtype && next->shape == old->shape && !taken.count(old->name);
      if (!fits || !takes_place(block[first], old->name, next->name)) continue;
      places[next->name] = old->name;
      taken.insert(old->name);
      break;
    }
  }
  // A place may have been taken from another: the first one's is everybody's.
  for (auto& [name, place] : places)
    for (auto it = places.find(place); it != places.end(); it = places.find(place)) place = it->second;
  return places;
}

Block share(const Block& block) {
  auto places = find_places(block);
  return places.empty() ? block : renamed(block, places);
}

}  // namespace

Module share_locals(Module module, const PassContext&) {
  for (auto& kernel : module.kernels) {
    // Locals stand in the body of the outer nest.
    Block body = rewrite(kernel->body, [](const Ref<Stmt>& stmt) -> Block {
      const auto* loop = std::get_if<For>(&stmt->node);
      bool holds = loop && std::any_of(loop->body.begin(), loop->body.end(), [](const auto& s) { return std::holds_alternative<Local>(s->node); });
      if (!holds) return {stmt};
      For shared = *loop;
      shared.body = share(shared.body);
      return {make_stmt(std::move(shared))};
    });
    body = share(body);
    if (body == kernel->body) continue;
    Kernel changed = *kernel;
    changed.body = std::move(body);
    kernel = std::make_shared<const Kernel>(std::move(changed));
  }
  return module;
}

}  // namespace deplo
