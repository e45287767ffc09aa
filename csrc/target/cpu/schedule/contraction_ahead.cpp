#include "target/cpu/schedule/contraction_scheduler.h"

// Rows that no hardware prefetcher sees coming, a short piece of each, are fetched while those before them are multiplied.

namespace deplo::loop_to_tile {
namespace {

constexpr int64_t kFewPanels = 16;  // of lanes: more of them hide the time that rows take to come

void collect(const loop_ir::Stmt& stmt, std::set<std::string>& names) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) {
    names.insert(let->operands.begin(), let->operands.end());
    collect_symbols(let->index, names);
  } else if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) {
    for (Expr e : load->index) collect_symbols(e, names);
    for (const Cond& c : load->guard) collect_symbols(c.expr, names);
  }
}

const std::string* named_by(const loop_ir::Stmt& stmt) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return &let->name;
  if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) return &load->name;
  return nullptr;
}

}  // namespace

loop_ir::Block ContractionScheduler::choice(const Operand& operand) const {
  const loop_ir::Load* main = main_load(operand);
  std::set<std::string> needed;
  if (main)
    for (Expr e : main->index) collect_symbols(e, needed);
  loop_ir::Block out;
  for (size_t i = operand.slice.size(); i-- > 0;) {
    const std::string* name = named_by(*operand.slice[i]);
    if (!name || needed.count(*name) == 0) continue;
    collect(*operand.slice[i], needed);
    out.insert(out.begin(), operand.slice[i]);
  }
  return out;
}

bool ContractionScheduler::is_chosen(const Item& item, const Operand& operand) const {
  const loop_ir::Block statements = choice(operand);
  if (statements.empty()) return false;
  std::set<std::string> read;
  for (const auto& stmt : statements) collect(*stmt, read);
  const auto varies = [&](const std::vector<Axis>& axes) {
    return std::any_of(axes.begin(), axes.end(), [&](const Axis& a) { return read.count(a.name) > 0; });
  };
  return !varies(rows_) && !varies(lane_class_) && !varies(item.contraction->reduce->axes);
}

bool ContractionScheduler::wants_outer_inside() const {
  if (in_rows_ || window_ || !per_call_ || !across_ || outer_.empty()) return false;
  return std::all_of(items_.begin(), items_.end(), [&](const Item& i) { return !i.rows.is_static && is_chosen(i, i.rows); });
}

bool ContractionScheduler::prefetches_rows(const Item& item) const {
  const bool few = per_call_ && lanes_extent_.is_constant() && lanes_extent_.value() <= kFewPanels * nr_;
  const bool known = knows_place(item.rows) || (outer_inside_ && is_chosen(item, item.rows));
  return few && across_ && !item.rows.is_static && !window_ && rows_.size() == 1 && known;
}

ContractionScheduler::Turn ContractionScheduler::turn_ahead(const Item& item) const {
  const Expr next = sym("kb" + item.tag) + 1;
  return turn(min(sym("par") + floordiv(next, item.depth_blocks), parallel_extent_ - 1));
}

tile_ir::Block ContractionScheduler::places_ahead(const Item& item) const {
  tile_ir::Block out;
  if (!outer_inside_ || !prefetches_rows(item)) return out;
  Substitution map = turn_ahead(item).outer;
  copy_statements(choice(item.rows), map, ahead_suffix(item), out);
  return out;
}

Ref<tile_ir::Stmt> ContractionScheduler::over_lines(const Item& item, const RowBlocks& rows, Expr first, Expr end, tile_ir::Block body) const {
  // The places of lines are computed once a line: in each step that would take as long as what is multiplied.
  const Expr line = sym("kl" + item.tag);
  const Expr from = first + line * kCacheLine;
  tile_ir::Block out = prefetch_rows(item, rows, floordiv(from, kCacheLine));
  out.push_back(loop("k" + item.tag, from, min(from + kCacheLine, end), LoopKind::serial, std::move(body), item.unroll));
  return loop(line.name(), 0, ceildiv(end - first, kCacheLine), LoopKind::serial, std::move(out));
}

tile_ir::Block ContractionScheduler::prefetch_rows(const Item& item, const RowBlocks& rows, Expr at) const {
  // Every panel of lanes goes by these rows, and fetches its share of their lines: all at once they would come no faster than memory brings them,
  // and the steps would wait.
  const loop_ir::Load* main = main_load(item.rows);
  const Expr next = sym("kb" + item.tag) + 1;
  const int64_t panels = (lanes_extent_.value() + nr_ - 1) / nr_;
  const int64_t each = (rows.mr + panels - 1) / panels;
  const Expr line = floordiv(at, panels) * panels + panel(item);
  const Expr ahead_row = sym("ra" + item.tag);
  const Expr here = row_of(item, rows, panels == 1 ? ahead_row : min(mod(at, panels) * each + ahead_row, rows.mr - 1));
  Substitution map = outer_map_;
  Expr row;
  if (outer_inside_) {
    const Turn ahead = turn_ahead(item);
    map = ahead.outer;
    for (const auto& stmt : choice(item.rows)) map[*named_by(*stmt)] = sym(*named_by(*stmt) + ahead_suffix(item));
    row = ahead.row_block * (row_tiles_ * mr_) + here;
  } else {
    row = first_row_ + here + floordiv(next, item.depth_blocks) * (row_tiles_ * mr_);
  }
  join(map, unflatten(rows_, min(row, rows_extent_ - 1)));
  join(map, depth_map(item, min(mod(next, item.depth_blocks) * item.depth_block + line * kCacheLine * item.group(), item.depth - 1)));
  std::vector<Expr> index;
  for (Expr e : main->index) index.push_back(substitute(e, map));
  return {loop(ahead_row.name(), 0, each, LoopKind::unroll, {make(tile_ir::Prefetch{main->buffer, std::move(index), 2})})};
}

}  // namespace deplo::loop_to_tile
