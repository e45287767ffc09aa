#include "target/cuda/schedule/kept_rows.h"

#include <algorithm>
#include <functional>
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

/// Where a buffer is accessed inside of loops.
struct Place {
  Ref<Stmt> stmt;
  std::vector<Axis> loops;
};

/// Whether a load under its loops reads what the store under its own wrote there.
bool reads_element(const Load& load, const std::vector<Axis>& loops, const Store& store, const std::vector<Axis>& made) {
  if (!load.guard.empty() || loops.size() != made.size() || load.index.size() != store.index.size()) return false;
  Substitution to;
  for (size_t k = 0; k < loops.size(); ++k) {
    if (loops[k].extent != made[k].extent) return false;
    to[made[k].name] = Expr::symbol(loops[k].name);
  }
  for (size_t d = 0; d < store.index.size(); ++d)
    if (substitute(store.index[d], to) != load.index[d]) return false;
  return true;
}

}  // namespace

Kernel with_kept_stores(const Kernel& kernel) {
  Nest nest = peel(kernel.body);
  std::map<std::string, std::vector<Place>> stores;
  std::map<std::string, std::vector<Place>> loads;
  const std::function<void(const Block&, std::vector<Axis>)> collect = [&](const Block& block, std::vector<Axis> loops) {
    for (const auto& stmt : block) {
      if (const auto* store = std::get_if<Store>(&stmt->node)) stores[store->buffer].push_back({stmt, loops});
      if (const auto* load = std::get_if<Load>(&stmt->node)) loads[load->buffer].push_back({stmt, loops});
      std::vector<Axis> inside = loops;
      if (const auto* loop = std::get_if<For>(&stmt->node)) {
        inside.push_back({loop->axis, loop->extent});
        collect(loop->body, inside);
      }
      if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
        inside.insert(inside.end(), reduce->axes.begin(), reduce->axes.end());
        collect(reduce->body, inside);
      }
      if (const auto* scan = std::get_if<Scan>(&stmt->node)) {
        inside.push_back(scan->axis);
        collect(scan->body, inside);
        collect(scan->then, inside);
      }
    }
  };
  collect(nest.body, {});
  Names names;
  names.reserve(kernel);
  Block rows;
  for (const auto& [buffer, places] : stores) {
    const auto readers = loads.find(buffer);
    const bool is_output = std::any_of(kernel.params.begin(), kernel.params.end(),
                                       [&, &name = buffer](const auto& p) { return p.name == name && p.kind == ParamKind::out; });
    if (!is_output || readers == loads.end() || places.size() != 1 || places[0].loops.empty()) continue;
    const Place& made = places[0];
    const auto& store = std::get<Store>(made.stmt->node);
    const bool whole = store.combiner == Combiner::set && store.guard.empty() &&
                       std::all_of(made.loops.begin(), made.loops.end(), [](const Axis& axis) { return axis.extent.is_constant(); });
    const bool again = std::all_of(readers->second.begin(), readers->second.end(),
                                   [&](const Place& read) { return reads_element(std::get<Load>(read.stmt->node), read.loops, store, made.loops); });
    const bool apart = std::all_of(made.loops.begin(), made.loops.end(), [&](const Axis& axis) {
      return std::any_of(store.index.begin(), store.index.end(), [&](const Expr& e) {
        const auto step = linear_coefficient(e, axis.name);
        return step && !step->is(0);
      });
    });
    if (!whole || !apart || !again) continue;
    Local row{names.fresh("row"), std::get<Load>(readers->second[0].stmt->node).dtype, {}};
    for (const Axis& axis : made.loops) row.shape.push_back(axis.extent);
    const auto at = [](const std::vector<Axis>& loops) {
      std::vector<Expr> index;
      for (const Axis& axis : loops) index.push_back(Expr::symbol(axis.name));
      return index;
    };
    nest.body = rewrite(nest.body, [&](const Ref<Stmt>& stmt) -> Block {
      if (stmt == made.stmt) return {stmt, make_stmt(Store{row.name, at(made.loops), store.value, {}, Combiner::set})};
      for (const Place& read : readers->second) {
        if (stmt != read.stmt) continue;
        const auto& load = std::get<Load>(stmt->node);
        return {make_stmt(Load{load.name, load.dtype, row.name, at(read.loops), {}, {}})};
      }
      return {stmt};
    });
    rows.push_back(make_stmt(row));
  }
  if (rows.empty()) return kernel;
  Kernel out = kernel;
  rows.insert(rows.end(), nest.body.begin(), nest.body.end());
  out.body = make_nest(nest.axes, std::move(rows));
  return out;
}

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
