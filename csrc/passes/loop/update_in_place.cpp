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

std::optional<Copy> as_copy(const Block& body) {
  auto p = as_pointwise(body);
  if (!p || p->body.size() != 1) return std::nullopt;
  const auto* load = std::get_if<Load>(&p->body[0]->node);
  if (!load || load->name != p->value || !load->guard.empty() || load->index != p->index()) return std::nullopt;
  return Copy{load->buffer, p->buffer};
}

/// v[i] = a where a guard holds, else x[i].
struct GuardedUpdate {
  PointwiseNest nest;
  std::string base;
  std::string updated;  ///< value stored where the guard holds
  std::vector<Cond> guard;
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

std::optional<GuardedUpdate> as_guarded_update(const Block& body) {
  auto p = as_pointwise(body);
  if (!p) return std::nullopt;
  const Let* select = find_let(p->body, p->value);
  if (!select || select->fn != Fn::where) return std::nullopt;
  GuardedUpdate update{*p, "", select->operands[1], {}};
  for (const auto& stmt : p->body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (load && load->name == select->operands[2] && load->index == p->index()) update.base = load->buffer;
  }
  if (update.base.empty() || !guard_of(p->body, select->operands[0], update.guard)) return std::nullopt;
  // Nothing else may read the base: the select's other side would see it half updated.
  for (const auto& stmt : p->body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (load && load->buffer == update.base && load->name != select->operands[2]) return std::nullopt;
  }
  return update;
}

// Axes whose guard pins them to [lo, hi) run over that interval only.
Block guarded_stores(const GuardedUpdate& update, const std::string& target, const Ranges& symbols) {
  std::vector<Axis> axes = update.nest.axes;
  Substitution shift;
  Ranges ranges = symbols;
  for (const Axis& axis : axes) ranges[axis.name] = axis_range(axis.extent);
  for (Axis& axis : axes) {
    Expr x = Expr::symbol(axis.name);
    Expr lo = 0;
    Expr hi = axis.extent;
    for (const Cond& cond : update.guard) {
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
  for (const Cond& cond : update.guard) guard.push_back(substitute(cond, shift));
  body.push_back(make_stmt(Store{target, index, update.updated, guard, Combiner::set}));
  return clean(make_nest(axes, std::move(body)), symbols);
}

struct Updater {
  ProgramGraph graph;

  void rename_everywhere(const std::string& from, const std::string& to) {
    Renaming renaming;
    renaming.buffers[from] = to;
    std::set<size_t> nodes = graph.readers(from);
    for (size_t w : graph.writers(from)) nodes.insert(w);
    for (size_t at : nodes) {
      auto& node = graph.nodes()[at];
      if (node.updated.erase(from)) node.updated.insert(to);
      graph.set_body(at, copy_block(node.body, renaming, nullptr));
    }
  }

  bool all_kernels(const std::string& buffer) {
    const auto& readers = graph.readers(buffer);
    return std::all_of(readers.begin(), readers.end(), [&](size_t r) { return graph.nodes()[r].is_kernel; });
  }

  // The steps that read what `base` held before `update` ran must be able to come before it.
  bool old_value_is_free(const std::string& base, size_t update, const std::set<size_t>& ignored) {
    for (size_t r : graph.readers(base))
      if (r != update && !ignored.count(r) && graph.reaches(update, r)) return false;
    return true;
  }

  // `write` copies v back to the input x.
  void visit_write(size_t write) {
    auto& node = graph.nodes()[write];
    if (!node.alive || !node.is_kernel) return;
    auto copy_back = as_copy(node.body);
    if (!copy_back) return;
    const std::string v = copy_back->source;
    const std::string x = copy_back->target;
    if (graph.buffer(x).kind != BufferKind::input || graph.writers(x).size() != 1) return;
    if (graph.buffer(v).kind != BufferKind::temp || graph.is_returned(v) || graph.is_returned(x) || !all_kernels(v) || !all_kernels(x)) return;
    const auto writers = graph.writers(v);
    if (writers.size() == 2)
      scatter_in_place(write, writers[0], writers[1], v, x);
    else if (writers.size() == 1)
      guarded_in_place(write, writers[0], v, x);
  }

  // copy x -> v; update v; copy v -> x: the update goes to x itself.
  void scatter_in_place(size_t write, size_t base, size_t update, const std::string& v, const std::string& x) {
    auto copy = graph.nodes()[base].is_kernel ? as_copy(graph.nodes()[base].body) : std::nullopt;
    if (!copy || copy->source != x || !graph.nodes()[update].updated.count(v) || graph.nodes()[update].reads.count(x)) return;
    if (!old_value_is_free(x, update, {base, write})) return;
    finish(write, base, update, v, x);
  }

  void guarded_in_place(size_t write, size_t update, const std::string& v, const std::string& x) {
    if (!graph.nodes()[update].is_kernel) return;
    auto guarded = as_guarded_update(graph.nodes()[update].body);
    if (!guarded || guarded->base != x || !old_value_is_free(x, update, {write})) return;
    graph.set_body(update, guarded_stores(*guarded, v, graph.program().symbols));
    graph.nodes()[update].updated.insert(v);
    finish(write, update, update, v, x);
  }

  // Old readers of x before the update, readers of v after it, v becomes x.
  void finish(size_t write, size_t base, size_t update, const std::string& v, const std::string& x) {
    graph.remove(write);
    if (base != update) graph.remove(base);
    for (size_t r : graph.readers(x))
      if (r != update) graph.add_order(r, update);
    for (size_t r : graph.readers(v))
      if (r != update) graph.add_order(update, r);
    rename_everywhere(v, x);
  }

  // copy t -> v; update v, where nothing else reads t: v is t.
  void visit_base(size_t base) {
    auto& node = graph.nodes()[base];
    auto copy = node.alive && node.is_kernel ? as_copy(node.body) : std::nullopt;
    if (!copy || !graph.is_private(copy->source) || graph.readers(copy->source).size() != 1) return;
    const std::string t = copy->source;
    const std::string v = copy->target;
    const Buffer& target = graph.buffer(v);
    if (target.kind == BufferKind::input || graph.writers(v).size() < 2 || graph.writers(v)[0] != base) return;
    size_t producer = graph.writers(t)[0];
    if (target.dtype != graph.buffer(t).dtype || target.shape != graph.buffer(t).shape) return;
    for (size_t w : graph.writers(v))
      if (w != base) graph.add_order(producer, w);
    for (size_t r : graph.readers(v)) graph.add_order(producer, r);
    graph.remove(base);
    rename_everywhere(t, v);
  }

  Module run() {
    for (size_t at = 0; at < graph.nodes().size(); ++at) visit_base(at);
    for (size_t at = 0; at < graph.nodes().size(); ++at) visit_write(at);
    return graph.finish();
  }
};

}  // namespace

Module update_in_place(Module module, const PassContext&) { return Updater{ProgramGraph(std::move(module))}.run(); }

}  // namespace deplo
