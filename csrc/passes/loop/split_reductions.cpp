#include "passes/loop/split_reductions.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "analysis/weighted_sum.h"
#include "passes/loop/likely_lines.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr double kFewResults = 32;        ///< results that alone would keep the cores busy
constexpr double kResultsOfThread = 4;    ///< where there are fewer cores
constexpr double kLongReduction = 65536;  ///< elements per result worth a second kernel
constexpr double kChunkElements = 16384;  ///< of one chunk, at least
constexpr double kMostChunks = 1024;      ///< of one result
constexpr double kContractionTile = 128;  ///< rows and lanes that one core takes at once
constexpr double kWantedTiles = 8;        ///< that keep the cores busy
constexpr double kLeastDepth = 512;       ///< of a chunk of a contraction: adding its sums up costs little beside it
constexpr double kLeastSide = 4;          ///< below, a contraction streams its operands

// Of grids of blocks.
constexpr double kFewRows = 64;         ///< of which a block takes each
constexpr double kColumnsOfBlock = 32;  ///< where memory runs along the results
constexpr double kEnoughBlocks = 528;   ///< that keep memory busy
constexpr double kLeastColumn = 256;    ///< elements of a chunk of a column
constexpr double kElementsPerSecond = 5e11;
constexpr double kSecondLaunch = 3e-6;  ///< seconds of the second kernel
constexpr double kBlockTile = 64;       ///< rows and columns of a block of a contraction whose blocks would be few
constexpr double kFewestSide = 2;       ///< below, a contraction streams its operands
constexpr double kFewestOfTile = 16;
constexpr double kEnoughTiles = 132;
constexpr double kBlockDepth = 256;        ///< of a chunk, at least
constexpr int64_t kAddedByReaders = 16;    ///< parts whose sums are added where they are read
constexpr double kMostPartials = 1 << 20;  ///< of more parts
constexpr double kStepSeconds = 2.8e-8;    ///< of a block for one k of float32
constexpr double kHalfStepSeconds = 7e-9;  ///< of 16-bit operands, on matrix units
constexpr double kTurnSeconds = 1.6e-8;    ///< of that where blocks of a core share its units
constexpr double kHalfTurnSeconds = 1.1e-9;
constexpr double kBytesPerSecond = 1.5e12;
constexpr double kRowsOfWarps = 64;  ///< or columns, of which a block's warps add up parts of k
constexpr double kWarpParts = 4;

struct ReductionSplitter {
  ProgramGraph graph;
  const PassContext& context;
  LikelyLines lines{graph, [this](Expr e) { return size(e); }};

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context.hints, graph.program().symbols)); }

  void visit_kernel(size_t at) {
    auto& node = graph.nodes()[at];
    if (!node.alive || !node.is_kernel || node.once) return;
    Nest nest = peel(node.body);
    auto found = std::find_if(nest.body.begin(), nest.body.end(), [](const auto& stmt) { return std::holds_alternative<Reduce>(stmt->node); });
    if (found == nest.body.end() || found != nest.body.begin()) return;
    const Reduce reduce = std::get<Reduce>((*found)->node);
    double results = 1;
    for (const Axis& axis : nest.axes) results *= size(axis.extent);
    double length = 1;
    for (const Axis& axis : reduce.axes) length *= size(axis.extent);
    Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = node.body;
    if (auto contractions = analysis::find_contractions(kernel); !contractions.empty()) {
      if (contractions.size() != 1) return;
      const bool grid = target_of(context).has_grid;
      const size_t cut = axis_to_cut(reduce.axes, kMostChunks);
      const Expr extent = reduce.axes[cut].extent;
      const int64_t chunks = grid ? blocks_of_k(at, contractions[0], extent, length) : even_chunks(extent, chunks_of(at, contractions[0], length));
      if (chunks > 1) split(at, nest, reduce, cut, length, length / static_cast<double>(chunks), true, grid && chunks <= kAddedByReaders);
      return;
    }
    bool partial = reduce.operands.size() != static_cast<size_t>(operand_count(reduce.combiner));
    if (partial || reduce.combiner == Combiner::online_softmax) return;
    const bool grid = target_of(context).has_grid;
    const bool again = grid && meets_again(nest, reduce);
    const bool columns = std::any_of(nest.axes.begin(), nest.axes.end(), [&](const Axis& axis) { return runs_along(reduce, axis); });
    if (grid && columns && !runs_along(reduce, reduce.axes.back(), nest.axes)) {
      const double blocks = std::ceil(results / kColumnsOfBlock);
      const double seconds = results * length / kElementsPerSecond;
      const double chunks = std::min(std::ceil(kEnoughBlocks / blocks), std::floor(length / kLeastColumn));
      // Columns that meet their input again are read once more by kernels of their own.
      const double more = seconds + kSecondLaunch + (again ? seconds + kSecondLaunch : 0);
      if (chunks > 1 && seconds * kEnoughBlocks / 2 / blocks > more) {
        const size_t cut = axis_to_cut(reduce.axes, chunks);
        split(at, nest, reduce, cut, length, even(reduce.axes[cut], length, length / chunks), true);
      }
      return;
    }
    if (again) return;
    const double few = std::min(kFewResults, kResultsOfThread * static_cast<double>(std::max(context.target.threads, 1)));
    if (results > (grid ? kFewRows : few) || length < kLongReduction) return;
    const double elements = std::max(kChunkElements, length / kMostChunks);
    const size_t cut = axis_to_cut(reduce.axes, length / elements);
    split(at, nest, reduce, cut, length, grid ? even(reduce.axes[cut], length, elements) : elements, false);
  }

  /// Whether some kernel takes a result together with what it was made of, as those of softmax and of norms do: they share rows.
  bool meets_again(const Nest& nest, const Reduce& reduce) {
    std::set<std::string> results;
    std::set<std::string> inputs;
    const auto collect = [](const Block& body, std::set<std::string>& loads, std::set<std::string>* stores) {
      visit(body, [&](const Stmt& stmt, const std::vector<Axis>&) {
        if (const auto* load = std::get_if<Load>(&stmt.node)) loads.insert(load->buffer);
        if (const auto* store = std::get_if<Store>(&stmt.node); store && stores) stores->insert(store->buffer);
      });
    };
    collect(reduce.body, inputs, nullptr);
    std::set<std::string> others;
    collect(nest.body, others, &results);
    return std::any_of(graph.nodes().begin(), graph.nodes().end(), [&](const auto& node) {
      if (!node.alive || !node.is_kernel) return false;
      std::set<std::string> loads;
      collect(node.body, loads, nullptr);
      const auto meets = [&](const std::set<std::string>& names) {
        return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return loads.count(name) > 0; });
      };
      return meets(results) && meets(inputs);
    });
  }

  /// Whether what the reduction loads will lie side by side along an axis; with `others`, what those move as well: a number for each row is little.
  bool runs_along(const Reduce& reduce, const Axis& axis, const std::vector<Axis>& others = {}) {
    return std::any_of(reduce.body.begin(), reduce.body.end(), [&](const auto& stmt) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || load->index.empty()) return false;
      const auto moves = [&](const Axis& other) {
        return std::any_of(load->index.begin(), load->index.end(), [&](Expr e) { return uses(e, other.name); });
      };
      if (!others.empty() && std::none_of(others.begin(), others.end(), moves)) return false;
      Expr place = load->index[lines.innermost(load->buffer)];
      if (place.kind() == ExprKind::mod) place = place.operands()[0];  // heads side by side
      const auto step = linear_coefficient(place, axis.name);
      return step && step->is(1);
    });
  }

  /// As many elements of a chunk, or up to twice as many, so that chunks are equal and of whole vectors; the same number where there is none such.
  double even(const Axis& axis, double length, double elements) const {
    if (!axis.extent.is_constant()) return elements;
    const int64_t extent = axis.extent.value();
    const double inner = length / size(axis.extent);
    const auto most = static_cast<int64_t>(length / elements);
    for (int64_t chunks = most; chunks > most / 2 && chunks > 1; --chunks) {
      const int64_t each = extent / chunks;
      if (each * chunks == extent && (each % 8 == 0 || inner > 1)) return static_cast<double>(each) * inner;
    }
    return elements;
  }

  struct Sides {
    double batch = 1, m = 1, n = 1;
    double tiles(double side) const { return batch * std::ceil(m / side) * std::ceil(n / side); }
  };

  /// Nothing where a length is not known.
  std::optional<Sides> sides_of(const analysis::Contraction& contraction) const {
    Sides sides;
    for (const auto& axis : contraction.axes) {
      if (!axis.extent.is_constant()) return std::nullopt;
      if (axis.kind == analysis::AxisClass::batch) sides.batch *= size(axis.extent);
      if (axis.kind == analysis::AxisClass::m) sides.m *= size(axis.extent);
      if (axis.kind == analysis::AxisClass::n) sides.n *= size(axis.extent);
    }
    return sides;
  }

  /// Chunks of k for a product of operands that change from call to call, whose tiles alone would leave cores idle.
  double chunks_of(size_t at, const analysis::Contraction& contraction, double length) {
    for (const auto* operand : {&contraction.a, &contraction.b})
      if (std::all_of(operand->buffers.begin(), operand->buffers.end(), [&](const std::string& b) { return graph.buffer(b).is_static; })) return 1;
    const auto sides = sides_of(contraction);
    if (!sides || sides->m < kLeastSide || sides->n < kLeastSide) return 1;
    // Few rows of weights of a softmax, which may become a kernel with it.
    const bool few = std::min(sides->m, sides->n) <= analysis::kFewQueries;
    for (const auto* operand : {&contraction.a, &contraction.b})
      for (const std::string& buffer : operand->buffers)
        if (few && comes_of_softmax(at, buffer)) return 1;
    const double tiles = sides->tiles(kContractionTile);
    return std::min(std::ceil(kWantedTiles / tiles), std::floor(length / kLeastDepth));
  }

  /// The same for blocks of a grid, of which even constant operands are read by every block: equal parts of an axis that take the least time.
  int64_t blocks_of_k(size_t at, const analysis::Contraction& contraction, Expr extent, double length) {
    const auto sides = sides_of(contraction);
    if (!sides || sides->m < kFewestSide || sides->n < kFewestSide || contraction.dtype != DType::f32 || !extent.is_constant()) return 1;
    for (const auto* operand : {&contraction.a, &contraction.b})
      for (const std::string& buffer : operand->buffers) {
        const std::set<size_t> along = summed(contraction, *operand, buffer);
        if (!is_float(graph.buffer(buffer).dtype) || is_reduced(at, buffer, &along)) return 1;
      }
    const double results = sides->batch * sides->m * sides->n;
    const auto most = static_cast<int64_t>(std::min(length / kBlockDepth, std::max<double>(kAddedByReaders, kMostPartials / results)));
    int64_t best = 1;
    double least = seconds_of(contraction, *sides, length, 1);
    for (int64_t chunks = 2; chunks <= most; ++chunks) {
      const double seconds = extent.value() % chunks == 0 ? seconds_of(contraction, *sides, length, static_cast<double>(chunks)) : least;
      if (seconds >= least) continue;
      least = seconds;
      best = chunks;
    }
    return best;
  }

  /// Of the blocks beside each other, a second kernel, and what travels between both.
  double seconds_of(const analysis::Contraction& contraction, const Sides& sides, double length, double chunks) const {
    bool narrow = true;
    for (const auto* operand : {&contraction.a, &contraction.b})
      narrow = narrow && !operand->buffers.empty() && size_of(graph.buffer(operand->buffers[0]).dtype) == 2;
    const double share = std::clamp(std::min(sides.m, sides.n), kFewestOfTile, kBlockTile) / kBlockTile;
    const double of_core = std::ceil(sides.tiles(kBlockTile) * chunks / kEnoughTiles);
    const double step = narrow ? std::max(kHalfStepSeconds, of_core * kHalfTurnSeconds) : std::max(kStepSeconds, of_core * kTurnSeconds * share);
    double alone = length / chunks * step;
    if (narrow && std::min(sides.m, sides.n) <= kRowsOfWarps) {
      // Warps of a block share k; what memory takes, parts of k do not shorten.
      const double bytes = 2 * sides.batch * (sides.m + sides.n) * length;
      alone = std::max(alone / kWarpParts, bytes / kBytesPerSecond);
    }
    if (chunks <= 1) return alone;
    return alone + kSecondLaunch + 2 * chunks * sides.batch * sides.m * sides.n * size_of(contraction.dtype) / kBytesPerSecond;
  }

  /// The dimensions of a buffer along which a product is summed.
  static std::set<size_t> summed(const analysis::Contraction& contraction, const analysis::ContractionOperand& operand, const std::string& buffer) {
    std::set<size_t> found;
    for (const auto& stmt : operand.slice)
      if (const auto* load = std::get_if<Load>(&stmt->node); load && load->buffer == buffer) add_summed(*load, *contraction.reduce, found);
    return found;
  }

  static void add_summed(const Load& load, const Reduce& reduce, std::set<size_t>& into) {
    for (size_t d = 0; d < load.index.size(); ++d)
      if (std::any_of(reduce.axes.begin(), reduce.axes.end(), [&](const Axis& axis) { return uses(load.index[d], axis.name); })) into.insert(d);
  }

  /// Whether another kernel reduces the buffer without multiplying it, along one of these dimensions, as softmax does with weights: both may become
  /// one kernel.
  bool is_reduced(size_t at, const std::string& buffer, const std::set<size_t>* along = nullptr) {
    for (size_t other = 0; other < graph.nodes().size(); ++other) {
      const auto& node = graph.nodes()[other];
      if (other == at || !node.alive || !node.is_kernel) continue;
      bool reduces = false;
      visit(node.body, [&](const Stmt& stmt, const std::vector<Axis>&) {
        const auto* reduce = std::get_if<Reduce>(&stmt.node);
        if (!reduce) return;
        visit(reduce->body, [&](const Stmt& inner, const std::vector<Axis>&) {
          const auto* load = std::get_if<Load>(&inner.node);
          if (!load || load->buffer != buffer) return;
          std::set<size_t> here;
          add_summed(*load, *reduce, here);
          reduces = reduces || !along || std::any_of(here.begin(), here.end(), [&](size_t d) { return along->count(d) > 0; });
        });
      });
      if (!reduces) continue;
      Kernel kernel;
      kernel.symbols = graph.program().symbols;
      kernel.body = node.body;
      if (analysis::find_contractions(kernel).empty()) return true;
    }
    return false;
  }

  /// Whether that holds for the buffer, or for one that it is made of point by point, as normalised weights are.
  bool comes_of_softmax(size_t at, const std::string& buffer) {
    if (is_reduced(at, buffer)) return true;
    for (size_t other = 0; other < graph.nodes().size(); ++other) {
      const auto& node = graph.nodes()[other];
      if (!node.alive || !node.is_kernel || !node.writes.count(buffer)) continue;
      for (const std::string& source : node.reads)
        if (is_reduced(other, source)) return true;
    }
    return false;
  }

  /// About `wanted` equal parts of an axis: a contraction whose depth differs from chunk to chunk has no schedule.
  static int64_t even_chunks(Expr extent, double wanted) {
    if (!extent.is_constant()) return 1;
    auto most = static_cast<int64_t>(wanted);
    while (most > 1 && extent.value() % most != 0) --most;
    return most;
  }

  // The outermost axis long enough to be cut, or else the longest. A grid's chunks then lie in one piece.
  size_t axis_to_cut(const std::vector<Axis>& axes, double chunks) const {
    const double enough = target_of(context).has_grid ? std::min(256.0, chunks) : 256.0;
    size_t longest = 0;
    for (size_t k = 0; k < axes.size(); ++k) {
      if (size(axes[k].extent) >= enough) return k;
      if (size(axes[k].extent) > size(axes[longest].extent)) longest = k;
    }
    return longest;
  }

  /// Chunks of `elements` terms of axis `cut`; `chunk_outside`: along an axis around the others, so that each chunk is a contraction of the same
  /// form; `unrolled`: their sums are added without a loop, so that what reads the result may add them itself.
  void split(size_t at, const Nest& nest, const Reduce& reduce, size_t cut, double length, double elements, bool chunk_outside,
             bool unrolled = false) {
    Names names;
    Kernel all;
    all.body = graph.nodes()[at].body;
    all.symbols = graph.program().symbols;
    names.reserve(all);
    const Axis& axis = reduce.axes[cut];
    double inner = length / size(axis.extent);
    auto step = static_cast<int64_t>(std::ceil(elements / inner));
    if (axis.extent.is_constant() && step >= axis.extent.value()) return;
    Axis chunk{names.fresh("c"), ceildiv(axis.extent, step)};
    Axis within{names.fresh(axis.name), 0};
    Expr start = Expr::symbol(chunk.name) * step;
    bool even = axis.extent.is_constant() && axis.extent.value() % step == 0;
    within.extent = even ? Expr(step) : min(Expr(step), axis.extent - start);

    // First kernel: partial results per chunk.
    Renaming renaming;
    renaming.exprs[axis.name] = start + Expr::symbol(within.name);
    Reduce first = reduce;
    first.axes[cut] = within;
    first.body = copy_block(reduce.body, renaming, nullptr);
    std::vector<Axis> outer = nest.axes;
    outer.insert(chunk_outside ? outer.begin() : outer.end(), chunk);
    std::vector<Expr> shape;
    std::vector<Expr> place;
    for (const Axis& a : outer) {
      shape.push_back(a.extent);
      place.push_back(Expr::symbol(a.name));
    }
    Body body(names);
    std::vector<std::string> partials;
    auto results = first.results;
    auto dtypes = first.dtypes;
    body.append(make_stmt(std::move(first)));
    for (size_t k = 0; k < results.size(); ++k) {
      partials.push_back(graph.add_buffer("part0", dtypes[k], shape));
      body.store(partials.back(), place, results[k]);
    }

    // Second kernel: the reduction of the partial results, then what followed the whole one.
    Block rest = nest.body;
    if (unrolled) {
      Body sums(names);
      std::string sum;
      for (int64_t k = 0; k < chunk.extent.value(); ++k) {
        std::vector<Expr> index = place;
        std::replace(index.begin(), index.end(), Expr::symbol(chunk.name), Expr(k));
        const std::string part = sums.load(partials[0], reduce.dtypes[0], index);
        if (k + 1 == chunk.extent.value())
          sums.append(make_stmt(Let{reduce.results[0], reduce.dtypes[0], Fn::add, {sum, part}, {}, 0}));
        else
          sum = k == 0 ? part : sums.let(Fn::add, reduce.dtypes[0], {sum, part});
      }
      Block added = sums.take();
      rest.erase(rest.begin());
      rest.insert(rest.begin(), added.begin(), added.end());
      graph.add_kernel(make_nest(outer, body.take()), at);
      graph.set_body(at, make_nest(nest.axes, std::move(rest)));
      return;
    }
    Reduce second = reduce;
    second.axes = {chunk};
    Body combine(names);
    second.operands.clear();
    if (reduce.combiner == Combiner::welford) {
      Expr count = within.extent;
      for (size_t k = 0; k < reduce.axes.size(); ++k)
        if (k != cut) count = count * reduce.axes[k].extent;
      second.operands.push_back(combine.index(reduce.dtypes[0], count));
    }
    for (size_t k = 0; k < partials.size(); ++k) second.operands.push_back(combine.load(partials[k], reduce.dtypes[k], place));
    second.body = combine.take();
    rest[0] = make_stmt(std::move(second));
    graph.add_kernel(make_nest(outer, body.take()), at);
    graph.set_body(at, make_nest(nest.axes, std::move(rest)));
  }

  Module run() {
    for (size_t at = 0, count = graph.nodes().size(); at < count; ++at) visit_kernel(at);
    return graph.finish();
  }
};

}  // namespace

Module split_reductions(Module module, const PassContext& context) { return ReductionSplitter{ProgramGraph(std::move(module)), context}.run(); }

}  // namespace deplo
