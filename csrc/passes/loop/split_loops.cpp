#include "passes/loop/split_loops.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include "loop_ir/build.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "loop_ir/turns.h"
#include "passes/loop/localize.h"
#include "passes/loop/repeats.h"
#include "passes/loop/split_index_set.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr int64_t kShortestPart = 16;  // elements: shorter parts leave most lanes of a vector idle
constexpr size_t kMostCopies = 4;      // each is a copy of the body
constexpr int64_t kManyParts = 8;      // of one point each: a store for each of them is less than choosing among them

const For* as_loop(const Ref<Stmt>& stmt) { return std::get_if<For>(&stmt->node); }

/// No loops inside, and nothing whose order counts.
bool is_straight(const Block& body) {
  return std::all_of(body.begin(), body.end(), [](const auto& stmt) {
    const auto* store = std::get_if<Store>(&stmt->node);
    return std::holds_alternative<Let>(stmt->node) || std::holds_alternative<Load>(stmt->node) || std::holds_alternative<Check>(stmt->node) ||
           (store && store->combiner == Combiner::set);
  });
}

/// Where a loop falls apart: the parts' first points, and the end. Empty if it does not.
std::vector<Expr> cuts_of(const For& loop, const Ranges& symbols) {
  if (!is_straight(loop.body)) return {};
  std::vector<Expr> cuts = turning_points(loop.body, {loop.axis, loop.extent}, symbols);
  if (cuts.empty() || cuts.size() >= kMostCopies) return {};
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(loop.extent);
  for (size_t k = 1; k < cuts.size(); ++k)
    if (!provably_nonnegative(cuts[k] - cuts[k - 1] - kShortestPart, symbols)) return {};
  return cuts;
}

/// In loops inside as well.
int64_t count_choices(const Block& body) {
  int64_t choices = 0;
  visit(body, [&](const Stmt& stmt, const auto&) {
    const auto* let = std::get_if<Let>(&stmt.node);
    choices += let && let->fn == Fn::where ? 1 : 0;
  });
  return choices;
}

/// Whether a loop may choose among a part for each of its points.
bool may_have_single_parts(const Block& body, const Axis& axis) {
  const auto extent = axis.extent.as_constant();
  return extent && *extent >= kManyParts && is_straight(body) && count_choices(body) + 1 >= *extent;
}

/// A straight loop body at single points of its axis: only what is chosen there.
class PointPicker {
 public:
  PointPicker(const Block& body, std::string axis) : body_(body), axis_(std::move(axis)) {
    for (size_t k = 0; k < body.size(); ++k)
      if (const std::string name = name_of(*body[k]); !name.empty()) places_[name] = k;
  }

  Block at(int64_t point, Names& names) {
    point_ = point;
    std::map<size_t, Ref<Stmt>> picked;
    std::set<std::string> wanted;
    const auto pick = [&](size_t k) {
      const auto [it, fresh] = picked.try_emplace(k);
      if (!fresh) return;
      it->second = with_chosen(body_[k]);
      collect_uses(*it->second, wanted);
      if (const auto* check = std::get_if<Check>(&body_[k]->node)) collect_symbols(check->cond.expr, wanted);
    };
    for (size_t k = 0; k < body_.size(); ++k)
      if (!is_straight(*body_[k])) pick(k);
    while (!wanted.empty()) {
      const auto found = places_.find(*wanted.begin());
      wanted.erase(wanted.begin());
      if (found != places_.end()) pick(found->second);
    }
    Block block;
    for (const auto& [k, stmt] : picked) block.push_back(stmt);
    Renaming renaming;
    renaming.exprs[axis_] = point;
    return copy_block(block, std::move(renaming), &names);
  }

 private:
  const Let* let_of(const std::string& name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? nullptr : std::get_if<Let>(&body_[found->second]->node);
  }

  std::optional<int64_t> number(const std::string& name) const {
    const Let* let = let_of(name);
    if (let && let->fn == Fn::index) return substitute(let->index, {{axis_, point_}}).as_constant();
    if (let && let->fn == Fn::constant && !is_float(let->dtype)) return let->literal.i;
    return std::nullopt;
  }

  std::optional<bool> truth(const std::string& name) const {
    const Let* let = let_of(name);
    if (!let || let->operands.size() != 2) return std::nullopt;
    if (let->fn == Fn::bit_and) {
      const auto a = truth(let->operands[0]);
      if (!a || !*a) return a;
      return truth(let->operands[1]);
    }
    const auto a = number(let->operands[0]);
    const auto b = number(let->operands[1]);
    if (!a || !b) return std::nullopt;
    if (let->fn == Fn::ge) return *a >= *b;
    if (let->fn == Fn::eq) return *a == *b;
    if (let->fn == Fn::ne) return *a != *b;
    return std::nullopt;
  }

  std::string chosen(std::string name) const {
    for (const Let* let = let_of(name); let && let->fn == Fn::where; let = let_of(name)) {
      const auto known = truth(let->operands[0]);
      if (!known) break;
      name = let->operands[*known ? 1 : 2];
    }
    return name;
  }

  Ref<Stmt> with_chosen(const Ref<Stmt>& stmt) const {
    Stmt copy = *stmt;
    if (auto* let = std::get_if<Let>(&copy.node))
      for (std::string& name : let->operands) name = chosen(name);
    if (auto* store = std::get_if<Store>(&copy.node)) store->value = chosen(store->value);
    return std::make_shared<Stmt>(std::move(copy));
  }

  const Block& body_;
  std::string axis_;
  int64_t point_ = 0;
  std::unordered_map<std::string, size_t> places_;
};

Block unrolled(const Block& body, const Axis& axis, Names& names) {
  Block parts;
  PointPicker picker(body, axis.name);
  for (int64_t k = 0; k < axis.extent.value(); ++k) {
    const Block part = picker.at(k, names);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  return parts;
}

/// A stack of many results, of each step one: a store for each in the place of a loop over them that chooses among all at every point. The body as it
/// was where that would take more statements.
Block with_single_parts(const Block& body, const Ranges& symbols, Names& names) {
  const Nest nest = peel(body);
  Block split = body;
  const auto found = std::find_if(nest.axes.begin(), nest.axes.end(), [&](const Axis& axis) { return may_have_single_parts(nest.body, axis); });
  if (nest.axes.size() > 1 && found != nest.axes.end()) {
    std::vector<Axis> others = nest.axes;
    others.erase(others.begin() + (found - nest.axes.begin()));
    split = make_nest(others, unrolled(nest.body, *found, names));
  } else {
    split = make_nest(nest.axes, rewrite(nest.body, [&](const Ref<Stmt>& stmt) -> Block {
                        const For* loop = as_loop(stmt);
                        if (!loop || !may_have_single_parts(loop->body, {loop->axis, loop->extent})) return {stmt};
                        return unrolled(loop->body, {loop->axis, loop->extent}, names);
                      }));
  }
  if (split == body) return body;
  split = clean(split, symbols);
  return count_statements(split) <= count_statements(body) ? split : body;
}

/// What a block reads at places that an axis moves.
std::vector<std::pair<std::string, std::vector<Expr>>> reads_along(const For& loop) {
  std::vector<std::pair<std::string, std::vector<Expr>>> found;
  for (const auto& stmt : loop.body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (!load || std::none_of(load->index.begin(), load->index.end(), [&](Expr e) { return uses(e, loop.axis); })) continue;
    std::vector<Expr> index = load->index;
    for (Expr& e : index) e = substitute(e, {{loop.axis, 0}});
    found.emplace_back(load->buffer, std::move(index));
  }
  return found;
}

bool share_reads(const For& a, const For& b) {
  if (a.extent != b.extent) return false;
  const auto of_a = reads_along(a);
  const auto of_b = reads_along(b);
  return std::any_of(of_a.begin(), of_a.end(), [&](const auto& read) { return std::find(of_b.begin(), of_b.end(), read) != of_b.end(); });
}

/// Loops of a block that are parts of one, joined where they read the same.
Block joined_parts(const Block& block, const std::set<std::string>& parts) {
  Block out;
  std::vector<size_t> at;  // of parts in `out`
  for (const auto& stmt : block) {
    const For* loop = as_loop(stmt);
    if (!loop || !parts.count(loop->axis)) {
      out.push_back(stmt);
      continue;
    }
    const auto same = std::find_if(at.begin(), at.end(), [&](size_t k) { return share_reads(*as_loop(out[k]), *loop); });
    if (same == at.end()) {
      at.push_back(out.size());
      out.push_back(stmt);
      continue;
    }
    const For& first = *as_loop(out[*same]);
    Renaming renaming;
    renaming.exprs[loop->axis] = Expr::symbol(first.axis);
    Block body = first.body;
    const Block second = copy_block(loop->body, renaming, nullptr);
    body.insert(body.end(), second.begin(), second.end());
    out[*same] = make_for({first.axis, first.extent}, std::move(body));
  }
  return out;
}

/// Without locals that nothing reads.
Block without_unread(const Block& block) {
  std::set<std::string> locals;
  visit(block, [&](const Stmt& stmt, const auto&) {
    if (const auto* local = std::get_if<Local>(&stmt.node)) locals.insert(local->name);
  });
  visit(block, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node)) locals.erase(load->buffer);
  });
  if (locals.empty()) return block;
  return rewrite(block, [&](const Ref<Stmt>& stmt) -> Block {
    const auto* local = std::get_if<Local>(&stmt->node);
    const auto* store = std::get_if<Store>(&stmt->node);
    return (local && locals.count(local->name)) || (store && locals.count(store->buffer)) ? Block{} : Block{stmt};
  });
}

class LoopSplitter {
 public:
  LoopSplitter(const Kernel& kernel, Names& names) : symbols_(kernel.symbols), names_(names), body_(kernel.body) {}

  Block run() {
    bool changed = false;
    while (const auto axis = next()) {
      tried_.insert(*axis);
      if (auto split = without(*axis)) {
        body_ = std::move(*split);
        changed = true;
      }
    }
    return changed ? finished() : body_;
  }

 private:
  /// A loop that falls apart and was not tried yet.
  std::optional<std::string> next() const {
    std::optional<std::string> found;
    visit(body_, [&](const Stmt& stmt, const auto&) {
      const auto* loop = std::get_if<For>(&stmt.node);
      if (!found && loop && !tried_.count(loop->axis) && !cuts_of(*loop, symbols_).empty()) found = loop->axis;
    });
    return found;
  }

  /// The body with that loop in parts; nothing if the outermost nest would be perfect no longer.
  std::optional<Block> without(const std::string& axis) {
    std::set<std::string> parts;
    Block split = rewrite(body_, [&](const Ref<Stmt>& stmt) -> Block {
      const For* loop = as_loop(stmt);
      return loop && loop->axis == axis ? parts_of(*loop, parts) : Block{stmt};
    });
    split = clean(split, symbols_);
    auto join = [&](const Block& block) { return joined_parts(block, parts); };
    split = join(rewrite(split, [&](const Ref<Stmt>& stmt) -> Block {
      const For* loop = as_loop(stmt);
      return loop ? Block{make_for({loop->axis, loop->extent}, join(loop->body))} : Block{stmt};
    }));
    const Nest before = peel(body_);
    if (!before.axes.empty() && before.axes.back().name == axis && peel(split).axes.size() != before.axes.size()) return std::nullopt;
    return clean(split, symbols_);
  }

  Block parts_of(const For& loop, std::set<std::string>& parts) {
    const std::vector<Expr> cuts = cuts_of(loop, symbols_);
    Block out;
    for (size_t k = 0; k + 1 < cuts.size(); ++k) {
      const std::string axis = names_.fresh(loop.axis);
      tried_.insert(axis);
      parts.insert(axis);
      Renaming renaming;
      renaming.exprs[loop.axis] = Expr::symbol(axis) + cuts[k];
      out.push_back(make_for({axis, cuts[k + 1] - cuts[k]}, copy_block(loop.body, std::move(renaming), &names_)));
    }
    return out;
  }

  /// The shorter loops joined to others, and values in the place of row buffers that stood between them.
  Block finished() const {
    const Nest nest = peel(body_);
    Ranges ranges = symbols_;
    for (const Axis& axis : nest.axes) ranges[axis.name] = axis_range(axis.extent);
    const Block body = clean(without_unread(merge_loops(nest.body, ranges)), ranges);
    return make_nest(nest.axes, hoist_invariants(body, ranges));
  }

  const Ranges& symbols_;
  Names& names_;
  Block body_;
  std::set<std::string> tried_;
};

bool has_cuts(const Kernel& kernel) {
  bool found = false;
  visit(kernel.body, [&](const Stmt& stmt, const auto&) {
    const auto* loop = std::get_if<For>(&stmt.node);
    found = found || (loop && !cuts_of(*loop, kernel.symbols).empty());
  });
  return found;
}

}  // namespace

Module split_loops(Module module, const PassContext& context) {
  Repeats repeats(context);
  for (auto& kernel : module.kernels) {
    Kernel copy = *kernel;
    if (!target_of(context).has_grid && count_choices(copy.body) + 1 >= kManyParts) {
      Names names;
      names.reserve(*kernel);
      copy.body = with_single_parts(copy.body, copy.symbols, names);
    }
    if (has_cuts(copy)) {
      const Kernel whole = copy;
      copy.body = repeats(copy.body, [&] {
        Names names;
        names.reserve(whole);
        return LoopSplitter(whole, names).run();
      });
    }
    if (!(copy == *kernel)) kernel = std::make_shared<const Kernel>(std::move(copy));
  }
  return module;
}

}  // namespace deplo
