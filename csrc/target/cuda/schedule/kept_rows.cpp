#include "target/cuda/schedule/kept_rows.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

/// How each element of a row comes about.
struct Recipe {
  std::string row;
  Block body;  ///< loads and values of one element, the last one its own
  std::vector<std::string> axes;
};

/// The recipe of a row that a loop at the top of a body makes; nothing where an element is more than values of its own.
std::optional<Recipe> recipe_of(const Local& local, const Block& body, const std::set<std::string>& stored) {
  if (local.shape.empty()) return std::nullopt;
  for (const auto& stmt : body) {
    if (!std::holds_alternative<For>(stmt->node)) continue;
    const Nest nest = peel({stmt});
    const auto at = std::find_if(nest.body.begin(), nest.body.end(), [&](const auto& s) {
      const auto* store = std::get_if<Store>(&s->node);
      return store && store->buffer == local.name;
    });
    if (at == nest.body.end()) continue;
    const auto& store = std::get<Store>((*at)->node);
    if (store.combiner != Combiner::set || !store.guard.empty() || store.index.size() != nest.axes.size()) return std::nullopt;
    Recipe recipe{local.name, statements_for(nest.body, {store.value}), {}};
    for (size_t d = 0; d < store.index.size(); ++d) {
      if (store.index[d] != Expr::symbol(nest.axes[d].name) || nest.axes[d].extent != local.shape[d]) return std::nullopt;
      recipe.axes.push_back(nest.axes[d].name);
    }
    if (recipe.body.empty() || name_of(*recipe.body.back()) != store.value) return std::nullopt;
    for (const auto& s : recipe.body) {
      const auto* load = std::get_if<Load>(&s->node);
      if (!is_straight(*s) || (load && stored.count(load->buffer) > 0)) return std::nullopt;
    }
    return recipe;
  }
  return std::nullopt;
}

/// A row that can be computed where it is read, from what nothing stores.
std::optional<Recipe> find_recipe(const Block& body) {
  std::map<std::string, int> stores;
  std::set<std::string> stored;
  std::set<std::string> guarded;  // loads of rows that hold in part
  visit(body, [&](const Stmt& stmt, const std::vector<Axis>&) {
    if (const auto* store = std::get_if<Store>(&stmt.node)) ++stores[store->buffer], stored.insert(store->buffer);
    if (const auto* load = std::get_if<Load>(&stmt.node); load && !load->guard.empty()) guarded.insert(load->buffer);
  });
  for (const auto& stmt : body) {
    const auto* local = std::get_if<Local>(&stmt->node);
    if (!local || stores[local->name] != 1 || guarded.count(local->name) > 0) continue;
    if (auto recipe = recipe_of(*local, body, stored)) return recipe;
  }
  return std::nullopt;
}

}  // namespace

Kernel without_kept_rows(const Kernel& kernel) {
  Kernel out = kernel;
  Nest nest = peel(out.body);
  Names names;
  names.reserve(kernel);
  bool changed = false;
  while (const auto recipe = find_recipe(nest.body)) {
    nest.body = rewrite(nest.body, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* local = std::get_if<Local>(&stmt->node); local && local->name == recipe->row) return {};
      if (const auto* store = std::get_if<Store>(&stmt->node); store && store->buffer == recipe->row) return {};
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || load->buffer != recipe->row) return {stmt};
      Renaming renaming;
      for (size_t d = 0; d < load->index.size(); ++d) renaming.exprs[recipe->axes[d]] = load->index[d];
      renaming.value(name_of(*recipe->body.back()), load->name);
      return copy_block(recipe->body, renaming, &names);
    });
    changed = true;
  }
  if (changed) out.body = clean(make_nest(nest.axes, nest.body), kernel.symbols);
  return out;
}

}  // namespace deplo::loop_to_tile
