#include "passes/loop/fuse_producers.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "analysis/cost.h"
#include "base/error.h"
#include "expr/node.h"
#include "passes/loop/program_graph.h"
#include "passes/loop/repeats.h"
#include "passes/loop/substitute.h"

namespace deplo {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Load;
using loop_ir::Stmt;

// Budgets, in float additions per element of the producer. See the header for what they trade.
constexpr double kSameElement = 1.5;    ///< evaluations per element that count as "about once" (tile borders, pooling windows excluded)
constexpr double kMostGuarded = 4;      ///< guarded evaluations per element that a select may waste
constexpr double kRowBudget = 12;       ///< recompute where a row buffer inside one kernel is the alternative
constexpr double kStencilBudget = 64;   ///< recompute where memory is the alternative
constexpr double kBroadcastBudget = 6;  ///< a small vector recomputed for every row
constexpr double kPrologueBudget = 16;  ///< operations on a static operand of a contraction (dequantisation)

struct Site {
  std::vector<Axis> loops;
  std::vector<Expr> index;
  bool guarded = false;
  bool in_reduce = false;
};

struct ProducerFuser {
  // How much one evaluation of the producer costs, and what it reads.
  struct Weight {
    double cost = 0;
    double full_reads = 0;  ///< different buffers about as large as the result
    int loads = 0;
    size_t parts = 0;          ///< changing buffers from which a place chooses, as in a concatenation
    bool only_moves = true;    ///< an index map: loads, coordinates, casts, selections by position
    bool all_static = true;    ///< every large operand, or where none is large each, stays the same between calls
    bool from_kernel = false;  ///< a large operand comes from a kernel with a reduction: better as that kernel's epilogue
  };

  // What is known of a kernel until its body changes.
  struct Facts {
    std::optional<PointwiseNest> pointwise;
    bool reduces = false;
    size_t statements = 0;
    std::optional<Weight> weight = std::nullopt;  ///< once it was asked for
  };

  ProgramGraph graph;
  const PassContext& context;
  std::vector<bool> is_static;
  std::map<size_t, loop_ir::Names> names;  ///< that a kernel uses
  std::map<std::string, bool> rooted_;
  std::unordered_map<std::string, double> elements_;  ///< of buffers
  std::unordered_map<size_t, Facts> facts_;           ///< of kernels
  std::vector<bool> settled_;                         ///< kernels whose answer is known while they, their readers and those are the same

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context.hints, graph.program().symbols)); }

  double elements_of(const std::string& buffer) {
    auto [it, fresh] = elements_.try_emplace(buffer);
    if (fresh) it->second = size(product(graph.buffer(buffer).shape));
    return it->second;
  }

  double points(const std::vector<Axis>& loops) const {
    double count = 1;
    for (const Axis& axis : loops) count *= size(axis.extent);
    return count;
  }

  // Loads of the producer's buffer that differ in place or scope.
  std::vector<Site> sites_in(const Block& body, const std::string& buffer) const {
    std::vector<Site> sites;
    loop_ir::visit(body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      const auto* load = std::get_if<Load>(&stmt.node);
      if (!load || load->buffer != buffer) return;
      bool known = std::any_of(sites.begin(), sites.end(), [&](const Site& s) { return s.index == load->index && s.loops == loops; });
      if (!known) sites.push_back({loops, load->index, !load->guard.empty(), false});
    });
    return sites;
  }

  static bool has_reduce(const Block& body) {
    bool found = false;
    loop_ir::visit(body, [&](const Stmt& stmt, const auto&) { found = found || std::holds_alternative<loop_ir::Reduce>(stmt.node); });
    return found;
  }

  // The buffer is the result of a reduction, or of pointwise functions on one, element by element: functions of it can be epilogues.
  bool rooted(const std::string& buffer) {
    auto [it, added] = rooted_.emplace(buffer, false);
    if (!added) return it->second;
    bool result = false;
    for (size_t writer : graph.writers(buffer)) {
      if (facts(writer).reduces) {
        result = true;
        continue;
      }
      const auto& p = facts(writer).pointwise;
      if (!p) continue;
      for (const auto& stmt : p->body)
        if (const auto* load = std::get_if<Load>(&stmt->node); load && once_each(load->index, p->axes)) result = result || rooted(load->buffer);
    }
    rooted_[buffer] = result;
    return result;
  }

  Weight weigh(const PointwiseNest& p, double elements) {
    Weight w;
    std::set<std::string> large;
    std::set<std::string> parts;
    bool changes = false;
    std::map<std::string, DType> dtypes;
    for (const auto& stmt : p.body) {
      if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) {
        dtypes[let->name] = let->dtype;
        w.cost += analysis::cost_of(let->fn);
        w.only_moves = w.only_moves && moves(*let, dtypes);
      }
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load) continue;
      dtypes[load->name] = load->dtype;
      w.loads += 1;
      const Buffer& b = graph.buffer(load->buffer);
      if (!load->guard.empty() && !b.is_static) parts.insert(load->buffer);
      changes = changes || !b.is_static;
      if (elements_of(load->buffer) * 2 < elements || (b.shape.empty() && elements > 1) || !large.insert(load->buffer).second) continue;
      w.full_reads += 1;
      w.all_static = w.all_static && b.is_static;
      w.from_kernel = w.from_kernel || (once_each(load->index, p.axes) && rooted(load->buffer));
    }
    w.parts = parts.size();
    if (large.empty()) w.all_static = !changes;
    return w;
  }

  // Coordinates and choices by position. A narrowing cast belongs to what it narrows: less is written.
  static bool moves(const loop_ir::Let& let, const std::map<std::string, DType>& dtypes) {
    if (let.fn == Fn::constant || let.fn == Fn::index || let.fn == Fn::bitcast || let.fn == Fn::where) return true;
    if (let.fn == Fn::cast) return size_of(let.dtype) >= 4;
    return std::all_of(let.operands.begin(), let.operands.end(), [&](const auto& operand) { return !is_float(dtypes.at(operand)); });
  }

  bool worthwhile(const PointwiseNest& p, const Weight& w, const std::vector<Site>& sites, size_t consumers) {
    double elements = points(p.axes);
    // Where products read a concatenation, each of its readers would choose among the parts again.
    auto repeats = [&](const Site& site) { return points(site.loops) > kSameElement * elements; };
    if (w.parts > 2 && sites.size() > 1 && std::any_of(sites.begin(), sites.end(), repeats)) return false;
    if (w.only_moves && !w.from_kernel && (sites.size() == 1 || w.full_reads <= 1)) return true;
    if (w.from_kernel && is_limit(p) && !(sites.size() == 1 && goes_through(sites[0]))) return false;
    if (w.only_moves && w.cost == 0) return true;
    if (w.from_kernel && is_narrowing(p) && !(sites.size() == 1 && takes_all(sites[0], p))) return false;
    double evaluations = 0;
    double most = 0;
    bool reduced = false;
    for (const Site& site : sites) {
      double here = points(site.loops);
      // A guard passes each element once, as in a concatenation.
      if (site.guarded && !site.in_reduce && here <= kMostGuarded * elements) here = std::min(here, elements);
      evaluations += here;
      most = std::max(most, here);
      reduced = reduced || (site.in_reduce && here > kSameElement * elements);
    }
    if (evaluations <= kSameElement * elements) return true;
    // What stays in memory anyway is read narrower than a wider copy of it would be.
    if (w.only_moves && w.full_reads == 1 && most <= kSameElement * elements && reads_kept(p) && widens(p)) return true;
    if (w.only_moves && w.full_reads <= 2 && w.cost <= kBroadcastBudget && !w.from_kernel) return true;
    if (reduced) {
      if (w.from_kernel) return false;
      return w.full_reads <= 1 && (w.all_static ? w.cost <= kPrologueBudget : w.cost <= 1 && w.loads == 1);
    }
    if (most > kSameElement * elements) return w.full_reads <= 1 && w.cost <= kBroadcastBudget && !w.from_kernel;
    // Several sites that each read every element about once; an epilogue computes it once for nothing.
    if (w.full_reads > 1 || w.from_kernel) return false;
    bool identity = std::all_of(sites.begin(), sites.end(), [&](const Site& s) { return in_place(s.index); });
    double extra = w.cost * (evaluations / elements);
    if (identity || consumers > 1) return extra <= kRowBudget;
    return extra <= kStencilBudget;
  }

  /// Whether what the producer reads would be found at a very long expression.
  static bool is_long(const PointwiseNest& p, const Site& site) {
    const auto longest = [](const std::vector<Expr>& index) {
      int64_t most = 1;
      for (const Expr& e : index) most = std::max(most, length_of(e, kLongestPlace));
      return most;
    };
    const int64_t at = longest(site.index);
    return std::any_of(p.body.begin(), p.body.end(), [&](const auto& stmt) {
      const auto* load = std::get_if<Load>(&stmt->node);
      return load && at > 1 && longest(load->index) * at >= kLongestPlace;
    });
  }

  // Every coordinate is a loop axis by itself: nests could be shared instead.
  static bool in_place(const std::vector<Expr>& index) {
    return std::all_of(index.begin(), index.end(), [](const Expr& e) { return e.is_symbol() || e.is_constant(); });
  }

  // No axis moves two coordinates, as in a view or a permutation: what a kernel computed before is read element by element.
  static bool once_each(const std::vector<Expr>& index, const std::vector<Axis>& axes) {
    return std::all_of(axes.begin(), axes.end(),
                       [&](const Axis& axis) { return std::count_if(index.begin(), index.end(), [&](Expr e) { return uses(e, axis.name); }) <= 1; });
  }

  Facts& facts(size_t at) {
    auto [it, fresh] = facts_.try_emplace(at);
    if (fresh) {
      const Block& body = graph.nodes()[at].body;
      it->second = {as_pointwise(body), has_reduce(body), loop_ir::count_statements(body)};
    }
    return it->second;
  }

  // True if the producer went into its readers. In the first round only index maps go, so that the second sees what functions really read.
  bool visit_producer(size_t at, bool only_moves) {
    auto& node = graph.nodes()[at];
    if (!node.alive || !node.is_kernel || node.once || settled_[at]) return false;
    // The order of steps may change from afar: who has to keep one is asked each time.
    settled_[at] = graph.overwriters(at).empty();
    Facts& own = facts(at);
    const auto& p = own.pointwise;
    if (!p || !graph.is_private(p->buffer) || !stores_all(*p)) return false;
    FlatSet<size_t> readers = graph.readers(p->buffer);
    bool checks = std::any_of(p->body.begin(), p->body.end(), [](const auto& stmt) { return std::holds_alternative<loop_ir::Check>(stmt->node); });
    if (readers.empty() && checks) return false;
    for (size_t r : readers)
      if (!can_substitute(graph.nodes()[r].body, *p, graph.program().symbols) || !keeps_order(at, r)) return false;
    // Each would have to read what the producer reads before the other overwrites it.
    const auto& overwriters = graph.overwriters(at);
    if (std::count_if(overwriters.begin(), overwriters.end(), [&](size_t w) { return readers.count(w) > 0; }) > 1) return false;
    if (!own.weight) own.weight = weigh(*p, points(p->axes));
    const Weight& weight = *own.weight;
    if (only_moves && !weight.only_moves) return false;
    if (!std::all_of(readers.begin(), readers.end(), [&](size_t r) { return p->body.size() + facts(r).statements <= kMostStatements; })) return false;
    // What only static inputs decide is computed once per program, unless that would keep a larger copy of it (dequantisation).
    bool leaves_static = is_static[at] && std::any_of(readers.begin(), readers.end(), [&](size_t r) { return !is_static[r]; });
    if (leaves_static && !weight.only_moves && (!widens(*p) || weight.cost > kPrologueBudget)) return false;
    const std::vector<Site> sites = sites_of(readers, p->buffer);
    if (std::any_of(sites.begin(), sites.end(), [&](const Site& site) { return is_long(*p, site); })) return false;
    if (!readers.empty() && !worthwhile(*p, weight, sites, readers.size())) return false;
    unsettle(at);
    for (size_t r : readers) {
      graph.inherit_order(at, r);
      graph.merge_provenance(at, r, true);
      graph.set_body(r, substitute_producer(graph.nodes()[r].body, *p, graph.program().symbols, names_of(r)));
    }
    for (size_t r : readers) {
      facts_.erase(r);
      unsettle(r);
    }
    graph.remove(at);
    return true;
  }

  // The kernel has changed, and so have the readers of what it reads.
  void unsettle(size_t at) {
    settled_[at] = false;
    for (const std::string& b : graph.nodes()[at].reads)
      for (size_t w : graph.writers(b)) settled_[w] = false;
  }

  std::vector<Site> sites_of(const FlatSet<size_t>& readers, const std::string& buffer) {
    std::vector<Site> sites;
    for (size_t r : readers)
      for (Site& site : sites_in(graph.nodes()[r].body, buffer)) {
        site.in_reduce = facts(r).reduces;
        sites.push_back(std::move(site));
      }
    return sites;
  }

  loop_ir::Names& names_of(size_t at) {
    auto [it, fresh] = names.try_emplace(at);
    if (!fresh) return it->second;
    loop_ir::Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = graph.nodes()[at].body;
    it->second.reserve(kernel);
    return it->second;
  }

  // A cast to fewer bytes alone: as the epilogue of what it casts, it halves what is written and read.
  bool is_narrowing(const PointwiseNest& p) const {
    if (p.body.size() != 2) return false;
    const auto* load = std::get_if<Load>(&p.body[0]->node);
    const auto* cast = std::get_if<loop_ir::Let>(&p.body[1]->node);
    return load && cast && cast->fn == Fn::cast && is_float(cast->dtype) && size_of(cast->dtype) < size_of(load->dtype);
  }

  // A choice by a comparison of integers, of which a tensor holds some: as the epilogue of what it chooses, it shows what need not be computed.
  static bool is_limit(const PointwiseNest& p) {
    std::map<std::string, const Stmt*> definitions;
    for (const auto& stmt : p.body) {
      if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) definitions[let->name] = stmt.get();
      if (const auto* load = std::get_if<Load>(&stmt->node)) definitions[load->name] = stmt.get();
    }
    auto let_of = [&](const std::string& name) {
      auto it = definitions.find(name);
      return it == definitions.end() ? nullptr : std::get_if<loop_ir::Let>(&it->second->node);
    };
    std::function<bool(const std::string&)> counts = [&](const std::string& name) {
      auto it = definitions.find(name);
      if (it == definitions.end()) return false;
      if (const auto* load = std::get_if<Load>(&it->second->node)) return load->dtype == DType::i64;
      const auto* let = let_of(name);
      return let && let->dtype == DType::i64 && std::any_of(let->operands.begin(), let->operands.end(), counts);
    };
    return std::any_of(definitions.begin(), definitions.end(), [&](const auto& entry) {
      const auto* where = std::get_if<loop_ir::Let>(&entry.second->node);
      if (!where || where->fn != Fn::where) return false;
      const auto condition = definitions.find(where->operands[0]);
      if (condition != definitions.end() && std::holds_alternative<Load>(condition->second->node)) return true;  // compared in a kernel of its own
      const auto* compared = let_of(where->operands[0]);
      if (!compared || (compared->fn != Fn::lt && compared->fn != Fn::gt)) return false;
      return std::any_of(compared->operands.begin(), compared->operands.end(), counts);
    });
  }

  // Read once and element by element: the reader can be an epilogue itself.
  bool takes_all(const Site& site, const PointwiseNest& p) const { return in_place(site.index) && points(site.loops) <= points(p.axes); }

  // Every coordinate is one of the reader's loops.
  static bool goes_through(const Site& site) {
    return std::all_of(site.index.begin(), site.index.end(), [&](const Expr& e) {
      return std::any_of(site.loops.begin(), site.loops.end(), [&](const Axis& axis) { return e == Expr::symbol(axis.name); });
    });
  }

  bool widens(const PointwiseNest& p) {
    double read = 0;
    for (const auto& access : loop_ir::accesses(p.body)) {
      const Buffer& b = graph.buffer(access.buffer);
      read += elements_of(access.buffer) * static_cast<double>(size_of(b.dtype));
    }
    return points(p.axes) * static_cast<double>(size_of(graph.buffer(p.buffer).dtype)) > read;
  }

  /// Text by hand may leave a part of a buffer as it is, from which nothing may be read.
  bool stores_all(const PointwiseNest& p) const {
    const std::vector<Expr>& shape = graph.buffer(p.buffer).shape;
    for (size_t d = 0; d < p.axes.size(); ++d)
      if (p.axes[d].extent != shape[d] && !simplify(p.axes[d].extent - shape[d], graph.program().symbols).is(0)) return false;
    return true;
  }

  /// Every buffer that it reads is an input or a result of the program.
  bool reads_kept(const PointwiseNest& p) {
    auto accesses = loop_ir::accesses(p.body);
    return std::all_of(accesses.begin(), accesses.end(), [&](const auto& a) { return !graph.is_private(a.buffer); });
  }

  // What the producer reads must not have been overwritten where the reader runs.
  bool keeps_order(size_t producer, size_t reader) {
    for (size_t w : graph.overwriters(producer)) {
      if (w == reader) {
        if (!updates_in_place(producer, reader)) return false;
      } else if (graph.reaches(w, reader)) {
        return false;
      }
    }
    return true;
  }

  // The reader overwrites what the producer reads: fine if it does so element by element.
  bool updates_in_place(size_t producer, size_t reader) {
    const auto& p = facts(producer).pointwise;
    const auto& r = facts(reader).pointwise;
    if (!p || !r) return false;
    auto in_place = [](const PointwiseNest& nest, const std::string& buffer) {
      bool all = true;
      for (const auto& stmt : nest.body)
        if (const auto* load = std::get_if<Load>(&stmt->node); load && load->buffer == buffer) all = all && load->index == nest.index();
      return all;
    };
    return in_place(*p, r->buffer) && in_place(*r, p->buffer) && in_place(*r, r->buffer) && !graph.is_versioned(p->buffer);
  }

  bool round(bool only_moves) {
    bool changed = false;
    if (only_moves || settled_.empty()) settled_.assign(graph.nodes().size(), false);
    for (size_t at = graph.nodes().size(); at-- > 0;) changed = visit_producer(at, only_moves) || changed;
    return changed;
  }

  loop_ir::Module run() {
    graph.remove_dead();
    is_static = graph.static_nodes();
    round(true);
    settled_.clear();
    // A chain of functions is visited from its end: what the whole of it costs and reads shows once its parts are joined.
    while (round(false)) continue;
    Repeats repeats(context);
    for (auto& node : graph.nodes()) {
      if (!node.alive || !node.is_kernel) continue;
      size_t at = static_cast<size_t>(&node - graph.nodes().data());
      Block cleaned = repeats(node.body, [&] { return loop_ir::clean(node.body, graph.program().symbols); });
      if (!std::equal(cleaned.begin(), cleaned.end(), node.body.begin(), node.body.end())) graph.set_body(at, std::move(cleaned));
    }
    return graph.finish();
  }
};

}  // namespace

loop_ir::Module fuse_producers(loop_ir::Module module, const PassContext& context) {
  return ProducerFuser{ProgramGraph(std::move(module)), context, {}, {}, {}, {}, {}, {}}.run();
}

}  // namespace deplo
