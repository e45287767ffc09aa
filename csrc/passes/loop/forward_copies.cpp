#include "passes/loop/forward_copies.h"

#include <algorithm>
#include <optional>

#include "expr/node.h"
#include "loop_ir/rewrite.h"
#include "passes/loop/program_graph.h"
#include "passes/loop/substitute.h"

namespace deplo {
namespace {

using loop_ir::Block;
using loop_ir::Load;
using loop_ir::Stmt;
using loop_ir::Store;

bool divides(Expr e) {
  if (e.is_constant() || e.is_symbol()) return false;
  if (e.kind() == ExprKind::floordiv || e.kind() == ExprKind::mod) return true;
  return std::any_of(e.operands().begin(), e.operands().end(), divides);
}

bool divides(const std::vector<Expr>& index) {
  return std::any_of(index.begin(), index.end(), [](Expr e) { return divides(e); });
}

Expr offset_of(const std::vector<Expr>& index, const std::vector<Expr>& strides) {
  Expr sum = 0;
  for (size_t d = 0; d < index.size(); ++d) sum = sum + index[d] * strides[d];
  return sum;
}

struct CopyForwarder {
  ProgramGraph graph;

  /// What the kernel copies all of, in order; empty where it does something else.
  std::string source_of(size_t at) {
    const auto& node = graph.nodes()[at];
    if (!node.alive || !node.is_kernel || node.once) return "";
    const auto copy = as_pointwise(node.body);
    if (!copy || copy->body.size() != 1) return "";
    const auto* load = std::get_if<Load>(&copy->body[0]->node);
    if (!load || load->name != copy->value || !load->guard.empty() || !graph.is_private(load->buffer)) return "";
    const Buffer& to = graph.buffer(copy->buffer);
    const Buffer& from = graph.buffer(load->buffer);
    if (to.kind == BufferKind::input || graph.is_versioned(to.name) || graph.writers(to.name).size() != 1 || node.updated.count(to.name)) return "";
    if (from.dtype != to.dtype || from.strides != contiguous_strides(from.shape) || to.strides != contiguous_strides(to.shape)) return "";
    Ranges ranges = graph.program().symbols;
    for (size_t d = 0; d < copy->axes.size(); ++d) {
      if (!simplify(copy->axes[d].extent - to.shape[d], ranges).is(0)) return "";
      ranges[copy->axes[d].name] = axis_range(copy->axes[d].extent);
    }
    if (!simplify(product(from.shape) - product(to.shape), ranges).is(0) || product(to.shape).is(0)) return "";
    return simplify(offset_of(load->index, from.strides) - offset_of(copy->index(), to.strides), ranges).is(0) ? from.name : "";
  }

  /// The kernel with the accesses to `from` at the same places of `to`; nothing where these would be quotients.
  std::optional<Block> redirected(size_t at, const std::string& from, const std::string& to) {
    const Block& body = graph.nodes()[at].body;
    const Buffer& source = graph.buffer(from);
    const Buffer& target = graph.buffer(to);
    Ranges ranges = graph.program().symbols;
    loop_ir::visit(body, [&](const Stmt& stmt, const auto&) {
      if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) ranges[loop->axis] = axis_range(loop->extent);
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node))
        for (const auto& a : reduce->axes) ranges[a.name] = axis_range(a.extent);
      if (const auto* scan = std::get_if<loop_ir::Scan>(&stmt.node)) ranges[scan->axis.name] = axis_range(scan->axis.extent);
    });
    bool plain = true;
    const auto moved = [&](auto access) {
      if (source.shape != target.shape) {
        const Expr offset = simplify(offset_of(access.index, source.strides), ranges);
        std::vector<Expr> index;
        for (size_t d = 0; d < target.shape.size(); ++d) {
          const Expr place = floordiv(offset, target.strides[d]);
          index.push_back(simplify(d == 0 ? place : mod(place, target.shape[d]), ranges));
        }
        plain = plain && !divides(index);
        access.index = std::move(index);
      }
      access.buffer = to;
      return Block{loop_ir::make_stmt(std::move(access))};
    };
    Block out = loop_ir::rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* load = std::get_if<Load>(&stmt->node); load && load->buffer == from) return moved(*load);
      if (const auto* store = std::get_if<Store>(&stmt->node); store && store->buffer == from) return moved(*store);
      return {stmt};
    });
    if (!plain) return std::nullopt;
    return out;
  }

  void forward(size_t at) {
    const std::string from = source_of(at);
    if (from.empty()) return;
    const std::string to = *graph.nodes()[at].writes.begin();
    const size_t writer = graph.writers(from)[0];
    if (graph.nodes()[writer].once) return;
    FlatSet<size_t> around = graph.readers(from);
    around.insert(writer);
    std::vector<std::pair<size_t, Block>> bodies;
    for (size_t other : around) {
      if (other == at) continue;
      auto body = redirected(other, from, to);
      if (!body) return;
      bodies.emplace_back(other, std::move(*body));
    }
    graph.inherit_order(at, writer);
    graph.merge_provenance(at, writer, false);
    graph.remove(at);
    for (auto& [other, body] : bodies) graph.set_body(other, std::move(body));
  }
};

}  // namespace

loop_ir::Module forward_copies(loop_ir::Module module, const PassContext& /*context*/) {
  CopyForwarder forwarder{ProgramGraph(std::move(module))};
  for (size_t at = 0; at < forwarder.graph.nodes().size(); ++at) forwarder.forward(at);
  return forwarder.graph.finish();
}

}  // namespace deplo
