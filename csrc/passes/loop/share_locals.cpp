#include "passes/loop/share_locals.h"

#include <algorithm>
#include <map>
#include <set>

#include "loop_ir/params.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo {

using namespace loop_ir;

namespace {

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
      if (!fits || !takes_place(block[first], *old, next->name)) continue;
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
