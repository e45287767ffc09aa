#include "passes/loop/split_reductions.h"

#include <algorithm>
#include <cmath>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "passes/loop/program_graph.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr double kFewResults = 32;        ///< results that alone would keep the cores busy
constexpr double kLongReduction = 65536;  ///< elements per result worth a second kernel
constexpr double kChunkElements = 16384;  ///< of one chunk, at least
constexpr double kMostChunks = 1024;      ///< of one result

struct Splitter {
  ProgramGraph graph;
  const PassContext& context;

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
    if (results > kFewResults || length < kLongReduction || is_contraction(node.body)) return;
    bool partial = reduce.operands.size() != static_cast<size_t>(operand_count(reduce.combiner));
    if (partial || reduce.combiner == Combiner::online_softmax) return;
    split(at, nest, reduce, length);
  }

  bool is_contraction(const Block& body) const {
    Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = body;
    return !analysis::find_contractions(kernel).empty();
  }

  // The outermost axis long enough to be cut, or else the longest.
  size_t axis_to_cut(const std::vector<Axis>& axes) const {
    size_t longest = 0;
    for (size_t k = 0; k < axes.size(); ++k) {
      if (size(axes[k].extent) >= 256) return k;
      if (size(axes[k].extent) > size(axes[longest].extent)) longest = k;
    }
    return longest;
  }

  void split(size_t at, const Nest& nest, const Reduce& reduce, double length) {
    Names names;
    Kernel all;
    all.body = graph.nodes()[at].body;
    all.symbols = graph.program().symbols;
    names.reserve(all);
    size_t cut = axis_to_cut(reduce.axes);
    const Axis& axis = reduce.axes[cut];
    double inner = length / size(axis.extent);
    auto step = static_cast<int64_t>(std::ceil(std::max(kChunkElements, length / kMostChunks) / inner));
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
    outer.push_back(chunk);
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
    Block rest = nest.body;
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

Module split_reductions(Module module, const PassContext& context) { return Splitter{ProgramGraph(std::move(module)), context}.run(); }

}  // namespace deplo
