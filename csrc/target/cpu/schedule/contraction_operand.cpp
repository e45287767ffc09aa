#include <algorithm>

#include "analysis/casts.h"
#include "loop_ir/places.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo::loop_to_tile {

std::optional<Operand::Narrow> Operand::narrow() const {
  auto defines = [&](const std::string& name) {
    return std::find_if(slice.begin(), slice.end(), [&](const auto& stmt) {
      const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
      const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
      return (let && let->name == name) || (load && load->name == name);
    });
  };
  auto last = defines(source->value);
  const auto* cast = last == slice.end() ? nullptr : std::get_if<loop_ir::Let>(&(*last)->node);
  if (!cast || cast->fn != Fn::cast || (cast->dtype != DType::f32 && cast->dtype != DType::i32)) return std::nullopt;
  auto wide = defines(cast->operands[0]);
  if (wide == slice.end()) return std::nullopt;
  const auto* load = std::get_if<loop_ir::Load>(&(*wide)->node);
  const auto* let = std::get_if<loop_ir::Let>(&(*wide)->node);
  DType dtype = load ? load->dtype : let->dtype;
  const bool half = dtype == DType::bf16 || dtype == DType::f16;
  const bool byte = dtype == DType::u8 || dtype == DType::i8;
  if (cast->dtype == DType::f32 ? !half : !byte) return std::nullopt;
  return Narrow{cast->operands[0], dtype};
}

std::optional<Operand::Narrow> Operand::stored() const {
  std::map<std::string, const loop_ir::Stmt*> definitions;
  for (const auto& stmt : slice) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) definitions[let->name] = stmt.get();
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) definitions[load->name] = stmt.get();
  }
  auto dtype_of = [](const loop_ir::Stmt& stmt) {
    const auto* let = std::get_if<loop_ir::Let>(&stmt.node);
    return let ? let->dtype : std::get<loop_ir::Load>(stmt.node).dtype;
  };
  std::optional<Narrow> found;
  std::vector<DType> passed;  // that the value takes on its way to the product: each must hold it
  for (std::string value = source->value; definitions.count(value) > 0;) {
    const auto* cast = std::get_if<loop_ir::Let>(&definitions.at(value)->node);
    if (!cast || cast->fn != Fn::cast) break;
    passed.push_back(cast->dtype);
    value = cast->operands[0];
    if (definitions.count(value) == 0) break;
    const DType dtype = dtype_of(*definitions.at(value));
    const bool keeps = std::all_of(passed.begin(), passed.end(), [&](DType wide) { return analysis::is_lossless(dtype, wide); });
    if (keeps && (!found || size_of(dtype) < size_of(found->dtype))) found = Narrow{value, dtype};
  }
  return found;
}

loop_ir::Block Operand::statements_of(const std::string& value) const {
  std::set<std::string> needed{value};
  loop_ir::Block out;
  for (size_t i = slice.size(); i-- > 0;) {
    const loop_ir::Stmt& stmt = *slice[i];
    if (needed.count(name_of(stmt)) == 0) continue;
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) {
      needed.insert(let->operands.begin(), let->operands.end());
      collect_symbols(let->index, needed);
    } else if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) {
      for (Expr e : load->index) collect_symbols(e, needed);
      for (const Cond& c : load->guard) collect_symbols(c.expr, needed);
    }
    out.insert(out.begin(), slice[i]);
  }
  return out;
}

std::optional<Operand::Prologue> Operand::prologue(const std::vector<Axis>& summed) const {
  const loop_ir::Load* main = nullptr;
  Prologue out;
  std::set<std::string> values;
  for (const auto& stmt : slice) values.insert(name_of(*stmt));
  for (const auto& stmt : slice) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) {
      if (let->fn == Fn::index) return std::nullopt;
      continue;
    }
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    std::set<std::string> read;
    if (load)
      for (Expr e : load->index) collect_symbols(e, read);
    const bool known = load && load->guard.empty() && std::none_of(read.begin(), read.end(), [&](const auto& s) { return values.count(s) > 0; });
    if (!known) return std::nullopt;
    if (load->buffer == source->buffers.front()) {
      if (main) return std::nullopt;
      main = load;
    } else {
      out.factors.push_back(load);
    }
  }
  if (!main || out.factors.empty()) return std::nullopt;
  // The innermost axes of the sum that no factor varies along.
  int64_t group = 1;
  for (size_t i = summed.size(); i-- > 0;) {
    const bool varies = std::any_of(out.factors.begin(), out.factors.end(), [&](const loop_ir::Load* f) {
      return std::any_of(f->index.begin(), f->index.end(), [&](Expr e) { return uses(e, summed[i].name); });
    });
    if (varies) break;
    if (!summed[i].extent.is_constant()) return std::nullopt;
    group *= summed[i].extent.value();
  }
  constexpr int64_t kLeastGroup = 8;  // below, the factors take as much memory as what they save
  if (group < kLeastGroup) return std::nullopt;
  out.main = {main->name, main->dtype};
  out.group = group;
  return out;
}

std::optional<Operand::Prologue> Item::prologue() const {
  if (words || parts > 1 || matrix || dtype() != DType::f32) return std::nullopt;
  auto found = lanes.prologue(contraction->reduce->axes);
  if (!found || (pairs && found->group % 2 != 0)) return std::nullopt;
  const auto stored = lanes.stored();
  if (size_of(found->main.dtype) >= (stored ? size_of(stored->dtype) : 4)) return std::nullopt;
  return found;
}

std::optional<Operand::Narrow> Item::packed_lanes() const {
  if (words || parts > 1) return std::nullopt;
  if (matrix) return lanes.narrow();
  if (auto scaled = prologue()) return scaled->main;
  return lanes.stored();
}

bool Item::has_odd_channels() const {
  return channels > 0 && count({summed.begin(), summed.begin() + static_cast<std::ptrdiff_t>(channels)}).value() % 2 != 0;
}

bool Item::needs_widening() const {
  if (!lanes.is_static || matrix) return false;
  if (prologue()) return true;
  auto packed = packed_lanes();
  return pairs && packed && packed->dtype != DType::bf16;
}

}  // namespace deplo::loop_to_tile
