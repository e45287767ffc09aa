#include "passes/tensor/compose_maps.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "expr/node.h"
#include "tensor_ir/rewrite.h"

namespace deplo {

using namespace tensor_ir;

namespace {

// Beyond this many sources a joined map costs more to evaluate than the copy that it saves.
constexpr size_t kMaxSources = 8;
constexpr size_t kManyParts = 3;  // of a concatenation: choosing among them costs about what copying them does

Expr axis(size_t d) { return Expr::symbol("i" + std::to_string(d)); }

std::vector<std::string> axis_names(size_t rank) {
  std::vector<std::string> names;
  for (size_t d = 0; d < rank; ++d) names.push_back(axis(d).name());
  return names;
}

std::vector<Expr> substituted(std::vector<Expr> list, const Substitution& values) {
  for (Expr& e : list) e = substitute(e, values);
  return list;
}

/// The conditions that no other one implies.
std::vector<Cond> without_implied(const std::vector<Cond>& guard, const Ranges& ranges) {
  std::vector<Cond> kept;
  for (size_t k = 0; k < guard.size(); ++k) {
    bool implied = false;
    for (size_t i = 0; i < guard.size() && !implied; ++i)
      implied = i != k && guard[i].kind == Cond::Kind::ge0 && guard[k].kind == Cond::Kind::ge0 &&
                provably_nonnegative(guard[k].expr - guard[i].expr, ranges);
    if (!implied) kept.push_back(guard[k]);
  }
  return kept;
}

bool is_plain(const IndexMap& map) { return map.indirects.empty() && map.sources.size() == 1 && map.sources[0].guard.empty(); }

/// How many elements of each value the graph reads once views have vanished: a value that only maps read is worth what these keep.
std::unordered_map<std::string, Expr> demands(const Graph& graph) {
  std::unordered_map<std::string, Expr> maps;  // what plain maps of a value keep
  std::unordered_set<std::string> whole;       // read as they are
  for (const Output& output : graph.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value.value)) whole.insert(value->name);
  for (const auto& write : graph.writes) whole.insert(write.value);
  std::unordered_map<std::string, Expr> result;
  for (size_t at = graph.ops.size(); at-- > 0;) {
    const Op& op = *graph.ops[at];
    for (const Value& value : op.results) {
      Expr size = product(value.type.shape);
      auto kept = maps.find(value.name);
      Expr views = kept == maps.end() ? Expr(0) : kept->second;
      result[value.name] = simplify(whole.count(value.name) ? size + views : views, graph.symbols);
    }
    const auto* map = std::get_if<IndexMap>(&op.node);
    const bool pointwise = std::holds_alternative<Elementwise>(op.node);
    bool fewer = false;
    if (op.results.size() == 1) {
      Expr size = product(op.results[0].type.shape);
      fewer = provably_nonnegative(size - result[op.results[0].name] - 1, graph.symbols);
    }
    for (const std::string& name : operands_of(op)) {
      if ((map && is_plain(*map)) || (pointwise && fewer)) {
        auto [it, fresh] = maps.try_emplace(name, 0);
        it->second = it->second + result[op.results[0].name];
      } else {
        whole.insert(name);
      }
    }
  }
  return result;
}

/// How often each value is read.
std::unordered_map<std::string, int> uses_of(const Graph& graph) {
  std::unordered_map<std::string, int> uses;
  for (const auto& op : graph.ops)
    for (const std::string& name : operands_of(*op)) ++uses[name];
  for (const Output& output : graph.outputs)
    if (const auto* value = std::get_if<ValueName>(&output.value.value)) ++uses[value->name];
  for (const auto& write : graph.writes) ++uses[write.value];
  return uses;
}

/// Concatenations of many parts that several values are computed from, once views have vanished, of which some read elements more than once.
std::unordered_set<std::string> kept_whole(const Graph& graph, const std::unordered_map<std::string, Expr>& demand) {
  std::unordered_map<std::string, int> readers;
  std::unordered_set<std::string> kept;
  for (size_t at = graph.ops.size(); at-- > 0;) {
    const Op& op = *graph.ops[at];
    const auto* map = std::get_if<IndexMap>(&op.node);
    if (map && map->indirects.empty() && map->sources.size() >= kManyParts && readers[op.results[0].name] > 1) {
      const Value& value = op.results[0];
      if (provably_nonnegative(demand.at(value.name) - product(value.type.shape) * readers[value.name] - 1, graph.symbols)) kept.insert(value.name);
    }
    for (const std::string& name : operands_of(op)) readers[name] += map && is_plain(*map) ? readers[op.results[0].name] : 1;
  }
  return kept;
}

/// If the first condition holds, so does the second.
bool implies(const Cond& given, const Cond& cond, const Ranges& ranges) {
  if (given.kind != Cond::Kind::ge0 || cond.kind != Cond::Kind::ge0) return given == cond;
  return provably_nonnegative(cond.expr - given.expr, ranges);
}

/// One of the guards holds at every point, as those of the parts of a concatenation do.
bool cover(const std::vector<std::vector<Cond>>& guards, const Ranges& ranges) {
  if (std::any_of(guards.begin(), guards.end(), [](const auto& guard) { return guard.empty(); })) return true;
  if (guards.empty() || guards[0][0].kind != Cond::Kind::ge0) return false;
  const Cond split = guards[0][0];
  for (const Cond& given : {split, negated(split)}) {
    std::vector<std::vector<Cond>> left;
    for (const auto& guard : guards) {
      std::vector<Cond> open;
      bool never = false;
      for (const Cond& cond : guard) {
        if (implies(given, cond, ranges)) continue;
        never = never || (cond.kind == Cond::Kind::ge0 && implies(given, negated(cond), ranges));
        open.push_back(cond);
      }
      if (!never) left.push_back(std::move(open));
    }
    if (!cover(left, ranges)) return false;
  }
  return true;
}

/// What the equations of a guard say of the axes of a map.
Substitution fixed_by(const std::vector<Cond>& guard, size_t rank) {
  Substitution fixed;
  for (const Cond& cond : guard) {
    if (cond.kind != Cond::Kind::eq0) continue;
    for (size_t d = 0; d < rank; ++d) {
      auto c = linear_coefficient(cond.expr, axis(d).name());
      if (!c || !(c->is(1) || c->is(-1))) continue;
      Expr rest = cond.expr - *c * axis(d);
      bool moves = false;
      for (size_t other = 0; other < rank; ++other) moves = moves || uses(rest, axis(other).name());
      if (moves) continue;
      fixed[axis(d).name()] = c->is(1) ? Expr(0) - rest : rest;
    }
  }
  return fixed;
}

struct Composer {
  Editor& editor;
  const std::unordered_map<std::string, Expr>& demand;
  const std::unordered_set<std::string>& whole;
  TensorType type;  ///< of the map
  std::string provenance;

  Ranges ranges() const {
    Ranges ranges = editor.symbols();
    for (size_t d = 0; d < type.shape.size(); ++d) ranges[axis(d).name()] = axis_range(type.shape[d]);
    return ranges;
  }

  /// Indices and guards in their simplest form over i0, i1, ...; sources that are never read are gone.
  IndexMap canonical(const IndexMap& given) const {
    IndexMap map = rename_axes(given, axis_names(type.shape.size()));
    Ranges known = ranges();
    auto simplify_all = [&](std::vector<Expr>& list) {
      for (Expr& e : list) e = simplify(e, known);
    };
    for (Indirect& j : map.indirects) {
      simplify_all(j.index);
      // In range once the check has passed.
      known[j.name] = axis_range(j.extent);
    }
    std::vector<Source> sources;
    for (Source& source : map.sources) {
      std::vector<Cond> guard;
      bool never = false;
      for (const Cond& cond : source.guard) {
        Cond c = simplify(cond, known);
        auto decided = decide(c, known);
        never = never || decided == std::optional<bool>(false);
        if (!decided && std::find(guard.begin(), guard.end(), c) == guard.end()) guard.push_back(c);
      }
      if (never) continue;
      source.guard = without_implied(guard, known);
      if (is_hidden(source, sources, known)) continue;
      simplify_all(source.index);
      sources.push_back(std::move(source));
      if (sources.back().guard.empty()) break;
    }
    map.sources = std::move(sources);
    drop_what_follows_says_too(map);
    return map;
  }

  /// Wherever the source's guard holds, so does that of one before it.
  static bool is_hidden(const Source& source, const std::vector<Source>& before, const Ranges& known) {
    return std::any_of(before.begin(), before.end(), [&](const Source& earlier) {
      return std::all_of(earlier.guard.begin(), earlier.guard.end(), [&](const Cond& cond) {
        return std::any_of(source.guard.begin(), source.guard.end(), [&](const Cond& given) { return implies(given, cond, known); });
      });
    });
  }

  /// A part that reads what the source behind it reads at these points is none of its own: old values put back where they were.
  void drop_what_follows_says_too(IndexMap& map) const {
    while (map.sources.size() > 1 && map.sources.back().guard.empty()) {
      const Source& part = map.sources[map.sources.size() - 2];
      if (part.operand != map.sources.back().operand || !equal_under(part.guard, part.index, map.sources.back().index)) return;
      map.sources.erase(map.sources.end() - 2);
    }
  }

  /// Equal at every point of the map where the guard holds.
  bool equal_under(const std::vector<Cond>& guard, const std::vector<Expr>& a, const std::vector<Expr>& b) const {
    const Substitution fixed = fixed_by(guard, type.shape.size());
    const Ranges known = ranges();
    for (size_t d = 0; d < a.size(); ++d)
      if (!simplify(substitute(a[d], fixed) - substitute(b[d], fixed), known).is(0)) return false;
    return true;
  }

  /// A map that puts a scatter over a view of `base` back to its places in `base`: the scatter into `base` itself, so that only what changes
  /// moves. The view's places must be those of the guard, one for each of its elements.
  std::optional<Scatter> as_scatter(const IndexMap& map, const std::unordered_map<std::string, int>& uses) const {
    if (!map.indirects.empty() || map.sources.empty() || map.sources.size() > 2) return std::nullopt;
    const Source& changed = map.sources[0];
    const Op* op = editor.definition(changed.operand);
    const auto* scatter = op ? std::get_if<Scatter>(&op->node) : nullptr;
    const IndexMap* view = scatter ? map_of(scatter->base) : nullptr;
    auto used = uses.find(changed.operand);
    if (!view || !is_plain(*view) || used == uses.end() || used->second != 1) return std::nullopt;
    const Source& there = view->sources[0];
    if (editor.value(there.operand).type != type) return std::nullopt;
    std::vector<Expr> own;
    for (size_t d = 0; d < type.shape.size(); ++d) own.push_back(axis(d));
    if (map.sources.size() == 2) {
      const Source& kept = map.sources[1];
      if (kept.operand != there.operand || !kept.guard.empty() || !equal_under({}, kept.index, own)) return std::nullopt;
    } else if (!changed.guard.empty()) {
      return std::nullopt;
    }
    // From a place of the base to the view's element, and on to its place in the base.
    Substitution element;
    for (size_t d = 0; d < view->axes.size(); ++d) element[view->axes[d]] = changed.index[d];
    if (!equal_under(changed.guard, substituted(there.index, element), own)) return std::nullopt;
    // From an element to its place, and back.
    const std::vector<Expr>& shape = editor.value(scatter->base).type.shape;
    Ranges known = editor.symbols();
    for (size_t d = 0; d < shape.size(); ++d) known[view->axes[d]] = axis_range(shape[d]);
    Substitution place;
    for (size_t d = 0; d < there.index.size(); ++d) place[axis(d).name()] = there.index[d];
    for (size_t d = 0; d < shape.size(); ++d)
      if (!simplify(substitute(changed.index[d], place) - Expr::symbol(view->axes[d]), known).is(0)) return std::nullopt;
    for (const Cond& cond : changed.guard)
      if (decide(simplify(substitute(cond, place), known), known) != std::optional<bool>(true)) return std::nullopt;
    Scatter moved = *scatter;
    moved.base = there.operand;
    Substitution target;
    for (size_t d = 0; d < view->axes.size(); ++d) target[view->axes[d]] = scatter->index[d];
    moved.index = substituted(there.index, target);
    return moved;
  }

  /// Every point has a source: the fill is never seen.
  bool is_total(const IndexMap& map, const std::vector<Expr>& shape) const {
    std::vector<std::vector<Cond>> guards;
    for (const Source& source : map.sources) guards.push_back(source.guard);
    Ranges known = editor.symbols();
    for (size_t d = 0; d < map.axes.size(); ++d) known[map.axes[d]] = axis_range(shape[d]);
    for (const Indirect& j : map.indirects) known[j.name] = axis_range(j.extent);
    return cover(guards, known);
  }

  const IndexMap* map_of(const std::string& name) const {
    const Op* op = editor.definition(name);
    return op ? std::get_if<IndexMap>(&op->node) : nullptr;
  }

  /// The sources that take the place of source k of `map`, which reads another map; false if they cannot be joined.
  bool enter(IndexMap& map, size_t k) const {
    const Source outer = map.sources[k];
    const IndexMap* inner = map_of(outer.operand);
    if (!inner) return false;
    // An indirect coordinate is read at every point of a map: it may not move under a guard.
    if (!inner->indirects.empty() && !outer.guard.empty()) return false;
    const bool total = is_total(*inner, editor.value(outer.operand).type.shape);
    bool fill_matters = !total && !(k + 1 == map.sources.size() && (outer.guard.empty() || same_literal(inner->fill, map.fill)));
    if (fill_matters || map.sources.size() + inner->sources.size() > kMaxSources) return false;
    Substitution values;
    for (size_t d = 0; d < outer.index.size(); ++d) values[inner->axes[d]] = outer.index[d];
    std::vector<Indirect> added;
    for (const Indirect& j : inner->indirects) {
      Indirect moved = j;
      moved.index = substituted(j.index, values);
      moved.name = "j" + std::to_string(map.indirects.size() + added.size());
      while (std::any_of(map.indirects.begin(), map.indirects.end(), [&](const Indirect& x) { return x.name == moved.name; })) moved.name += "_";
      values[j.name] = Expr::symbol(moved.name);
      added.push_back(std::move(moved));
    }
    std::vector<Source> sources;
    for (const Source& source : inner->sources) {
      Source joined{source.operand, substituted(source.index, values), outer.guard};
      for (const Cond& cond : source.guard) joined.guard.push_back(substitute(cond, values));
      sources.push_back(std::move(joined));
    }
    if (!total && outer.guard.empty()) map.fill = inner->fill;
    map.indirects.insert(map.indirects.end(), added.begin(), added.end());
    map.sources.erase(map.sources.begin() + static_cast<long>(k));
    map.sources.insert(map.sources.begin() + static_cast<long>(k), sources.begin(), sources.end());
    return true;
  }

  /// Coordinates read through plain maps of the index tensors.
  void enter(std::vector<Indirect>& indirects) const {
    for (Indirect& j : indirects) {
      while (const IndexMap* inner = map_of(j.tensor)) {
        if (!inner->indirects.empty() || inner->sources.size() != 1 || !inner->sources[0].guard.empty()) break;
        Substitution values;
        for (size_t d = 0; d < j.index.size(); ++d) values[inner->axes[d]] = j.index[d];
        j.tensor = inner->sources[0].operand;
        j.index = substituted(inner->sources[0].index, values);
      }
    }
  }

  static bool is_long(const IndexMap& map) {
    return std::any_of(map.sources.begin(), map.sources.end(), [](const Source& source) {
      return std::any_of(source.index.begin(), source.index.end(), [](Expr e) { return length_of(e, kLongestPlace) == kLongestPlace; });
    });
  }

  IndexMap composed(const IndexMap& given) const {
    IndexMap map = given;
    enter(map.indirects);
    map = canonical(map);
    for (size_t k = 0; k < map.sources.size();) {
      IndexMap joined = map;
      bool entered = enter(joined, k) && !is_long(joined);
      if (entered) {
        enter(joined.indirects);
        joined = canonical(joined);
        // A slice of one part reads that part all the same.
        entered = joined.sources.size() <= map.sources.size() || !whole.contains(map.sources[k].operand);
      }
      if (entered)
        map = std::move(joined);
      else
        ++k;
    }
    return map;
  }

  /// All that is read of an op's result is less than it computes.
  bool needs_fewer(const Value& source) const {
    auto it = demand.find(source.name);
    return it != demand.end() && provably_nonnegative(product(source.type.shape) - it->second - 1, editor.symbols());
  }

  bool is_identity(const IndexMap& map) const {
    if (!map.indirects.empty() || map.sources.size() != 1 || !map.sources[0].guard.empty()) return false;
    const Source& source = map.sources[0];
    if (editor.value(source.operand).type.shape != type.shape) return false;
    for (size_t d = 0; d < source.index.size(); ++d)
      if (source.index[d] != axis(d) && !(type.shape[d].is(1) && source.index[d].is(0))) return false;
    return true;
  }

  /// Emits the map as `name`; the value may turn out to be another op, or one that exists.
  Value emit(const std::string& name, const IndexMap& given, bool may_vanish) {
    IndexMap map = composed(given);
    if (may_vanish && is_identity(map)) return editor.value(map.sources[0].operand);
    if (is_plain(map)) {
      const std::string operand = map.sources[0].operand;
      const Op* op = editor.definition(operand);
      const auto* node = op ? std::get_if<Elementwise>(&op->node) : nullptr;
      if (node && node->fn == Fn::constant) return editor.emit(make_constant(name, type, node->literal, provenance));
      if (node && node->fn == Fn::index) {
        Substitution values;
        for (size_t d = 0; d < node->axes.size(); ++d) values[node->axes[d]] = map.sources[0].index[d];
        Expr e = simplify(substitute(node->index, values), ranges());
        return editor.emit(make_index(name, type, axis_names(type.shape.size()), e, provenance));
      }
      if (node && needs_fewer(op->results[0])) return push(name, *op, *node, map);
    }
    return editor.emit(make_map({name, type}, std::move(map), provenance));
  }

  /// f(a, b)[g] as f(a[g], b[g]).
  Value push(const std::string& name, Op op, const Elementwise& given, const IndexMap& map) {
    Elementwise node = given;
    std::vector<Value> operands;
    for (const std::string& operand : node.operands) {
      IndexMap moved = map;
      DType dtype = editor.value(operand).type.dtype;
      moved.sources[0].operand = operand;
      moved.fill = {dtype, 0, 0};
      operands.push_back(Composer{editor, demand, whole, {dtype, type.shape}, op.provenance}.emit(editor.fresh(), moved, true));
    }
    return editor.emit(make_elementwise(name, node.fn, type.dtype, operands, op.provenance));
  }
};

/// Before views vanish: a view of a view is put back step by step.
Graph scatter_into_bases(Graph graph) {
  const std::unordered_map<std::string, Expr> demand;
  const std::unordered_set<std::string> whole;
  const std::unordered_map<std::string, int> uses = uses_of(graph);
  return Editor(std::move(graph)).run([&](Editor& editor, const Ref<Op>& op) {
    const auto* map = std::get_if<IndexMap>(&op->node);
    const auto is_scattered = [&](const Source& source) {
      const Op* from = editor.definition(source.operand);
      return from && std::holds_alternative<Scatter>(from->node);
    };
    if (map && std::any_of(map->sources.begin(), map->sources.end(), is_scattered)) {
      const Composer composer{editor, demand, whole, op->results[0].type, op->provenance};
      if (auto scatter = composer.as_scatter(composer.canonical(*map), uses)) {
        editor.emit(make_scatter(op->results[0], std::move(*scatter), op->provenance));
        return;
      }
    }
    editor.emit(op);
  });
}

}  // namespace

Graph compose_maps(Graph graph, const PassContext&) {
  graph = scatter_into_bases(std::move(graph));
  const std::unordered_map<std::string, Expr> demand = demands(graph);
  const std::unordered_set<std::string> whole = kept_whole(graph, demand);
  return Editor(std::move(graph)).run([&demand, &whole](Editor& editor, const Ref<Op>& op) {
    const auto* map = std::get_if<IndexMap>(&op->node);
    const Value result = op->results.empty() ? Value{} : op->results[0];
    if (const auto* scatter = std::get_if<Scatter>(&op->node)) {
      Scatter entered = *scatter;
      Composer{editor, demand, whole, result.type, op->provenance}.enter(entered.indirects);
      editor.emit(make_scatter(result, std::move(entered), op->provenance));
      return;
    }
    if (!map) {
      editor.emit(op);
      return;
    }
    Composer composer{editor, demand, whole, result.type, op->provenance};
    // An identity stays where an output needs memory of its own.
    IndexMap simplest = composer.composed(*map);
    if (composer.is_identity(simplest) && editor.replace(result.name, simplest.sources[0].operand)) return;
    composer.emit(result.name, simplest, false);
  });
}

}  // namespace deplo
