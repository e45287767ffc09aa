#include <algorithm>
#include <utility>

#include "base/error.h"
#include "lower/tile_to_kernel/lowering.h"
#include "target/target.h"
#include "tile_ir/rewrite.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;

namespace {

// Bodies up to this size are repeated rather than looped over when the vectors are few.
constexpr int64_t kSmallBody = 16;
constexpr int64_t kFewVectors = 4;

/// The constant of min(constant, e).
std::optional<int64_t> capped(Expr e) {
  if (e.kind() != ExprKind::min) return std::nullopt;
  for (Expr operand : e.operands())
    if (operand.is_constant()) return operand.value();
  return std::nullopt;
}

/// Whether it is max(0, e).
bool is_cut(Expr lo) {
  return lo.kind() == ExprKind::max && std::any_of(lo.operands().begin(), lo.operands().end(), [](Expr e) { return e.is(0); });
}

int64_t statements(const Block& body, bool* nested) {
  int64_t count = 0;
  visit_all(body, [&](const Stmt& stmt) {
    ++count;
    *nested =
        *nested || std::holds_alternative<For>(stmt.node) || std::holds_alternative<Reduce>(stmt.node) || std::holds_alternative<Scan>(stmt.node);
  });
  return count;
}

}  // namespace

Lowering::LanesLoop Lowering::lanes_loop(const void* node, const Axis& axis, const Block& body) const {
  LanesLoop loop;
  loop.axis = &axis;
  loop.body = &body;
  loop.stores = &plan_.stores.at(node);
  loop.lanes = plan_.width(node);
  loop.in_flight = axis.by;
  if (auto whole = plan_.whole.find(node); whole != plan_.whole.end()) loop.capacity = whole->second;
  loop.varying = varying_names(body, axis.name, plan_);
  bool nested = false;
  loop.few = statements(body, &nested) <= kSmallBody && !nested ? std::max(axis.by, kFewVectors) : axis.by;
  return loop;
}

size_t Lowering::most_copies(const LanesLoop& loop, Expr lo, Expr hi) const {
  int64_t vectors = loop.in_flight;
  auto n = simplify(ceildiv(hi - lo, loop.lanes), ranges_).as_constant();
  if (n && (*n <= loop.few || loop.capacity > 0)) vectors = *n;
  return static_cast<size_t>(std::max<int64_t>(vectors, 1));
}

// A load that every lane shares is worth reading once, before the loop, if the loop is sure to run.
bool Lowering::loads_uniformly(const LanesLoop& loop) const {
  bool found = false;
  visit_all(*loop.body, [&](const Stmt& stmt) {
    if (const auto* load = std::get_if<Load>(&stmt.node)) found = found || !loop.varying.count(load->name);
  });
  return found;
}

void Lowering::for_lanes(const LanesLoop& loop, Expr lo, Expr hi, const Body& body) {
  Expr n = simplify(hi - lo, ranges_);
  if (auto most = bounds(n, ranges_).hi; most && *most <= 0) return;
  // A thread's piece of a row, whose beginning lies before the row's: its first lanes are off.
  if (auto most = hi.is_constant() ? std::optional<int64_t>(hi.value()) : capped(hi); most && *most <= loop.lanes && is_cut(lo)) {
    const Expr first = lo.operands()[lo.operands()[0].is(0) ? 1 : 0];
    LaneCopy copy{0, emit_.let("mask", {DType::boolean, loop.lanes}, Fn::bit_not, {emit_.first(loop.lanes, tidy(first))}), hi, false};
    copy.is_cut = true;
    if (!hi.is_constant() || *most < loop.lanes) copy.mask = all_of(copy.mask, emit_.first(loop.lanes, tidy(hi)));
    return with_copies(loop, {copy}, lo, hi, body);
  }
  if (loop.capacity > 0) return straight(loop, lo, hi, body);
  if (auto vectors = simplify(ceildiv(n, loop.lanes), ranges_).as_constant(); n.is_constant() && *vectors <= loop.few)
    return straight(loop, lo, hi, body);
  // A thread's piece of a row: one vector, which ends with the row.
  if (target_of(context_).has_grid) {
    auto most = capped(n);
    if (!most) most = bounds(n, ranges_).hi;
    if (most && *most > 0 && *most <= loop.lanes * loop.in_flight) return straight(loop, lo, hi, body);
  }
  bool runs = provably_nonnegative(n - 1, ranges_);
  // A thread's piece may lie behind the row's end: pieces of a loop that ends before it begins would not be empty.
  const bool may_be_empty = target_of(context_).has_grid && !provably_nonnegative(n, ranges_);
  if (runs || (!loads_uniformly(loop) && !may_be_empty)) return lanes_pieces(loop, lo, hi, runs, body);
  branch({less(lo, hi)}, [&] { lanes_pieces(loop, lo, hi, true, body); });
}

// Every vector at once, the last one masked if need be.
void Lowering::straight(const LanesLoop& loop, Expr lo, Expr hi, const Body& body) {
  Expr n = simplify(hi - lo, ranges_);
  int64_t extent = n.is_constant() ? n.value() : bounds(n, ranges_).hi.value_or(loop.capacity);
  if (loop.capacity > 0) extent = std::min(extent, loop.capacity);
  std::vector<LaneCopy> copies;
  for (int64_t at = 0; at < extent; at += loop.lanes) {
    LaneCopy copy{lo + at, "", 0, false};
    if (!n.is_constant() || at + loop.lanes > extent) {
      copy.live = simplify(hi - copy.base, ranges_);
      // The mask of more lanes than there are is that of all.
      if (auto most = capped(copy.live); most && *most >= loop.lanes) copy.live = copy.live.operands()[copy.live.operands()[0].is_constant() ? 1 : 0];
      copy.mask = emit_.first(loop.lanes, tidy(copy.live));
      copy.padding = n.is_constant() && hi.is_constant() && hi.value() >= loop.capacity;
    }
    copies.push_back(std::move(copy));
  }
  with_copies(loop, std::move(copies), lo, hi, body);
}

void Lowering::with_copies(const LanesLoop& loop, std::vector<LaneCopy> copies, Expr lo, Expr hi, const Body& body) {
  LaneContext context;
  context.axis = loop.axis->name;
  context.symbol = "$" + loop.axis->name;
  context.lanes = loop.lanes;
  context.copies = std::move(copies);
  context.varying = loop.varying;
  LaneContext* outer = lanes_;
  lanes_ = &context;
  std::vector<Unrolling> outside = std::exchange(unrolls_, {});
  ranges_[context.symbol] = {lo, hi - 1};
  scoped([&] {
    bind_axis(loop.axis->name, Expr::symbol(context.symbol));
    body();
  });
  ranges_.erase(context.symbol);
  unrolls_ = std::move(outside);
  lanes_ = outer;
}

// A loop over `step` elements at a time, in vectors without masks.
void Lowering::full_vectors(const LanesLoop& loop, Expr lo, Expr end, Expr hi, int64_t step, bool runs, const Body& body) {
  auto at = [&](Expr base) {
    std::vector<LaneCopy> copies;
    for (int64_t c = 0; c < step; c += loop.lanes) copies.push_back({base + c, "", 0, false});
    with_copies(loop, std::move(copies), lo, hi, body);
  };
  Expr trips = simplify(floordiv(end - lo, step), ranges_);
  if (trips.is_constant() && trips.value() <= 0) return;
  if (trips.is(1)) return at(lo);
  // At most once: its index is a constant, so that loads that vary with it would seem to vary with nothing and leave the loop.
  if (bounds(trips, ranges_).hi == 1) return branch({less(lo, end)}, [&] { at(lo); });
  std::set<std::string> buffers;
  for (const std::string& name : *loop.stores)
    if (auto it = memory_.find(name); it != memory_.end()) buffers.insert(it->second.name);
  Expr from = tidy(lo);
  Expr to = tidy(end);
  std::string variable = emit_.fresh(loop.axis->name);
  ranges_[variable] = {lo, end - step};
  multiples_[variable] = is_multiple(lo, loop.lanes) ? loop.lanes : 1;
  const std::string trip = "trip of " + variable;
  ranges_[trip] = axis_range(trips);
  steps_[variable] = lo + step * Expr::symbol(trip);
  emit_.open(Emitter::Nest::loop, runs, buffers);
  emit_.declare_symbol(variable);
  at(Expr::symbol(variable));
  kernel_ir::Block inner = emit_.close();
  ranges_.erase(variable);
  ranges_.erase(trip);
  steps_.erase(variable);
  emit_.append(kernel_ir::For{variable, from, to, step, 1, std::move(inner)});
}

Expr Lowering::named(Expr e, const std::string& hint) {
  if (e.is_constant() || e.is_symbol() || !may_name(e)) return e;
  if (auto size = size_of_host(e, hint)) return *size;
  Expr operands = e.kind() == ExprKind::add || e.kind() == ExprKind::mul ? tidy(e) : e;
  std::string name = emit_.index(hint, {DType::i64, 1}, operands, 0);
  Interval known = bounds(e, ranges_);
  Range range;
  if (known.lo) range.lo = *known.lo;
  if (known.hi) range.hi = *known.hi;
  ranges_[name] = range;
  return Expr::symbol(name);
}

// What follows from the symbols of the program alone the host computes, as it does shapes.
std::optional<Expr> Lowering::size_of_host(Expr e, const std::string& hint) {
  if (e.kind() == ExprKind::add || e.kind() == ExprKind::mul) {
    auto divides = [](Expr part, const auto& self) -> bool {
      if (part.is_constant() || part.is_symbol()) return false;
      if (part.kind() != ExprKind::add && part.kind() != ExprKind::mul) return true;
      return std::any_of(part.operands().begin(), part.operands().end(), [&](Expr p) { return self(p, self); });
    };
    if (!divides(e, divides)) return std::nullopt;
  }
  const Expr value = substitute(e, sizes_);
  for (const std::string& symbol : symbols_of(value))
    if (!kernel_.symbols.contains(symbol)) return std::nullopt;
  for (const kernel_ir::Size& known : out_.sizes)
    if (known.value == value) return Expr::symbol(known.name);
  std::string name = emit_.fresh(hint);
  const Interval known = bounds(value, kernel_.symbols);
  Range& range = ranges_[name];
  if (known.lo) range.lo = *known.lo;
  if (known.hi) range.hi = *known.hi;
  sizes_[name] = value;
  out_.sizes.push_back({name, value});
  return Expr::symbol(name);
}

// Vectors in flight, then single vectors, then a masked rest. `runs`: at least one of them does.
void Lowering::lanes_pieces(const LanesLoop& loop, Expr lo, Expr hi, bool runs, const Body& body) {
  int64_t lanes = loop.lanes;
  int64_t step = lanes * loop.in_flight;
  Expr n = simplify(hi - lo, ranges_);
  Expr main_end = named(simplify(lo + floordiv(n, step) * step, ranges_), loop.axis->name + "_main");
  Expr full_end = named(simplify(lo + floordiv(n, lanes) * lanes, ranges_), loop.axis->name + "_full");
  if (is_multiple(lo, lanes))
    for (Expr end : {main_end, full_end})
      if (end.is_symbol()) multiples_[end.name()] = lanes;
  full_vectors(loop, lo, main_end, hi, step, runs, body);
  if (n.is_constant() && n.value() % step <= loop.few * lanes) {
    if (n.value() % step != 0) straight(loop, main_end, hi, body);
    return;
  }
  if (loop.in_flight > 1 && main_end != full_end) full_vectors(loop, main_end, full_end, hi, lanes, runs, body);
  if (full_end == hi) return;
  branch({less(full_end, hi)}, [&] {
    Expr live = simplify(hi - full_end, ranges_);
    LaneCopy tail{full_end, emit_.first(loop.lanes, tidy(live)), live, false};
    tail.any = true;
    with_copies(loop, {tail}, lo, hi, body);
  });
}

}  // namespace deplo::tile_to_kernel
