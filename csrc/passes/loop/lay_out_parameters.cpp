#include "passes/loop/lay_out_parameters.h"

#include <algorithm>
#include <optional>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "passes/loop/program_graph.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr double kLeastReads = 4;  ///< of each element in a call: a training step copies anew

struct Access {
  const Load* load = nullptr;  ///< null: a store
  Expr offset;
  std::vector<Axis> loops;
  double points = 1;
};

struct LayOut {
  ProgramGraph graph;
  const PassContext& context;
  std::map<std::pair<std::string, size_t>, std::string> copies;  ///< buffer and dimension that lies innermost -> the copy

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context.hints, graph.program().symbols)); }

  static Expr offset_of(const std::vector<Expr>& index, const std::vector<Expr>& strides) {
    Expr offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset = offset + index[d] * strides[d];
    return offset;
  }

  std::vector<Access> accesses(const Block& body) const {
    std::map<std::string, std::vector<Expr>> locals;
    std::vector<Access> found;
    visit(body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      if (const auto* local = std::get_if<Local>(&stmt.node)) locals[local->name] = contiguous_strides(local->shape);
      const auto* load = std::get_if<Load>(&stmt.node);
      const auto* store = std::get_if<Store>(&stmt.node);
      if (!load && !store) return;
      const std::string& name = load ? load->buffer : store->buffer;
      auto local = locals.find(name);
      Access access{load, offset_of(load ? load->index : store->index, local == locals.end() ? graph.buffer(name).strides : local->second), loops, 1};
      for (const Axis& axis : loops) access.points *= size(axis.extent);
      found.push_back(std::move(access));
    });
    return found;
  }

  bool is_parameter(const Access& access) const {
    if (!access.load || !graph.program().find_buffer(access.load->buffer)) return false;
    const Buffer& b = graph.buffer(access.load->buffer);
    return b.kind == BufferKind::input && b.is_static && !graph.is_versioned(b.name);
  }

  static bool lies_along(const Access& access, const std::string& axis) {
    auto step = linear_coefficient(access.offset, axis);
    return step && step->is(1);
  }

  /// Of the loops around a load, the one along which most other accesses lie.
  std::string lanes_of(const Access& load, const std::vector<Access>& all) const {
    std::string best;
    double most = 0;
    for (const Axis& axis : load.loops) {
      double score = 0;
      for (const Access& other : all)
        if (!is_parameter(other) && lies_along(other, axis.name)) score += other.points;
      if (score > most) {
        most = score;
        best = axis.name;
      }
    }
    return best;
  }

  /// The dimension that should lie innermost, where the load reads across its lanes.
  std::optional<size_t> dimension_of(const Access& load, const std::vector<Access>& all) const {
    const std::string lanes = lanes_of(load, all);
    if (lanes.empty()) return std::nullopt;
    auto step = linear_coefficient(load.offset, lanes);
    if (!step || step->is(0) || step->is(1)) return std::nullopt;
    std::optional<size_t> found;
    for (size_t d = 0; d < load.load->index.size(); ++d) {
      auto along = linear_coefficient(load.load->index[d], lanes);
      if (along && along->is(0)) continue;
      if (found || !along || !along->is(1)) return std::nullopt;
      found = d;
    }
    return found;
  }

  void visit_kernel(size_t at) {
    const auto& node = graph.nodes()[at];
    if (!node.alive || !node.is_kernel || node.once) return;
    Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = node.body;
    std::set<std::string> operands;
    for (const auto& c : analysis::find_contractions(kernel))
      for (const auto* operand : {&c.a, &c.b}) operands.insert(operand->buffers.begin(), operand->buffers.end());
    const std::vector<Access> all = accesses(node.body);
    std::map<std::string, std::optional<size_t>> chosen;  ///< nothing where the loads of one buffer disagree
    std::map<std::string, double> points;
    for (const Access& access : all) {
      if (!is_parameter(access) || operands.count(access.load->buffer)) continue;
      auto dimension = dimension_of(access, all);
      auto [it, is_new] = chosen.try_emplace(access.load->buffer, dimension);
      if (!is_new && it->second != dimension) it->second = std::nullopt;
      points[access.load->buffer] += access.points;
    }
    for (const auto& [name, dimension] : chosen)
      if (dimension && points[name] >= kLeastReads * size(product(graph.buffer(name).shape))) replace(at, name, *dimension);
  }

  static std::vector<Expr> moved_last(std::vector<Expr> list, size_t d) {
    std::rotate(list.begin() + static_cast<std::ptrdiff_t>(d), list.begin() + static_cast<std::ptrdiff_t>(d) + 1, list.end());
    return list;
  }

  void replace(size_t at, const std::string& name, size_t d) {
    const std::string copy = copy_of(at, name, d);
    graph.set_body(at, rewrite(graph.nodes()[at].body, [&](const Ref<Stmt>& stmt) -> Block {
                     const auto* load = std::get_if<Load>(&stmt->node);
                     if (!load || load->buffer != name) return {stmt};
                     Load there = *load;
                     there.buffer = copy;
                     there.index = moved_last(load->index, d);
                     return {make_stmt(std::move(there))};
                   }));
  }

  std::string copy_of(size_t at, const std::string& name, size_t d) {
    auto [it, is_new] = copies.try_emplace({name, d});
    if (!is_new) return it->second;
    const Buffer buffer = graph.buffer(name);
    it->second = graph.add_buffer("laid0", buffer.dtype, moved_last(buffer.shape, d));
    Names names;
    std::vector<Axis> axes;
    std::vector<Expr> index;
    for (const Expr& extent : buffer.shape) {
      axes.push_back({names.fresh("i0"), extent});
      index.push_back(Expr::symbol(axes.back().name));
    }
    Body body(names);
    const std::string value = body.load(name, buffer.dtype, index);
    body.store(it->second, moved_last(index, d), value);
    graph.add_kernel(make_nest(axes, body.take()), at);
    return it->second;
  }

  Module run() {
    for (size_t at = 0, count = graph.nodes().size(); at < count; ++at) visit_kernel(at);
    return graph.finish();
  }
};

}  // namespace

Module lay_out_parameters(Module module, const PassContext& context) { return LayOut{ProgramGraph(std::move(module)), context, {}}.run(); }

}  // namespace deplo
