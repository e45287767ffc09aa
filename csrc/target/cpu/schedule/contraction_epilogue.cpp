#include <algorithm>
#include <cmath>

#include "analysis/cost.h"
#include "base/error.h"
#include "loop_ir/places.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo::loop_to_tile {
namespace {

constexpr int kRegisterOperations = 12;   // of an epilogue at one point, beyond which its copies for a whole register block are too much code
constexpr int64_t kRegisterAccesses = 8;  // loads and stores of it, likewise
constexpr int64_t kHiddenDepth = 96;  // multiply-adds of a sum, behind which its epilogue's reads come from far; hints before shorter ones cost more
constexpr int64_t kRegisterDepth = 256;  // multiply-adds of a sum, beyond which another pass over the tile in the first cache is lost among them

}  // namespace

bool ContractionScheduler::can_finish_in_registers() const {
  const Item& item = items_.back();
  if (across_ || apart_ || item.matrix || item.folded || any_points()) return false;
  int operations = 0;
  int64_t accesses = 0;
  auto near = [&](const std::string& buffer, const std::vector<Expr>& index) {
    auto step = linear_coefficient(offset(buffer, index), unit_.name);
    ++accesses;
    return step && (step->is(0) || step->is(1));
  };
  auto fits = [](DType dtype) { return dtype == DType::boolean || size_of(dtype) <= 4; };  // wider ones would narrow the vectors of the sums
  for (const auto& stmt : *nest_.inner) {
    const bool ok = std::visit(Overloaded{[&](const loop_ir::Let& s) {
                                            operations += analysis::cost_of(s.fn);
                                            return fits(s.dtype);
                                          },
                                          [&](const loop_ir::Load& s) { return fits(s.dtype) && s.guard.empty() && near(s.buffer, s.index); },
                                          [&](const loop_ir::Store& s) { return s.guard.empty() && near(s.buffer, s.index); },
                                          [&](const loop_ir::Reduce&) { return true; }, [](const auto&) { return false; }},
                               stmt->node);
    if (!ok) return false;
  }
  return operations <= kRegisterOperations && accesses <= kRegisterAccesses;
}

bool ContractionScheduler::wants_registers() const {
  const Item& item = items_.back();
  return item.depth.is_constant() && item.depth.value() <= kRegisterDepth * item.group() && can_finish_in_registers();
}

Substitution ContractionScheduler::at_row(Expr row) const {
  if (!window_) return unflatten(rows_, first_row_ + row);
  return {{rows_[0].name, first_row_line_ + floordiv(row, rows_[1].extent)}, {rows_[1].name, mod(row, rows_[1].extent)}};
}

Expr ContractionScheduler::tile_row(const Item& item, const RowBlocks& rows, Expr row) const {
  return window_ ? line_of(item, rows, row) * tile_points() + point_of(item, rows, row) : row_of(item, rows, row);
}

Expr ContractionScheduler::sums_left(const Item& item, bool several) {
  return (several ? item.depth_blocks - 1 - sym("kb" + item.tag) : Expr(0)) +
         (has_chains(item) ? ceildiv(depth_of_block(item), item.chain) - 1 - sym("kg" + item.tag) : Expr(0));
}

tile_ir::Block ContractionScheduler::prefetch_finish(const Item& item, bool several, const RowBlocks& rows) const {
  if (&item != &items_.back() || across_ || apart_ || in_rows_ || in_chunks(item) || hint(item.depth) < kHiddenDepth) return {};
  const std::string& t = item.tag;
  const Expr row = sym("r" + t + "p");
  Substitution at = outer_map_;
  join(at, window_ ? Substitution{{rows_[0].name, first_row_line_ + line_of(item, rows, row)}, {rows_[1].name, point_of(item, rows, row)}}
                   : unflatten(rows_, first_row_ + row_of(item, rows, row)));
  tile_ir::Block lines;
  for (const auto& stmt : *nest_.inner) {
    const auto* load = std::get_if<loop_ir::Load>(&stmt->node);
    if (!load || statics_.count(load->buffer) > 0) continue;
    const Expr place = offset(load->buffer, load->index);
    // What was loaded (a row that an index chooses) is known behind the sums alone.
    const auto is_value = [&](const auto& s) { return !loop_ir::name_of(*s).empty() && uses(place, loop_ir::name_of(*s)); };
    if (std::any_of(nest_.inner->begin(), nest_.inner->end(), is_value)) continue;
    const auto along = linear_coefficient(place, unit_.name);
    const bool varies = std::any_of(rows_.begin(), rows_.end(), [&](const Axis& a) { return uses(place, a.name); });
    if (!along || !along->is(1) || !varies) continue;
    for (int64_t lane = 0; lane < nr_; lane += kCacheLine * 4 / size_of(load->dtype)) {
      Substitution point = at;
      join(point, unflatten(lanes_, first_lane_ + panel(item) * nr_ + lane));
      std::vector<Expr> index;
      for (Expr e : load->index) index.push_back(substitute(e, point));
      lines.push_back(make(tile_ir::Prefetch{load->buffer, std::move(index), 1}));
    }
  }
  if (lines.empty()) return {};
  tile_ir::Block out{loop(row.name(), 0, rows.mr, LoopKind::unroll, std::move(lines))};
  if (several || has_chains(item)) out = {make(tile_ir::If{{{Cond::Kind::eq0, sums_left(item, several)}}, std::move(out)})};
  return out;
}

tile_ir::Block ContractionScheduler::add_to_tile(const Item& item, bool several, const RowBlocks& rows, const std::string& acc) const {
  const std::string& t = item.tag;
  const Expr row = sym("r" + t + "o");
  const Expr lane = sym("x" + t + "o");
  const std::vector<Expr> target{tile_row(item, rows, row), tile_lane(item, lane)};
  tile_ir::Block first{make(loop_ir::Load{"dv" + t, item.dtype(), acc, {row, lane}, {}, {}})};
  tile_ir::Block later = first;
  first.push_back(make(loop_ir::Store{"c" + t, target, "dv" + t, {}, Combiner::set}));
  later.push_back(make(loop_ir::Load{"ov" + t, item.dtype(), "c" + t, target, {}, {}}));
  later.push_back(make(loop_ir::Let{"sv" + t, item.dtype(), Fn::add, {"ov" + t, "dv" + t}, {}, 0}));
  later.push_back(make(loop_ir::Store{"c" + t, target, "sv" + t, {}, Combiner::set}));
  auto store = [&](bool more) { return tile_ir::Block{over_registers(item, rows, "o", {}, more ? later : first)}; };
  const bool finishes = in_registers_ && &item == &items_.back();
  if (!several && !has_chains(item)) return finishes ? finish_registers(item, rows, acc, store(false), false) : store(false);
  // What ran before in this tile, and what is left: blocks of k, chains of this block.
  const Expr before = (several ? sym("kb" + t) : Expr(0)) + (has_chains(item) ? sym("kg" + t) : Expr(0));
  const Cond none_before{Cond::Kind::eq0, before};
  const Cond some_before{Cond::Kind::ge0, before - 1};
  if (!finishes) return {make(tile_ir::If{{none_before}, store(false)}), make(tile_ir::If{{some_before}, store(true)})};
  const Expr left = sums_left(item, several);
  const Cond none_left{Cond::Kind::eq0, left};
  const Cond some_left{Cond::Kind::ge0, left - 1};
  tile_ir::Block out{make(tile_ir::If{{none_before, some_left}, store(false)}), make(tile_ir::If{{some_before, some_left}, store(true)})};
  out.push_back(make(tile_ir::If{{some_before, none_left}, finish_registers(item, rows, acc, store(true), true)}));
  const bool always_more = item.depth.is_constant() && item.depth.value() > item.chain;
  if (!always_more) out.push_back(make(tile_ir::If{{none_before, none_left}, finish_registers(item, rows, acc, store(false), false)}));
  return out;
}

tile_ir::Block ContractionScheduler::finish_registers(const Item& item, const RowBlocks& rows, const std::string& acc, tile_ir::Block store,
                                                      bool more) const {
  const std::string& t = item.tag;
  const Expr row = sym("r" + t + "f");
  const Expr lane = sym("x" + t + "f");
  const Expr first = panel(item) * nr_;
  Substitution at = window_ ? Substitution{{rows_[0].name, first_row_line_ + line_of(item, rows, row)}, {rows_[1].name, point_of(item, rows, row)}}
                            : unflatten(rows_, first_row_ + row_of(item, rows, row));
  join(at, unflatten(lanes_, first_lane_ + first + lane));
  const std::vector<Expr> place{tile_row(item, rows, row), tile_lane(item, lane)};
  tile_ir::Block whole{over_registers(item, rows, "f", {}, finish(at, [&](const Item& of, const std::string& result, tile_ir::Block& into) {
                                        if (&of != &item) return load_sum(of, result, place[0], place[1], into);
                                        into.push_back(make(loop_ir::Load{more ? "dv" + t : result, item.dtype(), acc, {row, lane}, {}, {}}));
                                        if (!more) return;
                                        into.push_back(make(loop_ir::Load{"ov" + t, item.dtype(), "c" + t, place, {}, {}}));
                                        into.push_back(make(loop_ir::Let{result, item.dtype(), Fn::add, {"ov" + t, "dv" + t}, {}, 0}));
                                      }))};
  // Rows and lanes that only pad the block are left out by way of the tile.
  const Expr rows_left = window_ ? valid_row_lines_ - line_of(item, rows, rows.mr - 1) - 1 : valid_rows_ - row_of(item, rows, rows.mr);
  const bool whole_rows = window_ ? block_lines_ == 1 : !in_rows_ && tail_ == 0 && rows_extent_.is_constant() && rows_extent_.value() % mr_ == 0;
  const bool whole_lanes = lanes_extent_.is_constant() && lanes_extent_.value() % nr_ == 0 && !two_lane_axes();
  const Expr lanes_left = valid_lanes_ - first - nr_;
  if (whole_rows && whole_lanes) return whole;
  const Expr left = whole_rows ? lanes_left : whole_lanes ? rows_left : min(rows_left, lanes_left);
  const Expr start = tile_row(item, rows, 0);
  for (auto& stmt : epilogue(start, min(start + rows.mr, valid_rows_))) store.push_back(stmt);
  return {make(tile_ir::If{{{Cond::Kind::ge0, left}}, std::move(whole)}), make(tile_ir::If{{{Cond::Kind::ge0, Expr(-1) - left}}, std::move(store)})};
}

tile_ir::Block ContractionScheduler::epilogue(Expr from, Expr to) const {
  const int64_t side = ctx_.target.vector_bytes / 4;
  auto whole = [&](int64_t of) { return lanes_extent_.is_constant() && lanes_extent_.value() % of == 0; };
  if (!in_panels()) return epilogue({from, to, 0, valid_lanes_, 0, whole(side)});
  const Item& item = items_.back();
  const Expr first = panel(item) * nr_;
  const Expr place = tile_lane(item, 0);
  if (whole(nr_) && !two_lane_axes()) return epilogue({from, to, first, nr_, place, true});
  // Most panels are whole: their vectors need no masks.
  const Expr left = valid_lanes_ - first - nr_;
  return {make(tile_ir::If{{{Cond::Kind::ge0, left}}, epilogue({from, to, first, nr_, place, true})}),
          make(tile_ir::If{{{Cond::Kind::ge0, Expr(-1) - left}}, epilogue({from, to, first, left + nr_, place, whole(side) && !two_lane_axes()})})};
}

tile_ir::Block ContractionScheduler::epilogue(const Finished& part) const {
  Expr row = sym("row");
  if (any_points()) {
    // Lines of the tile end in padding.
    const Expr line = sym("line");
    Finished points = part;
    points.from = 0;
    points.to = rows_[1].extent;
    const Substitution here{{rows_[0].name, first_row_line_ + line}, {rows_[1].name, row}};
    return {loop("line", 0, valid_row_lines_, LoopKind::serial, epilogue(points, here, line * tile_points() + row))};
  }
  return epilogue(part, at_row(row), row);
}

tile_ir::Block ContractionScheduler::epilogue(const Finished& part, const Substitution& here, Expr tile_row) const {
  auto at = [&](Expr lane) {
    Substitution map = here;
    join(map, unflatten(lanes_, first_lane_ + part.first + lane));
    return finish(map, [&, lane](const Item& item, const std::string& result, tile_ir::Block& into) {
      load_sum(item, result, tile_row, part.place + lane, into);
    });
  };
  if (!across_) return {loop("row", part.from, part.to, LoopKind::serial, {loop("lane", 0, part.lanes, LoopKind::lanes, at(sym("lane")))})};
  // The sums lie across: squares of them are transposed in registers.
  const int64_t side = ctx_.target.vector_bytes / 4;
  auto rows = [&](tile_ir::Block inner) { return tile_ir::Block{loop("row", part.from, part.to, LoopKind::lanes, std::move(inner))}; };
  tile_ir::Block inside{loop("lane_in", 0, side, LoopKind::unroll, at(sym("lane_square") * side + sym("lane_in")))};
  tile_ir::Block out{loop("lane_square", 0, floordiv(part.lanes, side), LoopKind::serial, rows(std::move(inside)))};
  if (!part.whole) out.push_back(loop("lane", floordiv(part.lanes, side) * side, part.lanes, LoopKind::serial, rows(at(sym("lane")))));
  return out;
}

void ContractionScheduler::load_sum(const Item& item, const std::string& result, Expr row, Expr lane, tile_ir::Block& into) {
  const DType f32 = item.dtype();
  auto load = [&](const std::string& name, const std::string& buffer) {
    into.push_back(make(loop_ir::Load{name, f32, buffer + item.tag, {row, lane}, {}, {}}));
    return name;
  };
  if (item.parts == 1) {
    load(result, "c");
    return;
  }
  auto let = [&](const std::string& name, DType dtype, Fn fn, std::vector<std::string> operands, Scalar value = {}) {
    into.push_back(make(loop_ir::Let{name, dtype, fn, std::move(operands), value, 0}));
    return name;
  };
  const std::string tag = ".p" + item.tag;
  const std::string large = load("large" + tag, "c");
  const std::string small = load("small" + tag, "cr");
  const std::string most = let("inf" + tag, f32, Fn::constant, {}, Scalar::of_float(f32, HUGE_VAL));
  const std::string finite = let("finite" + tag, DType::boolean, Fn::lt, {let("size" + tag, f32, Fn::abs, {large}), most});
  let(result, f32, Fn::where, {finite, let("both" + tag, f32, Fn::add, {large, small}), large});
}

tile_ir::Block ContractionScheduler::finish(const Substitution& point, const Sums& sums) const {
  Substitution map = outer_map_;
  join(map, point);
  tile_ir::Block inner;
  for (const auto& stmt : *nest_.inner) {
    std::visit(Overloaded{[&](const loop_ir::Let& s) { inner.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Load& s) { inner.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Store& s) { inner.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Check& s) { inner.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Reduce& s) {
                            for (const Item& item : items_)
                              if (item.contraction->reduce == &s) sums(item, s.results[0], inner);
                          },
                          [](const auto&) {}},
               stmt->node);
  }
  return inner;
}

}  // namespace deplo::loop_to_tile
