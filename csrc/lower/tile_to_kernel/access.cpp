#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "expr/check.h"
#include "expr/node.h"
#include "lower/tile_to_kernel/lowering.h"
#include "target/target.h"

namespace deplo::tile_to_kernel {

using namespace tile_ir;

namespace {

Fn function_of(Combiner combiner) {
  switch (combiner) {
    case Combiner::sum: return Fn::add;
    case Combiner::prod: return Fn::mul;
    case Combiner::min: return Fn::min;
    case Combiner::max: return Fn::max;
    default: break;
  }
  DEPLO_ASSERT(false, "a store cannot combine by {}", to_string(combiner));
}

int log2_of(Expr e) {
  if (!e.is_constant() || e.value() <= 0 || (e.value() & (e.value() - 1)) != 0) return -1;
  int shift = 0;
  while ((int64_t{1} << shift) < e.value()) ++shift;
  return shift;
}

}  // namespace

// ---- expressions ---------------------------------------------------------------------------------------------------

Expr Lowering::resolve(Expr e) const { return simplify(substitute(e, names_), ranges_); }

std::vector<Cond> Lowering::resolve(const std::vector<Cond>& guard, bool* never) const {
  std::vector<Cond> conds;
  for (const Cond& c : guard) {
    Cond cond{c.kind, resolve(c.expr)};
    auto known = decide(cond, ranges_);
    if (known && !*known) *never = true;
    if (!known) conds.push_back(cond);
  }
  return conds;
}

Expr Lowering::flat(const Memory& memory, const std::vector<Expr>& index) const {
  Expr offset = 0;
  for (size_t d = 0; d < index.size(); ++d) offset = offset + index[d] * memory.strides[d];
  return resolve(offset);
}

// Early evaluation must not divide by a size that may be 0: nothing is computed with it then, and code must not trap.
bool Lowering::may_name(Expr e) const { return !may_divide_by_zero(e, ranges_); }

Expr Lowering::tidy(Expr e) {
  switch (e.kind()) {
    case ExprKind::constant:
    case ExprKind::symbol: return e;
    case ExprKind::add: {
      Expr sum = 0;
      for (const Expr& t : e.operands()) sum = sum + tidy(t);
      return sum;
    }
    case ExprKind::mul: {
      Expr result = 1;
      for (const Expr& t : e.operands()) result = result * tidy(t);
      return result;
    }
    case ExprKind::floordiv:
    case ExprKind::mod:
    case ExprKind::min:
    case ExprKind::max: break;
  }
  return varies(e) || !may_name(e) ? e : named(e, "n");
}

// Symbols that stand for a value per lane start with $.
bool Lowering::varies(Expr e) const {
  if (!lanes_) return false;
  for (const std::string& s : symbols_of(e))
    if (s[0] == '$') return true;
  return false;
}

bool Lowering::varies(const std::vector<Cond>& guard) const {
  return std::any_of(guard.begin(), guard.end(), [&](const Cond& c) { return varies(c.expr); });
}

Expr Lowering::at_copy(Expr e, const LaneCopy& copy) const { return simplify(substitute(e, {{lanes_->symbol, copy.base}}), ranges_); }

std::string Lowering::scalar(Expr e, const std::string& hint) { return emit_.index(hint, {DType::i64, 1}, tidy(e), 0); }

std::string Lowering::truth(const Cond& cond) {
  Fn fn = cond.kind == Cond::Kind::ge0 ? Fn::ge : cond.kind == Cond::Kind::eq0 ? Fn::eq : Fn::ne;
  return emit_.let("holds", {DType::boolean, 1}, fn, {scalar(cond.expr), emit_.constant({DType::i64, 1}, Scalar::of_int(DType::i64, 0))});
}

/// Whether loaded values occur in e.
bool Lowering::uses_values(Expr e) const {
  return std::any_of(placeholders_.begin(), placeholders_.end(), [&](const auto& p) { return uses(e, p.first); });
}

// An i64 vector with the value of e in each lane of a copy. Threads of a grid have no vector arithmetic: lane by lane, expressions share what they
// divide, and keep to the width that sizes allow.
std::string Lowering::vector(Expr e, size_t copy) {
  Type type{DType::i64, width()};
  if (target_of(context_).has_grid && !uses_values(e) && !linear_coefficient(e, lanes_->symbol)) {
    std::vector<std::string> parts;
    for (int64_t lane = 0; lane < width(); ++lane) {
      const Expr here = substitute(e, {{lanes_->symbol, lanes_->copies[copy].base + lane}});
      parts.push_back(emit_.index("n", {DType::i64, 1}, tidy(simplify(here, ranges_)), 0));
    }
    for (int lanes = 2; parts.size() > 1; lanes *= 2) {
      std::vector<int> order(static_cast<size_t>(lanes));
      std::iota(order.begin(), order.end(), 0);
      for (size_t k = 0; 2 * k < parts.size(); ++k) parts[k] = emit_.shuffle({DType::i64, lanes}, parts[2 * k], parts[2 * k + 1], order);
      parts.resize(parts.size() / 2);
    }
    return parts[0];
  }
  Expr rest = 0;  // terms that are linear in the lane
  std::string sum;
  for (const Term& term : terms_of(e)) {
    Expr t = from_terms({term});
    bool others = uses_values(t);
    if (!others && linear_coefficient(t, lanes_->symbol)) {
      rest = rest + t;
      continue;
    }
    std::string product;
    Expr uniform = term.coefficient;
    for (const Expr& atom : term.atoms) {
      if (!varies(atom)) {
        uniform = uniform * atom;
        continue;
      }
      std::string factor = vector_atom(atom, copy);
      product = product.empty() ? factor : emit_.let("n", type, Fn::mul, {product, factor});
    }
    if (!uniform.is(1)) product = emit_.let("n", type, Fn::mul, {product, emit_.index("n", type, tidy(uniform), 0)});
    sum = sum.empty() ? product : emit_.let("n", type, Fn::add, {sum, product});
  }
  if (sum.empty() || !rest.is(0)) {
    std::string linear = emit_.index("n", type, tidy(at_copy(rest, lanes_->copies[copy])), *linear_coefficient(rest, lanes_->symbol));
    sum = sum.empty() ? linear : emit_.let("n", type, Fn::add, {sum, linear});
  }
  return sum;
}

// The quotient or rest of e's operands, of which `a` is the first: in 32 bits where they hold both, for vectors have no division, and LLVM multiplies
// by the inverse of a constant in 32 bits only; without a correction where neither can be negative.
std::string Lowering::divided(Expr e, std::string a, size_t copy) {
  const bool quotient = e.kind() == ExprKind::floordiv;
  const Expr divisor = e.operands()[1];
  Ranges ranges = ranges_;
  const LaneCopy& at = lanes_->copies[copy];
  ranges[lanes_->symbol] = {at.base, at.base + width() - 1};
  const Interval left = bounds(e.operands()[0], ranges);
  const Interval right = bounds(divisor, ranges);
  const bool positive = left.lo && *left.lo >= 0 && right.lo && *right.lo > 0;
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  const bool narrow = positive && left.hi && *left.hi <= kLargest && right.hi && *right.hi <= kLargest;
  const Fn fn = quotient ? (positive ? Fn::trunc_div : Fn::floor_div) : (positive ? Fn::fmod : Fn::remainder);
  const Type wide{DType::i64, width()};
  if (!narrow) return emit_.let("n", wide, fn, {a, vector(divisor, copy)});
  const Type type{DType::i32, width()};
  std::string by =
      divisor.is_constant() ? literal(Scalar::of_int(DType::i32, divisor.value())) : emit_.let("n", type, Fn::cast, {vector(divisor, copy)});
  return emit_.let("n", wide, Fn::cast, {emit_.let("n", type, fn, {emit_.let("n", type, Fn::cast, {a}), by})});
}

std::string Lowering::vector_atom(Expr e, size_t copy) {
  Type type{DType::i64, width()};
  switch (e.kind()) {
    case ExprKind::symbol: {
      auto it = placeholders_.find(e.name());
      return it == placeholders_.end() ? vector(e, copy) : operand(it->second, copy);
    }
    case ExprKind::floordiv:
    case ExprKind::mod: {
      if (auto pattern = lane_pattern(e, copy)) return *pattern;
      bool quotient = e.kind() == ExprKind::floordiv;
      std::string a = vector(e.operands()[0], copy);
      int shift = log2_of(e.operands()[1]);
      if (shift < 0) return divided(e, a, copy);
      int64_t bits = quotient ? shift : (int64_t{1} << shift) - 1;
      return emit_.let("n", type, quotient ? Fn::shr : Fn::bit_and, {a, literal(Scalar::of_int(DType::i64, bits))});
    }
    case ExprKind::min:
    case ExprKind::max:
      return emit_.let("n", type, e.kind() == ExprKind::min ? Fn::min : Fn::max, {vector(e.operands()[0], copy), vector(e.operands()[1], copy)});
    case ExprKind::constant:
    case ExprKind::add:
    case ExprKind::mul: break;
  }
  return vector(e, copy);
}

// ---- masks ---------------------------------------------------------------------------------------------------------

std::string Lowering::all_of(std::string a, const std::string& b) {
  if (a.empty() || a == b) return b;
  if (b.empty()) return a;
  return emit_.let("mask", emit_.type(a), Fn::bit_and, {a, b});
}

// The mask of one condition in a copy; "" if it always holds there.
std::string Lowering::condition(const Cond& cond, size_t copy) {
  int lanes = width();
  if (!varies(cond.expr)) return emit_.splat(truth(cond), lanes);
  const LaneCopy& at = lanes_->copies[copy];
  Ranges ranges = ranges_;
  Range& lane = ranges[lanes_->symbol];
  if (at.mask.empty())
    lane = {at.base, at.base + lanes - 1};
  else
    lane.lo = at.base;
  if (auto known = decide(cond, ranges)) return *known ? "" : literal(Scalar::of_int(DType::boolean, 0));
  bool others = uses_values(cond.expr);
  auto k = others ? std::nullopt : linear_coefficient(cond.expr, lanes_->symbol);
  if (k && k->is_constant() && cond.kind == Cond::Kind::ge0) {
    // start + k * lane >= 0
    Expr start = at_copy(cond.expr, at);
    if (k->value() < 0) return emit_.first(lanes, tidy(simplify(floordiv(start, -k->value()) + 1, ranges_)));
    return emit_.let("mask", {DType::boolean, lanes}, Fn::bit_not,
                     {emit_.first(lanes, tidy(simplify(ceildiv(Expr(-1) * start, k->value()), ranges_)))});
  }
  Fn fn = cond.kind == Cond::Kind::ge0 ? Fn::ge : cond.kind == Cond::Kind::eq0 ? Fn::eq : Fn::ne;
  return emit_.let("mask", {DType::boolean, lanes}, fn, {vector(cond.expr, copy), literal(Scalar::of_int(DType::i64, 0))});
}

std::string Lowering::guard_mask(const std::vector<Cond>& guard, size_t copy) {
  std::string mask;
  for (const Cond& cond : guard) mask = all_of(mask, condition(cond, copy));
  return mask;
}

std::string Lowering::scalar_mask(const std::vector<Cond>& guard) {
  std::string mask;
  for (const Cond& cond : guard) mask = all_of(mask, truth(cond));
  return mask;
}

// ---- operands ------------------------------------------------------------------------------------------------------

std::string Lowering::scalar_operand(const std::string& name) {
  const Value& value = values_.at(name);
  DEPLO_ASSERT(!value.varying, "kernel {}: {} differs between lanes", kernel_.name, name);
  if (value.literal) return emit_.constant({value.dtype, 1}, *value.literal);
  if (value.index) return emit_.index(name, {value.dtype, 1}, tidy(*value.index), 0);
  return value.copies.at(0);
}

std::string Lowering::operand(const std::string& name, size_t copy) {
  const Value& value = values_.at(name);
  if (!lanes_) return scalar_operand(name);
  if (value.literal) return literal(*value.literal);
  if (!value.varying) return emit_.splat(scalar_operand(name), width());
  if (!value.index) return value.copies.at(copy);
  Expr e = *value.index;
  bool others = uses_values(e);
  auto k = others ? std::nullopt : linear_coefficient(e, lanes_->symbol);
  if (k) return emit_.index(name, {value.dtype, width()}, tidy(at_copy(e, lanes_->copies[copy])), *k);
  std::string wide = vector(e, copy);
  return value.dtype == DType::i64 ? wide : emit_.let(name, {value.dtype, width()}, Fn::cast, {wide});
}

// ---- memory --------------------------------------------------------------------------------------------------------

void Lowering::statement(const Load& s) {
  bool never = false;
  std::vector<Cond> guard = resolve(s.guard, &never);
  Value value;
  value.dtype = s.dtype;
  if (never) {
    value.literal = s.fill;
  } else if (plan_.in_registers(s.buffer)) {
    value = load_register(s, registers_.at(s.buffer), guard);
  } else {
    const Memory& memory = memory_.at(s.buffer);
    Expr offset = flat(memory, s.index);
    value.varying = lanes_ && (lanes_->diverges || varies(offset) || varies(guard));
    if (!value.varying) value = load_scalar(s, memory, offset, guard);
    for (size_t c = 0; value.varying && c < copies(); ++c) value.copies.push_back(load_vector(s, memory, offset, guard, c));
  }
  bind(s.name, &s, std::move(value));
}

Value Lowering::load_scalar(const Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard) {
  kernel_ir::Load load;
  load.type = {s.dtype, 1};
  load.buffer = memory.name;
  load.offset = tidy(offset);
  load.mask = scalar_mask(guard);
  if (!load.mask.empty() && !is_zero(s.fill)) load.passthrough = emit_.constant(load.type, s.fill);
  Value value;
  value.dtype = s.dtype;
  value.copies.push_back(emit_.load(s.name, std::move(load)));
  return value;
}

namespace {

std::vector<int> reversed(int lanes) {
  std::vector<int> order;
  for (int l = lanes; l-- > 0;) order.push_back(l);
  return order;
}

}  // namespace

std::string Lowering::load_vector(const Load& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy) {
  const LaneCopy& at = lanes_->copies[copy];
  if (auto column = transposed_load(s, memory, copy)) return *column;
  if (auto spread = spread_load(s, memory, offset, guard, copy)) return *spread;
  if (auto window = window_load(s, memory, offset, guard, copy)) return *window;
  kernel_ir::Load load;
  load.type = {s.dtype, width()};
  load.buffer = memory.name;
  std::string mask = guard_mask(guard, copy);
  load.mask = all_of(at.mask, mask);
  if (!mask.empty() && !is_zero(s.fill)) load.passthrough = literal(s.fill);
  address(guarded_offset(offset, guard), copy, &load.offset, &load.stride, &load.gather);
  if (load.gather.empty() && load.stride.is(-1) && load.mask.empty()) {
    load.stride = 1;
    load.offset = load.offset - (width() - 1);
    std::string backward = emit_.load(s.name, std::move(load));
    return emit_.shuffle({s.dtype, width()}, backward, "", reversed(width()));
  }
  return emit_.load(s.name, std::move(load));
}

// A masked load from a page that does not exist takes a processor hundreds of cycles, even if no lane is wanted: what no lane wants is read from
// near the buffer's start. Threads of a grid leave such loads out.
Expr Lowering::guarded_offset(Expr offset, const std::vector<Cond>& guard) {
  if (target_of(context_).has_grid) return offset;
  std::string wanted;
  for (const Cond& cond : guard)
    if (!varies(cond.expr)) wanted = all_of(wanted, truth(cond));
  if (wanted.empty()) return offset;
  Expr lane_part = 0;
  Expr uniform = 0;
  for (const Term& term : terms_of(offset)) {
    Expr t = from_terms({term});
    (varies(t) ? lane_part : uniform) = (varies(t) ? lane_part : uniform) + t;
  }
  if (uniform.is_constant()) return offset;
  std::string zero = emit_.constant({DType::i64, 1}, Scalar::of_int(DType::i64, 0));
  return lane_part + Expr::symbol(emit_.let("n", {DType::i64, 1}, Fn::where, {wanted, scalar(uniform), zero}));
}

// Splits a flat position into that of lane 0 with a stride, or a uniform part with a vector of the rest.
void Lowering::address(Expr offset, size_t copy, Expr* base, Expr* stride, std::string* gather) {
  const LaneCopy& at = lanes_->copies[copy];
  offset = blockwise(offset, at);
  bool others = uses_values(offset);
  auto k = others ? std::nullopt : linear_coefficient(offset, lanes_->symbol);
  if (k) {
    *base = tidy(at_copy(offset, at));
    *stride = tidy(*k);
    return;
  }
  Expr uniform = 0;
  Expr rest = 0;
  for (const Term& term : terms_of(offset)) {
    Expr t = from_terms({term});
    (varies(t) ? rest : uniform) = (varies(t) ? rest : uniform) + t;
  }
  *base = tidy(uniform);
  *gather = vector(rest, copy);
}

// Where a copy starts at a multiple of the vector width, (lane + r) // d and (lane + r) % d do not wrap inside it if d and r are
// multiples of the width too.
Expr Lowering::blockwise(Expr e, const LaneCopy& at) const {
  switch (e.kind()) {
    case ExprKind::constant:
    case ExprKind::symbol: return e;
    case ExprKind::add: {
      Expr sum = 0;
      for (const Expr& t : e.operands()) sum = sum + blockwise(t, at);
      return sum;
    }
    case ExprKind::mul: {
      Expr result = 1;
      for (const Expr& t : e.operands()) result = result * blockwise(t, at);
      return result;
    }
    case ExprKind::min:
    case ExprKind::max: return e;
    case ExprKind::floordiv:
    case ExprKind::mod: break;
  }
  Expr a = e.operands()[0];
  Expr d = e.operands()[1];
  bool others = uses_values(e);
  auto k = linear_coefficient(a, lanes_->symbol);
  if (others || !k || !k->is(1) || !d.is_constant() || d.value() % width() != 0) return e;
  Expr start = substitute(a, {{lanes_->symbol, at.base}});
  if (!is_multiple(start, width())) return e;
  if (e.kind() == ExprKind::floordiv) return floordiv(start, d);
  return mod(start, d) + Expr::symbol(lanes_->symbol) - at.base;
}

bool Lowering::is_multiple(Expr e, int64_t of) const {
  for (const Term& term : terms_of(e)) {
    if (term.coefficient % of == 0) continue;
    int64_t known = term.coefficient;
    for (const Expr& atom : term.atoms) {
      auto it = atom.is_symbol() ? multiples_.find(atom.name()) : multiples_.end();
      if (it != multiples_.end()) known *= it->second;
    }
    if (known % of != 0) return false;
  }
  return true;
}

void Lowering::statement(const Store& s) {
  bool never = false;
  std::vector<Cond> guard = resolve(s.guard, &never);
  if (never) return;
  if (plan_.in_registers(s.buffer)) return store_register(s, registers_.at(s.buffer), guard);
  const Memory& memory = memory_.at(s.buffer);
  Expr offset = flat(memory, s.index);
  bool once = !lanes_ || (!lanes_->diverges && !varies(offset) && !varies(guard) && !values_.at(s.value).varying && s.combiner == Combiner::set);
  if (once) return store_scalar(s, memory, offset, guard);
  for (size_t c = 0; c < copies(); ++c) store_vector(s, memory, offset, guard, c);
}

void Lowering::store_scalar(const Store& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard) {
  kernel_ir::Store store;
  store.buffer = memory.name;
  store.offset = tidy(offset);
  store.value = scalar_operand(s.value);
  store.mask = scalar_mask(guard);
  store.combiner = s.combiner;
  store.atomic = s.atomic;
  emit_.store(std::move(store));
}

void Lowering::store_vector(const Store& s, const Memory& memory, Expr offset, const std::vector<Cond>& guard, size_t copy) {
  kernel_ir::Store store;
  store.buffer = memory.name;
  store.mask = all_of(lanes_->copies[copy].mask, guard_mask(guard, copy));
  store.value = operand(s.value, copy);
  store.combiner = s.combiner;
  store.atomic = s.atomic;
  address(offset, copy, &store.offset, &store.stride, &store.gather);
  bool apart = store.gather.empty() && store.stride.is_constant() && !store.stride.is(0);
  if (s.combiner != Combiner::set && apart && !s.atomic) {
    kernel_ir::Load load;
    load.type = {memory.dtype, width()};
    load.buffer = memory.name;
    load.offset = store.offset;
    load.stride = store.stride;
    load.mask = store.mask;
    std::string old = emit_.load("old", std::move(load));
    store.value = combined(s.combiner, old, store.value);
    store.combiner = Combiner::set;
  }
  if (store.gather.empty() && store.stride.is(-1) && store.mask.empty() && store.combiner == Combiner::set) {
    store.stride = 1;
    store.offset = store.offset - (width() - 1);
    store.value = emit_.shuffle({memory.dtype, width()}, store.value, "", reversed(width()));
  }
  emit_.store(std::move(store));
}

std::string Lowering::combined(Combiner combiner, const std::string& old, const std::string& value) {
  Type type = emit_.type(old);
  Type wide{compute_type(type.dtype), type.lanes};
  auto cast = [&](const std::string& name, Type to) { return emit_.type(name) == to ? name : emit_.let(name + "_x", to, Fn::cast, {name}); };
  return cast(emit_.let("sum", wide, function_of(combiner), {cast(old, wide), cast(value, wide)}), type);
}

// ---- register arrays -----------------------------------------------------------------------------------------------

std::string& Lowering::element(RegisterArray& array, const std::vector<Expr>& index, size_t copy) {
  int64_t position = 0;
  for (size_t d = 0; d < index.size(); ++d) {
    Expr e = resolve(index[d]);
    if (lanes_) e = at_copy(e, lanes_->copies[copy]);
    DEPLO_ASSERT(e.is_constant(), "kernel {}: a register array is indexed by {}, which is not constant here", kernel_.name, print(e));
    bool last = d + 1 == index.size();
    int64_t size = last ? (array.shape[d] + array.plan.width - 1) / array.plan.width : array.shape[d];
    position = position * size + (last ? e.value() / array.plan.width : e.value());
  }
  std::vector<std::string>& variables = array.variables.at(array.per_copy ? copy : 0);
  DEPLO_SUPPORT(position >= 0 && position < static_cast<int64_t>(variables.size()),
                "kernel {}: an index of a register array leaves its {} variables: {}", kernel_.name, variables.size(), position);
  return variables[static_cast<size_t>(position)];
}

Value Lowering::load_register(const Load& s, RegisterArray& array, const std::vector<Cond>& guard) {
  const bool in_lanes = !array.per_copy && array.plan.mode == RegisterPlan::Mode::lanes && array.plan.width > 1;
  const bool picks = in_lanes && (!lanes_ || !varies(resolve(s.index.back())));
  bool vectors = array.per_copy || (array.plan.mode == RegisterPlan::Mode::lanes && lanes_ && !picks);
  Value value;
  value.dtype = s.dtype;
  value.varying = lanes_ && (vectors || varies(guard));
  for (size_t c = 0; c < (value.varying ? copies() : 1); ++c) {
    std::string name = element(array, s.index, c);
    if (picks) name = emit_.extract(name, static_cast<int>(resolve(s.index.back()).value() % array.plan.width));
    if (value.varying && !vectors) name = emit_.splat(name, width());
    std::string mask = !value.varying ? scalar_mask(guard) : guard_mask(guard, c);
    if (!mask.empty()) {
      Type type = emit_.type(name);
      name = emit_.let(s.name, type, Fn::where, {mask, name, emit_.constant(type, s.fill)});
    }
    value.copies.push_back(std::move(name));
  }
  return value;
}

void Lowering::store_register(const Store& s, RegisterArray& array, const std::vector<Cond>& guard) {
  bool vectors = array.per_copy || (array.plan.mode == RegisterPlan::Mode::lanes && lanes_);
  for (size_t c = 0; c < (vectors ? copies() : 1); ++c) {
    std::string& variable = element(array, s.index, c);
    std::string value = vectors ? operand(s.value, c) : scalar_operand(s.value);
    if (s.combiner != Combiner::set) value = combined(s.combiner, variable, value);
    std::string mask = vectors && lanes_ ? guard_mask(guard, c) : scalar_mask(guard);
    // A tail's lanes beyond the array hold nothing.
    if (vectors && lanes_ && !array.per_copy && !lanes_->copies[c].padding) mask = all_of(lanes_->copies[c].mask, mask);
    if (vectors && lanes_ && array.per_copy && lanes_->diverges) mask = all_of(lanes_->copies[c].mask, mask);
    if (!mask.empty()) value = emit_.let("kept", emit_.type(value), Fn::where, {mask, value, variable});
    keep_values(array, &variable, plan_.order.at(&s));
    emit_.assign(variable, value);
  }
}

}  // namespace deplo::tile_to_kernel
