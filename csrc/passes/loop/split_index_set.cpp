#include "passes/loop/split_index_set.h"

#include <algorithm>
#include <map>
#include <set>

#include "loop_ir/turns.h"

namespace deplo {
namespace {

using namespace loop_ir;

std::vector<Cond> guards(const Block& body) {
  std::vector<Cond> found;
  visit(body, [&](const Stmt& stmt, const auto&) {
    const auto* load = std::get_if<Load>(&stmt.node);
    if (!load) return;
    for (const Cond& cond : load->guard)
      if (std::find(found.begin(), found.end(), cond) == found.end()) found.push_back(cond);
  });
  return found;
}

// The axis that a condition asks for, if it is a single one.
const Axis* asked_axis(const Cond& cond, const std::vector<Axis>& axes) {
  const Axis* asked = nullptr;
  for (const Axis& axis : axes) {
    if (!uses(cond.expr, axis.name)) continue;
    if (asked) return nullptr;
    asked = &axis;
  }
  return asked;
}

struct Part {
  Expr start;
  Expr extent;
};
using Parts = std::map<std::string, std::vector<Part>>;

Parts intervals(const NestGroup& nest, const Ranges& symbols) {
  std::map<std::string, std::vector<Expr>> points;
  const std::vector<Cond> conds = guards(nest.body);
  for (const Cond& cond : conds)
    if (const Axis* axis = asked_axis(cond, nest.axes))
      for (const Expr& point : turns_of(cond, axis->name)) insert_turn(point, axis->extent, points[axis->name], symbols);
  Parts parts;
  for (const Axis& axis : nest.axes) {
    auto it = points.find(axis.name);
    if (it == points.end() || it->second.empty()) continue;
    Expr start = 0;
    it->second.push_back(axis.extent);
    for (const Expr& end : it->second) {
      parts[axis.name].push_back({start, end - start});
      start = end;
    }
  }
  return parts;
}

NestGroup part_of(const NestGroup& nest, const std::map<std::string, Part>& parts, const Ranges& symbols) {
  std::vector<Axis> axes = nest.axes;
  Renaming renaming;
  for (Axis& axis : axes) {
    auto it = parts.find(axis.name);
    if (it == parts.end()) continue;
    axis.extent = it->second.extent;
    renaming.exprs[axis.name] = Expr::symbol(axis.name) + it->second.start;
  }
  loop_ir::Nest part = peel(clean(make_nest(axes, copy_block(nest.body, renaming, nullptr)), symbols));
  return {part.axes, part.body};
}

std::vector<NestGroup> split(const NestGroup& nest, const Parts& parts, const Ranges& symbols) {
  std::vector<std::map<std::string, Part>> choices(1);
  for (const auto& [axis, list] : parts) {
    std::vector<std::map<std::string, Part>> more;
    for (const auto& choice : choices)
      for (const Part& part : list) {
        more.push_back(choice);
        more.back()[axis] = part;
      }
    choices = std::move(more);
  }
  std::vector<NestGroup> nests;
  for (const auto& choice : choices) nests.push_back(part_of(nest, choice, symbols));
  return nests;
}

size_t count(const Parts& parts) {
  size_t all = 1;
  for (const auto& [axis, list] : parts) all *= list.size();
  return all;
}

}  // namespace

std::vector<NestGroup> split_index_set(const NestGroup& nest, const Ranges& symbols, size_t most) {
  const Parts parts = intervals(nest, symbols);
  if (parts.empty() || count(parts) > most) return {nest};
  return split(nest, parts, symbols);
}

NestGroup cut_to_reader(const NestGroup& nest, const NestGroup& reader, const std::string& buffer, const Ranges& symbols) {
  std::vector<const Store*> stores;
  std::vector<const Load*> loads;
  visit(nest.body, [&](const Stmt& stmt, const auto&) {
    if (const auto* store = std::get_if<Store>(&stmt.node)) stores.push_back(store);
  });
  visit(reader.body, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node); load && load->buffer == buffer) loads.push_back(load);
  });
  if (stores.size() != 1 || stores[0]->buffer != buffer || loads.size() != 1) return nest;
  NestGroup cut = nest;
  for (size_t d = 0; d < stores[0]->index.size(); ++d) {
    auto named = [](Expr e) { return [e](const Axis& axis) { return Expr::symbol(axis.name) == e; }; };
    auto axis = std::find_if(cut.axes.begin(), cut.axes.end(), named(stores[0]->index[d]));
    auto wanted = std::find_if(reader.axes.begin(), reader.axes.end(), named(loads[0]->index[d]));
    if (axis != cut.axes.end() && wanted != reader.axes.end() && provably_nonnegative(axis->extent - wanted->extent, symbols))
      axis->extent = wanted->extent;
  }
  return cut;
}

}  // namespace deplo
