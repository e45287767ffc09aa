#include "passes/loop/chain_windows.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "loop_ir/places.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;

/// Kernels that become one, the last one first.
struct WindowChain {
  std::vector<size_t> nodes;
  Block body;
};

struct Joiner {
  ProgramGraph graph;
  const PassContext& context;
  std::vector<bool> is_static{};

  /// A nest of points, with sums of points at most.
  bool is_points(size_t at) {
    const auto& node = graph.nodes()[at];
    if (!node.alive || !node.is_kernel || node.once || !node.updated.empty() || is_static[at]) return false;
    const Nest nest = peel(node.body);
    return !nest.axes.empty() && std::all_of(nest.body.begin(), nest.body.end(), [](const auto& stmt) {
      if (const auto* store = std::get_if<Store>(&stmt->node)) return store->combiner == Combiner::set;
      const auto* reduce = std::get_if<Reduce>(&stmt->node);
      return is_straight(*stmt) || (reduce && std::all_of(reduce->body.begin(), reduce->body.end(), [](const auto& s) { return is_straight(*s); }));
    });
  }

  /// The kernel whose result is this buffer, which only kernels of the chain read.
  std::optional<size_t> maker_of(const std::string& buffer, const WindowChain& chain) {
    if (!graph.find_buffer(buffer) || !graph.is_private(buffer) || graph.is_versioned(buffer)) return std::nullopt;
    const auto& writers = graph.writers(buffer);
    if (writers.size() != 1 || graph.nodes()[writers[0]].writes.size() != 1 || !is_points(writers[0])) return std::nullopt;
    const auto& readers = graph.readers(buffer);
    const bool own = readers.size() == 1 && std::find(chain.nodes.begin(), chain.nodes.end(), *readers.begin()) != chain.nodes.end();
    return own ? std::optional(writers[0]) : std::nullopt;
  }

  /// Whether it is read at more than one place for a point.
  bool reads_neighbours(size_t reader, const std::string& buffer) {
    const Block& body = graph.nodes()[reader].body;
    const size_t points = peel(body).axes.size();
    std::vector<Expr> place;
    bool found = false;
    visit(body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      const auto* load = std::get_if<Load>(&stmt.node);
      if (!load || load->buffer != buffer) return;
      found = found || (!place.empty() && place != load->index);
      place = load->index;
      for (size_t k = points; k < loops.size(); ++k)
        found = found || std::any_of(place.begin(), place.end(), [&](Expr e) { return uses(e, loops[k].name); });
    });
    return found;
  }

  // ---- the nest ------------------------------------------------------------------------------------------------------

  /// A kernel of the chain, under names of its own.
  struct Part {
    Nest nest;
    std::string array;                          ///< that it makes; empty: the results
    std::vector<size_t> dims;                   ///< of the buffer, those that are dimensions of the array
    std::map<std::string, std::string> shared;  ///< its axes by those of the last one
  };

  /// Dimensions in the order of memory, without those of one element.
  std::vector<size_t> dims_of(const Part& part, const std::string& buffer) {
    const Buffer& b = graph.buffer(buffer);
    const Store* store = nullptr;
    for (const auto& stmt : part.nest.body)
      if (const auto* s = std::get_if<Store>(&stmt->node)) store = s;
    std::vector<size_t> dims;
    for (size_t d = 0; d < store->index.size(); ++d)
      if (store->index[d].is_symbol()) dims.push_back(d);
    const bool constant = std::all_of(dims.begin(), dims.end(), [&](size_t d) { return b.strides[d].is_constant(); });
    if (constant) std::stable_sort(dims.begin(), dims.end(), [&](size_t x, size_t y) { return b.strides[x].value() > b.strides[y].value(); });
    return dims;
  }

  /// Nests of the chain's kernels, in order; nothing where one of them does not store a point an iteration.
  std::optional<std::vector<Part>> parts_of(const WindowChain& chain, Names& names) {
    std::vector<Part> parts;
    for (size_t k = chain.nodes.size(); k-- > 0;) {
      const auto& node = graph.nodes()[chain.nodes[k]];
      Part part;
      part.nest = peel(copy_block(node.body, {}, &names));
      if (k > 0) {
        part.array = *node.writes.begin();
        const auto is_store = [](const auto& stmt) { return std::holds_alternative<Store>(stmt->node); };
        if (std::count_if(part.nest.body.begin(), part.nest.body.end(), is_store) != 1) return std::nullopt;
        const auto& store = std::get<Store>((*std::find_if(part.nest.body.begin(), part.nest.body.end(), is_store))->node);
        std::vector<Expr> places;
        for (Expr e : store.index) {
          if (!e.is_symbol() && !e.is(0)) return std::nullopt;
          if (e.is_symbol()) places.push_back(e);
        }
        if (!store.guard.empty() || places.size() != part.nest.axes.size() || !one_place_each(places, part.nest.axes)) return std::nullopt;
        part.dims = dims_of(part, part.array);
      }
      parts.push_back(std::move(part));
    }
    return parts;
  }

  /// Axes of all parts that stand for the same axis of the last one: along which a reader reads what the same iteration made.
  void find_shared(std::vector<Part>& parts) {
    for (const Axis& a : parts.back().nest.axes) parts.back().shared[a.name] = a.name;
    for (size_t p = parts.size() - 1; p-- > 0;) {
      Part& maker = parts[p];
      const auto stored =
          std::find_if(maker.nest.body.begin(), maker.nest.body.end(), [](const auto& s) { return std::holds_alternative<Store>(s->node); });
      const std::vector<Expr>& made = std::get<Store>((*stored)->node).index;
      for (size_t q = p + 1; q < parts.size(); ++q) {
        const Part& reader = parts[q];
        std::vector<std::vector<Expr>> places;
        visit(reader.nest.body, [&](const Stmt& stmt, const auto&) {
          if (const auto* load = std::get_if<Load>(&stmt.node); load && load->buffer == maker.array) places.push_back(load->index);
        });
        if (places.empty()) continue;
        for (size_t d : maker.dims) {
          const Expr first = places[0][d];
          if (!first.is_symbol() || std::any_of(places.begin(), places.end(), [&](const auto& place) { return place[d] != first; })) continue;
          const auto found = reader.shared.find(first.name());
          if (found == reader.shared.end() || extent_in(reader, first.name()) != extent_in(maker, made[d].name())) continue;
          const bool twice = std::any_of(maker.shared.begin(), maker.shared.end(), [&](const auto& s) { return s.second == found->second; });
          if (!twice) maker.shared[made[d].name()] = found->second;
        }
      }
    }
    for (const Axis& a : parts.back().nest.axes) {
      const bool all = std::all_of(parts.begin(), parts.end(), [&](const Part& part) {
        return std::any_of(part.shared.begin(), part.shared.end(), [&](const auto& s) { return s.second == a.name; });
      });
      if (all) continue;
      for (Part& part : parts) std::erase_if(part.shared, [&](const auto& s) { return s.second == a.name; });
    }
  }

  static Expr extent_in(const Part& part, const std::string& axis) {
    return std::find_if(part.nest.axes.begin(), part.nest.axes.end(), [&](const Axis& a) { return a.name == axis; })->extent;
  }

  /// All kernels of the chain as one body.
  std::optional<Block> body_of(const WindowChain& chain) {
    Names names;
    for (size_t at : chain.nodes) {
      Kernel kernel;
      kernel.symbols = graph.program().symbols;
      kernel.body = graph.nodes()[at].body;
      kernel.params = make_params(kernel.body, [&](const std::string& name) { return &graph.buffer(name); });
      names.reserve(kernel);
    }
    auto found = parts_of(chain, names);
    if (!found) return std::nullopt;
    std::vector<Part>& parts = *found;
    find_shared(parts);
    std::map<std::string, std::pair<std::string, std::vector<size_t>>> locals;  // name and dimensions, by the buffer
    Block body;
    for (Part& part : parts) {
      std::vector<Axis> own;
      Renaming renaming;
      for (const Axis& a : part.nest.axes) {
        const auto shared = part.shared.find(a.name);
        if (shared == part.shared.end())
          own.push_back(a);
        else
          renaming.value(a.name, shared->second);
      }
      if (own.empty()) return std::nullopt;
      if (!part.array.empty()) {
        const auto stored =
            std::find_if(part.nest.body.begin(), part.nest.body.end(), [](const auto& s) { return std::holds_alternative<Store>(s->node); });
        const auto& store = std::get<Store>((*stored)->node);
        std::erase_if(part.dims, [&](size_t d) { return part.shared.count(store.index[d].name()) > 0; });
        const Buffer& b = graph.buffer(part.array);
        Local local{names.fresh("near0"), b.dtype, {}};
        for (size_t d : part.dims) local.shape.push_back(b.shape[d]);
        locals[part.array] = {local.name, part.dims};
        body.push_back(make_stmt(std::move(local)));
      }
      Block inner = rewrite(part.nest.body, [&](const Ref<Stmt>& s) -> Block {
        const auto place = [&](std::string& buffer, std::vector<Expr>& index) {
          const auto local = locals.find(buffer);
          if (local == locals.end()) return false;
          std::vector<Expr> at;
          for (size_t d : local->second.second) at.push_back(index[d]);
          buffer = local->second.first;
          index = std::move(at);
          return true;
        };
        if (const auto* load = std::get_if<Load>(&s->node)) {
          Load moved = *load;
          if (place(moved.buffer, moved.index)) return {make_stmt(std::move(moved))};
        }
        if (const auto* store = std::get_if<Store>(&s->node)) {
          Store moved = *store;
          if (place(moved.buffer, moved.index)) return {make_stmt(std::move(moved))};
        }
        return {s};
      });
      for (auto& stmt : copy_block(make_nest(own, std::move(inner)), renaming, nullptr)) body.push_back(std::move(stmt));
    }
    std::vector<Axis> outer;
    for (const Axis& a : parts.back().nest.axes)
      if (parts.back().shared.count(a.name) > 0) outer.push_back(a);
    return make_nest(outer, std::move(body));
  }

  bool is_worth(const Block& body) {
    Kernel kernel;
    kernel.name = "chain";
    kernel.body = body;
    kernel.params = make_params(kernel.body, [&](const std::string& name) { return &graph.buffer(name); });
    kernel.symbols = used_symbols(kernel, graph.program().symbols);
    for (const Param& p : kernel.params)
      if (p.kind == ParamKind::inout || (p.kind == ParamKind::in && graph.is_versioned(p.name))) return false;
    return target_of(context).chains(kernel, context);
  }

  /// The chain with the kernel that makes what one of its kernels reads.
  bool grow(WindowChain& chain) {
    std::set<std::string> reads;
    for (size_t at : chain.nodes) reads.insert(graph.nodes()[at].reads.begin(), graph.nodes()[at].reads.end());
    for (const std::string& buffer : reads) {
      const auto maker = maker_of(buffer, chain);
      if (!maker || std::find(chain.nodes.begin(), chain.nodes.end(), *maker) != chain.nodes.end()) continue;
      if (!reads_neighbours(*graph.readers(buffer).begin(), buffer)) continue;
      WindowChain longer = chain;
      longer.nodes.push_back(*maker);
      auto body = body_of(longer);
      if (!body || count_statements(*body) > kMostStatements || !is_worth(*body)) continue;
      longer.body = std::move(*body);
      chain = std::move(longer);
      return true;
    }
    return false;
  }

  Module run() {
    is_static = graph.static_nodes();
    for (size_t at = graph.nodes().size(); at-- > 0;) {
      if (!is_points(at)) continue;
      WindowChain chain{{at}, {}};
      while (grow(chain)) {
      }
      if (chain.nodes.size() < 2) continue;
      for (size_t k = 1; k < chain.nodes.size(); ++k) {
        graph.inherit_order(chain.nodes[k], at);
        graph.merge_provenance(chain.nodes[k], at, true);
      }
      graph.set_body(at, std::move(chain.body));
      graph.remove_dead();
    }
    return graph.finish();
  }
};

}  // namespace

Module chain_windows(Module module, const PassContext& context) {
  if (!target_of(context).has_grid) return module;
  return Joiner{ProgramGraph(std::move(module)), context}.run();
}

}  // namespace deplo
