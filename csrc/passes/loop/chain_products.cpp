#include "passes/loop/chain_products.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "expr/node.h"
#include "loop_ir/places.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;
using analysis::AxisClass;

constexpr size_t kMostAxes = 6;  // of a nest, and of its keys, whose orders are tried

bool uses_any(const std::vector<Expr>& exprs, const std::vector<Axis>& axes) {
  return std::any_of(exprs.begin(), exprs.end(),
                     [&](Expr e) { return std::any_of(axes.begin(), axes.end(), [&](const Axis& a) { return uses(e, a.name); }); });
}

/// The axes at which `stored`, a place that each iteration has for itself, is `place`; nothing where that cannot be told.
std::optional<Substitution> solve(const std::vector<Axis>& axes, const std::vector<Expr>& stored, const std::vector<Expr>& place,
                                  const Ranges& ranges) {
  Substitution found;
  for (size_t d = 0; d < stored.size(); ++d) {
    if (stored[d].is(0)) continue;
    std::vector<std::pair<int64_t, const Axis*>> parts;  // a sum of axes, each times the extents of those behind it
    for (const Term& term : terms_of(stored[d])) {
      const bool single = term.atoms.size() == 1 && term.atoms[0].is_symbol();
      auto at = std::find_if(axes.begin(), axes.end(), [&](const Axis& a) { return single && a.name == term.atoms[0].name(); });
      if (at == axes.end() || term.coefficient < 1) return std::nullopt;
      parts.emplace_back(term.coefficient, &*at);
    }
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    int64_t length = 1;
    for (size_t p = 0; p < parts.size(); ++p) {
      const auto& [step, axis] = parts[p];
      const bool last = p + 1 == parts.size();
      if (step != length || (!last && !axis->extent.is_constant())) return std::nullopt;
      Expr value = floordiv(place[d], step);
      if (!last) value = mod(value, axis->extent);
      if (!found.emplace(axis->name, simplify(value, ranges)).second) return std::nullopt;
      if (!last) length *= axis->extent.value();
    }
  }
  return found.size() == axes.size() ? std::optional(found) : std::nullopt;
}

/// A kernel that sums products, of which one factor may be computed where it is summed.
struct Reader {
  std::vector<Axis> outer;  ///< of its nest, without its columns
  std::vector<Axis> rows;   ///< those of them that only this factor has
  Axis column;
  Block body;                            ///< of the nest
  const Reduce* reduce = nullptr;        ///< in it
  analysis::ContractionOperand weights;  ///< that factor
  analysis::ContractionOperand other;
};

/// What becomes of one or more of them.
struct ProductChain {
  /// Values that a kernel stores at its axes, by the buffer.
  struct Computed {
    size_t maker = 0;
    std::vector<Expr> axes;
    std::map<std::string, std::string> values;
  };
  Names names;
  std::vector<Axis> outer, rows, keys;
  Block points;  ///< of the nest over the keys
  std::vector<Computed> computed;
  Block locals, stores, columns;
  std::vector<size_t> readers;
  std::set<std::string> matrices;  ///< that are computed
};

struct Chainer {
  ProgramGraph graph;
  const PassContext& context;
  std::vector<bool> is_static{};

  const Ranges& symbols() const { return graph.program().symbols; }
  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context.hints, symbols())); }
  double bytes(const std::string& name) const {
    const Buffer& b = graph.buffer(name);
    return size(product(b.shape)) * static_cast<double>(size_of(b.dtype));
  }
  bool is_kernel(size_t at) {
    const auto& node = graph.nodes()[at];
    return node.alive && node.is_kernel && !node.once && node.updated.empty();
  }

  Ranges ranges_of(const ProductChain& chain) const {
    Ranges ranges = symbols();
    for (const auto* axes : {&chain.outer, &chain.keys})
      for (const Axis& a : *axes) ranges[a.name] = axis_range(a.extent);
    return ranges;
  }

  // ---- what may be a chain -------------------------------------------------------------------------------------------

  /// Whether a kernel stores each element of this buffer once, and all that it stores may vanish.
  bool makes(size_t at, const std::string& buffer) {
    if (!is_kernel(at)) return false;
    const Nest nest = peel(graph.nodes()[at].body);
    std::set<std::string> stored;
    for (const auto& stmt : nest.body) {
      if (is_straight(*stmt)) continue;
      if (const auto* local = std::get_if<Local>(&stmt->node)) {
        if (!local->shape.empty()) return false;
        continue;
      }
      if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
        if (!std::all_of(reduce->body.begin(), reduce->body.end(), [](const auto& s) { return is_straight(*s); })) return false;
        continue;
      }
      const auto* store = std::get_if<Store>(&stmt->node);
      if (!store || !store->guard.empty() || store->combiner != Combiner::set || !stored.insert(store->buffer).second) return false;
    }
    return stored.count(buffer) > 0;
  }

  bool is_matrix(const std::string& buffer) {
    if (!graph.find_buffer(buffer) || !graph.is_private(buffer) || graph.is_versioned(buffer)) return false;
    const auto& writers = graph.writers(buffer);
    return writers.size() == 1 && !is_static[writers[0]] && makes(writers[0], buffer);
  }

  /// `body`: of a whole kernel.
  std::optional<Reader> read(const Block& body) {
    Reader reader;
    Nest nest = peel(body);
    reader.body = nest.body;
    Kernel kernel;
    kernel.symbols = symbols();
    kernel.body = make_nest(nest.axes, nest.body);
    for (const auto& stmt : reader.body) {
      const auto* reduce = std::get_if<Reduce>(&stmt->node);
      if (reduce && reader.reduce) return std::nullopt;
      if (reduce) reader.reduce = reduce;
      if (!reduce && !is_straight(*stmt) && !std::holds_alternative<Store>(stmt->node)) return std::nullopt;
    }
    if (!reader.reduce || nest.axes.size() > kMostAxes || reader.reduce->axes.size() > kMostAxes) return std::nullopt;
    const auto found = analysis::find_contractions(kernel);
    if (found.size() != 1 || found[0].dtype != DType::f32) return std::nullopt;
    const analysis::Contraction& c = found[0];
    for (bool first : {true, false}) {
      reader.weights = first ? c.a : c.b;
      reader.other = first ? c.b : c.a;
      const auto rows = c.axes_of(first ? AxisClass::m : AxisClass::n);
      const auto columns = c.axes_of(first ? AxisClass::n : AxisClass::m);
      if (columns.size() != 1 || rows.empty()) continue;
      reader.rows.clear();
      for (const auto& a : rows) reader.rows.push_back({a.name, a.extent});
      reader.column = {columns[0].name, columns[0].extent};
      if (!reads_matrix(reader)) continue;
      reader.outer.clear();
      for (const Axis& a : nest.axes)
        if (a.name != reader.column.name) reader.outer.push_back(a);
      return reader;
    }
    return std::nullopt;
  }

  bool reads_matrix(const Reader& reader) {
    return std::any_of(reader.weights.slice.begin(), reader.weights.slice.end(), [&](const auto& stmt) {
      const auto* load = std::get_if<Load>(&stmt->node);
      return load && uses_any(load->index, reader.rows) && uses_any(load->index, reader.reduce->axes) && is_matrix(load->buffer);
    });
  }

  // ---- making one ----------------------------------------------------------------------------------------------------

  /// The keys, the longest axis last: blocks are taken along it.
  std::vector<Axis> keys_of(const Reader& reader) const {
    std::vector<Axis> keys = reader.reduce->axes;
    auto longest = std::max_element(keys.begin(), keys.end(), [&](const Axis& a, const Axis& b) { return size(a.extent) <= size(b.extent); });
    std::rotate(longest, longest + 1, keys.end());
    return keys;
  }

  std::optional<ProductChain> start(size_t at) {
    auto reader = read(graph.nodes()[at].body);
    if (!reader) return std::nullopt;
    ProductChain chain;
    Kernel kernel;
    kernel.symbols = symbols();
    kernel.body = graph.nodes()[at].body;
    chain.names.reserve(kernel);
    for (const auto& b : graph.program().buffers) chain.names.reserve(b.name);
    chain.outer = reader->outer;
    chain.rows = reader->rows;
    for (const Axis& a : keys_of(*reader)) chain.keys.push_back({chain.names.fresh(a.name), a.extent});
    if (!add(chain, at, *reader, keys_of(*reader))) return std::nullopt;
    return chain;
  }

  /// `keys`: the axes of its sum that are those of the chain.
  bool add(ProductChain& chain, size_t at, const Reader& reader, const std::vector<Axis>& keys) {
    Renaming renaming;
    for (size_t k = 0; k < keys.size(); ++k) renaming.exprs[keys[k].name] = Expr::symbol(chain.keys[k].name);
    Block pool;
    for (const auto& stmt : reader.body)
      if (is_straight(*stmt)) pool.push_back(stmt);
    pool.insert(pool.end(), reader.reduce->body.begin(), reader.reduce->body.end());
    for (const auto& stmt : statements_for(pool, {reader.weights.value})) {
      std::set<std::string> used;
      collect_uses(*stmt, used);
      if (used.count(reader.column.name) > 0 || !copy(chain, stmt, renaming)) return false;
    }
    const std::string local = chain.names.fresh("weights0");
    std::vector<Expr> shape;
    std::vector<Expr> place;
    std::vector<Expr> own;
    for (size_t k = 0; k < keys.size(); ++k) {
      shape.push_back(chain.keys[k].extent);
      place.push_back(Expr::symbol(chain.keys[k].name));
      own.push_back(Expr::symbol(keys[k].name));
    }
    chain.locals.push_back(make_stmt(Local{local, DType::f32, shape}));
    chain.stores.push_back(make_stmt(Store{local, place, renaming.values.at(reader.weights.value), {}, Combiner::set}));
    Reduce sum = *reader.reduce;
    sum.axes = keys;
    sum.body = reader.other.slice;
    sum.body.push_back(make_stmt(Load{reader.weights.value, DType::f32, local, own, {}, {}}));
    for (const auto& stmt : reader.reduce->body)
      if (name_of(*stmt) == sum.operands[0]) sum.body.push_back(stmt);
    Block column;
    for (const auto& stmt : reader.body) column.push_back(std::holds_alternative<Reduce>(stmt->node) ? make_stmt(sum) : stmt);
    chain.columns.push_back(make_for(reader.column, std::move(column)));
    chain.readers.push_back(at);
    return true;
  }

  /// A statement among the points, with what it loads of matrices computed there.
  bool copy(ProductChain& chain, const Ref<Stmt>& stmt, Renaming& renaming) {
    const std::string name = name_of(*stmt);
    if (const auto* load = std::get_if<Load>(&stmt->node)) {
      std::vector<Expr> index;
      for (Expr e : load->index) index.push_back(substitute(e, renaming.exprs));
      if (uses_any(index, chain.rows) && uses_any(index, chain.keys) && is_matrix(load->buffer)) {
        const auto value = compute(chain, load->buffer, index);
        if (value) renaming.value(name, chosen(chain, *load, *value, renaming));
        return value.has_value();
      }
    }
    if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) {
      for (const std::string& result : reduce->results) renaming.value(result, chain.names.fresh(result));
    } else {
      renaming.value(name, chain.names.fresh(name));
    }
    for (auto& s : copy_block({stmt}, renaming, &chain.names)) chain.points.push_back(std::move(s));
    return true;
  }

  /// What the load gives of a place that holds the value.
  std::string chosen(ProductChain& chain, const Load& load, const std::string& value, const Renaming& renaming) const {
    if (load.guard.empty()) return value;
    Body body(chain.names);
    std::vector<Cond> guard;
    for (const Cond& c : load.guard) guard.push_back(substitute(c, renaming.exprs));
    const std::string inside = body.truth(guard, ranges_of(chain));
    const std::string found = body.let(Fn::where, load.dtype, {inside, value, body.constant(load.fill)});
    for (auto& s : body.take()) chain.points.push_back(std::move(s));
    return found;
  }

  /// The element of a matrix, among the points.
  std::optional<std::string> compute(ProductChain& chain, const std::string& buffer, const std::vector<Expr>& index) {
    const size_t maker = graph.writers(buffer)[0];
    const Nest nest = peel(graph.nodes()[maker].body);
    const Store* store = nullptr;
    for (const auto& stmt : nest.body)
      if (const auto* s = std::get_if<Store>(&stmt->node); s && s->buffer == buffer) store = s;
    const auto axes = solve(nest.axes, store->index, index, ranges_of(chain));
    if (!axes) return std::nullopt;
    std::vector<Expr> key;
    for (const Axis& a : nest.axes) key.push_back(axes->at(a.name));
    chain.matrices.insert(buffer);
    auto made = std::find_if(chain.computed.begin(), chain.computed.end(), [&](const auto& c) { return c.maker == maker && c.axes == key; });
    if (made == chain.computed.end()) {
      std::map<std::string, std::string> values;  // those of locals, too
      Renaming renaming;
      renaming.exprs = *axes;
      for (const auto& stmt : nest.body) {
        if (std::holds_alternative<Local>(stmt->node)) continue;
        const auto* load = std::get_if<Load>(&stmt->node);
        if (const auto* s = std::get_if<Store>(&stmt->node))
          values[s->buffer] = renaming.values.at(s->value);
        else if (load && values.count(load->buffer) > 0)
          renaming.value(load->name, chosen(chain, *load, values.at(load->buffer), renaming));
        else if (!copy(chain, stmt, renaming))
          return std::nullopt;
      }
      chain.computed.push_back({maker, std::move(key), std::move(values)});
      made = chain.computed.end() - 1;
    }
    return made->values.at(buffer);
  }

  Block body_of(const ProductChain& chain) const {
    Block points = chain.points;
    points.insert(points.end(), chain.stores.begin(), chain.stores.end());
    Block body = chain.locals;
    for (auto& stmt : make_nest(chain.keys, std::move(points))) body.push_back(std::move(stmt));
    body.insert(body.end(), chain.columns.begin(), chain.columns.end());
    return clean(make_nest(chain.outer, std::move(body)), symbols());
  }

  /// Whether the target multiplies it as one, and what it reads is less than the matrices that it computes.
  bool is_worth(const ProductChain& chain) {
    Kernel kernel;
    kernel.symbols = symbols();
    kernel.body = body_of(chain);
    kernel.params = make_params(kernel.body, [&](const std::string& name) { return &graph.buffer(name); });
    double read = 0;
    double matrices = 0;
    for (const Param& p : kernel.params) {
      if (p.kind == ParamKind::inout || (p.kind == ParamKind::in && graph.is_versioned(p.name))) return false;
      if (p.kind == ParamKind::in) read += bytes(p.name);
    }
    for (const std::string& name : chain.matrices) matrices += bytes(name);
    return matrices > read && target_of(context).chains(kernel, context);
  }

  // ---- joining -------------------------------------------------------------------------------------------------------

  /// The chain with another reader that sums over the same matrices at the same places.
  std::optional<ProductChain> joined(const ProductChain& chain, size_t at) {
    for (size_t other : chain.readers)
      if (graph.reaches(other, at) || graph.reaches(at, other)) return std::nullopt;
    const auto first = read(graph.nodes()[at].body);
    if (!first || first->outer.size() != chain.outer.size() || first->reduce->axes.size() != chain.keys.size()) return std::nullopt;
    std::optional<ProductChain> found;
    for_orders(first->outer, chain.outer, [&](const std::vector<Axis>& outer) {
      for_orders(first->reduce->axes, chain.keys, [&](const std::vector<Axis>& keys) {
        if (found) return;
        ProductChain made = chain;
        Renaming renaming;
        for (size_t a = 0; a < outer.size(); ++a) renaming.value(outer[a].name, chain.outer[a].name);
        const Nest nest = peel(graph.nodes()[at].body);
        Block body = copy_block(make_nest({first->column}, nest.body), renaming, &made.names);
        const auto reader = read(make_nest(chain.outer, std::move(body)));
        if (!reader || !same_names(reader->rows, chain.rows)) return;
        std::vector<Axis> own;
        for (const Axis& key : keys)
          for (size_t k = 0; k < keys.size(); ++k)
            if (first->reduce->axes[k].name == key.name) own.push_back(reader->reduce->axes[k]);
        if (add(made, at, *reader, own) && made.computed.size() == chain.computed.size()) found = std::move(made);
      });
    });
    return found;
  }

  /// Whether kernels that are joined already come both before and behind those of this chain.
  bool makes_circle(const std::vector<ProductChain>& kept, const ProductChain& chain) {
    const auto reaches = [&](const ProductChain& from, const ProductChain& to) {
      return std::any_of(from.readers.begin(), from.readers.end(), [&](size_t a) {
        return std::any_of(to.readers.begin(), to.readers.end(), [&](size_t b) { return a != b && graph.reaches(a, b); });
      });
    };
    std::vector<const ProductChain*> behind{&chain};
    std::set<const ProductChain*> seen;
    while (!behind.empty()) {
      const ProductChain* from = behind.back();
      behind.pop_back();
      for (const ProductChain& to : kept) {
        const bool own = std::find(chain.readers.begin(), chain.readers.end(), to.readers[0]) != chain.readers.end();
        if (own || to.readers.size() < 2 || seen.count(&to) > 0 || !reaches(*from, to)) continue;
        if (reaches(to, chain)) return true;
        seen.insert(&to);
        behind.push_back(&to);
      }
    }
    return false;
  }

  static bool same_names(const std::vector<Axis>& a, const std::vector<Axis>& b) {
    return std::is_permutation(a.begin(), a.end(), b.begin(), b.end());
  }

  /// Calls f on each order of `axes` in which they are as long as `like`.
  template <class F>
  static void for_orders(const std::vector<Axis>& axes, const std::vector<Axis>& like, const F& f) {
    std::vector<size_t> order(axes.size());
    std::iota(order.begin(), order.end(), 0);
    do {
      std::vector<Axis> made;
      for (size_t a : order) made.push_back(axes[a]);
      if (std::equal(made.begin(), made.end(), like.begin(), like.end(), [](const Axis& a, const Axis& b) { return a.extent == b.extent; })) f(made);
    } while (std::next_permutation(order.begin(), order.end()));
  }

  /// Chains whose matrices nothing else reads; those that share some stand and fall together.
  void keep_closed(std::vector<ProductChain>& chains) {
    for (bool changed = true; changed;) {
      changed = false;
      std::set<size_t> reading;
      std::set<std::string> matrices;
      for (const ProductChain& chain : chains) {
        reading.insert(chain.readers.begin(), chain.readers.end());
        matrices.insert(chain.matrices.begin(), chain.matrices.end());
      }
      const auto vanishes = [&](const std::string& matrix) {
        const size_t maker = graph.writers(matrix)[0];
        const auto& written = graph.nodes()[maker].writes;
        return std::all_of(written.begin(), written.end(), [&](const std::string& b) {
          const auto& readers = graph.readers(b);
          return matrices.count(b) > 0 && std::all_of(readers.begin(), readers.end(), [&](size_t r) {
                   const auto& makes = graph.nodes()[r].writes;
                   return reading.count(r) > 0 || std::all_of(makes.begin(), makes.end(), [&](const auto& m) { return matrices.count(m) > 0; });
                 });
        });
      };
      for (size_t c = 0; c < chains.size(); ++c) {
        const auto& own = chains[c].matrices;
        if (std::all_of(own.begin(), own.end(), vanishes)) continue;
        chains.erase(chains.begin() + static_cast<std::ptrdiff_t>(c));
        changed = true;
        break;
      }
    }
  }

  void replace(const ProductChain& chain) {
    const size_t into = chain.readers[0];
    Block body = body_of(chain);
    for (const ProductChain::Computed& c : chain.computed) graph.merge_provenance(c.maker, into, true);
    for (size_t r = 1; r < chain.readers.size(); ++r) {
      graph.inherit_order(chain.readers[r], into);
      graph.merge_provenance(chain.readers[r], into, false);
      graph.join(chain.readers[r], into, body);
    }
    graph.set_body(into, std::move(body));
  }

  Module run() {
    is_static = graph.static_nodes();
    std::vector<ProductChain> chains;
    for (size_t at = 0; at < graph.nodes().size(); ++at) {
      if (!is_kernel(at)) continue;
      auto chain = start(at);
      if (chain && is_worth(*chain)) chains.push_back(std::move(*chain));
    }
    keep_closed(chains);
    if (chains.empty()) return graph.finish();
    std::vector<ProductChain> kept;
    for (ProductChain& chain : chains) {
      const bool together = std::any_of(kept.begin(), kept.end(), [&](ProductChain& earlier) {
        auto both = joined(earlier, chain.readers[0]);
        if (!both || makes_circle(kept, *both) || !is_worth(*both)) return false;
        earlier = std::move(*both);
        return true;
      });
      if (!together) kept.push_back(std::move(chain));
    }
    for (const ProductChain& chain : kept) replace(chain);
    graph.remove_dead();
    return graph.finish();
  }
};

}  // namespace

Module chain_products(Module module, const PassContext& context) {
  if (!target_of(context).has_grid) return module;
  return Chainer{ProgramGraph(std::move(module)), context}.run();
}

}  // namespace deplo
