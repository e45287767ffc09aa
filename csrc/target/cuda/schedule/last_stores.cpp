#include "target/cuda/schedule/last_stores.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

constexpr int64_t kLongest = 2048;

/// What is added to the axis, if the expression is nothing else.
std::optional<int64_t> beside(Expr e, const std::string& axis) {
  const Expr rest = e - sym(axis);
  return uses(e, axis) && rest.is_constant() ? std::optional<int64_t>(rest.value()) : std::nullopt;
}

/// Whether two iterations that differ in the axis store to places that differ, or, of two stores, none is the other's whatever the iterations are.
bool apart(const Store& a, const Store& b, const Axis& axis) {
  for (size_t d = 0; d < a.index.size(); ++d) {
    const auto x = beside(a.index[d], axis.name);
    const auto y = beside(b.index[d], axis.name);
    if (x && y && *x == *y) return true;
  }
  return false;
}
bool never_meet(const Store& a, const Store& b, const std::vector<Axis>& axes) {
  for (size_t d = 0; d < a.index.size(); ++d)
    for (const Axis& axis : axes) {
      const auto x = beside(a.index[d], axis.name);
      const auto y = beside(b.index[d], axis.name);
      if (x && y && axis.extent.is_constant() && std::abs(*x - *y) >= axis.extent.value()) return true;
    }
  return false;
}

/// The only value that is a place in the stores, each of which has it as an index by itself; nothing where there are others.
std::optional<std::string> place_of(const std::vector<const Store*>& stores, const std::vector<Axis>& axes) {
  std::set<std::string> places;
  for (const Store* store : stores) {
    bool has_place = false;
    for (const Expr& e : store->index)
      for (const std::string& name : symbols_of(e)) {
        if (std::any_of(axes.begin(), axes.end(), [&](const Axis& a) { return a.name == name; })) continue;
        if (!e.is_symbol()) return std::nullopt;
        has_place = true;
        places.insert(name);
      }
    if (!has_place) return std::nullopt;
  }
  return places.size() == 1 ? std::optional<std::string>(*places.begin()) : std::nullopt;
}

}  // namespace

std::optional<LastStores> find_last_stores(const std::vector<Axis>& axes, const Block& body, Names& names) {
  std::vector<const Store*> stores;
  std::set<std::string> stored;
  for (const auto& stmt : body) {
    if (!is_straight(*stmt) && !std::holds_alternative<Store>(stmt->node) && !std::holds_alternative<Check>(stmt->node)) return std::nullopt;
    const auto* store = std::get_if<Store>(&stmt->node);
    if (!store) continue;
    if (store->combiner != Combiner::set) return std::nullopt;
    stores.push_back(store);
    stored.insert(store->buffer);
  }
  const auto place = place_of(stores, axes);
  if (!place) return std::nullopt;
  const bool reads = std::any_of(body.begin(), body.end(), [&](const auto& stmt) {
    const auto* load = std::get_if<Load>(&stmt->node);
    return load && stored.count(load->buffer) > 0;
  });
  const Block made = statements_for(body, {*place});
  if (reads || made.empty() || name_of(*made.back()) != *place) return std::nullopt;
  // What is checked of the place is checked by the last store to it; of other values, by all iterations: what a place follows from may differ where
  // places are equal.
  for (const auto& stmt : body) {
    const auto* check = std::get_if<Check>(&stmt->node);
    if (!check) continue;
    const std::set<std::string> checked = symbols_of(check->cond.expr);
    for (const auto& value : body)
      if (is_straight(*value) && name_of(*value) != *place && checked.count(name_of(*value)) > 0) return std::nullopt;
  }
  std::set<std::string> used;
  for (const auto& stmt : made) collect_uses(*stmt, used);
  std::vector<Axis> meeting;
  std::vector<Axis> others;
  for (const Axis& axis : axes) (used.count(axis.name) > 0 ? meeting : others).push_back(axis);
  if (meeting.size() != 1 || !meeting[0].extent.is_constant() || meeting[0].extent.value() > kLongest) return std::nullopt;
  for (const Store* a : stores)
    for (const Store* b : stores) {
      if (a->buffer != b->buffer || (a != b && never_meet(*a, *b, others))) continue;
      if (a != b || !std::all_of(others.begin(), others.end(), [&](const Axis& axis) { return apart(*a, *b, axis); })) return std::nullopt;
    }

  LastStores last{meeting[0].name, meeting[0].extent, names.fresh("j0"), {}, {}, {}};
  Renaming here;
  const std::string own = names.fresh(*place);
  here.value(*place, own);
  last.own = copy_block(made, here, &names);
  Renaming there;
  const std::string its = names.fresh(*place);
  there.value(*place, its);
  there.exprs[last.axis] = sym(last.other);
  Body search(names);
  search.append(copy_block(made, there, &names));
  const std::string same = search.let(Fn::eq, DType::boolean, {own, its});
  const std::string number = search.index(DType::i64, sym(last.other));
  const std::string none = search.index(DType::i64, -1);
  last.found = search.let(Fn::where, DType::i64, {same, number, none});
  last.search = search.take();
  return last;
}

}  // namespace deplo::loop_to_tile
