#include "passes/loop/kept_factor.h"

#include <algorithm>
#include <utility>

#include "loop_ir/places.h"

namespace deplo {

using loop_ir::Block;
using loop_ir::Check;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Stmt;

loop_ir::Kernel kernel_of(const Block& body, const Ranges& symbols) {
  loop_ir::Kernel kernel;
  kernel.symbols = symbols;
  kernel.body = body;
  return kernel;
}

std::optional<Factor> find_factor(const loop_ir::Kernel& kernel, const analysis::ContractionOperand& operand) {
  const auto define = [&](const std::string& name) {
    return std::find_if(operand.slice.begin(), operand.slice.end(), [&](const Ref<Stmt>& stmt) { return loop_ir::name_of(*stmt) == name; });
  };
  const auto dtype_of = [&](const std::string& name) {
    const Stmt& stmt = **define(name);
    const auto* let = std::get_if<Let>(&stmt.node);
    return let ? let->dtype : std::get<Load>(stmt.node).dtype;
  };
  std::string value = operand.value;
  for (auto found = define(value); found != operand.slice.end(); found = define(value)) {
    const auto* let = std::get_if<Let>(&(*found)->node);
    if (!let || let->fn != Fn::cast || define(let->operands[0]) == operand.slice.end()) break;
    if (size_of(dtype_of(let->operands[0])) >= size_of(let->dtype)) break;
    value = let->operands[0];
  }
  if (define(value) == operand.slice.end()) return std::nullopt;
  Block pool;
  loop_ir::visit(kernel.body, [&](const Stmt& stmt, const auto&) {
    if (loop_ir::is_straight(stmt)) pool.push_back(std::make_shared<Stmt>(stmt));
  });
  return Factor{value, dtype_of(value), loop_ir::statements_for(pool, {value})};
}

bool may_be_kept(const ProgramGraph& graph, const Factor& factor) {
  bool changes = false;
  for (const auto& stmt : factor.body) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (!load) continue;
    const Buffer* buffer = graph.find_buffer(load->buffer);
    if (!buffer || graph.is_versioned(load->buffer)) return false;
    changes = changes || !buffer->is_static;
  }
  return changes;
}

void keep_factor(ProgramGraph& graph, size_t at, const loop_ir::Kernel& kernel, const Factor& factor, const std::vector<KeptDimension>& dimensions,
                 const std::vector<Check>& moved) {
  std::vector<loop_ir::Axis> axes;
  std::vector<Expr> shape;
  std::vector<Expr> own_index;
  std::vector<Expr> index;
  for (const KeptDimension& dimension : dimensions) {
    axes.push_back(dimension.axis);
    shape.push_back(dimension.axis.extent);
    own_index.push_back(Expr::symbol(dimension.axis.name));
    index.push_back(dimension.place);
  }
  const std::string buffer = graph.add_buffer("factor0", factor.dtype, shape);
  Block body = factor.body;
  for (const Check& check : moved) body.push_back(loop_ir::make_stmt(check));
  body.push_back(loop_ir::make_stmt(loop_ir::Store{buffer, own_index, factor.value, {}, Combiner::set}));
  loop_ir::Names own("v");
  for (const auto& [symbol, range] : graph.program().symbols) own.reserve(symbol);
  for (const Buffer& b : graph.program().buffers) own.reserve(b.name);
  graph.add_kernel(clean(copy_block(loop_ir::make_nest(axes, std::move(body)), {}, &own), kernel.symbols), at);
  const Ref<Stmt> load = loop_ir::make_stmt(Load{factor.value, factor.dtype, buffer, index, {}, loop_ir::zero_of(factor.dtype)});
  graph.set_body(at, clean(rewrite(kernel.body,
                                   [&](const Ref<Stmt>& stmt) -> Block {
                                     const auto* check = std::get_if<Check>(&stmt->node);
                                     if (check && std::find(moved.begin(), moved.end(), *check) != moved.end()) return {};
                                     return {loop_ir::is_straight(*stmt) && loop_ir::name_of(*stmt) == factor.value ? load : stmt};
                                   }),
                           kernel.symbols));
}

}  // namespace deplo
