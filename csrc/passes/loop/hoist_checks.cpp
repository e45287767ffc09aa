#include "passes/loop/hoist_checks.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "loop_ir/bounded.h"
#include "loop_ir/build.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo {
namespace {

using namespace loop_ir;

using Checks = std::vector<Check>;

bool holds(const Checks& checks, const Check& check) { return std::find(checks.begin(), checks.end(), check) != checks.end(); }

std::vector<Axis> axes_of(const Stmt& stmt) {
  if (const auto* loop = std::get_if<For>(&stmt.node)) return {{loop->axis, loop->extent}};
  if (const auto* reduce = std::get_if<Reduce>(&stmt.node)) return reduce->axes;
  if (const auto* scan = std::get_if<Scan>(&stmt.node)) return {scan->axis};
  return {};
}

/// Every name that a loop defines: axes, values, results.
std::set<std::string> defined_in(const Ref<Stmt>& loop) {
  std::set<std::string> names;
  visit({loop}, [&](const Stmt& stmt, const auto&) {
    for (const Axis& axis : axes_of(stmt)) names.insert(axis.name);
    if (const auto* reduce = std::get_if<Reduce>(&stmt.node)) names.insert(reduce->results.begin(), reduce->results.end());
    if (const auto* scan = std::get_if<Scan>(&stmt.node)) names.insert(scan->results.begin(), scan->results.end());
    if (std::string name = name_of(stmt); !name.empty()) names.insert(name);
  });
  return names;
}

class Mover {
 public:
  explicit Mover(Names& names) : names_(names) {}

  /// `seen`: checks of the blocks around, which come before.
  Block walk(const Block& block, const Ranges& ranges, Checks seen) {
    Block out;
    for (const auto& stmt : block) {
      if (const auto* check = std::get_if<Check>(&stmt->node)) seen.push_back(*check);
      if (axes_of(*stmt).empty()) {
        out.push_back(stmt);
        continue;
      }
      const Ref<Stmt> loop = before(stmt, ranges, seen, out);
      out.push_back(inside(loop, ranges, seen));
    }
    return out;
  }

 private:
  Ref<Stmt> inside(const Ref<Stmt>& stmt, Ranges ranges, const Checks& seen) {
    for (const Axis& axis : axes_of(*stmt)) ranges[axis.name] = axis_range(axis.extent);
    Stmt copy = *stmt;
    if (auto* loop = std::get_if<For>(&copy.node)) loop->body = walk(loop->body, ranges, seen);
    if (auto* reduce = std::get_if<Reduce>(&copy.node)) reduce->body = walk(reduce->body, ranges, seen);
    if (auto* scan = std::get_if<Scan>(&copy.node)) {
      scan->body = walk(scan->body, ranges, seen);
      scan->then = walk(scan->then, ranges, seen);
    }
    return copy == *stmt ? stmt : std::make_shared<Stmt>(std::move(copy));
  }

  /// The loop without the checks that go to `out` in front of it.
  Ref<Stmt> before(const Ref<Stmt>& loop, const Ranges& ranges, Checks& seen, Block& out) {
    const Checks moved = movable(loop, ranges);
    if (moved.empty()) return loop;
    for (const Check& check : moved) {
      if (holds(seen, check)) continue;
      out.push_back(make_stmt(check));
      seen.push_back(check);
    }
    std::vector<std::pair<Bounded, std::string>> places;
    for (const Bounded& b : bounded_by(moved, ranges)) places.emplace_back(b, in_range(b, out));
    Block rebuilt = rewrite({loop}, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* check = std::get_if<Check>(&stmt->node)) return holds(moved, *check) ? Block{} : Block{stmt};
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || load->guard.empty()) return {stmt};
      Load copy = *load;
      for (const auto& [b, place] : places) replace(copy, b, place);
      return copy == *load ? Block{stmt} : Block{make_stmt(std::move(copy))};
    });
    return rebuilt.at(0);
  }

  static void replace(Load& load, const Bounded& b, const std::string& place) {
    auto at = [&](const Cond& cond) { return std::find(load.guard.begin(), load.guard.end(), cond); };
    if (at(b.above) == load.guard.end() || at(b.below) == load.guard.end()) return;
    load.guard.erase(at(b.above));
    load.guard.erase(at(b.below));
    for (Expr& e : load.index) e = substitute(e, {{b.value, Expr::symbol(place)}});
  }

  /// The nearest place in range, by a value that `out` or a block around it defines.
  std::string in_range(const Bounded& b, Block& out) {
    const Let wanted{"", DType::i64, Fn::index, {}, {}, b.in_range()};
    for (const auto& stmt : out)
      if (const auto* let = std::get_if<Let>(&stmt->node); let && let->fn == Fn::index && let->index == wanted.index) return let->name;
    Let let = wanted;
    let.name = names_.fresh(b.value);
    out.push_back(make_stmt(let));
    return let.name;
  }

  /// The checks in a loop that depend on nothing in it and are sure to run, each once.
  static Checks movable(const Ref<Stmt>& loop, const Ranges& ranges) {
    Checks found;
    std::optional<std::set<std::string>> defined;
    visit({loop}, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      const auto* check = std::get_if<Check>(&stmt.node);
      if (!check || holds(found, *check)) return;
      const bool runs = std::all_of(loops.begin(), loops.end(), [&](const Axis& a) { return provably_nonnegative(a.extent - 1, ranges); });
      if (!runs) return;
      if (!defined) defined = defined_in(loop);
      const std::set<std::string> read = symbols_of(check->cond.expr);
      if (std::none_of(read.begin(), read.end(), [&](const std::string& name) { return defined->count(name) > 0; })) found.push_back(*check);
    });
    return found;
  }

  Names& names_;
};

bool has_checks(const Block& body) {
  bool found = false;
  visit(body, [&](const Stmt& stmt, const auto&) { found = found || std::holds_alternative<Check>(stmt.node); });
  return found;
}

}  // namespace

Module hoist_checks(Module module, const PassContext&) {
  for (auto& kernel : module.kernels) {
    if (!has_checks(kernel->body)) continue;
    Kernel copy = *kernel;
    Names names;
    names.reserve(copy);
    const Nest nest = peel(copy.body);
    Ranges ranges = copy.symbols;
    for (const Axis& axis : nest.axes) ranges[axis.name] = axis_range(axis.extent);
    copy.body = make_nest(nest.axes, Mover(names).walk(nest.body, ranges, {}));
    if (!(copy == *kernel)) kernel = std::make_shared<Kernel>(std::move(copy));
  }
  return module;
}

}  // namespace deplo
