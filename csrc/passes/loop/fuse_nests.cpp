#include "passes/loop/fuse_nests.h"

#include <algorithm>
#include <functional>

#include "analysis/contraction.h"
#include "base/error.h"
#include "loop_ir/places.h"
#include "passes/loop/fusion_cost.h"
#include "passes/loop/fusion_shapes.h"
#include "passes/loop/keep_places.h"
#include "passes/loop/localize.h"
#include "passes/loop/own_places.h"
#include "passes/loop/program_graph.h"
#include "passes/loop/repeats.h"
#include "passes/loop/share_axes.h"
#include "passes/loop/split_axes.h"
#include "passes/loop/split_for_reader.h"
#include "passes/loop/split_index_set.h"
#include "passes/loop/tiled_products.h"
#include "target/target.h"

namespace deplo {
namespace {

using Group = FusionGroup;
using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Load;
using loop_ir::Stmt;
using loop_ir::Store;

constexpr size_t kSiblingsTried = 4;
constexpr double kSmallKernel = 4096;  ///< points below which a kernel without anything in common with another may still share its step
constexpr size_t kSmallTogether = 16;  ///< such kernels in one
constexpr size_t kMostPieces = 16;     ///< kernels that one falls apart into
constexpr double kStepBytes = 65536;   ///< bytes that move in the time that one more step takes

/// Two nests as they were before one of them was split.
struct Backup {
  NestGroup first;
  NestGroup second;
  loop_ir::Names names_of_first;
  loop_ir::Names names_of_second;
};

struct NestFuser {
  ProgramGraph graph;
  FusionCost cost;
  std::vector<Group> groups;
  std::vector<loop_ir::Names> names;
  std::vector<bool> is_static;       ///< runs once per program: never joins what runs at each call
  bool one_after_the_other = false;  ///< small nests may join that share no axis

  const PassContext& context;
  FusionShapes shapes;
  std::vector<FusionInstance> instances;                          ///< of the groups
  std::vector<std::set<std::string>> products;                    ///< results of contractions that a group is made of
  std::map<std::string, std::set<std::string>> rows_of_products;  ///< once all is fused: by a buffer that rows with products write
  const std::set<std::string>& apart;  ///< products that keep to kernels of their own, but for what goes on with each element

  NestFuser(loop_ir::Module module, const PassContext& options, const std::set<std::string>& products_apart)
      : graph(std::move(module)), cost(graph, options), context(options), shapes(graph), apart(products_apart) {}

  BufferOf buffers() const {
    return [this](const std::string& name) -> const Buffer& { return graph.buffer(name); };
  }

  void find_contractions(size_t at) {
    loop_ir::Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = loop_ir::make_nest(groups[at].nest.axes, groups[at].nest.body);
    groups[at].contractions = analysis::find_contractions(kernel);
    for (auto& c : groups[at].contractions) c.reduce = nullptr;  // it points into the copy above
    groups[at].contracts = !groups[at].contractions.empty();
  }

  // Makes the nest of a kernel that was only known by its shape.
  void realise(size_t at) {
    FusionInstance& instance = instances[at];
    if (!instance.pending) return;
    instance.pending = false;
    const FusionShape& shape = *instance.shape;
    groups[at].nest = {shape.group.nest.axes, loop_ir::rename_buffers(shape.group.nest.body, renaming(shape.buffers, instance.buffers))};
    names[at] = shape.names;
    if (shape.group.contracts) find_contractions(at);
  }

  // The kernel becomes one of a shape.
  void take(size_t at, FusionInstance instance) {
    const FusionGroup& group = instance.shape->group;
    groups[at].points = group.points;
    groups[at].statements = group.statements;
    groups[at].contracts = group.contracts;
    instances[at] = std::move(instance);
  }

  // The nest has changed by what only this kernel knows.
  void forget_shape(size_t at) {
    realise(at);
    instances[at] = {};
  }

  void share_shape(size_t at, std::shared_ptr<const FusionShape>& shape, std::vector<std::string> buffers) {
    shape = shapes.make(groups[at], names[at], is_pointwise(groups[at].nest), buffers);
    instances[at] = {shape, std::move(buffers), false};
    ++Repeats::made();
  }

  void start() {
    is_static = graph.static_nodes();
    groups.resize(graph.nodes().size());
    names.resize(groups.size());
    instances.resize(groups.size());
    products.resize(groups.size());
    for (size_t at = 0; at < groups.size(); ++at) {
      auto& node = graph.nodes()[at];
      Group& g = groups[at];
      g.fixed = !node.is_kernel || node.once;
      if (!node.is_kernel) continue;
      std::vector<std::string> numbered;
      std::shared_ptr<const FusionShape>* shape = nullptr;
      if (Repeats::are_shared(context) && !g.fixed && node.updated.empty() && !writes_versions(at)) {
        shape = &shapes.shape(shapes.key_of(node.body, numbered));
        if (*shape) {
          take(at, {*shape, std::move(numbered), true});
          const NestGroup& nest = (*shape)->group.nest;
          graph.set_body(at, loop_ir::rename_buffers(loop_ir::make_nest(nest.axes, nest.body), renaming((*shape)->buffers, instances[at].buffers)));
          note_products(at);
          continue;
        }
      }
      loop_ir::Nest nest = loop_ir::peel(loop_ir::clean(node.body, graph.program().symbols));
      g.nest = {nest.axes, nest.body};
      for (const std::string& b : node.writes)
        if (graph.is_versioned(b) || node.updated.count(b)) g.fixed = g.fixed || !overwrites(g.nest, b);
      if (!g.fixed) node.updated.clear();
      loop_ir::Kernel kernel;
      kernel.symbols = graph.program().symbols;
      kernel.body = node.body;
      names[at].reserve(kernel);
      graph.set_body(at, loop_ir::make_nest(g.nest.axes, g.nest.body));
      g.points = cost.points_of(graph.nodes()[at].body);
      g.statements = loop_ir::count_statements(graph.nodes()[at].body);
      find_contractions(at);
      note_products(at);
      if (shape) share_shape(at, *shape, std::move(numbered));
    }
  }

  void note_products(size_t at) {
    const auto& writes = graph.nodes()[at].writes;
    if (groups[at].contracts) products[at].insert(writes.begin(), writes.end());
  }

  bool stays_apart(size_t at) const {
    return std::any_of(products[at].begin(), products[at].end(), [&](const std::string& b) { return apart.count(b) > 0; });
  }

  // The kernel replaces all of an input that no other one writes, element by element.
  bool overwrites(const NestGroup& nest, const std::string& b) {
    return graph.buffer(b).kind == BufferKind::input && graph.writers(b).size() == 1 &&
           replaces_all(nest, b, graph.buffer(b).shape, graph.program().symbols);
  }

  // Inputs that one of the two overwrites and the other touches: their loads come first in an iteration only if it touches what others do not.
  bool meets_in_place(size_t first, size_t second, const NestGroup& joined) {
    for (size_t writer : {first, second}) {
      const auto& other = graph.nodes()[writer == first ? second : first];
      for (const std::string& b : graph.nodes()[writer].writes) {
        if (!graph.is_versioned(b) || (!other.reads.count(b) && !other.writes.count(b))) continue;
        if (!touches_one_place(joined, b) || !has_own_places(joined, b)) return false;
      }
    }
    return true;
  }

  bool writes_versions(size_t at) {
    const auto& writes = graph.nodes()[at].writes;
    return std::any_of(writes.begin(), writes.end(), [&](const std::string& b) { return graph.is_versioned(b); });
  }

  // Buffers that `second` reads and `first` writes.
  std::set<std::string> flows(size_t first, size_t second) {
    std::set<std::string> result;
    for (const std::string& b : graph.nodes()[first].writes)
      if (graph.nodes()[second].reads.count(b)) result.insert(b);
    return result;
  }

  bool too_large(size_t first, size_t second) const { return groups[first].statements + groups[second].statements > kMostStatements; }

  bool try_fuse(size_t first, size_t second, bool by_input) {
    Group& a = groups[first];
    Group& b = groups[second];
    if (is_static[first] != is_static[second]) return false;
    if (first == second || a.fixed || b.fixed || !graph.nodes()[first].alive || !graph.nodes()[second].alive) return false;
    if (too_large(first, second)) return false;
    std::set<std::string> flow = flows(first, second);
    if (std::any_of(flow.begin(), flow.end(), [&](const auto& b) { return graph.writers(b).size() > 1; })) return false;
    if (by_input && (!flow.empty() || !flows(second, first).empty())) return false;
    if (!instances[first].shape || !instances[second].shape || writes_versions(first) || writes_versions(second) || stays_apart(first) ||
        stays_apart(second))
      return attempt(first, second, by_input, flow, nullptr);
    const std::string key = shapes.key_of(first, instances[first], second, instances[second], flow, by_input, one_after_the_other);
    FusionTrial& trial = shapes.trial(shapes.trial(key).asks_readers ? key + what_readers_say(first, second) : key);
    if (!trial.tried || (trial.profitable && !trial.joined)) return attempt(first, second, by_input, flow, &trial);
    if (!trial.profitable || !may_join(first, second)) return false;
    std::vector<std::string> all = FusionShapes::joined(instances[first], instances[second]);
    adopt(first, second, {});
    take(second, {trial.joined, std::move(all), true});
    return true;
  }

  std::string what_readers_say(size_t first, size_t second) {
    realise(first);
    realise(second);
    return fmt::format("{:d}{:d}", leaves_tiles(first, second), has_epilogue(second));
  }

  // Fuses the two if that is profitable and possible; notes in `trial` what came of it.
  bool attempt(size_t first, size_t second, bool by_input, const std::set<std::string>& flow, FusionTrial* trial) {
    realise(first);
    realise(second);
    Group& a = groups[first];
    Group& b = groups[second];
    auto join_noted = [&](const AxisPairs& pairs) {
      if (trial) trial->profitable = true;
      if (!may_join(first, second)) return false;
      std::vector<std::string> all = trial ? FusionShapes::joined(instances[first], instances[second]) : std::vector<std::string>();
      if (!join_groups(first, second, pairs)) return false;
      instances[second] = {};
      if (trial) share_shape(second, trial->joined, std::move(all));
      return true;
    };
    if (trial) trial->tried = true;
    if (trial) trial->asks_readers = cost.scores_on_grid(a, b) || (!b.contractions.empty() && cost.weighs(a, b));
    if (by_input) {
      AxisPairs pairs = siblings(first, second);
      return !pairs.empty() && join_noted(pairs);
    }
    auto pairs = shared_by_dependence(a.nest, b.nest, flow);
    std::optional<Backup> backup;
    auto shares_all = [&] { return pairs && covers(*pairs, b.nest); };
    if (!shares_all()) {
      backup = Backup{a.nest, b.nest, names[first], names[second]};  // splits change a nest
      split_as(first, second, flow, pairs);
      if (!shares_all()) split_for(first, second, flow, pairs);
    }
    const bool may = pairs && (!(stays_apart(first) || stays_apart(second)) || (covers(*pairs, a.nest) && covers(*pairs, b.nest)));
    const bool wanted = may && !leaves_tiles(first, second) && cost.profitable(a, b, *pairs, flow, names[first], one_after_the_other);
    if (wanted && join_noted(*pairs)) return true;
    if (backup) {
      a.nest = std::move(backup->first);
      b.nest = std::move(backup->second);
      names[first] = std::move(backup->names_of_first);
      names[second] = std::move(backup->names_of_second);
    }
    return false;
  }

  // Nothing must run between the two.
  bool may_join(size_t first, size_t second) {
    if (graph.reaches(first, second, true) || graph.reaches(second, first)) return false;
    const auto& later = graph.overwriters(first);
    return std::none_of(later.begin(), later.end(), [&](size_t w) { return graph.reaches(w, second); });
  }

  // False, and nothing has changed, if the two would meet in what one of them overwrites.
  bool join_groups(size_t first, size_t second, const AxisPairs& pairs) {
    Group& a = groups[first];
    Group& b = groups[second];
    std::optional<loop_ir::Names> taken;
    if (writes_versions(first) || writes_versions(second)) taken = names[first];
    NestGroup joined = join(a.nest, b.nest, pairs, names[first]);
    if (taken && !meets_in_place(first, second, joined)) {
      names[first] = std::move(*taken);
      return false;
    }
    b.nest = std::move(joined);
    names[second] = std::move(names[first]);
    bool contracts = !a.contractions.empty() || !b.contractions.empty();
    b.points = std::max(a.points, b.points);
    b.statements += a.statements;
    adopt(first, second, loop_ir::make_nest(b.nest.axes, b.nest.body));
    if (contracts) find_contractions(second);
    return true;
  }

  // In the graph, `second` holds what `first` did, too.
  void adopt(size_t first, size_t second, Block body) {
    products[second].merge(products[first]);
    graph.inherit_order(first, second);
    graph.merge_provenance(first, second, true);
    graph.join(first, second, std::move(body));
  }

  // What is shared lies around the rest: memory runs along what stays inside.
  static bool shares_outermost(const AxisPairs& pairs, const NestGroup& nest) {
    return std::all_of(nest.axes.begin(), nest.axes.begin() + static_cast<std::ptrdiff_t>(pairs.size()), [&](const Axis& axis) {
      return std::any_of(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.second == axis.name; });
    });
  }

  // Whether memory runs along an axis of fewer points than a vector has: lanes of a contraction would store each element by itself (the phases of a
  // transposed convolution), which a nest that puts them together does not.
  bool stores_short_runs(const NestGroup& nest) const {
    return std::any_of(nest.body.begin(), nest.body.end(), [&](const auto& stmt) {
      const auto* store = std::get_if<loop_ir::Store>(&stmt->node);
      if (!store) return false;
      Expr at = 0;
      for (size_t d = 0; d < store->index.size(); ++d) at = at + store->index[d] * graph.buffer(store->buffer).strides[d];
      return std::any_of(nest.axes.begin(), nest.axes.end(), [&](const Axis& axis) {
        const auto along = linear_coefficient(at, axis.name);
        return along && along->is(1) && loop_ir::is_short(axis);
      });
    });
  }

  // Scores would leave their tiles for a softmax whose weights no product takes from its rows: a block of a grid multiplies rows for attention alone.
  bool leaves_tiles(size_t first, size_t second) {
    if (!cost.scores_on_grid(groups[first], groups[second])) return false;
    double scores = 0;
    for (const std::string& b : graph.nodes()[first].writes) scores = std::max(scores, cost.elements(b));
    std::set<size_t> seen;
    std::vector<size_t> open{second};
    bool weighs = false;
    while (!open.empty()) {
      const size_t at = open.back();
      open.pop_back();
      if (!seen.insert(at).second) continue;
      for (const std::string& b : graph.nodes()[at].writes) {
        if (cost.elements(b) < scores) continue;
        if (!graph.is_private(b)) return true;
        for (size_t reader : graph.readers(b)) {
          weighs = weighs || groups[reader].contracts;
          if (!groups[reader].contracts) open.push_back(reader);
        }
      }
    }
    return !weighs;
  }

  // Whether what reads its result goes on with each element: it joins first, while both have the same axes.
  bool has_epilogue(size_t at) {
    const auto& writes = graph.nodes()[at].writes;
    return std::any_of(writes.begin(), writes.end(), [&](const std::string& b) {
      if (!graph.is_private(b) || graph.readers(b).size() != 1) return false;
      const size_t reader = *graph.readers(b).begin();
      if (reader == at || groups[reader].fixed || groups[reader].contracts) return false;
      realise(reader);
      const auto pairs = shared_by_dependence(groups[at].nest, groups[reader].nest, {b});
      return pairs && covers(*pairs, groups[at].nest) && covers(*pairs, groups[reader].nest);
    });
  }

  // What follows a contraction may see two of its axes as one (groups of a convolution): split as the contraction has them, all are shared. What
  // follows sums over groups of channels so shares the groups, and values that a softmax weighs its heads.
  void split_as(size_t first, size_t second, const std::set<std::string>& flow, std::optional<AxisPairs>& pairs) {
    Group& b = groups[second];
    const bool weighs = cost.weighs(groups[first], b);
    const bool sums = groups[first].contractions.empty() || weighs;
    if (!b.contractions.empty() && (!weighs || has_epilogue(second))) return;
    if (sums && (groups[first].nest.axes.empty() || (pairs && covers(*pairs, groups[first].nest)))) return;
    loop_ir::Names taken = names[second];
    loop_ir::Nest nest = loop_ir::peel(split_axes_of(loop_ir::make_nest(b.nest.axes, b.nest.body), graph.program().symbols, taken));
    NestGroup split{nest.axes, nest.body};
    auto found = shared_by_dependence(groups[first].nest, split, flow);
    if (!found || !covers(*found, groups[first].nest) || (sums ? !shares_outermost(*found, split) : !covers(*found, split))) return;
    if (!sums && split.axes.size() > b.nest.axes.size() && stores_short_runs(split)) return;
    b.nest = std::move(split);
    names[second] = std::move(taken);
    pairs = std::move(found);
  }

  // What follows a contraction may see one of its axes as several (the rows of a batch of sequences, the heads of a layer): split as the reader
  // has them, all are shared.
  void split_for(size_t first, size_t second, const std::set<std::string>& flow, std::optional<AxisPairs>& pairs) {
    Group& a = groups[first];
    const Group& b = groups[second];
    if (!b.contractions.empty() || (a.contractions.empty() && !cost.multiplies_heads(a.nest))) return;
    loop_ir::Names taken = names[first];
    auto split = split_for_reader(a.nest, a.contractions, b.nest, flow, buffers(), graph.program().symbols, taken);
    if (!split) return;
    auto found = shared_by_dependence(*split, b.nest, flow);
    if (!found || !covers(*found, *split) || !covers(*found, b.nest)) return;
    a.nest = std::move(*split);
    names[first] = std::move(taken);
    pairs = std::move(found);
  }

  // A contraction that can take what a part of its reader does with its result as an epilogue.
  bool takes(size_t first, const NestGroup& nest, const NestGroup& part, size_t second, const std::string& flow) {
    const Ranges& symbols = graph.program().symbols;
    auto all = [&](const NestGroup& a, const NestGroup& b) {
      auto pairs = shared_by_dependence(a, b, {flow});
      return pairs && covers(*pairs, a) && covers(*pairs, b);
    };
    if (!may_join(first, second)) return false;
    if (all(nest, part)) return true;
    loop_ir::Names scratch = names[first];
    auto split = split_for_reader(nest, groups[first].contractions, part, {flow}, buffers(), symbols, scratch);
    if (split && all(*split, part)) return true;
    scratch = names[second];
    loop_ir::Nest apart = loop_ir::peel(split_axes_of(loop_ir::make_nest(part.axes, part.body), symbols, scratch));
    return all(nest, {apart.axes, apart.body});
  }

  /// What a contraction hands to one part of its reader alone.
  struct Handover {
    size_t from = 0;
    std::string buffer;
    NestGroup nest;  ///< of the contraction, cut to what the part reads
  };
  std::optional<Handover> handover(size_t at, const std::vector<NestGroup>& parts, const NestGroup& part) {
    auto reads = [](const NestGroup& nest, const std::string& b) {
      bool read = false;
      loop_ir::visit(nest.body, [&](const Stmt& stmt, const auto&) {
        const auto* load = std::get_if<Load>(&stmt.node);
        read = read || (load && load->buffer == b);
      });
      return read;
    };
    std::optional<Handover> best;
    realise(at);
    for (const std::string& b : graph.nodes()[at].reads) {
      if (!graph.is_private(b) || graph.readers(b).size() != 1 || (best && cost.bytes(b) <= cost.bytes(best->buffer)) || !reads(part, b)) continue;
      if (std::count_if(parts.begin(), parts.end(), [&](const NestGroup& p) { return reads(p, b); }) > 1) continue;
      const size_t w = graph.writers(b)[0];
      if (w == at || !groups[w].contracts || groups[w].fixed || is_static[w]) continue;
      realise(w);
      NestGroup nest = cut_to_reader(groups[w].nest, part, b, graph.program().symbols);
      if (takes(w, nest, part, at, b)) best = Handover{w, b, std::move(nest)};
    }
    return best;
  }

  bool stores_each_element_once(size_t at) {
    const auto& writes = graph.nodes()[at].writes;
    realise(at);
    return is_pointwise(groups[at].nest) && std::all_of(writes.begin(), writes.end(), [&](const std::string& b) {
             return !graph.is_versioned(b) && replaces_all(groups[at].nest, b, graph.buffer(b).shape, graph.program().symbols);
           });
  }

  // What puts together the results of contractions (a concatenation, a padding) falls apart, so that each of them
  // stores its own part.
  void split_parts(size_t at) {
    if (groups[at].fixed || is_static[at] || groups[at].contracts) return;
    const auto& reads = graph.nodes()[at].reads;
    if (std::none_of(reads.begin(), reads.end(),
                     [&](const auto& b) { return graph.is_private(b) && groups[graph.writers(b)[0]].contracts && graph.readers(b).size() == 1; }))
      return;
    if (!stores_each_element_once(at)) return;
    std::vector<NestGroup> parts = split_index_set(groups[at].nest, graph.program().symbols, kMostPieces);
    if (parts.size() < 2) return;
    std::vector<Handover> handovers;
    double saved = 0;
    for (const NestGroup& part : parts) {
      auto found = handover(at, parts, part);
      if (!found) continue;
      saved += 2 * cost.bytes(found->buffer);
      handovers.push_back(std::move(*found));
    }
    const size_t more_steps = std::max(parts.size() - handovers.size(), size_t{1}) - 1;
    if (saved <= static_cast<double>(more_steps) * kStepBytes) return;
    for (Handover& h : handovers) {
      graph.set_body(h.from, loop_ir::clean(loop_ir::make_nest(h.nest.axes, h.nest.body), graph.program().symbols));
      loop_ir::Nest nest = loop_ir::peel(graph.nodes()[h.from].body);
      forget_shape(h.from);
      groups[h.from].nest = {nest.axes, nest.body};
      find_contractions(h.from);
    }
    std::vector<Block> bodies;
    for (const NestGroup& part : parts) bodies.push_back(loop_ir::make_nest(part.axes, part.body));
    graph.split(at, bodies);
    for (NestGroup& part : parts) {
      Group g;
      const Block& body = bodies[static_cast<size_t>(&part - parts.data())];
      g.points = cost.points_of(body);
      g.statements = loop_ir::count_statements(body);
      g.nest = std::move(part);
      groups.push_back(std::move(g));
      names.push_back(names[at]);
      is_static.push_back(false);
      instances.emplace_back();
      products.emplace_back();
    }
  }

  // Nests that read the same large input at the same places, and share all their axes.
  AxisPairs siblings(size_t first, size_t second) {
    const Group& a = groups[first];
    const Group& b = groups[second];
    if (!a.contractions.empty() || !b.contractions.empty()) return {};
    std::set<std::string> common;
    double common_bytes = 0;
    double all_bytes = 0;
    for (const std::string& name : graph.nodes()[second].reads) {
      all_bytes += cost.bytes(name);
      if (!graph.nodes()[first].reads.count(name)) continue;
      common.insert(name);
      common_bytes += cost.bytes(name);
    }
    if (common_bytes * 4 < all_bytes) return {};
    AxisPairs pairs = shared_by_input(a.nest, b.nest, common);
    if (!covers(pairs, a.nest) || !covers(pairs, b.nest)) return {};
    return pairs;
  }

  void fuse_into(size_t at) {
    bool progress = true;
    while (progress) {
      progress = false;
      // The largest flow first: what it saves is most.
      std::vector<std::pair<double, size_t>> producers;
      for (const std::string& b : graph.nodes()[at].reads)
        for (size_t w : graph.writers(b))
          if (w != at) producers.emplace_back(-cost.bytes(b), w);
      std::sort(producers.begin(), producers.end());
      for (const auto& [weight, w] : producers)
        if (try_fuse(w, at, false)) {
          progress = true;
          break;
        }
    }
  }

  void fuse_siblings(size_t at) {
    std::set<size_t> tried;
    std::vector<std::string> reads(graph.nodes()[at].reads.begin(), graph.nodes()[at].reads.end());
    std::sort(reads.begin(), reads.end(), [&](const auto& x, const auto& y) { return cost.bytes(x) > cost.bytes(y); });
    for (const std::string& b : reads) {
      FlatSet<size_t> others = graph.readers(b);
      for (size_t other : others) {
        if (other >= at || too_large(other, at) || tried.size() >= kSiblingsTried || !tried.insert(other).second) continue;
        try_fuse(other, at, true);
      }
    }
  }

  // How many steps must run before this one, one after the other. Steps with equal numbers are independent.
  std::vector<size_t> find_depths() {
    std::vector<size_t> depths(graph.nodes().size(), 0);
    std::vector<bool> done(graph.nodes().size(), false);
    std::function<size_t(size_t)> depth = [&](size_t at) {
      if (done[at]) return depths[at];
      done[at] = true;
      for (size_t p : graph.predecessors(at))
        if (graph.nodes()[p].alive) depths[at] = std::max(depths[at], depth(p) + 1);
      return depths[at];
    };
    for (size_t at = 0; at < groups.size(); ++at)
      if (graph.nodes()[at].alive) depth(at);
    return depths;
  }

  // Small pointwise kernels that have nothing in common: the step costs more than the work. One thread runs them one after the other.
  void fuse_small() {
    std::vector<size_t> depths = find_depths();
    std::map<size_t, size_t> open;  // by depth
    for (size_t at = 0; at < groups.size(); ++at) {
      Group& g = groups[at];
      if (!graph.nodes()[at].alive || g.fixed || is_static[at] || g.points > kSmallKernel || g.contracts) continue;
      if (instances[at].shape ? !instances[at].shape->is_pointwise : !is_pointwise(g.nest)) continue;
      auto [it, fresh] = open.try_emplace(depths[at], at);
      if (fresh) continue;
      size_t first = it->second;
      it->second = at;
      if (groups[first].small + g.small > kSmallTogether) continue;
      forget_shape(first);
      forget_shape(at);
      g.nest = join(groups[first].nest, g.nest, {}, names[first]);
      g.points += groups[first].points;
      g.statements += groups[first].statements;
      g.small += groups[first].small;
      names[at] = std::move(names[first]);
      adopt(first, at, loop_ir::make_nest(g.nest.axes, g.nest.body));
    }
  }

  static bool is_pointwise(const NestGroup& nest) {
    bool plain = true;
    loop_ir::visit(nest.body, [&](const Stmt& stmt, const auto&) {
      plain = plain && (std::holds_alternative<Load>(stmt.node) || std::holds_alternative<Store>(stmt.node) ||
                        std::holds_alternative<loop_ir::Let>(stmt.node) || std::holds_alternative<loop_ir::For>(stmt.node));
    });
    return plain;
  }

  loop_ir::Module run() {
    start();
    // What shares no axis with its reader hides the axes that others could share: it comes last.
    for (bool apart : {false, true}) {
      one_after_the_other = apart;
      for (size_t at = 0; at < groups.size(); ++at) {
        if (!graph.nodes()[at].alive || groups[at].fixed) continue;
        split_parts(at);
        if (graph.nodes()[at].alive) fuse_into(at);
      }
      for (size_t at = 0; at < groups.size(); ++at)
        if (graph.nodes()[at].alive && !groups[at].fixed) fuse_siblings(at);
    }
    fuse_small();
    localize_all();
    find_rows_of_products();
    return graph.finish();
  }

  void find_rows_of_products() {
    for (size_t at = 0; at < groups.size(); ++at) {
      const auto& node = graph.nodes()[at];
      if (!node.alive || products[at].empty() || node.inside.empty() || stays_apart(at)) continue;
      const loop_ir::Nest nest = loop_ir::peel(node.body);
      const bool has_loops =
          std::any_of(nest.body.begin(), nest.body.end(), [](const auto& stmt) { return std::holds_alternative<loop_ir::For>(stmt->node); });
      if (has_loops && !node.writes.empty()) rows_of_products[*node.writes.begin()] = products[at];
    }
  }

  void localize_all() {
    Repeats repeats(context);
    for (size_t at = 0; at < groups.size(); ++at) {
      if (!graph.nodes()[at].alive || !graph.nodes()[at].is_kernel) continue;
      const auto& inner = graph.nodes()[at].inside;
      const std::set<std::string> inside(inner.begin(), inner.end());
      auto is_private = [&](const std::string& b) {
        return inside.count(b) > 0 || (graph.is_private(b) && graph.writers(b)[0] == at &&
                                       std::all_of(graph.readers(b).begin(), graph.readers(b).end(), [&](size_t r) { return r == at; }));
      };
      const NestGroup& nest = groups[at].nest;
      auto make = [&] {
        realise(at);
        return localize(nest, is_private, buffers(), graph.program().symbols);
      };
      if (instances[at].shape) {
        loop_ir::Structure key;
        key.add(instances[at].shape->id);
        for (const std::string& b : instances[at].buffers) key.add(static_cast<char>(is_private(b)));
        graph.set_body(at, repeats(key.take(), instances[at].buffers, make));
      } else {
        auto describe = [&](loop_ir::Structure& key, const std::vector<std::string>& names) {
          key.add(nest.axes.size());
          for (const std::string& b : names) {
            key.add(static_cast<char>(is_private(b)));
            const Buffer* buffer = graph.find_buffer(b);
            if (!buffer) continue;
            key.add(static_cast<char>(buffer->dtype));
            key.add(buffer->shape);
          }
        };
        graph.set_body(at, repeats(loop_ir::make_nest(nest.axes, nest.body), make, describe));
      }
    }
  }
};

}  // namespace

loop_ir::Module fuse_nests(loop_ir::Module module, const PassContext& context) {
  std::set<std::string> apart;
  while (true) {
    NestFuser fuser(module, context, apart);
    loop_ir::Module fused = fuser.run();
    std::set<std::string> written;
    for (const auto& [buffer, products] : fuser.rows_of_products) written.insert(buffer);
    // As attention over pages of a cache will be.
    const std::set<std::string> lost = find_multiplied(keep_places(fused, context), written, context).by_points;
    if (lost.empty()) return fused;
    for (const std::string& buffer : lost) apart.merge(fuser.rows_of_products.at(buffer));
  }
}

}  // namespace deplo
