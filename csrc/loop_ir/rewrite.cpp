#include "loop_ir/rewrite.h"

#include "base/error.h"

namespace deplo::loop_ir {
namespace {

struct Copier {
  Renaming renaming;
  Names* names;

  std::string define(const std::string& name) {
    if (auto it = renaming.values.find(name); it != renaming.values.end() && !names) return it->second;
    if (!names) return name;
    if (fixed.count(name)) return renaming.values.at(name);
    std::string fresh = names->fresh(name);
    renaming.value(name, fresh);
    return fresh;
  }
  Axis define(const Axis& axis) {
    Expr extent = expr(axis.extent);
    return {define(axis.name), extent};
  }
  std::vector<std::string> define(const std::vector<std::string>& list) {
    std::vector<std::string> result;
    for (const std::string& name : list) result.push_back(define(name));
    return result;
  }

  Expr expr(Expr e) const { return substitute(e, renaming.exprs); }
  std::vector<Expr> exprs(const std::vector<Expr>& list) const {
    std::vector<Expr> result;
    for (const Expr& e : list) result.push_back(expr(e));
    return result;
  }
  std::vector<Cond> guard(const std::vector<Cond>& list) const {
    std::vector<Cond> result;
    for (const Cond& cond : list) result.push_back(substitute(cond, renaming.exprs));
    return result;
  }
  std::string value(const std::string& name) const {
    auto it = renaming.values.find(name);
    return it == renaming.values.end() ? name : it->second;
  }
  std::vector<std::string> values(const std::vector<std::string>& list) const {
    std::vector<std::string> result;
    for (const std::string& name : list) result.push_back(value(name));
    return result;
  }
  std::string buffer(const std::string& name) const {
    auto it = renaming.buffers.find(name);
    return it == renaming.buffers.end() ? name : it->second;
  }

  Block block(const Block& body) {
    Block result;
    for (const auto& stmt : body) result.push_back(make_stmt(std::visit([&](const auto& s) -> decltype(Stmt::node) { return copy(s); }, stmt->node)));
    return result;
  }

  Let copy(Let s) {
    s.operands = values(s.operands);
    s.index = expr(s.index);
    s.name = define(s.name);
    return s;
  }
  Load copy(Load s) {
    s.buffer = buffer(s.buffer);
    s.index = exprs(s.index);
    s.guard = guard(s.guard);
    s.name = define(s.name);
    return s;
  }
  Store copy(Store s) {
    s.buffer = buffer(s.buffer);
    s.index = exprs(s.index);
    s.guard = guard(s.guard);
    s.value = value(s.value);
    return s;
  }
  For copy(const For& s) {
    Axis axis = define(Axis{s.axis, s.extent});
    return {axis.name, axis.extent, block(s.body)};
  }
  Reduce copy(Reduce s) {
    for (Axis& axis : s.axes) axis = define(axis);
    s.body = block(s.body);
    s.operands = values(s.operands);
    s.results = define(s.results);
    return s;
  }
  Scan copy(Scan s) {
    s.axis = define(s.axis);
    s.body = block(s.body);
    s.operands = values(s.operands);
    s.results = define(s.results);
    s.then = block(s.then);
    return s;
  }
  Local copy(Local s) {
    s.shape = exprs(s.shape);
    if (names) {
      std::string fresh = names->fresh(s.name);
      renaming.buffers[s.name] = fresh;
      s.name = fresh;
    } else {
      s.name = buffer(s.name);
    }
    return s;
  }
  Check copy(const Check& s) { return {substitute(s.cond, renaming.exprs), s.code}; }

  std::set<std::string> fixed;  ///< definitions whose new name the caller chose
};

/// The statement with `f` applied to its bodies; itself where nothing changes.
Ref<Stmt> with_bodies(const Ref<Stmt>& stmt, const std::function<Block(const Block&)>& f) {
  auto copy = std::make_shared<Stmt>(*stmt);
  bool changed = false;
  auto update = [&](Block& body) {
    Block next = f(body);
    changed = changed || next != body;
    body = std::move(next);
  };
  if (auto* s = std::get_if<For>(&copy->node)) update(s->body);
  if (auto* s = std::get_if<Reduce>(&copy->node)) update(s->body);
  if (auto* s = std::get_if<Scan>(&copy->node)) {
    update(s->body);
    update(s->then);
  }
  return changed ? copy : stmt;
}

void visit_block(const Block& block, std::vector<Axis>& loops, const Visit& f) {
  for (const auto& stmt : block) {
    f(*stmt, loops);
    size_t depth = loops.size();
    if (const auto* s = std::get_if<For>(&stmt->node)) {
      loops.push_back({s->axis, s->extent});
      visit_block(s->body, loops, f);
    } else if (const auto* s = std::get_if<Reduce>(&stmt->node)) {
      loops.insert(loops.end(), s->axes.begin(), s->axes.end());
      visit_block(s->body, loops, f);
    } else if (const auto* s = std::get_if<Scan>(&stmt->node)) {
      loops.push_back(s->axis);
      visit_block(s->body, loops, f);
      visit_block(s->then, loops, f);
    }
    loops.resize(depth);
  }
}

}  // namespace

Block rewrite(const Block& block, const std::function<Block(const Ref<Stmt>&)>& f) {
  Block out;
  for (const auto& stmt : block) {
    Ref<Stmt> next = with_bodies(stmt, [&](const Block& body) { return rewrite(body, f); });
    for (auto& replacement : f(next)) out.push_back(std::move(replacement));
  }
  return out;
}

Block copy_block(const Block& block, Renaming renaming, Names* names) {
  Copier copier{std::move(renaming), names, {}};
  for (const auto& [from, to] : copier.renaming.values) copier.fixed.insert(from);
  return copier.block(block);
}

void visit(const Block& block, const Visit& f) {
  std::vector<Axis> loops;
  visit_block(block, loops, f);
}

size_t count_statements(const Block& block) {
  size_t count = 0;
  visit(block, [&](const Stmt&, const auto&) { ++count; });
  return count;
}

Nest peel(const Block& block) {
  Nest nest{{}, block};
  while (nest.body.size() == 1) {
    const auto* loop = std::get_if<For>(&nest.body[0]->node);
    if (!loop) break;
    nest.axes.push_back({loop->axis, loop->extent});
    Block inner = loop->body;
    nest.body = std::move(inner);
  }
  return nest;
}

}  // namespace deplo::loop_ir
