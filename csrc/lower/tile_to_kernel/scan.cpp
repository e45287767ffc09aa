#include <algorithm>

#include "base/error.h"
#include "lower/tile_to_kernel/lowering.h"
#include "tile_ir/rewrite.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;
using kernel_ir::Partner;

namespace {

constexpr int64_t kWarp = 32;

}  // namespace

/// A scan that threads share.
struct Lowering::Scanning {
  const Scan& s;
  Combination combination;
  LoopKind threads = LoopKind::thread_x;
  std::vector<State> carry{};  ///< vars: what the pieces so far come to, for each copy of a lanes loop around; none where there is one piece
  // What is left for shared memory: a value for each slot (a warp, or a row of threads) of each group of threads that scan together. Pieces take
  // turns with its halves, so that one barrier each is enough.
  std::vector<std::string> arrays{};  ///< one for each part of the state
  int64_t slots = 1, groups = 1;
  Expr group = 0;
  int64_t size = 1;  ///< elements of a slot
};

/// What the body of a scan made of an element.
struct Lowering::Element {
  std::map<std::string, Value> values;
  Substitution names;
  std::map<std::string, std::string> placeholders;
  std::vector<State> states;  ///< of a thread's elements up to it, for each copy
};

void Lowering::statement(const Scan& s) {
  const std::set<std::string>& stores = plan_.stores.at(&s);
  keep_values(stores, plan_.order.at(&s));
  const auto threads = std::find_if(s.axes.begin(), s.axes.end(), is_thread);
  if (threads == s.axes.end()) return scan_in_order(s);
  Scanning x{s, Combination(emit_, s.results[0], s.combiner, s.dtypes, s.operands.size(), Combination::Use::scans_parts), threads->kind};
  const bool vectors = s.axes.back().kind != LoopKind::lanes && lanes_ && lanes_->varying.count(s.results[0]);
  const Axis* pieces = threads == s.axes.begin() ? nullptr : &s.axes[0];
  const Expr lo = pieces ? resolve(pieces->lo) : Expr(0);
  const Expr hi = pieces ? resolve(pieces->hi) : Expr(1);
  const int64_t step = pieces ? pieces->step : 1;
  const State identity = x.combination.identity(vectors ? width() : 1);
  const bool one = simplify(ceildiv(hi - lo, step), ranges_).is(1);
  for (size_t c = 0; !one && c < (vectors ? copies() : 1); ++c) {
    x.carry.emplace_back();
    for (const std::string& init : identity) x.carry.back().push_back(emit_.var(s.results[0] + "_carry", emit_.type(init), init));
  }
  make_partials(x, vectors ? copies() : 1, vectors ? width() : 1);
  if (!pieces) return scan_piece(x, 0);
  auto piece = [&] { scan_piece(x, one ? Expr(0) : mod(floordiv(names_.at(pieces->name) - lo, step), 2)); };
  if (pieces->kind == LoopKind::unroll) return unrolled(*pieces, piece);
  serial(pieces->name, pieces->name, lo, hi, step, static_cast<int>(pieces->by), stores, piece);
}

// By one thread, in increasing order, with the state carried from one index to the next. Float sums run in float64, as eager's do.
void Lowering::scan_in_order(const Scan& s) {
  const Axis& axis = s.axes[0];
  Combination combination(emit_, s.results[0], s.combiner, s.dtypes, s.operands.size(), Combination::Use::scans);
  bool vectors = lanes_ && lanes_->varying.count(s.results[0]);
  State identity = combination.identity(vectors ? width() : 1);
  std::vector<State> states;
  for (size_t c = 0; c < (vectors ? copies() : 1); ++c) {
    State state;
    for (const std::string& init : identity) state.push_back(emit_.var(s.results[0] + "_a", emit_.type(init), init));
    states.push_back(std::move(state));
  }
  serial(axis.name, axis.name, resolve(axis.lo), resolve(axis.hi), axis.step, static_cast<int>(axis.by), plan_.stores.at(&s), [&] {
    block(s.body);
    std::vector<State> results;
    for (size_t c = 0; c < states.size(); ++c) {
      std::vector<std::string> operands;
      for (const std::string& name : s.operands) operands.push_back(vectors ? operand(name, c) : scalar_operand(name));
      State next = combination.step(states[c], operands);
      for (size_t p = 0; p < next.size(); ++p) emit_.assign(states[c][p], next[p]);
      results.push_back(combination.results(next, ""));
    }
    for (size_t k = 0; k < s.results.size(); ++k) {
      Value value;
      value.dtype = s.dtypes[k];
      value.varying = vectors;
      for (const State& result : results) value.copies.push_back(result[k]);
      bind(s.results[k], &s, std::move(value));
    }
    block(s.then);
  });
}

// A thread combines its own elements, threads what these come to, and each element is then what lies before the thread with what lies in it.
void Lowering::scan_piece(Scanning& x, Expr half) {
  if (plan_.width(&x.s) > 1)
    scan_lanes(x, half);
  else
    scan_elements(x, half);
}

void Lowering::scan_elements(Scanning& x, Expr half) {
  const Scan& s = x.s;
  const Axis& own = s.axes.back();
  DEPLO_SUPPORT(own.lo.is_constant() && own.hi.is_constant(), "{}: a thread scans no constant number of elements {}", kernel_.name, own.name);
  const bool vectors = lanes_ && lanes_->varying.count(s.results[0]);
  std::vector<State> states(vectors ? copies() : 1, x.combination.identity(vectors ? width() : 1));
  std::vector<Element> elements;
  for (int64_t i = own.lo.value(); i < own.hi.value(); i += own.step) {
    elements.push_back(remembered([&] {
      bind_axis(own.name, i);
      block(s.body);
      for (size_t c = 0; c < states.size(); ++c) {
        std::vector<std::string> operands;
        for (const std::string& name : s.operands) operands.push_back(vectors ? operand(name, c) : scalar_operand(name));
        states[c] = x.combination.step(states[c], operands);
      }
    }));
    elements.back().states = states;
  }
  const std::vector<State> before = before_thread(x, states, half);
  for (Element& element : elements)
    for (size_t c = 0; c < states.size(); ++c) element.states[c] = x.combination.results(x.combination.merge(before[c], element.states[c]), "");
  for (const Element& element : elements)
    scoped([&] {
      recall(element);
      for (size_t k = 0; k < s.results.size(); ++k) {
        Value value;
        value.dtype = s.dtypes[k];
        value.varying = vectors;
        for (const State& result : element.states) value.copies.push_back(result[k]);
        bind(s.results[k], &s, std::move(value));
      }
      block(s.then);
    });
}

// A vector of them: of lanes that are off, nothing that counts follows those behind the end.
void Lowering::scan_lanes(Scanning& x, Expr half) {
  const Scan& s = x.s;
  const Axis& own = s.axes.back();
  LanesLoop loop = lanes_loop(&s, own, s.body);
  loop.varying.merge(varying_names({make_stmt(s)}, own.name, plan_));
  for (const std::string& result : s.results) loop.varying.merge(varying_names(s.then, result, plan_));
  for_lanes(loop, resolve(own.lo), resolve(own.hi), [&] {
    block(s.body);
    std::vector<State> states;  // lane after lane
    State state = x.combination.identity(1);
    for (size_t c = 0; c < copies(); ++c) {
      std::vector<std::string> vectors;
      for (const std::string& name : s.operands) vectors.push_back(operand(name, c));
      for (int l = 0; l < width(); ++l) {
        std::vector<std::string> operands;
        operands.reserve(vectors.size());
        for (const std::string& vector : vectors) operands.push_back(emit_.extract(vector, l));
        const State next = x.combination.step(state, operands);
        const LaneCopy& copy = lanes_->copies[c];
        state = copy.is_cut ? x.combination.select(emit_.extract(copy.mask, l), next, state) : next;
        states.push_back(state);
      }
    }
    const State before = before_thread(x, {state}, half)[0];
    for (State& lane : states) lane = x.combination.results(x.combination.merge(before, lane), "");
    for (size_t k = 0; k < s.results.size(); ++k) {
      Value value;
      value.dtype = s.dtypes[k];
      value.varying = true;
      for (size_t c = 0; c < copies(); ++c) {
        std::vector<std::string> lanes;
        for (size_t l = 0; l < static_cast<size_t>(width()); ++l) lanes.push_back(states[c * static_cast<size_t>(width()) + l][k]);
        value.copies.push_back(side_by_side(std::move(lanes)));
      }
      bind(s.results[k], &s, std::move(value));
    }
    block(s.then);
  });
}

std::string Lowering::side_by_side(std::vector<std::string> scalars) {
  while (scalars.size() > 1) {
    std::vector<std::string> pairs;
    for (size_t k = 0; k < scalars.size(); k += 2) {
      const Type half = emit_.type(scalars[k]);
      std::vector<int> lanes;
      for (int l = 0; l < 2 * half.lanes; ++l) lanes.push_back(l);
      pairs.push_back(emit_.shuffle({half.dtype, 2 * half.lanes}, scalars[k], scalars[k + 1], std::move(lanes)));
    }
    scalars = std::move(pairs);
  }
  return scalars[0];
}

Lowering::Element Lowering::remembered(const Body& body) {
  Element element;
  scoped([&] {
    const size_t mark = bound_.size();
    body();
    for (size_t k = mark; k < bound_.size(); ++k) {
      const std::string& name = bound_[k];
      if (auto value = values_.find(name); value != values_.end()) element.values[name] = value->second;
      if (auto expr = names_.find(name); expr != names_.end()) element.names[name] = expr->second;
      if (auto symbol = placeholders_.find("$" + name); symbol != placeholders_.end()) element.placeholders[symbol->first] = symbol->second;
    }
  });
  return element;
}

void Lowering::recall(const Element& element) {
  std::set<std::string> names;
  for (const auto& [name, value] : element.values) names.insert(name);
  for (const auto& [name, expr] : element.names) names.insert(name);
  bound_.insert(bound_.end(), names.begin(), names.end());
  for (const auto& [name, value] : element.values) values_[name] = value;
  for (const auto& [name, expr] : element.names) names_[name] = expr;
  placeholders_.insert(element.placeholders.begin(), element.placeholders.end());
}

// ---- between threads -----------------------------------------------------------------------------------------------

void Lowering::make_partials(Scanning& x, size_t copies, int lanes) {
  const int64_t across = out_.block.at(0).value();
  const int64_t down = out_.block.size() > 1 ? out_.block[1].value() : 1;
  DEPLO_SUPPORT(across * down % kWarp == 0, "{}: {} threads scan, not a multiple of {}", kernel_.name, across * down, kWarp);
  const bool along_x = x.threads == LoopKind::thread_x;
  DEPLO_SUPPORT(!along_x || (copies == 1 && lanes == 1), "{}: lanes and threads along x are scanned at once", kernel_.name);
  DEPLO_SUPPORT(!along_x || across >= kWarp || x.carry.empty(), "{}: {} threads along x scan piece by piece, fewer than {}", kernel_.name, across,
                kWarp);
  x.slots = along_x ? std::max<int64_t>(1, across / kWarp) : down;
  x.groups = along_x ? down : across;
  x.group = Expr::symbol(along_x ? "thread_y" : "thread_x");
  if (x.groups == 1) x.group = 0;
  x.size = static_cast<int64_t>(copies) * lanes;
  if (x.slots == 1) return;
  const int64_t halves = x.carry.empty() ? 1 : 2;
  const State identity = x.combination.identity(lanes);
  for (const std::string& part : identity) {
    kernel_ir::Alloc array{emit_.fresh(x.s.results[0] + "_partial"), emit_.type(part).dtype, halves * x.slots * x.groups * x.size,
                           kernel_ir::Space::shared, 0};
    x.arrays.push_back(array.name);
    emit_.declare_symbol(array.name);
    emit_.append(std::move(array));
  }
}

// The combination of all elements before a thread's own, of which each copy comes to `own`. Takes the piece into the carry.
std::vector<State> Lowering::before_thread(Scanning& x, const std::vector<State>& own, Expr half) {
  const bool along_x = x.threads == LoopKind::thread_x;
  auto place = [&](Expr slot) { return tidy(simplify(((half * x.slots + slot) * x.groups + x.group) * x.size, ranges_)); };
  if (!along_x && x.slots > 1) {
    for (size_t c = 0; c < own.size(); ++c)
      for (size_t p = 0; p < x.arrays.size(); ++p) {
        const Expr at = place(Expr::symbol("thread_y")) + static_cast<int64_t>(c) * (x.size / static_cast<int64_t>(own.size()));
        emit_.store({x.arrays[p], at, 1, "", own[c][p], "", Combiner::set, false});
      }
    emit_.barrier();
  }
  std::vector<State> before;
  for (size_t c = 0; c < own.size(); ++c) {
    State all;
    State* of_piece = x.carry.empty() ? nullptr : &all;
    before.push_back(along_x ? before_along_x(x, own[c], half, of_piece) : before_along_y(x, own, c, half, of_piece));
    if (!of_piece) continue;
    before.back() = x.combination.merge(x.carry[c], before.back());
    const State next = x.combination.merge(x.carry[c], all);
    for (size_t p = 0; p < next.size(); ++p) emit_.assign(x.carry[c][p], next[p]);
  }
  return before;
}

// Within a warp by exchanges (Hillis and Steele 1986), between warps through shared memory. `all`: what the piece comes to, if that is asked for.
State Lowering::before_along_x(Scanning& x, const State& own, Expr half, State* all) {
  const Expr thread = Expr::symbol("thread_x");
  const int64_t group = std::min(out_.block.at(0).value(), kWarp);
  const Expr lane = mod(thread, group);
  const State identity = x.combination.identity(1);
  auto exchanged = [&](const State& state, int number, Partner partner) {
    State other;
    for (const std::string& part : state) other.push_back(emit_.exchange(part, number, partner));
    return other;
  };
  auto is_from = [&](int64_t first) { return truth({Cond::Kind::ge0, simplify(lane - first, ranges_)}); };
  State upto = own;
  for (int64_t distance = 1; distance < group; distance *= 2) {
    const State merged = x.combination.merge(exchanged(upto, static_cast<int>(distance), Partner::below), upto);
    upto = x.combination.select(is_from(distance), merged, upto);
  }
  State before = x.combination.select(is_from(1), exchanged(upto, 1, Partner::below), identity);
  if (x.slots == 1) {
    if (all) *all = exchanged(upto, kWarp - 1, Partner::number);
    return before;
  }
  const Expr warp = floordiv(thread, kWarp);
  const Expr slot = mod(thread, x.slots);
  auto place = [&](Expr at) { return tidy(simplify(((half * x.slots + at) * x.groups + x.group) * x.size, ranges_)); };
  const Expr mine = place(warp);
  const Expr read = place(slot);
  const std::string is_earlier = truth({Cond::Kind::ge0, simplify(warp - slot - 1, ranges_)});
  emit_.open(Emitter::Nest::branch, false, {});
  for (size_t p = 0; p < upto.size(); ++p) emit_.store({x.arrays[p], mine, 1, "", upto[p], "", Combiner::set, false});
  kernel_ir::Block then = emit_.close();
  emit_.append(kernel_ir::If{{equal(lane, kWarp - 1)}, "", std::move(then), {}});
  emit_.barrier();
  State of_slot;
  for (size_t p = 0; p < upto.size(); ++p) {
    kernel_ir::Load load;
    load.type = emit_.type(upto[p]);
    load.buffer = x.arrays[p];
    load.offset = read;
    of_slot.push_back(emit_.load(x.s.results[0] + "_p", std::move(load)));
  }
  // Rounding depends on the order in some combinations: all threads then take what the first one has.
  const State earlier =
      exchanged(combined_by_exchange(x.combination, x.combination.select(is_earlier, of_slot, identity), x.slots), 0, Partner::number);
  if (all) *all = exchanged(combined_by_exchange(x.combination, of_slot, x.slots), 0, Partner::number);
  return x.combination.merge(earlier, before);
}

// Rows of threads one after the other, as they lie in shared memory.
State Lowering::before_along_y(Scanning& x, const std::vector<State>& own, size_t copy, Expr half, State* all) {
  if (x.slots == 1) {
    if (all) *all = own[copy];
    return x.combination.identity(emit_.type(own[copy][0]).lanes);
  }
  const Expr row = Expr::symbol("thread_y");
  State sum;
  for (const std::string& init : x.combination.identity(emit_.type(own[copy][0]).lanes))
    sum.push_back(emit_.var(x.s.results[0] + "_a", emit_.type(init), init));
  auto add = [&](Expr lo, Expr hi) {
    const std::string axis = x.s.results[0] + ".row";
    serial(axis, "row", lo, hi, 1, 1, {}, [&] {
      State other;
      for (size_t p = 0; p < sum.size(); ++p) {
        kernel_ir::Load load;
        load.type = emit_.type(sum[p]);
        load.buffer = x.arrays[p];
        const Expr at = ((half * x.slots + names_.at(axis)) * x.groups + x.group) * x.size;
        load.offset = tidy(simplify(at + static_cast<int64_t>(copy) * load.type.lanes, ranges_));
        other.push_back(emit_.load(x.s.results[0] + "_p", std::move(load)));
      }
      const State merged = x.combination.merge(sum, other);
      for (size_t p = 0; p < sum.size(); ++p) emit_.assign(sum[p], merged[p]);
    });
  };
  add(0, row);
  State before;
  for (const std::string& part : sum) before.push_back(emit_.copy(part));
  if (!all) return before;
  add(row, x.slots);
  *all = sum;
  return before;
}

}  // namespace deplo::tile_to_kernel
