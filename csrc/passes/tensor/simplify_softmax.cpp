#include "passes/tensor/simplify_softmax.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "passes/tensor/eliminate_dead_code.h"
#include "tensor_ir/rewrite.h"

namespace deplo {

using namespace tensor_ir;

namespace {

/// A graph's ops by what they define and read.
class Uses {
 public:
  explicit Uses(const Graph& graph) {
    for (const auto& op : graph.ops) {
      for (const Value& v : op->results) definitions_[v.name] = op.get();
      for (const std::string& name : operands_of(*op)) readers_[name].push_back(op.get());
    }
    for (const auto& write : graph.writes) kept_.insert(write.value);
    for (const Output& output : graph.outputs)
      if (const auto* value = std::get_if<ValueName>(&output.value.value)) kept_.insert(value->name);
  }

  const Op* definition(const std::string& name) const {
    auto it = definitions_.find(name);
    return it == definitions_.end() ? nullptr : it->second;
  }
  template <class Node>
  const Node* as(const std::string& name) const {
    const Op* op = definition(name);
    return op ? std::get_if<Node>(&op->node) : nullptr;
  }
  const Elementwise* elementwise(const std::string& name, Fn fn) const {
    const auto* node = as<Elementwise>(name);
    return node && node->fn == fn ? node : nullptr;
  }
  const TensorType* type(const std::string& name) const {
    const Op* op = definition(name);
    if (!op) return nullptr;
    return &std::find_if(op->results.begin(), op->results.end(), [&](const Value& v) { return v.name == name; })->type;
  }
  /// Those whose results somebody needs.
  const std::vector<const Op*>& readers(const std::string& name) const {
    static const std::vector<const Op*> none;
    auto it = readers_.find(name);
    return it == readers_.end() ? none : it->second;
  }
  bool is_kept(const std::string& name) const { return kept_.count(name) > 0; }

 private:
  std::map<std::string, const Op*> definitions_;
  std::map<std::string, std::vector<const Op*>> readers_;
  std::set<std::string> kept_;
};

/// Without conversions between floats, which keep the order of numbers.
std::string without_casts(const Uses& uses, std::string name) {
  for (const auto* cast = uses.elementwise(name, Fn::cast); cast; cast = uses.elementwise(name, Fn::cast)) {
    const TensorType* from = uses.type(cast->operands[0]);
    if (!from || !is_float(from->dtype) || !is_float(uses.type(name)->dtype)) break;
    name = cast->operands[0];
  }
  return name;
}

const IndexMap* plain_map(const Uses& uses, const std::string& name) {
  const auto* map = uses.as<IndexMap>(name);
  return map && map->sources.size() == 1 && map->indirects.empty() && map->sources[0].guard.empty() ? map : nullptr;
}

/// Where the map reads for the place `index` of its result.
std::vector<Expr> through(const IndexMap& map, const std::vector<Expr>& index) {
  Substitution to;
  for (size_t d = 0; d < map.axes.size(); ++d) to[map.axes[d]] = index[d];
  std::vector<Expr> found;
  for (const Expr& e : map.sources[0].index) found.push_back(substitute(e, to));
  return found;
}

/// The reduction along one axis whose result, converted and spread over that axis, `name` is; null if there is none.
const Op* spread_reduction(const Uses& uses, const std::string& name, int axis) {
  const TensorType* type = uses.type(name);
  if (!type) return nullptr;
  std::vector<Expr> index;
  std::vector<std::string> coordinates;
  for (size_t d = 0; d < type->shape.size(); ++d) {
    coordinates.push_back("i" + std::to_string(d));
    index.push_back(Expr::symbol(coordinates.back()));
  }
  const std::vector<Expr> of_result = index;
  for (std::string at = name;;) {
    at = without_casts(uses, at);
    if (const IndexMap* map = plain_map(uses, at)) {
      index = through(*map, index);
      at = map->sources[0].operand;
      continue;
    }
    const auto* reduction = uses.as<Reduction>(at);
    if (!reduction || reduction->axes != std::vector<int>{axis} || uses.definition(at)->results[0].name != at) return nullptr;
    if (index.size() + 1 != of_result.size()) return nullptr;
    for (size_t d = 0; d < of_result.size(); ++d) {
      if (d == static_cast<size_t>(axis)) continue;
      const Expr here = index[d > static_cast<size_t>(axis) ? d - 1 : d];
      if (here != of_result[d] && !(type->shape[d].is(1) && here.is(0))) return nullptr;
    }
    return uses.definition(at);
  }
}

bool is_max_of(const Uses& uses, const Op* op, const std::string& x) {
  if (!op) return false;
  const auto& reduction = std::get<Reduction>(op->node);
  const bool largest = reduction.combiner == Combiner::max || reduction.combiner == Combiner::argmax;
  return largest && without_casts(uses, reduction.operands[0]) == without_casts(uses, x);
}

/// x of exp(y - max(y)) where y is x - max(x), maybe rounded, and the exponentials are only divided by their sum, or added to it: others would show
/// infinities. Nothing if `op` is not that difference.
std::optional<Value> shifted_softmax(const Uses& uses, const Op& op, int& axis) {
  const auto* outer = std::get_if<Elementwise>(&op.node);
  if (!outer || outer->fn != Fn::sub) return std::nullopt;
  const Value& result = op.results[0];
  const auto* inner = uses.elementwise(without_casts(uses, outer->operands[0]), Fn::sub);
  if (!inner || inner == outer || uses.is_kept(result.name)) return std::nullopt;
  const TensorType* type = uses.type(inner->operands[0]);
  if (!type || *type != result.type) return std::nullopt;
  const auto& readers = uses.readers(result.name);
  if (readers.size() != 1) return std::nullopt;
  const auto* exp = std::get_if<Elementwise>(&readers[0]->node);
  const std::string& weight = readers[0]->results[0].name;
  if (!exp || exp->fn != Fn::exp || uses.is_kept(weight)) return std::nullopt;
  for (axis = 0; axis < static_cast<int>(result.type.shape.size()); ++axis) {
    if (!is_max_of(uses, spread_reduction(uses, outer->operands[1], axis), outer->operands[0])) continue;
    if (!is_max_of(uses, spread_reduction(uses, inner->operands[1], axis), inner->operands[0])) continue;
    const bool divided = std::all_of(uses.readers(weight).begin(), uses.readers(weight).end(), [&](const Op* reader) {
      if (const auto* sum = std::get_if<Reduction>(&reader->node)) return sum->combiner == Combiner::sum && sum->axes == std::vector<int>{axis};
      const auto* div = std::get_if<Elementwise>(&reader->node);
      if (!div || div->fn != Fn::div || div->operands[0] != weight) return false;
      const Op* by = spread_reduction(uses, div->operands[1], axis);
      return by && std::get<Reduction>(by->node).combiner == Combiner::sum && std::get<Reduction>(by->node).operands[0] == weight;
    });
    if (divided) return Value{inner->operands[0], *type};
  }
  return std::nullopt;
}

Graph with_one_maximum(Graph graph) {
  const Graph before = graph;
  const Uses uses(before);
  return Editor(std::move(graph)).run([&](Editor& editor, const Ref<Op>& op) {
    int axis = 0;
    const auto x = shifted_softmax(uses, *op, axis);
    if (!x) return (void)editor.emit(op);
    const Value& result = op->results[0];
    const Value max = editor.emit(make_reduction({editor.fresh()}, Combiner::max, {*x}, {axis}, op->provenance));
    IndexMap spread;
    Source source{max.name, {}, {}};
    for (size_t d = 0; d < result.type.shape.size(); ++d) {
      spread.axes.push_back("i" + std::to_string(d));
      if (d != static_cast<size_t>(axis)) source.index.push_back(Expr::symbol(spread.axes[d]));
    }
    spread.sources = {std::move(source)};
    const Value all = editor.emit(make_map({editor.fresh(), result.type}, std::move(spread), op->provenance));
    editor.emit(make_elementwise(result.name, Fn::sub, result.type.dtype, {*x, all}, op->provenance));
  });
}

// ---- rows that choose ------------------------------------------------------------------------------------------------

/// A sum of products one of whose factors is where(c, 0, w) with w a quotient of an exponential, as softmax's, and c the same along all that is
/// summed.
struct RowChoice {
  const Elementwise* product = nullptr;
  size_t side = 0;                ///< the factor's
  std::vector<const Op*> path;    ///< maps and conversions from the choice to the factor, last first
  std::string weights;            ///< w
  std::string chosen;             ///< c, before it is spread
  std::vector<Expr> index;        ///< of `chosen`, over the product's coordinates
  std::vector<std::string> axes;  ///< these
};

bool is_zero(const Uses& uses, const std::string& name) {
  const auto* constant = uses.elementwise(name, Fn::constant);
  return constant && is_float(constant->literal.dtype) && constant->literal.f == 0;
}

bool is_minus_infinity(const Uses& uses, const std::string& name) {
  const auto* constant = uses.elementwise(name, Fn::constant);
  return constant && is_float(constant->literal.dtype) && constant->literal.f == -std::numeric_limits<double>::infinity();
}

bool reads_once(const Uses& uses, const std::string& name) { return !uses.is_kept(name) && uses.readers(name).size() == 1; }

std::optional<RowChoice> row_choice(const Uses& uses, const Op& op) {
  const auto* sum = std::get_if<Reduction>(&op.node);
  if (!sum || sum->combiner != Combiner::sum || sum->operands.size() != 1 || !reads_once(uses, sum->operands[0])) return std::nullopt;
  RowChoice found;
  found.product = uses.elementwise(sum->operands[0], Fn::mul);
  if (!found.product) return std::nullopt;
  for (size_t d = 0; d < uses.type(sum->operands[0])->shape.size(); ++d) found.axes.push_back("i" + std::to_string(d));
  for (found.side = 0; found.side < 2; ++found.side) {
    found.path.clear();
    found.index.clear();
    for (const std::string& axis : found.axes) found.index.push_back(Expr::symbol(axis));
    std::string at = found.product->operands[found.side];
    for (; reads_once(uses, at);) {
      const auto* cast = uses.elementwise(at, Fn::cast);
      const TensorType* from = cast ? uses.type(cast->operands[0]) : nullptr;
      if (from && is_float(from->dtype)) {
        found.path.push_back(uses.definition(at));
        at = cast->operands[0];
      } else if (const IndexMap* map = plain_map(uses, at)) {
        found.path.push_back(uses.definition(at));
        found.index = through(*map, found.index);
        at = map->sources[0].operand;
      } else {
        break;
      }
    }
    const auto* where = reads_once(uses, at) ? uses.elementwise(at, Fn::where) : nullptr;
    if (!where || !is_zero(uses, where->operands[1])) continue;
    found.weights = where->operands[2];
    found.chosen = where->operands[0];
    const auto* div = uses.elementwise(without_casts(uses, found.weights), Fn::div);
    if (!div || !uses.elementwise(without_casts(uses, div->operands[0]), Fn::exp)) continue;
    while (const IndexMap* map = plain_map(uses, found.chosen)) {
      found.index = through(*map, found.index);
      found.chosen = map->sources[0].operand;
    }
    const auto* eq = uses.elementwise(found.chosen, Fn::eq);
    if (!eq || !is_minus_infinity(uses, eq->operands[1])) continue;
    const bool same = std::none_of(sum->axes.begin(), sum->axes.end(), [&](int axis) {
      return std::any_of(found.index.begin(), found.index.end(),
                         [&](const Expr& e) { return deplo::uses(e, found.axes[static_cast<size_t>(axis)]); });
    });
    if (same) return found;
  }
  return std::nullopt;
}

/// Rows of weights that are all zero because nothing was left of them (`_safe_softmax`) are left out of the sum, and their results chosen to be
/// zero: what is summed is a softmax then.
Graph with_choices_last(Graph graph) {
  const Graph before = graph;
  const Uses uses(before);
  return Editor(std::move(graph)).run([&](Editor& editor, const Ref<Op>& op) {
    const auto choice = row_choice(uses, *op);
    if (!choice) return (void)editor.emit(op);
    const auto& sum = std::get<Reduction>(op->node);
    const Value& result = op->results[0];
    Value factor = editor.value(choice->weights);
    for (auto step = choice->path.rbegin(); step != choice->path.rend(); ++step) {
      const Op& was = **step;
      if (const auto* map = std::get_if<IndexMap>(&was.node)) {
        IndexMap copy = *map;
        copy.sources[0].operand = factor.name;
        factor = editor.emit(make_map({editor.fresh(), {factor.type.dtype, was.results[0].type.shape}}, std::move(copy), was.provenance));
      } else {
        factor = editor.emit(make_elementwise(editor.fresh(), Fn::cast, was.results[0].type.dtype, {factor}, was.provenance));
      }
    }
    std::vector<Value> factors{editor.value(choice->product->operands[0]), editor.value(choice->product->operands[1])};
    factors[choice->side] = factor;
    const Value product = editor.emit(make_elementwise(editor.fresh(), Fn::mul, result.type.dtype, factors, op->provenance));
    const Value total = editor.emit(make_reduction({editor.fresh()}, Combiner::sum, {product}, sum.axes, op->provenance));
    IndexMap spread;
    Substitution to;
    for (size_t d = 0; d < choice->axes.size(); ++d) {
      if (std::count(sum.axes.begin(), sum.axes.end(), static_cast<int>(d)) > 0) continue;
      spread.axes.push_back("i" + std::to_string(spread.axes.size()));
      to[choice->axes[d]] = Expr::symbol(spread.axes.back());
    }
    std::vector<Expr> index;
    for (const Expr& e : choice->index) index.push_back(substitute(e, to));
    spread.sources = {Source{choice->chosen, std::move(index), {}}};
    const Value chosen = editor.emit(make_map({editor.fresh(), {DType::boolean, result.type.shape}}, std::move(spread), op->provenance));
    const Value zero = editor.emit(make_constant(editor.fresh(), result.type, Scalar::of_float(result.type.dtype, 0), op->provenance));
    editor.emit(make_elementwise(result.name, Fn::where, result.type.dtype, {chosen, zero, total}, op->provenance));
  });
}

// ---- concatenations --------------------------------------------------------------------------------------------

/// Two parts along an axis, of which one has one element: [0, at) and [at, extent).
struct Cut {
  int axis = 0;
  Expr at;
};

std::optional<Cut> cut_of(const Op& op, const Ranges& symbols) {
  const auto* map = std::get_if<IndexMap>(&op.node);
  if (!map || map->sources.size() != 2 || !map->indirects.empty()) return std::nullopt;
  const std::vector<Expr>& shape = op.results[0].type.shape;
  for (size_t d = 0; d < shape.size(); ++d) {
    const Expr i = Expr::symbol(map->axes[d]);
    if (shape[d].is(2) || !provably_nonnegative(shape[d] - 2, symbols)) continue;
    for (Expr at : {shape[d] - 1, Expr(1)})
      for (size_t first : {0, 1}) {
        const auto& left = map->sources[first].guard;
        const auto& right = map->sources[1 - first].guard;
        if (left == std::vector<Cond>{less(i, at)} && right == std::vector<Cond>{less_equal(at, i)}) return Cut{static_cast<int>(d), at};
      }
  }
  return std::nullopt;
}

/// What is computed of a concatenation, all in two parts.
class Parts {
 public:
  Parts(const Uses& uses, const Op& op, Cut cut, const Ranges& symbols)
      : uses_(uses), cut_(cut), extent_(op.results[0].type.shape[cut.axis]), symbols_(symbols) {
    closed_ = add(op) && reduces_;
  }
  bool closed() const { return closed_; }
  bool holds(const Op& op) const { return ops_.count(&op) > 0; }
  bool reads(const Op& op) const { return ends_.count(&op) > 0; }

  /// An op that is computed in parts, or that reads some of them.
  void emit(Editor& editor, const Op& op) {
    if (const auto* reduction = std::get_if<Reduction>(&op.node)) return emit_reduction(editor, op, *reduction);
    const Value& result = op.results[0];
    if (ends_.count(&op) > 0) {
      IndexMap map = std::get<IndexMap>(op.node);
      Source& source = map.sources[0];
      const size_t part = part_of(op, map);
      if (part == 1) source.index[cut_.axis] = source.index[cut_.axis] - cut_.at;
      source.operand = parts_.at(source.operand)[part].name;
      editor.emit(make_map(result, std::move(map), op.provenance));
      return;
    }
    std::array<Value, 2> parts;
    for (size_t part : {0, 1}) {
      if (const auto* map = std::get_if<IndexMap>(&op.node)) {
        parts[part] = part_of_map(editor, op, *map, part, &map->sources[part_first(*map) == 0 ? part : 1 - part]);
        continue;
      }
      const auto& node = std::get<Elementwise>(op.node);
      std::vector<Value> operands;
      for (const std::string& name : node.operands) {
        auto known = parts_.find(name);
        operands.push_back(known != parts_.end() ? known->second[part] : outside(editor, name, part, op.provenance));
      }
      parts[part] = editor.emit(make_elementwise(editor.fresh(), node.fn, result.type.dtype, operands, op.provenance));
    }
    parts_[result.name] = parts;
  }

 private:
  bool add(const Op& op) {
    if (!ops_.insert(&op).second) return true;
    for (const Value& v : op.results) {
      if (uses_.is_kept(v.name)) return false;
      for (const Op* reader : uses_.readers(v.name))
        if (!follow(*reader)) return false;
    }
    return true;
  }

  bool follow(const Op& op) {
    if (const auto* node = std::get_if<Elementwise>(&op.node)) return !node->operands.empty() && node->fn != Fn::index && add(op);
    if (const auto* reduction = std::get_if<Reduction>(&op.node)) {
      const bool fits = reduction->axes == std::vector<int>{cut_.axis} && reduction->operands.size() == 1 &&
                        (reduction->combiner == Combiner::sum || reduction->combiner == Combiner::max || reduction->combiner == Combiner::min);
      if (fits) ends_.insert(&op);
      return reduces_ = fits;
    }
    const auto* map = std::get_if<IndexMap>(&op.node);
    if (!map || map->sources.size() != 1 || part_of(op, *map) > 1) return false;
    for (const Indirect& j : map->indirects)
      if (j.tensor == map->sources[0].operand) return false;
    ends_.insert(&op);
    return true;
  }

  /// The part that all of a map lies in; 2 if there is none.
  size_t part_of(const Op& op, const IndexMap& map) const {
    Ranges ranges = symbols_;
    for (size_t d = 0; d < map.axes.size(); ++d) ranges[map.axes[d]] = axis_range(op.results[0].type.shape[d]);
    const Expr at = map.sources[0].index[cut_.axis];
    if (provably_nonnegative(cut_.at - 1 - at, ranges)) return 0;
    return provably_nonnegative(at - cut_.at, ranges) ? 1 : 2;
  }

  /// Of the two sources of the concatenation, the one that comes first along the axis.
  size_t part_first(const IndexMap& map) const { return map.sources[0].guard[0] == less(Expr::symbol(map.axes[cut_.axis]), cut_.at) ? 0 : 1; }

  TensorType type_of(const TensorType& whole, size_t part) const {
    TensorType type = whole;
    type.shape[cut_.axis] = part == 0 ? cut_.at : extent_ - cut_.at;
    return type;
  }

  /// The part of a map, of which `only` is the one source that counts if it is given.
  Value part_of_map(Editor& editor, const Op& op, const IndexMap& whole, size_t part, const Source* only) const {
    IndexMap map = whole;
    if (only) {
      map.sources = {*only};
      map.sources[0].guard.clear();
    }
    const Substitution shift{{map.axes[cut_.axis], Expr::symbol(map.axes[cut_.axis]) + (part == 0 ? Expr(0) : cut_.at)}};
    for (Indirect& j : map.indirects)
      for (Expr& e : j.index) e = substitute(e, shift);
    for (Source& s : map.sources) {
      for (Expr& e : s.index) e = substitute(e, shift);
      for (Cond& c : s.guard) c = substitute(c, shift);
    }
    const TensorType type = type_of(op.results[0].type, part);
    const Source& s = map.sources[0];
    bool same = map.sources.size() == 1 && s.guard.empty() && editor.value(s.operand).type == type;
    for (size_t d = 0; same && d < s.index.size(); ++d) same = s.index[d] == Expr::symbol(map.axes[d]) || (type.shape[d].is(1) && s.index[d].is(0));
    return same ? editor.value(s.operand) : editor.emit(make_map({editor.fresh(), type}, std::move(map), op.provenance));
  }

  /// Of a value that is not in parts.
  Value outside(Editor& editor, const std::string& name, size_t part, const std::string& provenance) const {
    const Value whole = editor.value(name);
    if (const Scalar* literal = editor.literal(name))
      return editor.emit(make_constant(editor.fresh(), type_of(whole.type, part), *literal, provenance));
    const Op* op = editor.definition(name);
    if (const auto* map = op ? std::get_if<IndexMap>(&op->node) : nullptr) return part_of_map(editor, *op, *map, part, nullptr);
    IndexMap map;
    Source source{name, {}, {}};
    for (size_t d = 0; d < whole.type.shape.size(); ++d) {
      map.axes.push_back("i" + std::to_string(d));
      const Expr i = Expr::symbol(map.axes[d]);
      source.index.push_back(d == static_cast<size_t>(cut_.axis) && part == 1 ? i + cut_.at : i);
    }
    map.sources = {std::move(source)};
    return editor.emit(make_map({editor.fresh(), type_of(whole.type, part)}, std::move(map), provenance));
  }

  void emit_reduction(Editor& editor, const Op& op, const Reduction& reduction) const {
    const Value& result = op.results[0];
    std::vector<Value> reduced;
    for (size_t part : {0, 1}) {
      const Value& of = parts_.at(reduction.operands[0])[part];
      if (!of.type.shape[cut_.axis].is(1)) {
        reduced.push_back(editor.emit(make_reduction({editor.fresh()}, reduction.combiner, {of}, reduction.axes, op.provenance)));
        continue;
      }
      IndexMap map;
      Source source{of.name, {}, {}};
      for (size_t d = 0; d < of.type.shape.size(); ++d) {
        if (d == static_cast<size_t>(cut_.axis)) {
          source.index.emplace_back(0);
          continue;
        }
        map.axes.push_back("i" + std::to_string(map.axes.size()));
        source.index.push_back(Expr::symbol(map.axes.back()));
      }
      map.sources = {std::move(source)};
      reduced.push_back(editor.emit(make_map({editor.fresh(), result.type}, std::move(map), op.provenance)));
    }
    const Fn fn = reduction.combiner == Combiner::sum ? Fn::add : reduction.combiner == Combiner::max ? Fn::max : Fn::min;
    editor.emit(make_elementwise(result.name, fn, result.type.dtype, reduced, op.provenance));
  }

  const Uses& uses_;
  const Cut cut_;
  const Expr extent_;
  const Ranges& symbols_;
  bool closed_ = false, reduces_ = false;
  std::set<const Op*> ops_, ends_;
  std::map<std::string, std::array<Value, 2>> parts_;
};

Graph without_concatenations(Graph graph) {
  const Graph before = graph;
  const Uses uses(before);
  std::vector<Parts> all;
  for (const auto& op : before.ops)
    if (const auto cut = cut_of(*op, before.symbols)) {
      Parts parts(uses, *op, *cut, before.symbols);
      const bool apart = std::none_of(before.ops.begin(), before.ops.end(), [&](const auto& other) {
        return parts.holds(*other) && std::any_of(all.begin(), all.end(), [&](const Parts& p) { return p.holds(*other); });
      });
      if (parts.closed() && apart) all.push_back(std::move(parts));
    }
  if (all.empty()) return graph;
  return Editor(std::move(graph)).run([&](Editor& editor, const Ref<Op>& op) {
    for (Parts& parts : all)
      if (parts.holds(*op) || parts.reads(*op)) return parts.emit(editor, *op);
    editor.emit(op);
  });
}

}  // namespace

Graph simplify_softmax(Graph graph, const PassContext& context) {
  // Composed maps leave readers behind that nobody needs.
  graph = eliminate_dead_code(with_one_maximum(std::move(graph)), context);
  return without_concatenations(eliminate_dead_code(with_choices_last(std::move(graph)), context));
}

}  // namespace deplo
