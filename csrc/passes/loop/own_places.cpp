#include "passes/loop/own_places.h"

#include <algorithm>
#include <set>

namespace deplo {
namespace {

using loop_ir::Axis;
using loop_ir::Load;
using loop_ir::Stmt;
using loop_ir::Store;

std::vector<std::vector<Expr>> places_of(const NestGroup& nest, const std::string& buffer) {
  std::vector<std::vector<Expr>> places;
  loop_ir::visit(nest.body, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node); load && load->buffer == buffer) places.push_back(load->index);
    if (const auto* store = std::get_if<Store>(&stmt.node); store && store->buffer == buffer) places.push_back(store->index);
  });
  return places;
}

bool stores_plainly(const NestGroup& nest, const std::string& buffer) {
  bool plain = true;
  loop_ir::visit(nest.body, [&](const Stmt& stmt, const auto&) {
    const auto* store = std::get_if<Store>(&stmt.node);
    if (store && store->buffer == buffer) plain = plain && store->guard.empty() && store->combiner == Combiner::set;
  });
  return plain;
}

}  // namespace

bool has_own_places(const NestGroup& nest, const std::string& buffer) {
  const auto places = places_of(nest, buffer);
  return std::all_of(places.begin(), places.end(), [&](const std::vector<Expr>& place) {
    std::set<std::string> left;
    for (const Axis& axis : nest.axes) left.insert(axis.name);
    return std::all_of(place.begin(), place.end(), [&](const Expr& e) { return e.is_symbol() ? left.erase(e.name()) == 1 : e.is(0); }) &&
           left.empty();
  });
}

bool touches_one_place(const NestGroup& nest, const std::string& buffer) {
  const auto places = places_of(nest, buffer);
  return std::all_of(places.begin(), places.end(), [&](const auto& place) { return place == places[0]; });
}

bool replaces_all(const NestGroup& nest, const std::string& buffer, const std::vector<Expr>& shape, const Ranges& symbols) {
  Expr points = 1;
  for (const Axis& axis : nest.axes) points = points * axis.extent;
  return has_own_places(nest, buffer) && stores_plainly(nest, buffer) && simplify(points - product(shape), symbols).is(0);
}

}  // namespace deplo
