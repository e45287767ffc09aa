#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "lower/tile_to_kernel/lowering.h"
#include "tile_ir/rewrite.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;

namespace {

// One accumulator takes at most so many elements before it is added to an outer one: the error grows with both counts, not their product.
constexpr int64_t kChain = 128;
// Of sums, whose blocks cost one addition each. Eager mode's cascade takes chains of 16, and of few numbers four sums side by side (ATen's
// SumKernel.cpp). Along lanes a chain adds up to one of as many as there are lanes.
constexpr int64_t kShortChain = 8;
constexpr int64_t kLanesChain = 32;

// Whether reassociating in blocks keeps a long chain of float additions accurate.
bool rounds(const Reduce& s) {
  bool adds = s.combiner == Combiner::sum || s.combiner == Combiner::welford || s.combiner == Combiner::online_softmax;
  return adds && is_float(s.dtypes[0]);
}

int uses_of(const Block& body, const std::string& name) {
  int count = 0;
  visit_all(body, [&](const Stmt& stmt) {
    std::visit(
        Overloaded{[&](const Let& s) { count += static_cast<int>(std::count(s.operands.begin(), s.operands.end(), name)); },
                   [&](const Store& s) { count += s.value == name; },
                   [&](const Reduce& s) { count += static_cast<int>(std::count(s.operands.begin(), s.operands.end(), name)); },
                   [&](const Scan& s) { count += static_cast<int>(std::count(s.operands.begin(), s.operands.end(), name)); }, [](const auto&) {}},
        stmt.node);
  });
  return count;
}

}  // namespace

struct Lowering::Reduction {
  const Reduce& s;
  Combination combination;
  const Axis* lanes = nullptr;  ///< its own lanes axis
  LanesLoop loop{};
  bool vectors = false;  ///< accumulators are vectors
  int width = 1;
  size_t copies = 1;             ///< accumulators along the lanes
  size_t groups = 1;             ///< times those along the last serial axis
  size_t group = 0;              ///< the one that the point being lowered adds to
  const Let* product = nullptr;  ///< the multiplication that feeds a sum alone: fused with it
  int64_t chain = 0;             ///< elements that one accumulator takes
  size_t own = 0;                ///< where the axes begin that are no threads
};

void Lowering::statement(const Reduce& s) {
  const std::set<std::string>& stores = plan_.stores.at(&s);
  keep_values(stores, plan_.order.at(&s));
  Reduction r{s, Combination(emit_, s.results[0], s.combiner, s.dtypes, s.operands.size(), Combination::Use::reduces)};
  r.lanes = lanes_axis(s, plan_);
  r.vectors = r.lanes || (lanes_ && lanes_->varying.count(s.results[0]));
  if (r.lanes) {
    r.loop = lanes_loop(&s, *r.lanes, s.body);
    r.width = r.loop.lanes;
    r.copies = most_copies(r.loop, resolve(r.lanes->lo), resolve(r.lanes->hi));
  } else if (r.vectors) {
    r.width = width();
    r.copies = copies();
  }
  const Axis& last = s.axes.back();
  if (&last != r.lanes && last.kind != LoopKind::unroll) r.groups = static_cast<size_t>(last.by);
  if (s.combiner == Combiner::sum && is_float(s.dtypes[0]) && uses_of(s.body, s.operands[0]) == 0)
    for (const auto& stmt : s.body)
      if (const auto* let = std::get_if<Let>(&stmt->node); let && let->name == s.operands[0] && let->fn == Fn::mul) r.product = let;
  std::vector<State> accumulators = make_accumulators(r);
  while (is_thread(s.axes[r.own])) ++r.own;
  reduce_axes(r, r.own, accumulators);
  finish(r, accumulators);
}

std::vector<State> Lowering::make_accumulators(Reduction& r) {
  State identity = r.combination.identity(r.width);
  std::vector<State> accumulators;
  for (size_t k = 0; k < r.copies * r.groups; ++k) {
    State state;
    for (const std::string& init : identity) state.push_back(emit_.var(r.s.results[0] + "_a", emit_.type(init), init));
    accumulators.push_back(std::move(state));
  }
  return accumulators;
}

std::optional<int64_t> Lowering::most_trips(const Reduction& r, size_t from) const {
  int64_t total = 1;
  for (size_t k = from; k < r.s.axes.size(); ++k) {
    const Axis& axis = r.s.axes[k];
    int64_t each = axis.step;
    if (&axis == r.lanes)
      each = r.loop.lanes * r.loop.in_flight;
    else if (k + 1 == r.s.axes.size())
      each *= static_cast<int64_t>(r.groups);
    auto n = bounds(resolve(axis.hi - axis.lo), ranges_).hi;
    if (!n || __builtin_mul_overflow(total, std::max<int64_t>(1, (*n + each - 1) / each), &total)) return std::nullopt;
  }
  return total;
}

void Lowering::reduce_axes(Reduction& r, size_t at, std::vector<State>& accumulators) {
  if (at == r.s.axes.size()) return reduce_point(r, accumulators);
  Expr lo = resolve(r.s.axes[at].lo);
  Expr hi = resolve(r.s.axes[at].hi);
  auto all = most_trips(r, at);
  if (r.chain == 0) {
    // Four levels of blocks, of any size where nothing bounds it.
    const int64_t root = all ? static_cast<int64_t>(std::ceil(std::pow(static_cast<double>(*all), 0.25))) : 2 * kShortChain;
    r.chain = r.s.combiner == Combiner::sum ? std::clamp(root, r.lanes && all ? kLanesChain : kShortChain, kChain) : kChain;
  }
  const int64_t one_block = r.lanes ? r.chain : std::min(r.chain + r.chain / 2, kChain);
  if (!rounds(r.s) || (all && *all <= one_block) || r.s.axes[at].kind == LoopKind::unroll) return reduce_axis(r, at, lo, hi, accumulators);
  reduce_in_blocks(r, at, lo, hi, accumulators);
}

// Blocks of the axis have accumulators of their own, added to the outer ones after each; blocks of blocks where they are many.
void Lowering::reduce_in_blocks(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<State>& accumulators) {
  const Axis& axis = r.s.axes[at];
  auto inner = most_trips(r, at + 1);
  bool last = at + 1 == r.s.axes.size();
  int64_t each = &axis == r.lanes ? r.loop.lanes * r.loop.in_flight : axis.step * (last ? static_cast<int64_t>(r.groups) : 1);
  // A long inner loop makes a block of every index, and blocks itself.
  int64_t block = inner && *inner <= r.chain ? r.chain / *inner * each : each;
  auto bound = bounds(hi - lo, ranges_).hi;
  auto extent = bound ? bound : expected(hi - lo);
  std::vector<int64_t> sizes{block};
  const size_t least = bound ? 1 : r.chain < kLanesChain ? 4 : 3;  // what nothing bounds may be far from the size of the example
  while (sizes.size() < least || (sizes.size() < 3 && extent && *extent / sizes.back() > r.chain)) sizes.push_back(sizes.back() * r.chain);
  auto in_blocks = [&] { reduce_blocks(r, at, lo, hi, sizes, accumulators); };
  if (bound || !last || &axis != r.lanes) return in_blocks();
  // Short rows do without the accumulators of every level.
  Cond is_short = less_equal(hi - lo, block);
  branch({is_short}, [&] { reduce_axis(r, at, lo, hi, accumulators); });
  branch({negated(is_short)}, in_blocks);
}

// What an unbounded extent is for the example sizes.
std::optional<int64_t> Lowering::expected(Expr e) const {
  for (const std::string& symbol : symbols_of(e))
    if (!context_.hints.count(symbol)) return std::nullopt;
  return evaluate(e, context_.hints);
}

void Lowering::reduce_blocks(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<int64_t> sizes, std::vector<State>& accumulators) {
  if (sizes.empty()) return reduce_axis(r, at, lo, hi, accumulators);
  int64_t size = sizes.back();
  sizes.pop_back();
  std::string name = fmt::format("{}_block", r.s.axes[at].name);
  std::string key = fmt::format("{}.{}", name, sizes.size());
  serial(key, name, lo, hi, size, 1, plan_.stores.at(&r.s), [&] {
    Expr start = names_.at(key);
    std::vector<State> own = make_accumulators(r);
    Expr end = named(simplify(min(start + size, hi), ranges_), name + "_end");
    reduce_blocks(r, at, start, end, sizes, own);
    merge_into(r, accumulators, own);
  });
}

void Lowering::merge_into(Reduction& r, const std::vector<State>& into, const std::vector<State>& from) {
  for (size_t k = 0; k < into.size(); ++k) {
    State merged = r.combination.merge(into[k], from[k]);
    for (size_t p = 0; p < merged.size(); ++p) emit_.assign(into[k][p], merged[p]);
  }
}

void Lowering::reduce_axis(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<State>& accumulators) {
  const Axis& axis = r.s.axes[at];
  auto inside = [&] { reduce_axes(r, at + 1, accumulators); };
  if (&axis == r.lanes) return for_lanes(r.loop, lo, hi, inside);
  if (axis.kind == LoopKind::unroll) return unrolled(axis, inside);
  bool last = at + 1 == r.s.axes.size();
  if (last && r.groups > 1) return reduce_serial(r, at, lo, hi, accumulators);
  serial(axis.name, axis.name, lo, hi, axis.step, last ? 1 : static_cast<int>(axis.by), plan_.stores.at(&r.s), inside);
}

// The last axis, several indices at a time into accumulators of their own.
void Lowering::reduce_serial(Reduction& r, size_t at, Expr lo, Expr hi, std::vector<State>& accumulators) {
  const Axis& axis = r.s.axes[at];
  auto by = static_cast<int64_t>(r.groups);
  int64_t step = axis.step * by;
  Expr trips = simplify(ceildiv(hi - lo, axis.step), ranges_);
  Expr main_end = named(simplify(lo + floordiv(trips, by) * step, ranges_), axis.name + "_main");
  std::string name = axis.name + "_by";
  serial(name, name, lo, main_end, step, 1, plan_.stores.at(&r.s), [&] {
    for (int64_t g = 0; g < by; ++g) {
      r.group = static_cast<size_t>(g);
      scoped([&] {
        bind_axis(axis.name, names_.at(name) + g * axis.step);
        reduce_axes(r, at + 1, accumulators);
      });
    }
  });
  r.group = 0;
  serial(axis.name, axis.name, main_end, hi, axis.step, 1, plan_.stores.at(&r.s), [&] { reduce_axes(r, at + 1, accumulators); });
}

void Lowering::reduce_point(Reduction& r, std::vector<State>& accumulators) {
  scoped([&] {
    for (const auto& stmt : r.s.body)
      if (!r.product || std::get_if<Let>(&stmt->node) != r.product) std::visit([&](const auto& s) { statement(s); }, stmt->node);
    auto value = [&](const std::string& name, size_t c) { return r.vectors ? operand(name, c) : scalar_operand(name); };
    std::vector<State> next;
    size_t points = r.vectors ? copies() : 1;
    for (size_t c = 0; c < points; ++c) {
      const State& state = accumulators.at(r.group * r.copies + c % r.copies);
      State updated;
      if (r.product) {
        updated = r.combination.step_product(state, value(r.product->operands[0], c), value(r.product->operands[1], c));
      } else {
        std::vector<std::string> operands;
        for (const std::string& name : r.s.operands) operands.push_back(value(name, c));
        updated = r.combination.step(state, operands);
      }
      if (r.lanes && !lanes_->copies[c].mask.empty()) updated = r.combination.select(lanes_->copies[c].mask, updated, state);
      for (size_t p = 0; p < state.size(); ++p) emit_.assign(state[p], updated[p]);
    }
  });
}

void Lowering::finish(Reduction& r, const std::vector<State>& accumulators) {
  for (const State& state : accumulators)
    for (const std::string& part : state) emit_.freeze(part);
  auto tree = [&](std::vector<State> states) {
    while (states.size() > 1) {
      std::vector<State> half;
      for (size_t k = 0; k + 1 < states.size(); k += 2) half.push_back(r.combination.merge(states[k], states[k + 1]));
      if (states.size() % 2 == 1) half.push_back(states.back());
      states = std::move(half);
    }
    return states[0];
  };
  std::string some = r.s.combiner == Combiner::online_softmax && r.own == 0 ? nonempty(r.s.axes) : "";
  auto all_threads = [&](State state) { return r.own > 0 ? across_threads(r, std::move(state)) : state; };
  std::vector<State> results;
  if (r.lanes || !r.vectors) {
    results.push_back(r.combination.results(all_threads(r.combination.across_lanes(tree(accumulators))), some));
  } else {
    for (size_t c = 0; c < r.copies; ++c) {
      std::vector<State> own;
      for (size_t g = 0; g < r.groups; ++g) own.push_back(accumulators[g * r.copies + c]);
      results.push_back(r.combination.results(all_threads(tree(own)), some));
    }
  }
  for (size_t k = 0; k < r.s.results.size(); ++k) {
    Value value;
    value.dtype = r.s.dtypes[k];
    value.varying = r.vectors && !r.lanes;
    for (const State& result : results) value.copies.push_back(result[k]);
    bind(r.s.results[k], &r.s, std::move(value));
  }
}

// As a tree, of groups of as many threads.
State Lowering::combined_by_exchange(Combination& combination, State own, int64_t threads) {
  for (int64_t distance = threads / 2; distance > 0; distance /= 2) {
    State other;
    for (const std::string& part : own) other.push_back(emit_.exchange(part, static_cast<int>(distance), kernel_ir::Partner::differs));
    own = combination.merge(own, other);
  }
  return own;
}

// The threads of a warp combine by exchanging what they have, as a tree. What is left of it, a value for each warp or for each row of threads, goes
// through shared memory, one barrier, and is combined alike.
State Lowering::across_threads(Reduction& r, State state) {
  constexpr int64_t kWarp = 32;
  auto reduced = [&](LoopKind kind) {
    return std::any_of(r.s.axes.begin(), r.s.axes.begin() + static_cast<int64_t>(r.own), [&](const Axis& axis) { return axis.kind == kind; });
  };
  const bool along_x = reduced(LoopKind::thread_x);
  const bool along_y = reduced(LoopKind::thread_y);
  const int64_t across = out_.block.at(0).value();
  const int64_t down = out_.block.size() > 1 ? out_.block[1].value() : 1;
  DEPLO_SUPPORT(across * down % kWarp == 0, "{}: {} threads reduce, not a multiple of {}", kernel_.name, across * down, kWarp);
  const int64_t lanes = emit_.type(state[0]).lanes;
  DEPLO_SUPPORT(!along_x || lanes == 1, "{}: lanes and threads along x are reduced at once", kernel_.name);
  // Rounding depends on the order in some combinations: all threads then take what the first one has.
  const bool ordered = r.s.combiner == Combiner::welford || r.s.combiner == Combiner::online_softmax || r.combination.parts() > 1;
  auto exchanged = [&](State own, int64_t threads) {
    own = combined_by_exchange(r.combination, std::move(own), threads);
    if (ordered && threads == kWarp)
      for (std::string& part : own) part = emit_.exchange(part, 0, kernel_ir::Partner::number);
    return own;
  };
  if (along_x) state = exchanged(std::move(state), std::min(across, kWarp));
  const int64_t warps = along_x && across > kWarp ? across / kWarp : 1;
  const int64_t partials = warps * (along_y ? down : 1);
  if (partials == 1) return state;

  const Expr x = Expr::symbol("thread_x");
  const Expr y = out_.block.size() > 1 ? Expr::symbol("thread_y") : Expr(0);
  const int64_t groups = (along_x ? 1 : across) * (along_y ? 1 : down);
  const Expr group = (along_x ? Expr(0) : x) + (along_y ? Expr(0) : y * (along_x ? 1 : across));
  const Expr partial = (along_y ? y * warps : Expr(0)) + (warps > 1 ? floordiv(x, kWarp) : Expr(0));
  std::vector<std::string> arrays;
  for (const std::string& part : state) {
    kernel_ir::Alloc array{emit_.fresh(r.s.results[0] + "_partial"), emit_.type(part).dtype, partials * groups * lanes, kernel_ir::Space::shared, 0};
    arrays.push_back(array.name);
    emit_.declare_symbol(array.name);
    emit_.append(std::move(array));
  }
  auto place = [&](Expr at) { return tidy(simplify((at * groups + group) * lanes, ranges_)); };
  const Expr own = place(partial);
  const bool some_store = along_x;
  if (some_store) emit_.open(Emitter::Nest::branch, false, {});
  for (size_t p = 0; p < state.size(); ++p) emit_.store({arrays[p], own, 1, "", state[p], "", Combiner::set, false});
  if (some_store) {
    kernel_ir::Block then = emit_.close();
    emit_.append(kernel_ir::If{{equal(mod(x, std::min(across, kWarp)), 0)}, "", std::move(then), {}});
  }
  emit_.barrier();
  auto stored = [&](Expr at) {
    State found;
    for (size_t p = 0; p < state.size(); ++p) {
      kernel_ir::Load load;
      load.type = emit_.type(state[p]);
      load.buffer = arrays[p];
      load.offset = place(at);
      found.push_back(emit_.load(r.s.results[0] + "_p", std::move(load)));
    }
    return found;
  };
  if (along_x && across >= kWarp && partials <= kWarp) {
    State combined = exchanged(stored(mod(x, partials)), partials);
    if (ordered && partials < kWarp)
      for (std::string& part : combined) part = emit_.exchange(part, 0, kernel_ir::Partner::number);
    return combined;
  }
  State combined = stored(0);
  for (int64_t p = 1; p < partials; ++p) combined = r.combination.merge(combined, stored(p));
  return combined;
}

// A bool that says whether the axes have a point; "" if they surely do. Bounds by inner axes count as nonempty.
std::string Lowering::nonempty(const std::vector<Axis>& axes) {
  std::string all;
  std::set<std::string> own;
  for (const Axis& axis : axes) own.insert(axis.name);
  for (const Axis& axis : axes) {
    Cond cond = less(axis.lo, axis.hi);
    bool inner = false;
    for (const std::string& s : symbols_of(cond.expr)) inner = inner || own.count(s);
    if (inner) continue;
    cond.expr = resolve(cond.expr);
    if (auto known = decide(cond, ranges_); !known || !*known) all = all_of(all, truth(cond));
  }
  return all;
}

}  // namespace deplo::tile_to_kernel
