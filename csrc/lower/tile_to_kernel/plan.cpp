#include "lower/tile_to_kernel/plan.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/error.h"
#include "scalar/warp.h"
#include "target/target.h"
#include "tile_ir/rewrite.h"

namespace deplo::tile_to_kernel {
namespace {

using namespace tile_ir;

constexpr int64_t kMaxRegisterVariables = 512;
constexpr int64_t kMostGridLanes = 16;

bool uses_any(Expr e, const std::set<std::string>& names) {
  for (const std::string& s : symbols_of(e))
    if (names.count(s)) return true;
  return false;
}

bool uses_any(const std::vector<Expr>& exprs, const std::set<std::string>& names) {
  return std::any_of(exprs.begin(), exprs.end(), [&](Expr e) { return uses_any(e, names); });
}

bool uses_any(const std::vector<Cond>& conds, const std::set<std::string>& names) {
  return std::any_of(conds.begin(), conds.end(), [&](const Cond& c) { return uses_any(c.expr, names); });
}

bool uses_any(const std::vector<std::string>& values, const std::set<std::string>& names) {
  return std::any_of(values.begin(), values.end(), [&](const std::string& v) { return names.count(v) > 0; });
}

// ---- varying values ------------------------------------------------------------------------------------------------

struct Varying {
  const Plan& plan;
  std::set<std::string> names;
  std::set<std::string> arrays;  ///< register arrays declared inside the loop: one per lane
  bool diverges = false;         ///< under a condition that differs between lanes

  void block(const Block& body) {
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s); }, stmt->node);
  }
  void statement(const Let& s) {
    if (uses_any(s.operands, names) || (s.fn == Fn::index && uses_any(s.index, names))) names.insert(s.name);
  }
  void statement(const Load& s) {
    if (diverges || arrays.count(s.buffer) || uses_any(s.index, names) || uses_any(s.guard, names)) names.insert(s.name);
  }
  void statement(const For& s) { block(s.body); }
  void statement(const If& s) {
    bool outer = diverges;
    diverges = diverges || uses_any(s.guard, names);
    block(s.body);
    diverges = outer;
  }
  template <class Combination>
  void combination(const Combination& s) {
    block(s.body);
    if (uses_any(s.operands, names)) names.insert(s.results.begin(), s.results.end());
  }
  void statement(const Reduce& s) { combination(s); }
  void statement(const Scan& s) {
    combination(s);
    block(s.then);
  }
  void statement(const Alloc& s) { arrays.insert(s.name); }
  void statement(const Store&) {}
  void statement(const Check&) {}
  void statement(const Barrier&) {}
  void statement(const Prefetch&) {}
  void statement(const Matrix&) {}
  void statement(const CopyAsync&) {}
  void statement(const CopyGroup&) {}
  void statement(const LoadMatrix&) {}
  void statement(const JoinMatrix&) {}
  void statement(const Mma&) {}
  void statement(const MultiplyTiles&) {}
  void statement(const MultiplyGroup&) {}
};

std::vector<const Axis*> addresses(const std::vector<Axis>& axes) {
  std::vector<const Axis*> out;
  for (const Axis& axis : axes) out.push_back(&axis);
  return out;
}

// ---- widths --------------------------------------------------------------------------------------------------------

struct LanesLoop {
  const void* node = nullptr;
  const Axis* axis = nullptr;
  const Block* body = nullptr;
};

/// Constraints that accesses put on one register array.
struct ArrayUse {
  const Alloc* alloc = nullptr;
  const void* inside = nullptr;  ///< the lanes loop that declares it
  std::set<const void*> loops;   ///< lanes loops that index its last dimension
  bool by_lanes = false;
  bool by_scalars = false;
  bool stored_uniformly = false;  ///< a scalar element is stored in a lanes loop outside of which it was declared
  bool irregular = false;
  int64_t alignment = 0;  ///< common divisor of what is added to the lanes axis
};

struct Planner {
  const Kernel& kernel;
  const PassContext& context;
  Plan plan;
  std::vector<LanesLoop> loops;
  std::map<std::string, ArrayUse> arrays;
  const LanesLoop* current = nullptr;
  std::map<std::string, const Axis*> axes;

  // ---- gathering ----

  void block(const Block& body) {
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s); }, stmt->node);
  }

  template <class Nest>
  void nest(const Nest& s, const std::vector<const Axis*>& own, const Block* then = nullptr) {
    const LanesLoop* outer = current;
    LanesLoop loop;
    for (const Axis* axis : own) {
      axes[axis->name] = axis;
      if (axis->kind == LoopKind::lanes) {
        loop = {&s, axis, &s.body};
        loops.push_back(loop);
        current = &loop;
      }
    }
    block(s.body);
    if (then) block(*then);
    current = outer;
  }

  void statement(const For& s) { nest(s, {&s.axis}); }
  void statement(const Reduce& s) { nest(s, addresses(s.axes)); }
  void statement(const Scan& s) { nest(s, addresses(s.axes), &s.then); }
  void statement(const If& s) { block(s.body); }
  void statement(const Alloc& s) {
    if (s.space != Space::reg) return;
    ArrayUse& use = arrays[s.name];
    use.irregular = use.irregular || use.alloc;  // two arrays of one name
    use.alloc = &s;
    use.inside = current ? current->node : nullptr;
  }
  void statement(const Load& s) { access(s.buffer, s.index, false); }
  void statement(const Store& s) { access(s.buffer, s.index, true); }
  void statement(const Let&) {}
  void statement(const Check&) {}
  void statement(const Barrier&) {}
  void statement(const Prefetch& s) {
    if (auto it = arrays.find(s.buffer); it != arrays.end()) it->second.irregular = true;
  }

  void statement(const Matrix&) {}
  void statement(const CopyAsync&) {}
  void statement(const CopyGroup&) {}
  void statement(const LoadMatrix&) {}
  // Pairs of the lanes of its vectors, or one of them.
  void statement(const JoinMatrix& s) {
    if (auto it = arrays.find(s.array); it != arrays.end() && lanes_of_matrix(s.dtype) > 1) it->second.by_lanes = true;
  }
  void statement(const Mma& s) {
    if (auto it = arrays.find(s.array); it != arrays.end()) it->second.by_lanes = true;
  }
  void statement(const MultiplyTiles& s) {
    if (auto it = arrays.find(s.array); it != arrays.end()) it->second.by_lanes = true;
  }
  void statement(const MultiplyGroup& s) {
    if (auto it = arrays.find(s.array); it != arrays.end()) it->second.by_lanes = true;
  }

  void access(const std::string& buffer, const std::vector<Expr>& index, bool store) {
    auto it = arrays.find(buffer);
    if (it == arrays.end()) return;
    ArrayUse& use = it->second;
    bool lanes = current && !index.empty() && uses(index.back(), current->axis->name);
    if (!lanes) {
      // A grid's threads pick lanes of their vectors.
      use.by_scalars = use.by_scalars || store || !target_of(context).has_grid;
      if (store && current && use.inside != current->node) use.stored_uniformly = true;
      return;
    }
    use.by_lanes = true;
    use.loops.insert(current->node);
    if (use.inside == current->node) use.irregular = true;
    auto k = linear_coefficient(index.back(), current->axis->name);
    // A vector whose first lanes are off begins at 0.
    const Expr lo = current->axis->lo.kind() == ExprKind::max ? Expr(0) : current->axis->lo;
    if (!k || !k->is(1) || !lo.is_constant()) {
      use.irregular = true;
      return;
    }
    Expr rest = index.back() - Expr::symbol(current->axis->name) + lo;
    use.alignment = std::gcd(use.alignment, divisor(rest));
  }

  // The largest number that divides e for all values of the unrolled axes; 0: e is 0.
  int64_t divisor(Expr e) const {
    int64_t g = 0;
    Expr constant = e;
    for (const std::string& symbol : symbols_of(e)) {
      auto k = linear_coefficient(e, symbol);
      auto axis = axes.find(symbol);
      if (!k || !k->is_constant() || axis == axes.end()) return 1;
      constant = constant - *k * Expr::symbol(symbol);
      g = std::gcd(g, k->value() * std::gcd(axis->second->lo.as_constant().value_or(1), axis->second->step));
      // lo + t * step: both parts count.
    }
    return std::gcd(g, constant.as_constant().value_or(1));
  }

  // ---- deciding ----

  // Elements per vector: f32 and 32-bit integers fill a register, wider ones take two; bodies of narrow types alone use it in full.
  int natural_width(const LanesLoop& loop) const {
    if (target_of(context).has_grid) {
      // A thread's piece of a row is one vector, however many registers and accesses that takes.
      Expr n = loop.axis->lo.kind() == ExprKind::max ? loop.axis->hi : loop.axis->hi - loop.axis->lo;
      if (n.kind() == ExprKind::min) n = n.operands()[n.operands()[0].is_constant() ? 0 : 1];
      if (auto lanes = n.as_constant(); lanes && *lanes >= 1 && *lanes <= kMostGridLanes)
        return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(*lanes)));
    }
    int bytes = std::min(context.target.vector_bytes, target_of(context).most_vector_bytes);
    // Of what differs from lane to lane, or of all where nothing does; 16 bits that are moved, not computed with, are no wider than they look.
    const std::set<std::string> varying = varying_names(*loop.body, loop.axis->name, plan);
    std::set<int64_t> sizes;
    std::set<int64_t> all;
    std::set<std::string> halves;
    bool half = false;
    visit_all(*loop.body, [&](const Stmt& stmt) {
      const auto* load = std::get_if<Load>(&stmt.node);
      const auto* let = std::get_if<Let>(&stmt.node);
      if ((!load && !let) || (let && let->fn == Fn::index && let->dtype == DType::i64)) return;
      const std::string& name = load ? load->name : let->name;
      const DType dtype = load ? load->dtype : let->dtype;
      all.insert(size_of(dtype));
      if (varying.count(name) == 0) return;
      sizes.insert(size_of(dtype));
      const bool is_half = size_of(dtype) == 2 && is_float(dtype);
      if (is_half) halves.insert(name);
      if (!let || let->fn == Fn::cast || let->fn == Fn::where) return;
      half = half || is_half || std::any_of(let->operands.begin(), let->operands.end(), [&](const auto& o) { return halves.count(o) > 0; });
    });
    if (sizes.empty()) sizes = std::move(all);
    int64_t size = 4;
    if (!sizes.empty() && !sizes.count(4) && !half) size = sizes.count(8) ? 8 : sizes.count(2) ? 2 : 1;
    int64_t width = std::max<int64_t>(1, bytes / size);
    Expr extent = loop.axis->hi - loop.axis->lo;
    if (auto n = extent.as_constant())
      while (width > 1 && width / 2 >= *n) width /= 2;
    return static_cast<int>(width);
  }

  // Loop bounds that differ between lanes, and memory of one's own, run element by element.
  bool vectorizable(const LanesLoop& loop) const {
    std::set<std::string> names = varying_names(*loop.body, loop.axis->name, plan);
    bool possible = true;
    auto uniform = [&](const Axis& axis) {
      if (&axis != loop.axis && (uses_any(axis.lo, names) || uses_any(axis.hi, names))) possible = false;
    };
    visit_all(*loop.body, [&](const Stmt& stmt) {
      std::visit(
          Overloaded{[&](const For& s) { uniform(s.axis); }, [&](const Scan& s) { std::for_each(s.axes.begin(), s.axes.end(), uniform); },
                     [&](const Reduce& s) { std::for_each(s.axes.begin(), s.axes.end(), uniform); },
                     [&](const Alloc& s) { possible = possible && s.space == Space::reg && !arrays.at(s.name).irregular; }, [](const auto&) {}},
          stmt.node);
    });
    if (const auto* reduce = reduction(loop))
      for (const Axis& axis : reduce->axes) uniform(axis);
    return possible;
  }

  const Reduce* reduction(const LanesLoop& loop) const {
    auto it = reductions.find(loop.node);
    return it == reductions.end() ? nullptr : it->second;
  }

  void decide() {
    for (const LanesLoop& loop : loops) plan.lanes[loop.node] = natural_width(loop);
    for (const LanesLoop& loop : loops)
      if (!vectorizable(loop)) plan.lanes[loop.node] = 1;
    for (bool changed = true; changed;) {
      changed = false;
      for (auto& [name, use] : arrays) changed = decide(name, use) || changed;
    }
    for (const auto& [name, use] : arrays)
      if (plan.registers.at(name).mode == RegisterPlan::Mode::lanes)
        for (const void* loop : use.loops) plan.whole[loop] = std::max(plan.whole[loop], use.alloc->shape.back().value());
  }

  // Makes the loops that share an array agree on a width; true if that changed one.
  bool decide(const std::string& name, const ArrayUse& use) {
    RegisterPlan& array = plan.registers[name];
    array.mode = RegisterPlan::Mode::scalars;
    int64_t count = 1;
    for (const Expr& e : use.alloc->shape) count *= e.value();
    bool shared = use.by_lanes && (use.by_scalars || use.inside);
    if (use.irregular || shared || use.stored_uniformly || count > kMaxRegisterVariables * 16) {
      array.mode = RegisterPlan::Mode::memory;
      return false;
    }
    if (!use.by_lanes) {
      if (count > kMaxRegisterVariables) array.mode = RegisterPlan::Mode::memory;
      return false;
    }
    array.mode = RegisterPlan::Mode::lanes;
    int width = 1 << 30;
    for (const void* loop : use.loops) width = std::min(width, plan.lanes.at(loop));
    while (use.alignment % width != 0) width /= 2;
    array.width = width;
    if (count / width > kMaxRegisterVariables) array.mode = RegisterPlan::Mode::memory;
    bool changed = false;
    for (const void* loop : use.loops) {
      changed = changed || plan.lanes.at(loop) != width;
      plan.lanes[loop] = width;
    }
    return changed;
  }

  // ---- stores and uses ----

  std::map<const void*, const Reduce*> reductions;
  int position = 0;
  std::map<std::string, std::vector<const void*>> definitions;  ///< of each visible name, innermost last

  void use(const std::string& name) {
    auto it = definitions.find(name);
    if (it != definitions.end() && !it->second.empty()) plan.last_use[it->second.back()] = position;
  }
  void use(Expr e) {
    for (const std::string& s : symbols_of(e)) use(s);
  }
  void use(const std::vector<Expr>& exprs) {
    for (Expr e : exprs) use(e);
  }
  void use(const std::vector<Cond>& conds) {
    for (const Cond& c : conds) use(c.expr);
  }
  void use(const std::vector<std::string>& names) {
    for (const std::string& n : names) use(n);
  }

  /// Adds to `stores` what the block writes.
  void trace(const Block& body, std::set<std::string>& stores) {
    for (const auto& stmt : body) {
      ++position;
      std::visit([&](const auto& s) { trace(s, stores); }, stmt->node);
    }
  }
  void trace(const Let& s, std::set<std::string>&) {
    use(s.operands);
    if (s.fn == Fn::index) use(s.index);
    definitions[s.name].push_back(&s);
  }
  void trace(const Load& s, std::set<std::string>&) {
    use(s.index);
    use(s.guard);
    definitions[s.name].push_back(&s);
  }
  void trace(const Store& s, std::set<std::string>& stores) {
    plan.order[&s] = position;
    use(s.index);
    use(s.guard);
    use(s.value);
    stores.insert(s.buffer);
  }
  template <class Nest>
  void trace_nest(const Nest& s, const std::vector<const Axis*>& own, std::set<std::string>& stores, const std::vector<std::string>& operands,
                  const Block* then = nullptr) {
    plan.order[&s] = position;
    for (const Axis* axis : own) {
      use(axis->lo);
      use(axis->hi);
    }
    std::set<std::string> inner;
    trace(s.body, inner);
    use(operands);
    if (then) trace(*then, inner);
    stores.insert(inner.begin(), inner.end());
    plan.stores[&s] = std::move(inner);
  }
  void trace(const For& s, std::set<std::string>& stores) { trace_nest(s, {&s.axis}, stores, {}); }
  void trace(const Reduce& s, std::set<std::string>& stores) {
    reductions[&s] = &s;
    trace_nest(s, addresses(s.axes), stores, s.operands);
    for (const std::string& r : s.results) definitions[r].push_back(&s);
  }
  void trace(const Scan& s, std::set<std::string>& stores) {
    for (const std::string& r : s.results) definitions[r].push_back(&s);
    trace_nest(s, addresses(s.axes), stores, s.operands, &s.then);
  }
  void trace(const If& s, std::set<std::string>& stores) {
    use(s.guard);
    trace(s.body, stores);
  }
  void trace(const Alloc&, std::set<std::string>&) {}
  void trace(const Check& s, std::set<std::string>&) { use(s.cond.expr); }
  void trace(const Barrier&, std::set<std::string>&) {}
  void trace(const Prefetch& s, std::set<std::string>&) { use(s.index); }
  void trace(const Matrix& s, std::set<std::string>& stores) {
    use(s.a.index);
    use(s.b.index);
    if (s.kind == Matrix::Kind::store) stores.insert(s.a.buffer);
  }
  void trace(const CopyAsync& s, std::set<std::string>& stores) {
    use(s.index);
    use(s.from_index);
    use(s.count);
    use(s.guard);
    stores.insert(s.buffer);
  }
  void trace(const CopyGroup&, std::set<std::string>&) {}
  void trace(const LoadMatrix& s, std::set<std::string>&) {
    use(s.index);
    definitions[s.name].push_back(&s);
  }
  void trace(const JoinMatrix& s, std::set<std::string>&) {
    for (const std::vector<Expr>& place : s.places) use(place);
    definitions[s.name].push_back(&s);
  }
  void trace(const Mma& s, std::set<std::string>& stores) {
    plan.order[&s] = position;
    use(s.low);
    use(s.high);
    use(s.a);
    use(s.b);
    stores.insert(s.array);
  }
  void trace(const MultiplyTiles& s, std::set<std::string>& stores) {
    plan.order[&s] = position;
    for_each_expr(s.products, [&](Expr e) { use(e); });
    for (const TileFactor* f : {&s.products.a, &s.products.b}) stores.insert(f->tiles);
    stores.insert(s.array);
  }
  void trace(const MultiplyGroup& s, std::set<std::string>& stores) {
    plan.order[&s] = position;
    for (const std::string& matrix : s.products.matrices) use(matrix);
    use(s.unit);
    for_each_place(s.products, [&](Expr e) { use(e); });
    stores.insert(s.array);
  }

  void run() {
    std::set<std::string> stores;
    trace(kernel.body, stores);
    block(kernel.body);
    decide();
  }
};

}  // namespace

Plan make_plan(const Kernel& kernel, const PassContext& context) {
  Planner planner{kernel, context, {}, {}, {}, nullptr, {}, {}, 0, {}};
  planner.run();
  return std::move(planner.plan);
}

std::set<std::string> varying_names(const Block& body, const std::string& axis, const Plan& plan) {
  Varying varying{plan, {axis}, {}};
  varying.block(body);
  return std::move(varying.names);
}

const Axis* lanes_axis(const Reduce& reduce, const Plan& plan) {
  if (plan.width(&reduce) <= 1) return nullptr;
  for (const Axis& axis : reduce.axes)
    if (axis.kind == LoopKind::lanes) return &axis;
  return nullptr;
}

}  // namespace deplo::tile_to_kernel
