#include "passes/loop/fusion_cost.h"

#include <algorithm>
#include <cmath>

#include "analysis/cost.h"
#include "analysis/neighbours.h"
#include "analysis/weighted_sum.h"
#include "passes/loop/split_for_reader.h"
#include "target/target.h"

namespace deplo {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Load;
using loop_ir::Stmt;
using loop_ir::Store;

constexpr double kEnoughParallel = 16;       ///< shared iterations that occupy any machine's cores well enough
constexpr double kRowBlock = 128;            ///< rows of a contraction whose fused rows stay in cache together
constexpr double kCores = 8;                 ///< that read a shared operand each for itself
constexpr double kEnoughShared = 4096;       ///< points shared by two kernels that keep blocks of a grid busy
constexpr double kLongColumn = 64;           ///< points of one of fewer columns, of which a thread each takes longer than a launch
constexpr double kEnoughColumns = 65536;     ///< that keep a thread each busy
constexpr double kLeastPart = 128;           ///< elements of a part of a reduction that has a kernel of its own
constexpr double kGridBlocks = 264;          ///< that keep memory busy
constexpr double kLeastOfRow = 4;            ///< as many points as a row's kernel took before: it reads most of them anew
constexpr double kPointsOfLaunch = 1 << 20;  ///< that a device passes through memory in the time of a kernel's launch
constexpr double kLongKeys = 128;            ///< of float32, that are worth blocks of a grid
constexpr double kMostWidth = 256;           ///< of the heads of attention that blocks of a grid take as a whole
constexpr double kMostChained = 1 << 20;     ///< bytes of an operand of one of two contractions in one kernel, without a softmax between them
constexpr double kSmallProduct = 8192;       ///< multiply-adds up to which a contraction is as fast without packed operands
constexpr double kFirstLevelCache = 32768;   ///< bytes of one part of a batched operand that are read again for nothing
constexpr double kManyTaps = 16;             ///< of a window: what neighbours share of it outweighs its result's way through a near cache

// Enough iterations to share among threads, or too little work to need it.
bool parallel_enough(double shared, double work) { return shared >= kEnoughParallel || work / shared <= kSmallIteration; }

// Whether a body holds such a statement of this kind.
template <class Node, class F>
bool holds(const Block& body, const F& is_one) {
  bool found = false;
  loop_ir::visit(body, [&](const Stmt& stmt, const std::vector<Axis>&) {
    const auto* node = std::get_if<Node>(&stmt.node);
    found = found || (node && is_one(*node));
  });
  return found;
}

bool reduces(const Block& body, Combiner combiner) {
  return holds<loop_ir::Reduce>(body, [&](const loop_ir::Reduce& reduce) { return reduce.combiner == combiner; });
}

bool applies(const Block& body, Fn fn) {
  return holds<loop_ir::Let>(body, [&](const loop_ir::Let& let) { return let.fn == fn; });
}

bool has_sums(const Block& body) {
  return holds<loop_ir::Reduce>(body, [](const loop_ir::Reduce&) { return true; });
}

std::vector<std::string> names_of_first(const AxisPairs& pairs) {
  std::vector<std::string> names;
  for (const auto& pair : pairs) names.push_back(pair.first);
  return names;
}

std::vector<std::string> names_of_second(const AxisPairs& pairs) {
  std::vector<std::string> names;
  for (const auto& pair : pairs) names.push_back(pair.second);
  return names;
}

// Two contractions in one nest: gates over the same rows, with equal reductions.
bool gated_pair(const FusionGroup& a, const FusionGroup& b) {
  for (const auto& x : a.contractions)
    for (const auto& y : b.contractions) {
      bool shares = !x.a.buffers.empty() && !y.a.buffers.empty() && (x.a.buffers[0] == y.a.buffers[0] || x.b.buffers[0] == y.b.buffers[0]);
      auto kx = x.axes_of(analysis::AxisClass::k);
      auto ky = y.axes_of(analysis::AxisClass::k);
      bool equal = kx.size() == ky.size();
      for (size_t k = 0; equal && k < kx.size(); ++k) equal = kx[k].extent == ky[k].extent;
      if (!shares || !equal) return false;
    }
  return true;
}

// Over shared rows and lanes a contraction is none any longer: chunks of k stay apart from what adds them up.
bool gives_up_batch(const FusionGroup& a, const AxisPairs& pairs) {
  for (const auto& c : a.contractions)
    for (const auto& axis : c.axes_of(analysis::AxisClass::batch)) {
      bool outer = std::any_of(a.nest.axes.begin(), a.nest.axes.end(), [&](const Axis& x) { return x.name == axis.name; });
      bool kept = std::any_of(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.first == axis.name; });
      if (outer && !kept) return true;
    }
  return false;
}

// Rows of parts of a result (heads of a layer): no schedule takes those, for the part lies inside of the rows.
bool parts_rows(const FusionGroup& a, const AxisPairs& pairs) {
  for (const auto& c : a.contractions) {
    auto shares = [&](analysis::AxisClass of) {
      auto axes = c.axes_of(of);
      return std::any_of(axes.begin(), axes.end(), [&](const auto& axis) {
        return std::any_of(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.first == axis.name; });
      });
    };
    if (shares(analysis::AxisClass::m) && shares(analysis::AxisClass::n)) return true;
  }
  return false;
}

// A contraction all of whose rows read all that the other one gives (a gradient of keys): no row of either stays in a near cache, and no schedule
// multiplies such a nest in blocks.
bool shares_no_rows(const FusionGroup& b, const AxisPairs& pairs) {
  return std::none_of(b.contractions.begin(), b.contractions.end(), [&](const auto& c) {
    return std::any_of(c.axes.begin(), c.axes.end(), [&](const auto& axis) {
      const bool shared = std::any_of(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.second == axis.name; });
      return shared && axis.kind != analysis::AxisClass::batch;
    });
  });
}

// Channels of their own (depthwise) are no matrices.
bool multiplies_matrices(const FusionGroup& group) {
  return std::any_of(group.contractions.begin(), group.contractions.end(), [](const analysis::Contraction& c) {
    return !c.axes_of(analysis::AxisClass::m).empty() && !c.axes_of(analysis::AxisClass::n).empty();
  });
}

// A window of many taps slides over the nest's points, as that of a depthwise convolution.
bool slides_window(const NestGroup& nest, const FusionCost& cost) {
  return std::any_of(nest.body.begin(), nest.body.end(), [&](const auto& stmt) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    double taps = 1;
    if (reduce)
      for (const Axis& tap : reduce->axes) taps *= cost.size(tap.extent);
    if (!reduce || taps < kManyTaps) return false;
    return std::any_of(reduce->body.begin(), reduce->body.end(), [&](const auto& inner) {
      const auto* load = std::get_if<Load>(&inner->node);
      return load && std::any_of(load->index.begin(), load->index.end(), [&](Expr e) {
               auto of = [&](const std::vector<Axis>& axes) {
                 return std::any_of(axes.begin(), axes.end(), [&](const Axis& a) { return uses(e, a.name); });
               };
               return of(reduce->axes) && of(nest.axes);
             });
    });
  });
}

bool has_softmax(const Block& body) { return reduces(body, Combiner::max) && applies(body, Fn::exp); }

}  // namespace

double FusionCost::size(Expr e) const { return std::max(1.0, analysis::estimate(e, context_.hints, graph_.program().symbols)); }

double FusionCost::bytes(const std::string& name) const {
  auto [it, fresh] = bytes_.try_emplace(name);
  if (fresh) {
    const Buffer& b = graph_.buffer(name);
    it->second = size(product(b.shape)) * static_cast<double>(size_of(b.dtype));
  }
  return it->second;
}

double FusionCost::points(const std::vector<Axis>& axes) const {
  double count = 1;
  for (const Axis& axis : axes) count *= size(axis.extent);
  return count;
}

double FusionCost::points_of(const Block& body) const {
  double total = 0;
  loop_ir::visit(body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
    if (std::holds_alternative<Load>(stmt.node) || std::holds_alternative<Store>(stmt.node)) total = std::max(total, points(loops));
  });
  return total;
}

// What contractions read again when every block of rows, or every core, reads the operands that its rows share.
double FusionCost::bytes_read_again(const NestGroup& joined) const {
  loop_ir::Kernel kernel;
  kernel.symbols = graph_.program().symbols;
  kernel.body = loop_ir::make_nest(joined.axes, joined.body);
  double total = 0;
  for (const auto& c : analysis::find_contractions(kernel)) {
    // Blocks of a GPU with matrix units take rows together, and share what they read in its cache.
    const auto is_half = [&](const std::string& name) {
      const Buffer* buffer = graph_.find_buffer(name);
      return buffer && size_of(buffer->dtype) == 2;
    };
    const bool in_blocks = target_of(context_).has_grid && (std::any_of(c.a.buffers.begin(), c.a.buffers.end(), is_half) ||
                                                            std::any_of(c.b.buffers.begin(), c.b.buffers.end(), is_half));
    const double cores = in_blocks ? 1 : kCores;
    for (const auto* operand : {&c.a, &c.b}) {
      double bytes = 4;
      double rows = 1;    // shared iterations that read the same part of the operand
      double copies = 1;  // different parts
      for (const auto& axis : c.axes) {
        bool shared = std::any_of(joined.axes.begin(), joined.axes.end(), [&](const Axis& a) { return a.name == axis.name; });
        bool used = operand->axes.count(axis.name) > 0;
        if (used) bytes *= size(axis.extent);
        if (shared) (used ? copies : rows) *= size(axis.extent);
      }
      if (copies > 1 && bytes / copies <= kFirstLevelCache) continue;
      double blocks = std::max(std::ceil(rows / kRowBlock), std::min(rows, cores / copies));
      total += bytes * std::max(0.0, blocks - 1) * (copies < cores ? 2 : 1);
    }
  }
  return total;
}

// A contraction gives up an axis: rows of its result stay in cache, its other operand is read for every block of rows. What follows rows that
// do so already (an attention's epilogue) costs no more of that.
bool FusionCost::keep_rows(const NestGroup& rows, const NestGroup& joined, const std::set<std::string>& flow) {
  double saved = 0;
  for (const std::string& b : flow) saved += bytes(b) * (graph_.is_private(b) ? 2 : 1);
  const bool already = rows.axes.size() == joined.axes.size() && std::any_of(rows.body.begin(), rows.body.end(), [](const auto& stmt) {
                         return std::holds_alternative<loop_ir::For>(stmt->node);
                       });
  return saved >= bytes_read_again(joined) - (already ? bytes_read_again(rows) : 0);
}

// A contraction may follow another over the same rows (attention) if those rows are seen by it alone, and neither has an operand that
// is packed once for all calls: a chain of layers runs faster one by one.
bool FusionCost::chainable(const FusionGroup& a, const FusionGroup& b, const std::set<std::string>& flow) {
  const BufferOf buffers = [this](const std::string& name) -> const Buffer& { return graph_.buffer(name); };
  for (const std::string& name : flow)
    if (!graph_.is_private(name)) return false;
  for (const FusionGroup* g : {&a, &b})
    for (const auto& c : g->contractions)
      if (is_packed_once(c.a, buffers) || is_packed_once(c.b, buffers)) return false;
  if (has_softmax(a.nest.body) || has_softmax(b.nest.body)) return true;
  // Blocks of a grid multiply tiles, not rows; `chain_products` joins what they multiply as a chain.
  if (target_of(context_).has_grid) return false;
  // What a batch reads of either operand is to lie in a near cache: alone, a contraction packs larger ones once for all of its rows.
  for (const FusionGroup* g : {&a, &b})
    for (const auto& c : g->contractions)
      for (const auto* operand : {&c.a, &c.b}) {
        double bytes = sizeof(float);
        for (const auto& axis : c.axes)
          if (axis.kind != analysis::AxisClass::batch && operand->axes.count(axis.name) > 0) bytes *= size(axis.extent);
        if (bytes > kMostChained) return false;
      }
  return true;
}

// A row of its own for each head, times a matrix that changes from call to call, of 16-bit numbers, or of float32 and long. Threads of a CPU take
// some rows side by side.
size_t FusionCost::products_of_heads(const NestGroup& nest, const std::set<std::string>* of) const {
  const bool grid = target_of(context_).has_grid;
  size_t count = 0;
  loop_ir::Kernel kernel;
  kernel.symbols = graph_.program().symbols;
  kernel.body = loop_ir::make_nest(nest.axes, nest.body);
  for (const auto& c : analysis::find_contractions(kernel, true)) {
    double depth = 1;
    std::map<analysis::AxisClass, double> extents{{analysis::AxisClass::m, 1}, {analysis::AxisClass::n, 1}};
    size_t sides = 0;
    for (const auto& axis : c.axes) {
      if (axis.kind == analysis::AxisClass::k) depth *= size(axis.extent);
      if (!extents.count(axis.kind)) continue;
      extents[axis.kind] *= size(axis.extent);
      ++sides;
    }
    const auto [few, rows] = std::minmax(extents[analysis::AxisClass::m], extents[analysis::AxisClass::n]);
    const bool side_by_side = grid ? sides == 1 && !c.axes_of(analysis::AxisClass::batch).empty() : few <= analysis::kFewQueries;
    bool streams = false;
    bool changes = true;
    bool reads = !of;
    for (const auto* operand : {&c.a, &c.b}) {
      bool all_static = true;
      for (const std::string& name : operand->buffers)
        if (const Buffer* buffer = graph_.find_buffer(name)) {
          reads = reads || of->count(name) > 0;
          streams = streams || size_of(buffer->dtype) == 2 || (buffer->dtype == DType::f32 && std::max(rows, depth) >= kLongKeys);
          all_static = all_static && buffer->is_static;
        } else {
          all_static = false;
        }
      changes = changes && !all_static;
    }
    if (reads && streams && changes && side_by_side && std::min(rows, depth) <= kMostWidth) ++count;
  }
  return count;
}

// Scores of few queries and their softmax, that and the values, or all that and what follows: threads, or blocks of a grid, take parts of the keys of
// such a kernel (`split_keys`).
bool FusionCost::attends(const FusionGroup& a, const FusionGroup& b) const {
  if (!has_softmax(a.nest.body)) return has_softmax(b.nest.body) && multiplies_heads(a.nest);
  return multiplies_heads(has_sums(b.nest.body) ? b.nest : a.nest);
}

bool FusionCost::weighs(const FusionGroup& a, const FusionGroup& b) const {
  return attends(a, b) || (has_softmax(a.nest.body) && !a.contractions.empty() && !b.contractions.empty());
}

bool FusionCost::multiplies(const NestGroup& nest) const {
  loop_ir::Kernel kernel;
  kernel.symbols = graph_.program().symbols;
  kernel.body = loop_ir::make_nest(nest.axes, nest.body);
  return !analysis::find_contractions(kernel, true).empty();
}

bool FusionCost::scores_on_grid(const FusionGroup& a, const FusionGroup& b) const {
  return target_of(context_).has_grid && multiplies_matrices(a) && !has_softmax(a.nest.body) && has_softmax(b.nest.body);
}

double FusionCost::elements(const std::string& buffer) { return bytes(buffer) / static_cast<double>(size_of(graph_.buffer(buffer).dtype)); }

// Sums or loops over what such a kernel reads, as norms and rotations of queries have, or sums of what it gives: with them it is none that streams
// keys, or leaves masked ones out.
bool FusionCost::disturbs_attention(const FusionGroup& a, const FusionGroup& b, const AxisPairs& pairs, const std::set<std::string>& flow) const {
  if (multiplies_heads(a.nest))
    return products_of_heads(a.nest) > 1 && has_softmax(a.nest.body) && reduces(b.nest.body, Combiner::sum) && !applies(b.nest.body, Fn::exp) &&
           !multiplies_heads(b.nest);
  return !applies(a.nest.body, Fn::exp) && (reduces(a.nest.body, Combiner::sum) || !covers(pairs, a.nest)) && products_of_heads(b.nest, &flow) > 0;
}

// What a block keeps of a row of attention: queries, of which scores are products, and columns of values.
bool FusionCost::has_narrow_heads(const FusionGroup& scores, const FusionGroup& readers, double shared) {
  if (scores.contractions.size() != 1) return true;  // values have joined
  for (const auto& c : scores.contractions) {
    double depth = 1;
    for (const auto& axis : c.axes)
      if (axis.kind == analysis::AxisClass::k) depth *= size(axis.extent);
    if (depth > kMostWidth) return false;
  }
  return readers.contractions.empty() || points(readers.nest.axes) <= kMostWidth * shared;
}

bool FusionCost::profitable(const FusionGroup& a, const FusionGroup& b, const AxisPairs& pairs, const std::set<std::string>& flow,
                            const loop_ir::Names& names, bool one_after_the_other) {
  bool whole_a = covers(pairs, a.nest);
  bool whole_b = covers(pairs, b.nest);
  double shared = 1;
  for (const auto& [name, partner] : pairs)
    for (const Axis& axis : a.nest.axes)
      if (axis.name == name) shared *= size(axis.extent);
  bool contracts_a = !a.contractions.empty();
  bool contracts_b = !b.contractions.empty();
  // Blocks of a grid copy windows for tiles of points, which loops inside of other points are not.
  const auto has_windows = [](const FusionGroup& g) { return analysis::sums_neighbours(g.nest.axes, g.nest.body); };
  if (target_of(context_).has_grid && !(whole_a && whole_b) && (has_windows(a) || has_windows(b))) return false;
  if (!target_of(context_).has_grid && attends(a, b) && covers(pairs, has_softmax(a.nest.body) ? a.nest : b.nest)) return true;
  // Neighbours side by side in registers share a window's points, which they cannot inside of a row's kernel.
  if (!whole_a && !target_of(context_).has_grid && !multiplies_matrices(a) && slides_window(a.nest, *this)) return false;
  if (contracts_a || contracts_b) {
    if (contracts_a && contracts_b && whole_a && whole_b) return gated_pair(a, b);
    if (whole_a && whole_b) {
      // Blocks of a grid multiply tiles of matrices, and points of a tile sum nothing else.
      const bool tiles = multiplies_matrices(a) && !holds<loop_ir::For>(a.nest.body, [](const loop_ir::For&) { return true; });
      if (target_of(context_).has_grid && tiles && has_sums(b.nest.body)) return false;
      return contracts_a;  // an epilogue; prologues are fuse_producers' business
    }
    // Rows of a contraction may stay in cache if it gives up one axis; what prepares an operand stays apart.
    if (!contracts_a || pairs.empty() || a.nest.axes.size() > pairs.size() + 1) return false;
    if (gives_up_batch(a, pairs) || parts_rows(a, pairs)) return false;
    // Blocks of a grid multiply tiles; rows of such sums they have for attention alone.
    const bool matrices = multiplies_matrices(a) || multiplies_matrices(b);
    // What gives attention its queries has other rows than a block of it.
    if (contracts_a && target_of(context_).has_grid && !has_softmax(a.nest.body) && has_softmax(b.nest.body) && multiplies(b.nest)) return false;
    if (matrices && target_of(context_).has_grid && !((has_softmax(a.nest.body) || has_softmax(b.nest.body)) && has_narrow_heads(a, b, shared)))
      return false;
    if (contracts_b && !target_of(context_).has_grid && b.points / shared > kSmallProduct && shares_no_rows(b, pairs)) return false;
    if (contracts_b && !chainable(a, b, flow)) return false;
    loop_ir::Names scratch = names;
    return keep_rows(a.nest, join(a.nest, b.nest, pairs, scratch), flow);
  }
  // Threads of a row would take several rows of sums one after the other.
  const auto loses_rows = [&](const FusionGroup& g) { return has_sums(g.nest.body) && points(g.nest.axes) > shared; };
  const bool serial = target_of(context_).has_grid && shared < kEnoughShared && (loses_rows(a) || loses_rows(b));
  if (pairs.empty() && !(a.nest.axes.empty() && b.nest.axes.empty()))
    return one_after_the_other && !serial && std::max(a.points, b.points) <= kSmallIteration;
  if (disturbs_attention(a, b, pairs, flow)) return false;
  if (whole_a && whole_b) return true;
  if (target_of(context_).has_grid && attends(a, b)) return true;
  if (serial) return false;
  // Parts of long sums keep blocks of a grid busy, and are few beside what they are made of.
  if (!whole_a && target_of(context_).has_grid && a.points >= kLeastPart * points(a.nest.axes)) return false;
  // So do parts of sums down columns, and few long columns.
  const bool few_columns = has_sums(b.nest.body) || (shared < kEnoughShared && b.points >= kLongColumn * shared);
  if (!whole_b && target_of(context_).has_grid && few_columns && has_columns(b.nest, names_of_second(pairs))) return false;
  // Threads that sum columns read what others of them stored: blocks would take column by column.
  const bool few_stored = shared < (has_sums(a.nest.body) ? kEnoughShared : kEnoughColumns) && a.points >= kLongColumn * shared;
  if (!whole_a && target_of(context_).has_grid && few_stored && has_columns(a.nest, names_of_first(pairs))) return false;
  // Blocks of a grid that are few take long over what reads little of what comes before.
  if (!whole_b && target_of(context_).has_grid && shared < kGridBlocks && a.points * kLeastOfRow < b.points &&
      b.points * (kGridBlocks / shared - 1) > kPointsOfLaunch)
    return false;
  return parallel_enough(shared, std::max(a.points, b.points));
}

/// Whether memory runs along what two nests share: blocks of a grid would be as few as those columns.
bool FusionCost::has_columns(const NestGroup& nest, const std::vector<std::string>& shared) const {
  bool found = false;
  loop_ir::visit(nest.body, [&](const Stmt& stmt, const std::vector<Axis>&) {
    const auto* load = std::get_if<Load>(&stmt.node);
    if (!load || !graph_.find_buffer(load->buffer)) return;
    const auto& strides = graph_.buffer(load->buffer).strides;
    Expr offset = 0;
    for (size_t d = 0; d < load->index.size(); ++d) offset = offset + load->index[d] * strides[d];
    // Of what all of the nest's axes move.
    const bool all = std::all_of(nest.axes.begin(), nest.axes.end(), [&](const Axis& axis) { return uses(offset, axis.name); });
    for (const std::string& name : shared) {
      const auto step = linear_coefficient(offset, name);
      found = found || (all && step && step->is(1));
    }
  });
  return found;
}

}  // namespace deplo
