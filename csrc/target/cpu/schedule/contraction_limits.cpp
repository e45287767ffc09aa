#include <algorithm>

#include "target/cpu/schedule/contraction_scheduler.h"

// Lanes that a comparison with a tensor's number leaves out, as the empty places of blocks of an expert's tokens: nothing is multiplied for panels
// of such lanes alone.

namespace deplo::loop_to_tile {
namespace {

using loop_ir::Let;
using loop_ir::Load;

/// Definitions of straight-line statements, by name.
std::map<std::string, Ref<loop_ir::Stmt>> definitions_of(const loop_ir::Block& block) {
  std::map<std::string, Ref<loop_ir::Stmt>> out;
  for (const auto& stmt : block) {
    if (const auto* let = std::get_if<Let>(&stmt->node)) out[let->name] = stmt;
    if (const auto* load = std::get_if<Load>(&stmt->node)) out[load->name] = stmt;
  }
  return out;
}

std::set<std::string> read_by(const loop_ir::Stmt& stmt) {
  std::set<std::string> names;
  if (const auto* let = std::get_if<Let>(&stmt.node)) {
    names.insert(let->operands.begin(), let->operands.end());
    collect_symbols(let->index, names);
  } else if (const auto* load = std::get_if<Load>(&stmt.node)) {
    for (Expr e : load->index) collect_symbols(e, names);
    for (const Cond& c : load->guard) collect_symbols(c.expr, names);
  }
  return names;
}

}  // namespace

bool ContractionScheduler::depends_on_sums(const std::string& value, const std::string& left_out, std::map<std::string, bool>& known) const {
  if (auto it = known.find(value); it != known.end()) return it->second;
  for (const Item& item : items_)
    if (item.contraction->result == value) return true;
  bool& depends = known[value] = false;
  const auto definitions = definitions_of(*nest_.inner);
  auto it = definitions.find(value);
  if (it == definitions.end()) return false;
  const auto* let = std::get_if<Let>(&it->second->node);
  std::set<std::string> names = read_by(*it->second);
  if (let && let->fn == Fn::where && let->operands[0] == left_out) names = {let->operands[2]};
  const bool any = std::any_of(names.begin(), names.end(), [&](const std::string& n) { return depends_on_sums(n, left_out, known); });
  depends = any;
  return any;
}

std::optional<ContractionScheduler::LaneLimit> ContractionScheduler::find_lane_limit() const {
  if (!per_call_ || !across_ || window_ || in_rows_ || lanes_.size() != 1) return std::nullopt;
  if (std::any_of(items_.begin(), items_.end(), [](const Item& i) { return i.matrix || i.parts > 1 || i.words || i.bits > 0; })) return std::nullopt;
  const auto definitions = definitions_of(*nest_.inner);
  for (const auto& [name, stmt] : definitions) {
    const auto* where = std::get_if<Let>(&stmt->node);
    if (!where || where->fn != Fn::where) continue;
    auto limit = limit_of(where->operands[0]);
    if (!limit) continue;
    std::map<std::string, bool> known;
    const auto all = stores();
    if (std::none_of(all.begin(), all.end(), [&](const loop_ir::Store* s) { return depends_on_sums(s->value, limit->condition, known); }))
      return limit;
  }
  return std::nullopt;
}

std::optional<ContractionScheduler::LaneLimit> ContractionScheduler::limit_of(const std::string& condition) const {
  const auto definitions = definitions_of(*nest_.inner);
  auto it = definitions.find(condition);
  const auto* compared = it == definitions.end() ? nullptr : std::get_if<Let>(&it->second->node);
  if (!compared || (compared->fn != Fn::lt && compared->fn != Fn::gt)) return std::nullopt;
  const std::string& place = compared->operands[compared->fn == Fn::lt ? 0 : 1];
  LaneLimit out{condition, compared->operands[compared->fn == Fn::lt ? 1 : 0], {}};
  auto defined = definitions.find(place);
  const auto* index = defined == definitions.end() ? nullptr : std::get_if<Let>(&defined->second->node);
  if (!index || index->fn != Fn::index || index->index != Expr::symbol(lanes_[0].name)) return std::nullopt;
  // All that makes the number must be the same for a block.
  std::set<std::string> needed{out.value};
  std::map<std::string, bool> known;
  for (size_t i = nest_.inner->size(); i-- > 0;) {
    const auto& stmt = (*nest_.inner)[i];
    const auto* let = std::get_if<Let>(&stmt->node);
    const auto* load = std::get_if<Load>(&stmt->node);
    if ((!let && !load) || needed.count(let ? let->name : load->name) == 0) continue;
    if ((let ? let->dtype : load->dtype) != DType::i64 && (let ? let->name : load->name) == out.value) return std::nullopt;
    const auto more = read_by(*stmt);
    needed.insert(more.begin(), more.end());
    out.statements.insert(out.statements.begin(), stmt);
  }
  auto varies = [&](const std::vector<Axis>& axes) {
    return std::any_of(axes.begin(), axes.end(), [&](const Axis& a) { return needed.count(a.name) > 0; });
  };
  const bool fixed = !out.statements.empty() && !varies(rows_) && !varies(lane_class_);
  return fixed && !depends_on_sums(out.value, "", known) ? std::optional(std::move(out)) : std::nullopt;
}

tile_ir::Block ContractionScheduler::limit_lanes() {
  limit_ = find_lane_limit();
  tile_ir::Block out;
  if (!limit_) return out;
  const std::string name = copy_statements(limit_->statements, outer_map_, ".limit", out).at(limit_->value);
  counted_lanes_ = max(min(valid_lanes_, sym(name) - first_lane_), 0);
  return out;
}

tile_ir::Block ContractionScheduler::within_limit(tile_ir::Block tile) const {
  tile_ir::Block out{make(tile_ir::If{{{Cond::Kind::ge0, counted_lanes_ - 1}}, std::move(tile)})};
  // What the other lanes' stores write.
  const Expr lane = sym("lane_left");
  const Expr row = sym("row_left");
  Substitution map = at_row(row);
  join(map, unflatten(lanes_, first_lane_ + lane));
  tile_ir::Block left = finish(map, [](const Item& item, const std::string& result, tile_ir::Block& into) {
    into.push_back(make(Let{result, item.dtype(), Fn::constant, {}, Scalar::of_float(item.dtype(), 0), 0}));
  });
  for (auto& stmt : left) {
    const auto* let = std::get_if<Let>(&stmt->node);
    if (let && let->name == limit_->condition) stmt = make(Let{let->name, DType::boolean, Fn::constant, {}, Scalar::of_int(DType::boolean, 0), 0});
  }
  left = {loop(row.name(), 0, valid_rows_, LoopKind::lanes, std::move(left))};
  out.push_back(loop(lane.name(), min(ceildiv(counted_lanes_, nr_) * nr_, valid_lanes_), valid_lanes_, LoopKind::serial, std::move(left)));
  return out;
}

tile_ir::Block ContractionScheduler::pack_within_limit(tile_ir::Block panel, const std::vector<Axis>& batch, Expr panels,
                                                       std::set<std::string>& reads) const {
  const auto limit = find_lane_limit();
  if (!limit) return panel;
  for (const auto& stmt : limit->statements)
    if (const auto* load = std::get_if<Load>(&stmt->node)) reads.insert(load->buffer);
  std::set<std::string> needed;
  for (const auto& stmt : limit->statements) {
    const auto more = read_by(*stmt);
    needed.insert(more.begin(), more.end());
  }
  // The panels are those of `batch`: the number must not vary along other axes.
  const bool same = std::all_of(outer_.begin(), outer_.end(),
                                [&](const Axis& a) { return needed.count(a.name) == 0 || std::find(batch.begin(), batch.end(), a) != batch.end(); });
  if (!same) return panel;
  tile_ir::Block out;
  const std::string name = copy_statements(limit->statements, unflatten(batch, floordiv(sym("par"), panels)), ".limit", out).at(limit->value);
  out.push_back(make(tile_ir::If{{{Cond::Kind::ge0, sym(name) - mod(sym("par"), panels) * nr_ - 1}}, std::move(panel)}));
  return out;
}

}  // namespace deplo::loop_to_tile
