#include "passes/loop/update_in_place.h"

#include <algorithm>

#include "passes/loop/program_graph.h"
#include "passes/loop/substitute.h"

namespace deplo {
namespace {

using namespace loop_ir;

/// A kernel that copies `source` to `target` element by element.
struct Copy {
  std::string source;
  std::string target;
};

// Each coordinate is the axis itself, or 0 where the axis has one element. A buffer of another rank has no such place.
bool is_own_place(const std::vector<Expr>& index, const std::vector<Axis>& axes) {
  if (index.size() != axes.size()) return false;
  for (size_t d = 0; d < axes.size(); ++d)
    if (index[d] != Expr::symbol(axes[d].name) && !(index[d].is(0) && axes[d].extent.is(1))) return false;
  return true;
}

std::optional<Copy> as_copy(const Block& body) {
  if (innermost(body).size() != 2) return std::nullopt;
  auto p = as_pointwise(body);
  if (!p || p->body.size() != 1) return std::nullopt;
  const auto* load = std::get_if<Load>(&p->body[0]->node);
  if (!load || load->name != p->value || !load->guard.empty() || load->index.size() != p->axes.size()) return std::nullopt;
  if (!is_own_place(load->index, p->axes)) return std::nullopt;
  return Copy{load->buffer, p->buffer};
}

/// v[i] = x[i], but the value of the last part whose guard holds.
struct GuardedUpdate {
  struct Part {
    std::string value;
    std::vector<Cond> guard;
  };
  PointwiseNest nest;
  std::string base;
  std::vector<Part> parts;
};

const Let* find_let(const Block& body, const std::string& name) {
  for (const auto& stmt : body)
    if (const auto* let = std::get_if<Let>(&stmt->node); let && let->name == name) return let;
  return nullptr;
}

// The guard behind a bool that Body::truth made.
bool guard_of(const Block& body, const std::string& name, std::vector<Cond>& guard) {
  const Let* let = find_let(body, name);
  if (!let) return false;
  if (let->fn == Fn::bit_and) return guard_of(body, let->operands[0], guard) && guard_of(body, let->operands[1], guard);
  if (let->fn != Fn::ge && let->fn != Fn::eq && let->fn != Fn::ne) return false;
  const Let* value = find_let(body, let->operands[0]);
  const Let* zero = find_let(body, let->operands[1]);
  if (!value || value->fn != Fn::index || !zero || zero->fn != Fn::constant || zero->literal.as_double() != 0) return false;
  guard.push_back({let->fn == Fn::ge ? Cond::Kind::ge0 : let->fn == Fn::eq ? Cond::Kind::eq0 : Cond::Kind::ne0, value->index});
  return true;
}

const Load* find_load(const Block& body, const std::string& name) {
  for (const auto& stmt : body)
    if (const auto* load = std::get_if<Load>(&stmt->node); load && load->name == name) return load;
  return nullptr;
}

// Whether a value is made from a load of the buffer; coordinates count.
bool depends_on(const Block& body, const std::string& value, const std::string& buffer) {
  std::set<std::string> needed{value};
  for (size_t at = body.size(); at-- > 0;) {
    if (const auto* let = std::get_if<Let>(&body[at]->node); let && needed.count(let->name)) {
      needed.insert(let->operands.begin(), let->operands.end());
      if (let->fn == Fn::index) collect_symbols(let->index, needed);
    }
    const auto* load = std::get_if<Load>(&body[at]->node);
    if (!load || !needed.count(load->name)) continue;
    if (load->buffer == buffer) return true;
    for (const Expr& e : load->index) collect_symbols(e, needed);
    for (const Cond& cond : load->guard) collect_symbols(cond.expr, needed);
  }
  return false;
}

std::optional<GuardedUpdate> as_guarded_update(const Block& body) {
  auto p = as_pointwise(body);
  if (!p) return std::nullopt;
  GuardedUpdate update{*p, "", {}};
  std::string rest = p->value;
  while (const Let* select = find_let(p->body, rest)) {
    GuardedUpdate::Part part{select->fn == Fn::where ? select->operands[1] : "", {}};
    if (select->fn != Fn::where || !guard_of(p->body, select->operands[0], part.guard)) return std::nullopt;
    update.parts.insert(update.parts.begin(), std::move(part));
    rest = select->operands[2];
  }
  const Load* kept = find_load(p->body, rest);
  if (!kept || update.parts.empty() || !kept->guard.empty()) return std::nullopt;
  update.base = kept->buffer;
  // An element may read its own old value and no other; with several parts, what one reads another may have stored already.
  for (const auto& stmt : p->body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (load && load->buffer == update.base && !is_own_place(load->index, p->axes)) return std::nullopt;
    if (std::holds_alternative<Check>(stmt->node)) return std::nullopt;
  }
  for (const auto& part : update.parts)
    if (update.parts.size() > 1 && depends_on(p->body, part.value, update.base)) return std::nullopt;
  return update;
}

// Axes whose guard pins them to [lo, hi) run over that interval only.
Block guarded_stores(const GuardedUpdate& update, const GuardedUpdate::Part& part, const std::string& target, const Ranges& symbols) {
  std::vector<Axis> axes = update.nest.axes;
  Substitution shift;
  Ranges ranges = symbols;
  for (const Axis& axis : axes) ranges[axis.name] = axis_range(axis.extent);
  for (Axis& axis : axes) {
    Expr x = Expr::symbol(axis.name);
    Expr lo = 0;
    Expr hi = axis.extent;
    for (const Cond& cond : part.guard) {
      auto coefficient = linear_coefficient(cond.expr, axis.name);
      if (!coefficient) continue;
      Expr rest = cond.expr - *coefficient * x;
      bool outer = std::all_of(axes.begin(), axes.end(), [&](const Axis& other) { return !uses(rest, other.name); });
      if (!outer) continue;
      if (cond.kind == Cond::Kind::ge0 && coefficient->is(1)) lo = max(lo, Expr(0) - rest);
      if (cond.kind == Cond::Kind::ge0 && coefficient->is(-1)) hi = min(hi, rest + 1);
      if (cond.kind == Cond::Kind::eq0 && (coefficient->is(1) || coefficient->is(-1))) {
        Expr at = coefficient->is(1) ? Expr(0) - rest : rest;
        lo = max(lo, at);
        hi = min(hi, at + 1);
      }
    }
    lo = simplify(lo, symbols);
    hi = simplify(hi, symbols);
    if (lo.is(0) && hi == axis.extent) continue;
    Expr extent = simplify(hi - lo, symbols);
    axis.extent = provably_nonnegative(extent, symbols) ? extent : max(extent, Expr(0));
    shift[axis.name] = x + lo;
  }
  Renaming renaming;
  renaming.exprs = shift;
  Block body = copy_block(update.nest.body, renaming, nullptr);
  std::vector<Expr> index;
  for (const Expr& e : update.nest.index()) index.push_back(substitute(e, shift));
  std::vector<Cond> guard;
  for (const Cond& cond : part.guard) guard.push_back(substitute(cond, shift));
  body.push_back(make_stmt(Store{target, index, part.value, guard, Combiner::set}));
  return clean(make_nest(axes, std::move(body)), symbols);
}

/// v as an updated copy of the base: the step that makes it from the base, and those that change it afterwards.
struct UpdateChain {
  std::string v;
  std::string base;
  size_t first;
  std::optional<GuardedUpdate> guarded;  ///< what `first` is, unless a plain copy
  std::vector<size_t> updates;
};

struct Updater {
  ProgramGraph graph;

  // Kernels take any strides; ATen may be told what it works on.
  bool same_to_all(const std::string& v, const std::string& base) {
    const Buffer& a = graph.buffer(v);
    const Buffer& b = graph.buffer(base);
    if (a.dtype != b.dtype || a.shape != b.shape) return false;
    auto kernels = [&](const auto& steps) { return std::all_of(steps.begin(), steps.end(), [&](size_t s) { return graph.nodes()[s].is_kernel; }); };
    return a.strides == b.strides || (kernels(graph.readers(v)) && kernels(graph.readers(base)) && kernels(graph.writers(base)));
  }

  std::optional<UpdateChain> chain_of(const std::string& v) {
    const auto& writers = graph.writers(v);
    if (writers.empty() || graph.buffer(v).kind == BufferKind::input) return std::nullopt;
    UpdateChain chain{v, "", writers[0], std::nullopt, {writers.begin() + 1, writers.end()}};
    const auto& first = graph.nodes()[chain.first];
    if (!first.is_kernel || first.once || first.updated.count(v)) return std::nullopt;
    for (size_t w : chain.updates)
      if (!graph.nodes()[w].updated.count(v)) return std::nullopt;
    if (auto copy = as_copy(first.body)) {
      chain.base = copy->source;
    } else {
      chain.guarded = as_guarded_update(first.body);
      if (!chain.guarded) return std::nullopt;
      chain.base = chain.guarded->base;
    }
    return same_to_all(v, chain.base) ? std::optional(std::move(chain)) : std::nullopt;
  }

  // The steps that change the base once v is the base; a plain copy is none.
  static std::vector<size_t> changes(const UpdateChain& chain) {
    std::vector<size_t> result = chain.updates;
    if (chain.guarded) result.push_back(chain.first);
    return result;
  }

  // Whatever reads the old value can do so before the first change.
  bool old_value_is_free(const UpdateChain& chain, size_t ignored) {
    for (size_t r : graph.readers(chain.base)) {
      if (r == chain.first || r == ignored) continue;
      for (size_t change : changes(chain))
        if (r == change || graph.reaches(change, r)) return false;
    }
    return true;
  }

  // Makes v the base itself.
  void merge(const UpdateChain& chain, const std::string& name) {
    std::vector<size_t> changing = changes(chain);
    for (size_t change : changing) {
      for (size_t r : graph.readers(chain.base))
        if (r != change && r != chain.first) graph.add_order(r, change);
      for (size_t w : graph.writers(chain.base))
        if (w != change) graph.add_order(w, change);
    }
    for (size_t r : graph.readers(chain.v)) {
      for (size_t w : graph.writers(chain.base))
        if (w != r) graph.add_order(w, r);
      if (r != chain.first) graph.add_order(chain.first, r);
    }
    if (chain.guarded) {
      store_parts(chain);
    } else {
      graph.remove(chain.first);
    }
    const std::string& gone = name == chain.v ? chain.base : chain.v;
    graph.rename_buffer(gone, name);
  }

  // Each part is a kernel of its own: a later one may overwrite what an earlier one stored.
  void store_parts(const UpdateChain& chain) {
    const GuardedUpdate& update = *chain.guarded;
    // All take over the order of the first step before they get one among themselves.
    std::vector<size_t> nodes;
    for (size_t k = 0; k + 1 < update.parts.size(); ++k) nodes.push_back(graph.add_kernel({}, chain.first));
    nodes.push_back(chain.first);
    for (size_t k = 0; k < nodes.size(); ++k) {
      if (k > 0) graph.add_order(nodes[k - 1], nodes[k]);
      graph.nodes()[nodes[k]].updated.insert(chain.v);
      graph.set_body(nodes[k], guarded_stores(update, update.parts[k], chain.v, graph.program().symbols));
    }
  }

  // `write` copies v back to the input x, whose updated copy v is: the updates go to x itself.
  void visit_write(size_t write) {
    const auto& node = graph.nodes()[write];
    auto copy_back = node.alive && node.is_kernel ? as_copy(node.body) : std::nullopt;
    if (!copy_back) return;
    const std::string x = copy_back->target;
    if (graph.buffer(x).kind != BufferKind::input || graph.writers(x).size() != 1 || graph.is_returned(x)) return;
    const std::string v = copy_back->source;
    auto chain = chain_of(v);
    if (!chain || chain->base != x || graph.buffer(v).kind != BufferKind::temp || graph.is_returned(v)) return;
    if (!old_value_is_free(*chain, write)) return;
    graph.remove(write);
    merge(*chain, x);
  }

  // v is an updated copy of a base that nothing reads afterwards: it takes the base's place. A base that one kernel makes point by point
  // may rather be computed where it is used, so only what updates it anyway in memory makes it one.
  void visit_base(const std::string& v) {
    auto chain = chain_of(v);
    if (!chain || graph.buffer(chain->base).kind != BufferKind::temp || graph.is_returned(chain->base)) return;
    bool only_reader = graph.is_private(chain->base) && graph.readers(chain->base).size() == 1;
    bool in_memory = graph.writers(chain->base).size() > 1;
    if (!in_memory && (!only_reader || chain->guarded || chain->updates.empty())) return;
    if (!old_value_is_free(*chain, chain->first)) return;
    merge(*chain, v);
  }

  Module run() {
    std::vector<std::string> copies;
    for (const auto& node : graph.nodes())
      if (node.is_kernel && node.writes.size() == 1) copies.push_back(*node.writes.begin());
    for (const std::string& v : copies) visit_base(v);
    for (size_t at = 0; at < graph.nodes().size(); ++at) visit_write(at);
    return graph.finish();
  }
};

}  // namespace

Module update_in_place(Module module, const PassContext&) { return Updater{ProgramGraph(std::move(module))}.run(); }

}  // namespace deplo
