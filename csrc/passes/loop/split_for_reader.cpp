#include "passes/loop/split_for_reader.h"

#include <algorithm>
#include <map>

namespace deplo {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Load;
using loop_ir::Stmt;
using loop_ir::Store;

constexpr int64_t kWidestVector = 16;  // floats of any machine's vectors

Expr extents(const std::vector<Axis>& axes) {
  Expr all = 1;
  for (const Axis& axis : axes) all = all * axis.extent;
  return all;
}

// The axes, outer first, of which `place` is the row-major position; none if it is not one.
std::vector<Axis> joined_axes(Expr place, const std::vector<Axis>& axes) {
  std::vector<Axis> parts;
  Expr rest = place;
  Expr step = 1;
  for (bool found = true; found && !rest.is(0);) {
    found = false;
    for (const Axis& axis : axes) {
      auto coefficient = linear_coefficient(rest, axis.name);
      if (!coefficient || !(*coefficient == step) || axis.extent.is(1)) continue;
      parts.insert(parts.begin(), axis);
      rest = rest - Expr::symbol(axis.name) * step;
      step = step * axis.extent;
      found = true;
      break;
    }
  }
  return rest.is(0) ? parts : std::vector<Axis>();
}

struct ReaderSplitter {
  const NestGroup& nest;
  const std::vector<analysis::Contraction>& contractions;
  const NestGroup& reader;
  const BufferOf& buffer;
  const Ranges& symbols;

  // In every contraction, the operand that the axis does not belong to is packed once for all calls.
  bool are_rows_of_layers(const std::string& axis) const {
    return std::all_of(contractions.begin(), contractions.end(), [&](const analysis::Contraction& c) {
      const auto& other = c.a.axes.count(axis) > 0 ? c.b : c.a;
      return other.axes.count(axis) == 0 && is_packed_once(other, buffer);
    });
  }

  // Whether vectors can run along the innermost part where the parts lie apart.
  bool keeps_lanes(const std::string& axis, const std::vector<Axis>& parts) const {
    if (!parts.back().extent.is_constant()) return false;
    const bool known = std::all_of(parts.begin(), parts.end(), [](const Axis& part) { return part.extent.is_constant(); });
    return parts.back().extent.value() % kWidestVector == 0 || (known && parts.size() == 2 && are_rows_of_layers(axis));
  }

  bool may_store(const Store& store, const std::string& axis, const std::vector<Axis>& parts) const {
    Expr offset = 0;
    const Buffer& b = buffer(store.buffer);
    for (size_t d = 0; d < store.index.size(); ++d) offset = offset + store.index[d] * b.strides[d];
    bool together = true;
    bool contiguous = false;
    for (size_t k = 0; k < parts.size(); ++k) {
      const bool last = k + 1 == parts.size();
      auto step = linear_coefficient(offset, parts[k].name);
      contiguous = contiguous || !step || (step->is(1) && !(last && keeps_lanes(axis, parts)));
      if (last) break;
      auto inner = linear_coefficient(offset, parts[k + 1].name);
      together = together && step && inner && simplify(*step - *inner * parts[k + 1].extent, symbols).is(0);
    }
    return together || !contiguous;
  }

  bool may_store(const std::string& axis, const std::vector<Axis>& parts) const {
    bool fine = true;
    loop_ir::visit(reader.body, [&](const Stmt& stmt, const auto&) {
      if (const auto* store = std::get_if<Store>(&stmt.node)) fine = fine && may_store(*store, axis, parts);
    });
    return fine;
  }

  std::map<std::string, std::vector<Axis>> find(const std::set<std::string>& flow) const {
    std::map<std::string, std::vector<Axis>> splits;
    auto match = [&](const Store& store, const Load& load) {
      for (size_t d = 0; d < store.index.size(); ++d) {
        auto axis = std::find_if(nest.axes.begin(), nest.axes.end(), [&](const Axis& x) { return Expr::symbol(x.name) == store.index[d]; });
        if (axis == nest.axes.end()) continue;
        auto parts = joined_axes(load.index[d], reader.axes);
        if (parts.size() > 1 && simplify(extents(parts) - axis->extent, symbols).is(0) && may_store(axis->name, parts)) splits[axis->name] = parts;
      }
    };
    loop_ir::visit(nest.body, [&](const Stmt& stmt, const auto&) {
      const auto* store = std::get_if<Store>(&stmt.node);
      if (!store || !flow.count(store->buffer)) return;
      loop_ir::visit(reader.body, [&](const Stmt& other, const auto&) {
        if (const auto* load = std::get_if<Load>(&other.node); load && load->buffer == store->buffer) match(*store, *load);
      });
    });
    return splits;
  }
};

}  // namespace

bool is_packed_once(const analysis::ContractionOperand& operand, const BufferOf& buffer) {
  return std::all_of(operand.buffers.begin(), operand.buffers.end(), [&](const std::string& name) { return buffer(name).is_static; });
}

std::optional<NestGroup> split_for_reader(const NestGroup& nest, const std::vector<analysis::Contraction>& contractions, const NestGroup& reader,
                                          const std::set<std::string>& flow, const BufferOf& buffer, const Ranges& symbols, loop_ir::Names& names) {
  auto splits = ReaderSplitter{nest, contractions, reader, buffer, symbols}.find(flow);
  if (splits.empty()) return std::nullopt;
  loop_ir::Renaming renaming;
  std::vector<Axis> axes;
  for (const Axis& axis : nest.axes) {
    auto split = splits.find(axis.name);
    if (split == splits.end()) {
      axes.push_back(axis);
      continue;
    }
    Expr whole = 0;
    for (const Axis& part : split->second) {
      axes.push_back({names.fresh(axis.name), part.extent});
      whole = whole * part.extent + Expr::symbol(axes.back().name);
    }
    renaming.exprs[axis.name] = whole;
  }
  Block body = loop_ir::make_nest(axes, loop_ir::copy_block(nest.body, renaming, nullptr));
  loop_ir::Nest split = loop_ir::peel(loop_ir::clean(body, symbols));
  return NestGroup{split.axes, split.body};
}

}  // namespace deplo
