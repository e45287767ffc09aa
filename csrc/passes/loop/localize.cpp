#include "passes/loop/localize.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <unordered_map>

#include "base/error.h"
#include "loop_ir/params.h"
#include "loop_ir/text.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr size_t kLoopsTried = 32;  ///< before a loop, to join it to

// What one statement of a block needs and makes.
struct Footprint {
  std::set<std::string> defines;
  std::set<std::string> needs;
  std::set<std::string> reads;  ///< buffers
  std::set<std::string> writes;
  bool reduces = false;

  void add(Footprint other) {
    defines.merge(other.defines);
    needs.merge(other.needs);
    reads.merge(other.reads);
    writes.merge(other.writes);
    reduces = reduces || other.reduces;
  }
};

void define(Footprint& f, const std::string& name) { f.defines.insert(name); }

Footprint footprint(const Stmt& stmt) {
  Footprint f;
  auto need = [&](const Expr& e) { collect_symbols(e, f.needs); };
  Block one{std::make_shared<Stmt>(stmt)};
  for_each_expr(one, need);
  visit(one, [&](const Stmt& s, const auto&) {
    std::visit(Overloaded{[&](const Let& x) {
                            define(f, x.name);
                            f.needs.insert(x.operands.begin(), x.operands.end());
                          },
                          [&](const Load& x) {
                            define(f, x.name);
                            f.reads.insert(x.buffer);
                          },
                          [&](const Store& x) {
                            f.needs.insert(x.value);
                            f.writes.insert(x.buffer);
                            if (x.combiner != Combiner::set) f.reads.insert(x.buffer);
                          },
                          [&](const For&) {},
                          [&](const Reduce& x) {
                            f.reduces = true;
                            f.defines.insert(x.results.begin(), x.results.end());
                            f.needs.insert(x.operands.begin(), x.operands.end());
                          },
                          [&](const Scan& x) {
                            f.reduces = true;
                            f.defines.insert(x.results.begin(), x.results.end());
                            f.needs.insert(x.operands.begin(), x.operands.end());
                          },
                          [&](const Local& x) { f.writes.insert(x.name); },  // what uses it stays behind
                          [](const Check&) {}},
               s.node);
  });
  return f;
}

bool intersects(const std::set<std::string>& a, const std::set<std::string>& b) {
  if (a.size() > b.size()) return intersects(b, a);
  return std::any_of(a.begin(), a.end(), [&](const std::string& name) { return b.count(name) > 0; });
}

bool must_precede(const Footprint& first, const Footprint& second) {
  return intersects(first.defines, second.needs) || intersects(first.writes, second.reads) || intersects(first.writes, second.writes) ||
         intersects(first.reads, second.writes);
}

// Every place at which a block stores or loads a buffer.
std::vector<std::vector<Expr>> places(const Block& block, const std::string& buffer, bool stores, bool& simple) {
  std::vector<std::vector<Expr>> result;
  visit(block, [&](const Stmt& stmt, const auto&) {
    if (const auto* s = std::get_if<Store>(&stmt.node); s && s->buffer == buffer) {
      simple = simple && s->combiner == Combiner::set && s->guard.empty();
      if (stores) result.push_back(s->index);
    }
    if (const auto* s = std::get_if<Load>(&stmt.node); s && !stores && s->buffer == buffer) result.push_back(s->index);
  });
  return result;
}

// True if iteration i of `second` touches of what `first` writes only what iteration i wrote: some dimension is the axis itself in both.
bool meets_in_iteration(const For& first, const For& second, const Footprint& a, const Footprint& b) {
  auto aligned = [&](const std::string& buffer) {
    bool simple = true;
    auto stored = places(first.body, buffer, true, simple);
    auto other = places(second.body, buffer, false, simple);
    auto also = places(second.body, buffer, true, simple);
    other.insert(other.end(), also.begin(), also.end());
    if (!simple || stored.empty() || other.empty()) return false;
    for (size_t d = 0; d < stored[0].size(); ++d) {
      bool here = std::all_of(stored.begin(), stored.end(), [&](const auto& p) { return p[d] == Expr::symbol(first.axis); }) &&
                  std::all_of(other.begin(), other.end(), [&](const auto& p) { return p[d] == Expr::symbol(second.axis); });
      if (here) return true;
    }
    return false;
  };
  for (const std::string& buffer : a.writes)
    if ((b.reads.count(buffer) || b.writes.count(buffer)) && !aligned(buffer)) return false;
  for (const std::string& buffer : a.reads)
    if (b.writes.count(buffer)) return false;
  return true;
}

struct LoopMerger {
  Block merge(Block body) {
    for (auto& stmt : body)
      if (const auto* loop = std::get_if<For>(&stmt->node)) stmt = make_for({loop->axis, loop->extent}, merge(loop->body));
    return merge_from(body, 1);
  }

  struct Item {
    Ref<Stmt> stmt;
    std::optional<Footprint> known;  ///< made when asked for: most statements never are
    const Footprint& print() {
      if (!known) known = footprint(*stmt);
      return *known;
    }
  };

  // Of the loops before `from`, none can join another any longer.
  Block merge_from(const Block& body, size_t from) {
    std::vector<Item> items;
    for (const auto& stmt : body) items.push_back({stmt, std::nullopt});
    for (size_t b = from; b < items.size(); ++b)
      if (std::holds_alternative<For>(items[b].stmt->node) && joins_earlier(items, b)) --b;
    Block merged;
    for (Item& item : items) merged.push_back(std::move(item.stmt));
    return merged;
  }

  // True if loop b joined the nearest loop before it that can take it.
  bool joins_earlier(std::vector<Item>& items, size_t b) {
    std::vector<size_t> lifted;  // statements in between that b depends on, the last first
    Footprint needed;            // of them all
    size_t tried = 0;
    for (size_t a = b; a-- > 0 && tried < kLoopsTried;) {
      bool precedes_lifted = must_precede(items[a].print(), needed);
      if (fits(items, a, b)) {
        ++tried;
        // What b depends on moves in front of a, so it must not depend on a.
        if (!precedes_lifted && meets_in_iteration(*taker(items[a]), loop(items[b]), items[a].print(), items[b].print())) {
          join(items, a, b, {lifted.begin(), lifted.end()});
          return true;
        }
      }
      if (!precedes_lifted && !must_precede(items[a].print(), items[b].print())) continue;
      lifted.push_back(a);
      needed.add(items[a].print());
    }
    return false;
  }

  static const For& loop(const Item& item) { return std::get<For>(item.stmt->node); }

  /// A loop, or a scan as one, into which others may move.
  static std::optional<For> taker(const Item& item) {
    if (const auto* first = std::get_if<For>(&item.stmt->node)) return *first;
    const auto* scan = std::get_if<Scan>(&item.stmt->node);
    if (!scan) return std::nullopt;
    For whole{scan->axis.name, scan->axis.extent, scan->body};
    whole.body.insert(whole.body.end(), scan->then.begin(), scan->then.end());
    return whole;
  }

  // A pointwise loop joins the loop or scan that makes what it reads, as its epilogue; a reduction stays apart from loops that prepare its operands.
  static bool fits(std::vector<Item>& items, size_t a, size_t b) {
    if (const auto* scan = std::get_if<Scan>(&items[a].stmt->node))
      return scan->axis.extent == loop(items[b]).extent && std::all_of(loop(items[b]).body.begin(), loop(items[b]).body.end(), [](const auto& stmt) {
               return std::holds_alternative<Let>(stmt->node) || std::holds_alternative<Load>(stmt->node) ||
                      std::holds_alternative<Store>(stmt->node);
             });
    const auto* first = std::get_if<For>(&items[a].stmt->node);
    return first && first->extent == loop(items[b]).extent && (!items[b].print().reduces || items[a].print().reduces);
  }

  // Moves loop b up into loop a, and `lifted` before a.
  void join(std::vector<Item>& items, size_t a, size_t b, const std::set<size_t>& lifted) {
    const auto* scan = std::get_if<Scan>(&items[a].stmt->node);
    const For* first = scan ? nullptr : &loop(items[a]);
    const For* second = &loop(items[b]);
    std::string axis = scan ? scan->axis.name : first->axis;
    std::string gone = second->axis;
    Renaming renaming;
    renaming.value(gone, axis);
    Block joined = scan ? scan->then : first->body;
    size_t from = joined.size();
    for (auto& stmt : copy_block(second->body, renaming, nullptr)) joined.push_back(std::move(stmt));
    if (scan) {
      Scan longer = *scan;
      longer.then = std::move(joined);
      items[a].stmt = make_stmt(std::move(longer));
    } else {
      items[a].stmt = make_for({axis, first->extent}, merge_from(joined, from));
    }
    Footprint both = items[a].print();
    both.add(items[b].print());
    items[a].known = std::move(both);
    // The order from a on: what is lifted, the joined loop, the rest.
    std::vector<Item> rest;
    for (size_t at : lifted) rest.push_back(std::move(items[at]));
    for (size_t at = a; at < items.size(); ++at)
      if (at != b && !lifted.count(at)) rest.push_back(std::move(items[at]));
    items.resize(a);
    std::move(rest.begin(), rest.end(), std::back_inserter(items));
  }
};

// Loads of a place just stored, in the same iteration of the same loops, are the stored value.
struct Forwarder {
  std::map<std::string, std::pair<std::vector<Expr>, std::string>> last;  ///< buffer -> place and value of its visible last store
  std::set<std::string> stored_once;

  const Block& whole;
  const Ranges& ranges;
  std::optional<Names> names;  ///< that the body does not use, once some are wanted

  Forwarder(const Block& body, const Ranges& ranges) : whole(body), ranges(ranges) {
    std::map<std::string, int> stores;
    visit(body, [&](const Stmt& stmt, const auto&) {
      if (const auto* s = std::get_if<Store>(&stmt.node)) stores[s->buffer] += s->combiner == Combiner::set && s->guard.empty() ? 1 : 2;
    });
    for (const auto& [buffer, count] : stores)
      if (count == 1) stored_once.insert(buffer);
  }

  Block block(const Block& body) {
    std::vector<std::string> stored;  // here: seen no longer behind the block
    Renaming renaming;
    Block out;
    for (const auto& original : body) {
      Ref<Stmt> stmt = renaming.values.empty() ? original : copy_block({original}, renaming, nullptr)[0];
      if (const auto* load = std::get_if<Load>(&stmt->node)) {
        auto it = last.find(load->buffer);
        if (it != last.end() && it->second.first == load->index) {
          renaming.value(load->name, load->guard.empty() ? it->second.second : chosen(*load, it->second.second, out));
          continue;
        }
      } else if (const auto* store = std::get_if<Store>(&stmt->node)) {
        if (stored_once.count(store->buffer)) {
          last[store->buffer] = {store->index, store->value};
          stored.push_back(store->buffer);
        }
      } else if (const auto* loop = std::get_if<For>(&stmt->node)) {
        stmt = make_for({loop->axis, loop->extent}, block(loop->body));
      } else if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
        // Forwarding may replace the operand itself.
        Reduce copy = *reduce;
        Block none;
        copy.body = with_operands(copy.body, copy.operands, none);
        stmt = make_stmt(std::move(copy));
      } else if (const auto* scan = std::get_if<Scan>(&stmt->node)) {
        Scan copy = *scan;
        copy.body = with_operands(copy.body, copy.operands, copy.then);
        copy.then = block(copy.then);
        stmt = make_stmt(std::move(copy));
      }
      out.push_back(std::move(stmt));
    }
    for (const std::string& buffer : stored) last.erase(buffer);
    return out;
  }

  /// The value where the load's guard holds, else what it is filled with.
  std::string chosen(const Load& load, const std::string& value, Block& out) {
    if (!names) {
      Kernel kernel;
      kernel.body = whole;
      names.emplace();
      names->reserve(kernel);
      for (const auto& [name, range] : ranges) names->reserve(name);
      visit(whole, [&](const Stmt& stmt, const auto&) {
        if (const auto* s = std::get_if<Store>(&stmt.node)) names->reserve(s->buffer);
        if (const auto* s = std::get_if<Load>(&stmt.node)) names->reserve(s->buffer);
      });
    }
    loop_ir::Body body(*names);
    const std::string fill = body.constant(load.fill);
    const std::string result = body.let(Fn::where, load.dtype, {body.truth(load.guard, ranges), value, fill});
    for (auto& stmt : body.take()) out.push_back(std::move(stmt));
    return result;
  }

  // Operands are defined in the body: one that forwards to an outer value stays a definition there.
  Block with_operands(const Block& body, std::vector<std::string>& operands, Block& then) {
    Renaming renaming;
    Block out;
    for (const auto& original : body) {
      Ref<Stmt> stmt = renaming.values.empty() ? original : copy_block({original}, renaming, nullptr)[0];
      if (const auto* load = std::get_if<Load>(&stmt->node)) {
        auto it = last.find(load->buffer);
        if (it != last.end() && load->guard.empty() && it->second.first == load->index) {
          renaming.value(load->name, it->second.second);
          continue;
        }
      }
      out.push_back(std::move(stmt));
    }
    for (std::string& operand : operands)
      if (auto it = renaming.values.find(operand); it != renaming.values.end()) operand = it->second;
    if (!renaming.values.empty()) then = copy_block(then, renaming, nullptr);
    return out;
  }
};

// Stored by this kernel alone: without loads it disappears, with loads it becomes a local over its inner dimensions.
Block make_local(const Block& body, const std::vector<Axis>& shared, const std::function<bool(const std::string&)>& is_private,
                 const std::function<const Buffer&(const std::string&)>& buffer) {
  struct Use {
    bool loaded = false;
    std::vector<std::vector<Expr>> stored;
    std::vector<std::vector<Expr>> read;
  };
  std::vector<std::pair<std::string, Use>> uses;  // in the order of the first ones, so that nothing follows from names
  std::unordered_map<std::string, size_t> known;
  auto use = [&](const std::string& name) -> Use& {
    auto [it, fresh] = known.try_emplace(name, uses.size());
    if (fresh) uses.emplace_back(name, Use{});
    return uses[it->second].second;
  };
  visit(body, [&](const Stmt& stmt, const auto&) {
    if (const auto* s = std::get_if<Store>(&stmt.node); s && is_private(s->buffer)) use(s->buffer).stored.push_back(s->index);
    if (const auto* s = std::get_if<Load>(&stmt.node); s && is_private(s->buffer)) use(s->buffer).read.push_back(s->index);
  });
  std::map<std::string, std::vector<size_t>> kept;  ///< dimensions of each new local
  std::set<std::string> dropped;
  Block out;
  for (const auto& [name, found] : uses) {
    if (found.stored.empty()) continue;
    if (found.read.empty()) {
      dropped.insert(name);
      continue;
    }
    const Buffer& b = buffer(name);
    std::vector<size_t> dims;
    std::vector<Expr> shape;
    for (size_t d = 0; d < b.shape.size(); ++d) {
      const Expr& e = found.stored[0][d];
      bool is_shared =
          e.is_constant() || (e.is_symbol() && std::any_of(shared.begin(), shared.end(), [&](const Axis& axis) { return axis.name == e.name(); }));
      auto same = [&](const auto& place) { return place[d] == e; };
      if (is_shared && std::all_of(found.stored.begin(), found.stored.end(), same) && std::all_of(found.read.begin(), found.read.end(), same))
        continue;
      dims.push_back(d);
      shape.push_back(b.shape[d]);
    }
    out.push_back(make_stmt(Local{name, b.dtype, shape}));
    kept[name] = dims;
  }
  auto pick = [&](const std::string& name, const std::vector<Expr>& index) {
    std::vector<Expr> result;
    for (size_t d : kept.at(name)) result.push_back(index[d]);
    return result;
  };
  Block rest = rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
    if (const auto* s = std::get_if<Store>(&stmt->node)) {
      if (dropped.count(s->buffer)) return {};
      if (!kept.count(s->buffer)) return {stmt};
      Store copy = *s;
      copy.index = pick(s->buffer, s->index);
      return {make_stmt(std::move(copy))};
    }
    if (const auto* s = std::get_if<Load>(&stmt->node); s && kept.count(s->buffer)) {
      Load copy = *s;
      copy.index = pick(s->buffer, s->index);
      return {make_stmt(std::move(copy))};
    }
    return {stmt};
  });
  out.insert(out.end(), rest.begin(), rest.end());
  return out;
}

}  // namespace

Block merge_loops(const Block& body, const Ranges& ranges) {
  const Block merged = LoopMerger{}.merge(clean(body, ranges));
  return clean(Forwarder(merged, ranges).block(merged), ranges);
}

Block localize(const NestGroup& group, const std::function<bool(const std::string&)>& is_private,
               const std::function<const Buffer&(const std::string&)>& buffer, const Ranges& symbols) {
  Ranges ranges = symbols;
  for (const Axis& axis : group.axes) ranges[axis.name] = axis_range(axis.extent);
  const Block body = make_local(merge_loops(group.body, ranges), group.axes, is_private, buffer);
  return make_nest(group.axes, hoist_invariants(clean(body, ranges), ranges));
}

}  // namespace deplo
