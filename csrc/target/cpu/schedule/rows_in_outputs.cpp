#include "target/cpu/schedule/rows_in_outputs.h"

#include <optional>

#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

/// The row of an output that is to be the local: its leading coordinates.
struct Row {
  std::string output;
  std::vector<Expr> lead;
};

/// The row that this store gives, if every iteration of the outer nest has one of its own that lies in memory as the local does.
std::optional<Row> row_of(const Store& store, const Local& local, const Param& output, const std::vector<Axis>& axes) {
  const size_t leading = output.shape.size() - local.shape.size();
  const std::vector<Expr> strides = contiguous_strides(local.shape);
  for (size_t d = 0; d < local.shape.size(); ++d)
    if (output.shape[leading + d] != local.shape[d] || output.strides[leading + d] != strides[d]) return std::nullopt;
  Row row{output.name, {store.index.begin(), store.index.begin() + static_cast<std::ptrdiff_t>(leading)}};
  std::vector<Expr> moving;
  for (Expr e : row.lead)
    if (!e.is_constant()) moving.push_back(e);
  return one_place_each(moving, axes) ? std::optional(row) : std::nullopt;
}

std::optional<Row> find_row(const Kernel& kernel, const Nest& nest, const Local& local) {
  const Ref<Stmt>* last = nullptr;
  for (const auto& stmt : nest.body)
    if (count_uses({stmt}, local.name) > 0) last = &stmt;
  if (!last || local.shape.empty()) return std::nullopt;
  for (const Param& p : kernel.params) {
    if (p.kind != ParamKind::out || p.dtype != local.dtype || count_uses(kernel.body, p.name) != 1) continue;
    const Store* store = takes_place(*last, local, p.name);
    if (!store) continue;
    if (auto row = row_of(*store, local, p, nest.axes)) return row;
  }
  return std::nullopt;
}

Block with_row(const Block& block, const Local& local, const Row& row) {
  return rewrite(block, [&](const Ref<Stmt>& stmt) -> Block {
    auto changed = [&](auto access) -> Block {
      access.buffer = row.output;
      access.index.insert(access.index.begin(), row.lead.begin(), row.lead.end());
      return {make_stmt(std::move(access))};
    };
    if (const auto* load = std::get_if<Load>(&stmt->node); load && load->buffer == local.name) return changed(*load);
    if (const auto* store = std::get_if<Store>(&stmt->node); store && store->buffer == local.name) return changed(*store);
    if (const auto* other = std::get_if<Local>(&stmt->node); other && other->name == local.name) return {};
    return {stmt};
  });
}

}  // namespace

Kernel rows_in_outputs(const Kernel& kernel) {
  Kernel out = kernel;
  Nest nest = peel(kernel.body);
  for (const auto& stmt : Block(nest.body))
    if (const auto* local = std::get_if<Local>(&stmt->node))
      if (auto row = find_row(out, nest, *local)) {
        nest.body = with_row(nest.body, *local, *row);
        out.body = make_nest(nest.axes, nest.body);
      }
  return out;
}

}  // namespace deplo::loop_to_tile
