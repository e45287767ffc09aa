#include <algorithm>
#include <utility>

#include "lower/tile_to_kernel/lowering.h"
#include "target/target.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;

namespace {

constexpr int64_t kLargestSpread = 4;  // strides up to here read every element and pick
constexpr size_t kMostWindows = 4;     // pieces of memory that are read whole to pick lanes from them

bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

// Group l of the result r is group r of row l. The butterfly of Eklundh (1972), in log2(rows) steps.
std::vector<std::string> Lowering::transpose(std::vector<std::string> rows, int group) {
  Type type = emit_.type(rows[0]);
  int lanes = type.lanes / group;
  auto pairs = [&](int distance, auto&& first, auto&& second) {
    std::vector<std::string> next(rows.size());
    for (int r = 0; r < lanes; ++r) {
      if (r & distance) continue;
      std::vector<int> low;
      std::vector<int> high;
      for (int j = 0; j < lanes; ++j)
        for (int g = 0; g < group; ++g) {
          low.push_back(first(j) * group + g);
          high.push_back(second(j) * group + g);
        }
      const auto a = static_cast<size_t>(r);
      const auto b = static_cast<size_t>(r) + static_cast<size_t>(distance);
      next[a] = emit_.shuffle(type, rows[a], rows[b], low);
      next[b] = emit_.shuffle(type, rows[a], rows[b], high);
    }
    rows = std::move(next);
  };
  // Rows d apart exchange groups of d lanes; after all d, row r holds column r.
  for (int d = 1; d < lanes; d *= 2) {
    auto from = [&](int j, int odd) { return ((j & d) ? lanes + (j & ~d) : j) + odd; };
    pairs(d, [&](int j) { return from(j, 0); }, [&](int j) { return from(j, d); });
  }
  return rows;
}

// A strided load inside an unrolled axis along which it is contiguous: as many rows as lanes are read whole and transposed in registers.
// Every index of the axis asks for the same rows, and equal values have one name.
std::optional<std::string> Lowering::transposed_load(const Load& s, const Memory& memory, size_t copy) {
  const LaneCopy& lanes = lanes_->copies[copy];
  if (unrolls_.empty() || !s.guard.empty() || lanes_->diverges || !is_power_of_two(width())) return std::nullopt;
  // Beyond the last lane that is on, its row is read again.
  const bool masked = !lanes.mask.empty();
  if (masked && (lanes.is_cut || !(lanes.any || provably_nonnegative(lanes.live - 1, ranges_)))) return std::nullopt;
  // Of elements of 16 bits, two rows lie side by side before words are transposed: half as many of each.
  const bool words = size_of(s.dtype) == 2 && width() >= 8;
  const int points = words ? width() / 2 : width();
  const Unrolling& unrolling = unrolls_.back();
  int64_t at = unrolling.at - unrolling.lo;
  int64_t block = unrolling.lo + at / points * points;
  if (points < 4 || block + points > unrolling.hi) return std::nullopt;
  Expr now = names_.at(unrolling.axis);
  auto offset_at = [&](int64_t index) {
    names_[unrolling.axis] = index;
    return flat(memory, s.index);
  };
  // Most often the axis is a term of the place; where it hides in quotients, each of its numbers is looked at.
  const std::string turn = "$turn";
  names_[unrolling.axis] = Expr::symbol(turn);
  ranges_[turn] = {Expr(unrolling.lo), Expr(unrolling.hi - 1)};
  const Expr place = flat(memory, s.index);
  ranges_.erase(turn);
  const auto step = linear_coefficient(place, turn);
  const bool linear = step && step->is(1);
  const Expr start = linear ? substitute(place, {{turn, block}}) : offset_at(block);
  bool contiguous = true;
  for (int64_t k = 1; k < points && contiguous && !linear; ++k) contiguous = offset_at(block + k) - start == Expr(k);
  names_[unrolling.axis] = now;
  for (const auto& [symbol, value] : placeholders_) contiguous = contiguous && !uses(start, symbol);
  auto stride = linear_coefficient(start, lanes_->symbol);
  if (!contiguous || !stride || stride->is(0) || stride->is(1) || stride->is(-1)) return std::nullopt;
  auto load_row = [&](int l) {
    const Expr lane = masked ? min(l, lanes.live - 1) : Expr(l);
    kernel_ir::Load row;
    row.type = {s.dtype, points};
    row.buffer = memory.name;
    row.offset = tidy(simplify(substitute(start, {{lanes_->symbol, lanes.base + lane}}), ranges_));
    return emit_.load(s.name, std::move(row));
  };
  // All columns are made for the first one that is asked for. The first row's name says that nothing was stored since.
  std::vector<std::string> rows{load_row(0)};
  auto key = [&](size_t column) {
    const void* live = masked ? lanes.live.node() : nullptr;
    return fmt::format("square {} {} {} {} {} {}", rows[0], static_cast<const void*>(start.node()), static_cast<const void*>(lanes.base.node()), live,
                       width(), column);
  };
  const auto wanted = static_cast<size_t>(unrolling.at - block);
  if (const std::string* known = emit_.recall(key(wanted))) return *known;
  for (int l = 1; l < width(); ++l) rows.push_back(load_row(l));
  std::vector<std::string> columns = rows;
  if (words) {
    columns.clear();
    for (size_t l = 0; l < rows.size(); l += 2) {
      std::vector<int> order;
      for (int p = 0; p < points; ++p) order.insert(order.end(), {p, points + p});
      columns.push_back(emit_.shuffle({s.dtype, width()}, rows[l], rows[l + 1], order));
    }
  }
  columns = transpose(std::move(columns), words ? 2 : 1);
  for (size_t column = 0; column < columns.size(); ++column) emit_.remember(key(column), columns[column]);
  return columns[wanted];
}

std::optional<Lowering::LiveLanes> Lowering::live_lanes(const std::vector<Cond>& guard, size_t copy) const {
  const LaneCopy& at = lanes_->copies[copy];
  if (at.is_cut) return std::nullopt;  // its first lanes are off
  LiveLanes live{0, at.mask.empty() ? Expr(width()) : min(width(), at.live)};
  for (const Cond& cond : guard) {
    for (const auto& [symbol, value] : placeholders_)
      if (uses(cond.expr, symbol)) return std::nullopt;
    auto k = linear_coefficient(cond.expr, lanes_->symbol);
    if (cond.kind != Cond::Kind::ge0 || !k || !k->is_constant()) return std::nullopt;
    Expr start = at_copy(cond.expr, at);
    if (k->is(0)) {  // none or all
      live.hi = min(live.hi, max(0, min(1, start + 1)) * width());
    } else if (k->value() < 0) {
      live.hi = min(live.hi, floordiv(start, -k->value()) + 1);
    } else {
      live.lo = max(live.lo, ceildiv(Expr(-1) * start, k->value()));
    }
  }
  return LiveLanes{simplify(live.lo, ranges_), simplify(live.hi, ranges_)};
}

// A load with a small stride reads all that lies between its elements, too (memory of the same buffer), and picks by shuffles.
std::optional<std::string> Lowering::spread_load(const Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy) {
  const LaneCopy& at = lanes_->copies[copy];
  if (lanes_->diverges || !target_of(context_).shuffles_lanes || width() < 4) return std::nullopt;
  for (const auto& [symbol, value] : placeholders_)
    if (uses(offset, symbol)) return std::nullopt;
  auto k = linear_coefficient(offset, lanes_->symbol);
  if (!k || !k->is_constant() || k->value() < 2 || k->value() > kLargestSpread) return std::nullopt;
  auto live = live_lanes(guard, copy);
  if (!live) return std::nullopt;
  const int64_t stride = k->value();
  const int lanes = width();
  Type type{s.dtype, lanes};
  // Where the lanes step over whole groups of a row, all of a group may be read, and loads of its other elements read the same.
  const Expr inner = s.index.empty() ? Expr(0) : simplify(mod(s.index.back(), stride), ranges_);
  const bool groups = memory.group() && *memory.group() % stride == 0 && inner.is_constant();
  const int64_t place = groups ? inner.value() : 0;
  Expr first = live->lo * stride;
  Expr end = groups ? live->hi * stride : (live->hi - 1) * stride + 1;
  std::string picked;
  for (int64_t part = 0; part < stride; ++part) {
    kernel_ir::Load load;
    load.type = type;
    load.buffer = memory.name;
    load.offset = tidy(at_copy(offset, at) + (part * lanes - place));
    Expr from = simplify(first - part * lanes, ranges_);
    Expr to = simplify(end - part * lanes, ranges_);
    if (!picked.empty() && provably_nonnegative(Expr(0) - to, ranges_)) break;
    if (!provably_nonnegative(to - lanes, ranges_)) load.mask = emit_.first(lanes, tidy(to));
    if (!provably_nonnegative(Expr(0) - from, ranges_))
      load.mask = all_of(load.mask, emit_.let("mask", {DType::boolean, lanes}, Fn::bit_not, {emit_.first(lanes, tidy(from))}));
    std::string whole = emit_.load(s.name, std::move(load));
    // Lane l comes from element l * stride, in part l * stride / lanes.
    std::vector<int> order;
    for (int l = 0; l < lanes; ++l) {
      int64_t element = l * stride + place - part * lanes;
      order.push_back(picked.empty() ? static_cast<int>(std::clamp<int64_t>(element, 0, lanes - 1))
                      : element < 0  ? l
                                     : lanes + static_cast<int>(std::min<int64_t>(element, lanes - 1)));
    }
    picked = picked.empty() ? emit_.shuffle(type, whole, "", order) : emit_.shuffle(type, picked, whole, order);
  }
  std::string mask = all_of(at.mask, guard_mask(guard, copy));
  if (mask == at.mask) return picked;
  return emit_.let(s.name, type, Fn::where, {mask, picked, literal(s.fill)});
}

// e in one lane, by the number of the loop's trip: what a quotient or a rest adds from lane to lane is a constant then, if it is in every trip.
Expr Lowering::at_lane(Expr e, size_t copy, int64_t lane) const {
  return simplify(substitute(substitute(e, {{lanes_->symbol, lanes_->copies[copy].base + lane}}), steps_), ranges_);
}

// Lanes that lie close together in an order that is the same in every trip (each element twice, as images are enlarged, or the phases of a
// transposed convolution in turn) are picked from whole pieces of memory.
std::optional<std::string> Lowering::window_load(const Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy) {
  if (lanes_->diverges || !target_of(context_).shuffles_lanes || width() < 4 || uses_values(offset)) return std::nullopt;
  if (linear_coefficient(offset, lanes_->symbol)) return std::nullopt;
  const LaneCopy& at = lanes_->copies[copy];
  int64_t live = width();
  if (!at.mask.empty()) {
    if (at.is_cut || !at.live.is_constant()) return std::nullopt;
    live = std::min<int64_t>(live, at.live.value());
  }
  std::vector<Cond> uniform;
  std::vector<Cond> by_lane;
  for (const Cond& cond : guard) (varies(cond.expr) ? by_lane : uniform).push_back(cond);
  struct Window {
    Expr start;
    int64_t first = 0;                ///< the lane that it starts with
    int64_t last = 0;                 ///< the furthest element that is picked
    std::vector<int64_t> place = {};  ///< of each lane; -1: elsewhere
  };
  std::vector<Window> windows;
  bool fills = false;
  for (int64_t lane = 0; lane < live; ++lane) {
    bool on = true;
    for (const Cond& cond : by_lane) {
      if (uses_values(cond.expr)) return std::nullopt;
      const auto known = decide({cond.kind, at_lane(cond.expr, copy, lane)}, ranges_);
      if (!known) return std::nullopt;
      on = on && *known;
    }
    fills = fills || !on;
    if (!on) continue;
    const Expr here = at_lane(offset, copy, lane);
    bool found = false;
    for (Window& window : windows) {
      const Expr apart = simplify(here - window.start, ranges_);
      if (!apart.is_constant() || apart.value() < 0 || apart.value() >= width()) continue;
      window.place[static_cast<size_t>(lane)] = apart.value();
      window.last = std::max(window.last, apart.value());
      found = true;
      break;
    }
    if (found) continue;
    if (windows.size() == kMostWindows) return std::nullopt;
    windows.push_back({here, lane, 0, std::vector<int64_t>(static_cast<size_t>(width()), -1)});
    windows.back().place[static_cast<size_t>(lane)] = 0;
  }
  if (windows.empty()) return std::nullopt;
  const Type type{s.dtype, width()};
  const std::string wanted = guard_mask(uniform, copy);
  std::string picked = fills ? literal(s.fill) : "";
  for (const Window& window : windows) {
    kernel_ir::Load load;
    load.type = type;
    load.buffer = memory.name;
    load.offset = tidy(simplify(substitute(offset, {{lanes_->symbol, at.base + window.first}}), ranges_));
    if (window.last + 1 < width()) load.mask = emit_.first(width(), window.last + 1);
    load.mask = all_of(load.mask, wanted);
    const std::string whole = emit_.load(s.name, std::move(load));
    std::vector<int> order;
    for (int lane = 0; lane < width(); ++lane) {
      const auto place = static_cast<int>(window.place[static_cast<size_t>(lane)]);
      order.push_back(picked.empty() ? std::max(place, 0) : place < 0 ? lane : width() + place);
    }
    picked = picked.empty() ? emit_.shuffle(type, whole, "", order) : emit_.shuffle(type, picked, whole, order);
  }
  if (wanted.empty() || is_zero(s.fill)) return picked;
  return emit_.let(s.name, type, Fn::where, {wanted, picked, literal(s.fill)});
}

// A quotient or rest that goes the same way from lane to lane in every trip: no division, and what depends on the lane is a constant.
std::optional<std::string> Lowering::lane_pattern(Expr e, size_t copy) {
  if (!target_of(context_).shuffles_lanes || uses_values(e) || !may_name(e)) return std::nullopt;
  // A rest is a constant in each lane; a quotient grows from the first one's.
  Expr first = at_lane(e, copy, 0);
  const bool constant = first.is_constant() && first.value() >= 0;
  if (constant) first = 0;
  std::vector<int> order;
  for (int64_t lane = 0; lane < width(); ++lane) {
    const Expr apart = simplify(at_lane(e, copy, lane) - first, ranges_);
    if (!apart.is_constant() || apart.value() < 0 || apart.value() >= width()) return std::nullopt;
    order.push_back(static_cast<int>(apart.value()));
  }
  const Type type{DType::i64, width()};
  std::string rest = emit_.shuffle(type, emit_.index("n", type, 0, 1), "", order);
  if (constant) return rest;
  const Expr start = at_copy(e, lanes_->copies[copy]);
  return emit_.let("n", type, Fn::add, {emit_.index("n", type, tidy(start), 0), rest});
}

}  // namespace deplo::tile_to_kernel
