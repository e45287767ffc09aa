#include <algorithm>

#include "base/error.h"
#include "base/require.h"
#include "expr/check.h"
#include "loop_ir/verify.h"

namespace deplo::loop_ir {

void StatementVerifier::fail(const std::string& text) const { throw InternalError(kernel_ + ": " + text); }

Visible StatementVerifier::parameters() const {
  Visible names{{}, {}, {}, Points(symbols_)};
  for (const Param& p : params_)
    located(p.location, [&] {
      DEPLO_REQUIRE(p.shape.size() == p.strides.size(), fmt::format("{} has {} sizes and {} strides", p.name, p.shape.size(), p.strides.size()));
      for (const Expr& e : p.strides) expression(names, e, "strides of " + p.name);
      sizes(names, p.shape, p.name);
      bytes_of(p.dtype, p.shape);
      bytes_of(p.dtype, p.shape, p.strides);
      bool is_new = names.buffers.emplace(p.name, BufferInfo{p.dtype, &p.shape, p.kind != ParamKind::in}).second;
      DEPLO_REQUIRE(is_new, "the parameter " + p.name + " is declared twice");
    });
  return names;
}

void StatementVerifier::check_stored() const {
  for (const Param& p : params_)
    located(p.location, [&] {
      bool empty = std::any_of(p.shape.begin(), p.shape.end(), [](const Expr& size) { return size.is(0); });
      DEPLO_REQUIRE(p.kind != ParamKind::out || empty || stored_.count(p.name), "nothing stores the output " + p.name);
    });
}

void StatementVerifier::define(Visible& names, const std::string& name, DType dtype) const {
  DEPLO_REQUIRE(!taken(names, name), "the name " + name + " is defined twice");
  names.values[name] = dtype;
}

void StatementVerifier::define_axis(Visible& names, const std::string& name, Expr lo, Expr hi, int64_t step) const {
  DEPLO_REQUIRE(!taken(names, name), "the axis " + name + " is defined twice");
  names.axes.insert(name);
  names.points.add_axis(name, lo, hi, step);
}

void StatementVerifier::define_buffer(Visible& names, const std::string& name, const BufferInfo& info) const {
  sizes(names, *info.shape, name);
  bytes_of(info.dtype, *info.shape);
  DEPLO_REQUIRE(names.buffers.emplace(name, info).second, "the buffer " + name + " is declared twice");
}

DType StatementVerifier::value(const Visible& names, const std::string& name) const {
  auto it = names.values.find(name);
  DEPLO_REQUIRE(it != names.values.end(), "the value " + name + " is not defined here");
  return it->second;
}

void StatementVerifier::expression(const Visible& names, Expr e, const std::string& where) const {
  for (const std::string& name : symbols_of(e)) {
    if (names.axes.count(name) || is_size(name)) continue;
    auto it = names.values.find(name);
    DEPLO_REQUIRE(it != names.values.end(), fmt::format("{} uses {}, which is no axis, symbol or value here", where, name));
    DEPLO_REQUIRE(it->second == DType::i64, fmt::format("{} uses {} of dtype {}; coordinates are i64", where, name, to_string(it->second)));
  }
  check_divisors(e, symbols_);
}

void StatementVerifier::guard(const Visible& names, const std::vector<Cond>& conds, const std::string& where) const {
  for (const Cond& c : conds) expression(names, c.expr, where);
}

void StatementVerifier::sizes(const Visible& names, const std::vector<Expr>& shape, const std::string& buffer) const {
  for (const Expr& e : shape) {
    expression(names, e, "shape of " + buffer);
    DEPLO_REQUIRE(decide(less(e, 0), symbols_) != std::optional<bool>(true), fmt::format("{} has the size {}", buffer, print(e)));
  }
}

const BufferInfo& StatementVerifier::access(const Visible& names, const std::string& buffer, const std::vector<Expr>& index) const {
  auto it = names.buffers.find(buffer);
  DEPLO_REQUIRE(it != names.buffers.end(), "the buffer " + buffer + " is not declared here");
  DEPLO_REQUIRE(it->second.shape->size() == index.size(),
                fmt::format("{} has {} dimensions, indexed with {}", buffer, it->second.shape->size(), index.size()));
  for (const Expr& e : index) expression(names, e, "index of " + buffer);
  return it->second;
}

void StatementVerifier::inside(const Visible& names, const std::string& buffer, const std::vector<Expr>& index,
                               const std::vector<Cond>& guard) const {
  if (auto why = names.points.escape(buffer, index, *names.buffers.at(buffer).shape, guard)) fail(*why);
}

void StatementVerifier::statement(const Let& s, Visible& names) const {
  if (s.fn == Fn::index) expression(names, s.index, "index " + s.name);
  std::vector<DType> dtypes;
  for (const std::string& operand : s.operands) dtypes.push_back(value(names, operand));
  std::string complaint = type_error(s.fn, s.dtype, dtypes.data(), static_cast<int>(dtypes.size()));
  DEPLO_REQUIRE(complaint.empty(), s.name + ": " + complaint);
  DEPLO_REQUIRE(s.fn != Fn::constant || s.literal.dtype == s.dtype, s.name + ": the literal has another dtype");
  define(names, s.name, s.dtype);
  if (s.fn == Fn::index) names.points.define(s.name, s.index);
}

void StatementVerifier::statement(const Load& s, Visible& names) const {
  const BufferInfo& buffer = access(names, s.buffer, s.index);
  guard(names, s.guard, "guard of " + s.name);
  DEPLO_REQUIRE(buffer.dtype == s.dtype, s.name + ": a load has its buffer's dtype");
  DEPLO_REQUIRE(s.guard.empty() || s.fill.dtype == s.dtype, s.name + ": the fill of a load has its buffer's dtype");
  inside(names, s.buffer, s.index, s.guard);
  define(names, s.name, s.dtype);
}

void StatementVerifier::statement(const Store& s, Visible& names) {
  if (!names.points.none()) stored_.insert(s.buffer);
  const BufferInfo& buffer = access(names, s.buffer, s.index);
  guard(names, s.guard, "guard of the store to " + s.buffer);
  DEPLO_REQUIRE(buffer.writable, "store to the input " + s.buffer);
  DType dtype = value(names, s.value);
  DEPLO_REQUIRE(dtype == buffer.dtype, fmt::format("store of {} {} to {} of dtype {}", to_string(dtype), s.value, s.buffer, to_string(buffer.dtype)));
  DEPLO_REQUIRE(operand_count(s.combiner) == 1 && result_count(s.combiner) == 1, fmt::format("a store cannot combine by {}", to_string(s.combiner)));
  DEPLO_REQUIRE(!s.atomic || combines_atomically(s.combiner, dtype),
                fmt::format("an atomic store to {} of dtype {}; allowed: sums of f32, f64, i32 and i64", s.buffer, to_string(dtype)));
  inside(names, s.buffer, s.index, s.guard);
}

void StatementVerifier::element(const Visible& names, const std::string& buffer, const std::vector<Expr>& index, DType dtype, bool written) {
  const BufferInfo& info = access(names, buffer, index);
  DEPLO_REQUIRE(info.dtype == dtype, fmt::format("{} is {}, needed is {}", buffer, to_string(info.dtype), to_string(dtype)));
  DEPLO_REQUIRE(!written || info.writable, "store to the input " + buffer);
  if (written && !names.points.none()) stored_.insert(buffer);
  inside(names, buffer, index, {});
}

void StatementVerifier::statement(const Check& s, Visible& names) const { expression(names, s.cond.expr, "check"); }

void StatementVerifier::combination(const std::vector<std::string>& results, const std::vector<DType>& dtypes, Combiner combiner,
                                    const std::vector<std::string>& operands, const Visible& inner) const {
  std::string name = results.empty() ? "a reduction" : results[0];
  DEPLO_REQUIRE(combiner != Combiner::set, name + ": set is no reduction");
  size_t partial = combiner == Combiner::welford ? 3 : combiner == Combiner::online_softmax ? 2 : 0;
  DEPLO_REQUIRE(operands.size() == static_cast<size_t>(operand_count(combiner)) || (partial > 0 && operands.size() == partial),
                fmt::format("{}: {} takes {} operands, found {}", name, to_string(combiner), operand_count(combiner), operands.size()));
  DEPLO_REQUIRE(results.size() == static_cast<size_t>(result_count(combiner)) && dtypes.size() == results.size(),
                fmt::format("{}: {} gives {} results, found {}", name, to_string(combiner), result_count(combiner), results.size()));
  for (size_t k = 0; k < operands.size(); ++k) {
    DType dtype = value(inner, operands[k]);
    if (operands.size() == results.size() && dtype != dtypes[k])
      fail(fmt::format("{}: operand {} is {}, the result {}", name, operands[k], to_string(dtype), to_string(dtypes[k])));
  }
}

}  // namespace deplo::loop_ir
