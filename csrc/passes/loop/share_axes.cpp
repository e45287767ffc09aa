#include "passes/loop/share_axes.h"

#include <algorithm>

#include "base/error.h"
#include "expr/node.h"

namespace deplo {
namespace {

using namespace loop_ir;

using Candidates = std::map<std::string, std::optional<std::string>>;  ///< axis of first -> its partner, if still possible

bool is_axis(const std::vector<Axis>& axes, const std::string& name) {
  return std::any_of(axes.begin(), axes.end(), [&](const Axis& axis) { return axis.name == name; });
}

Expr extent_of(const std::vector<Axis>& axes, const std::string& name) {
  for (const Axis& axis : axes)
    if (axis.name == name) return axis.extent;
  return 0;
}

struct Structural {
  bool operator()(Expr a, Expr b) const { return compare(a, b) < 0; }
};

// The symbols of a sum whose terms are each a constant times one symbol, or a size times one of the axes (and a constant), by coefficient.
std::optional<std::map<Expr, std::string, Structural>> linear_terms(Expr e, const std::vector<Axis>& axes, int64_t& constant) {
  std::map<Expr, std::string, Structural> result;
  constant = 0;
  for (const Term& term : terms_of(e)) {
    if (term.atoms.empty()) {
      constant = term.coefficient;
      continue;
    }
    auto is_loop = [&](Expr atom) { return atom.is_symbol() && (term.atoms.size() == 1 || is_axis(axes, atom.name())); };
    auto at = std::find_if(term.atoms.begin(), term.atoms.end(), is_loop);
    if (at == term.atoms.end() || std::count_if(term.atoms.begin(), term.atoms.end(), is_loop) > 1) return std::nullopt;
    Expr coefficient = term.coefficient;
    for (const Expr& atom : term.atoms)
      if (!(atom == *at)) coefficient = coefficient * atom;
    if (!result.emplace(coefficient, at->name()).second) return std::nullopt;
  }
  return result;
}

// Pairs the axes of two places that are equal term by term; false where they are not.
bool match(Expr stored, const std::vector<Axis>& storing, Expr loaded, const std::vector<Axis>& loading, std::map<std::string, std::string>& pairs) {
  int64_t a = 0;
  int64_t b = 0;
  auto x = linear_terms(stored, storing, a);
  auto y = linear_terms(loaded, loading, b);
  if (!x || !y || a != b || x->size() != y->size()) return false;
  for (const auto& [coefficient, name] : *x) {
    auto it = y->find(coefficient);
    if (it == y->end()) return false;
    pairs[name] = it->second;
  }
  return true;
}

// Keeps in `candidates` only the pairs that this store and this load agree on.
void constrain(const NestGroup& first, const NestGroup& second, const std::vector<Expr>& stored, const std::vector<Expr>& loaded,
               Candidates& candidates) {
  std::map<std::string, std::string> pairs;
  for (size_t d = 0; d < stored.size(); ++d) {
    std::map<std::string, std::string> here;
    if (match(stored[d], first.axes, loaded[d], second.axes, here)) pairs.insert(here.begin(), here.end());
  }
  for (const Axis& axis : first.axes) {
    auto it = pairs.find(axis.name);
    bool possible = it != pairs.end() && is_axis(second.axes, it->second) && extent_of(second.axes, it->second) == axis.extent;
    auto [entry, added] = candidates.emplace(axis.name, possible ? std::optional(it->second) : std::nullopt);
    if (!added && (!possible || entry->second != it->second)) entry->second = std::nullopt;
  }
}

AxisPairs chosen(const NestGroup& first, const Candidates& candidates) {
  AxisPairs pairs;
  std::set<std::string> taken;
  for (const Axis& axis : first.axes) {
    auto it = candidates.find(axis.name);
    if (it == candidates.end() || !it->second || !taken.insert(*it->second).second) continue;
    pairs.emplace_back(axis.name, *it->second);
  }
  return pairs;
}

}  // namespace

std::optional<AxisPairs> shared_by_dependence(const NestGroup& first, const NestGroup& second, const std::set<std::string>& buffers) {
  std::map<std::string, std::vector<const Store*>> stores;
  bool simple = true;
  visit(first.body, [&](const Stmt& stmt, const auto&) {
    const auto* store = std::get_if<Store>(&stmt.node);
    if (!store || !buffers.count(store->buffer)) return;
    stores[store->buffer].push_back(store);
    simple = simple && store->guard.empty() && store->combiner == Combiner::set;
  });
  if (!simple) return std::nullopt;
  Candidates candidates;
  visit(second.body, [&](const Stmt& stmt, const auto&) {
    const auto* load = std::get_if<Load>(&stmt.node);
    if (!load || !buffers.count(load->buffer)) return;
    for (const Store* store : stores[load->buffer]) constrain(first, second, store->index, load->index, candidates);
  });
  return chosen(first, candidates);
}

AxisPairs shared_by_input(const NestGroup& first, const NestGroup& second, const std::set<std::string>& buffers) {
  std::map<std::string, std::vector<std::vector<Expr>>> places;
  visit(first.body, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node); load && buffers.count(load->buffer)) places[load->buffer].push_back(load->index);
  });
  AxisPairs best;
  visit(second.body, [&](const Stmt& stmt, const auto&) {
    const auto* load = std::get_if<Load>(&stmt.node);
    if (!load || !buffers.count(load->buffer)) return;
    for (const auto& place : places[load->buffer]) {
      Candidates candidates;
      constrain(first, second, place, load->index, candidates);
      AxisPairs pairs = chosen(first, candidates);
      if (pairs.size() > best.size()) best = std::move(pairs);
    }
  });
  return best;
}

NestGroup join(const NestGroup& first, const NestGroup& second, const AxisPairs& pairs, Names& names) {
  NestGroup result;
  std::vector<Axis> rest_first;
  for (const Axis& axis : first.axes) {
    bool shared = std::any_of(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.first == axis.name; });
    (shared ? result.axes : rest_first).push_back(axis);
  }
  result.body = make_nest(rest_first, first.body);
  Renaming renaming;
  std::vector<Axis> rest_second;
  for (const Axis& axis : second.axes) {
    auto it = std::find_if(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.second == axis.name; });
    if (it != pairs.end()) {
      renaming.exprs[axis.name] = Expr::symbol(it->first);
    } else {
      rest_second.push_back({names.fresh(axis.name), axis.extent});
      renaming.exprs[axis.name] = Expr::symbol(rest_second.back().name);
    }
  }
  Block body = make_nest(rest_second, copy_block(second.body, renaming, &names));
  result.body.insert(result.body.end(), body.begin(), body.end());
  return result;
}

}  // namespace deplo
