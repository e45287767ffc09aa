#include "loop_ir/build.h"

#include "base/error.h"

namespace deplo::loop_ir {
namespace {

void reserve_block(Names& names, const Block& block) {
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const Let& s) { names.reserve(s.name); }, [&](const Load& s) { names.reserve(s.name); }, [](const Store&) {},
                          [&](const For& s) {
                            names.reserve(s.axis);
                            reserve_block(names, s.body);
                          },
                          [&](const Reduce& s) {
                            for (const auto& name : s.results) names.reserve(name);
                            for (const Axis& axis : s.axes) names.reserve(axis.name);
                            reserve_block(names, s.body);
                          },
                          [&](const Scan& s) {
                            for (const auto& name : s.results) names.reserve(name);
                            names.reserve(s.axis.name);
                            reserve_block(names, s.body);
                            reserve_block(names, s.then);
                          },
                          [&](const Local& s) { names.reserve(s.name); }, [](const Check&) {}},
               stmt->node);
}

}  // namespace

void Names::reserve(const Kernel& kernel) {
  for (const Param& p : kernel.params) reserve(p.name);
  for (const auto& [name, range] : kernel.symbols) reserve(name);
  reserve_block(*this, kernel.body);
}

std::string Names::fresh(const std::string& hint) {
  std::string stem = stem_.empty() ? hint.substr(0, hint.find_last_not_of("0123456789") + 1) : stem_;
  if (stem_.empty() && stem != hint && take(hint)) return hint;
  int& next = next_[stem];
  std::string name;
  do name = stem + std::to_string(next++);
  while (!take(name));
  return name;
}

Ref<Stmt> make_for(Axis axis, Block body) { return make_stmt(For{std::move(axis.name), axis.extent, std::move(body)}); }

Block make_nest(const std::vector<Axis>& axes, Block body) {
  for (size_t k = axes.size(); k-- > 0;) body = {make_for(axes[k], std::move(body))};
  return body;
}

Scalar zero_of(DType dtype) { return is_float(dtype) ? Scalar::of_float(dtype, 0) : Scalar::of_int(dtype, 0); }

std::string Body::let(Fn fn, DType dtype, std::vector<std::string> operands) {
  std::string name = names_.fresh("v");
  block_.push_back(make_stmt(Let{name, dtype, fn, std::move(operands), {}, {}}));
  return name;
}

std::string Body::constant(Scalar literal) {
  std::string name = names_.fresh("c");
  DType dtype = literal.dtype;
  block_.push_back(make_stmt(Let{name, dtype, Fn::constant, {}, literal, {}}));
  return name;
}

std::string Body::index(DType dtype, Expr value) {
  std::string name = names_.fresh("n");
  block_.push_back(make_stmt(Let{name, dtype, Fn::index, {}, {}, value}));
  return name;
}

std::string Body::load(const std::string& buffer, DType dtype, std::vector<Expr> index, std::vector<Cond> guard, Scalar fill) {
  std::string name = names_.fresh("v");
  block_.push_back(make_stmt(Load{name, dtype, buffer, std::move(index), std::move(guard), fill}));
  return name;
}

std::string Body::load(const std::string& buffer, DType dtype, std::vector<Expr> index) {
  return load(buffer, dtype, std::move(index), {}, zero_of(dtype));
}

std::string Body::cast(const std::string& name, DType from, DType to) {
  if (from == to) return name;
  auto is_half = [](DType d) { return compute_type(d) != d; };
  bool through = (is_half(from) && to != DType::f32) || (is_half(to) && from != DType::f32);
  return let(Fn::cast, to, {through ? let(Fn::cast, DType::f32, {name}) : name});
}

std::string Body::truth(const std::vector<Cond>& guard, const Ranges& ranges) {
  std::string all;
  for (const Cond& cond : guard) {
    Interval range = bounds(cond.expr, ranges);
    bool narrow = range.lo && range.hi && *range.lo >= INT32_MIN && *range.hi <= INT32_MAX;
    DType dtype = narrow ? DType::i32 : DType::i64;
    Fn fn = cond.kind == Cond::Kind::ge0 ? Fn::ge : cond.kind == Cond::Kind::eq0 ? Fn::eq : Fn::ne;
    std::string value = index(dtype, cond.expr);
    std::string one = let(fn, DType::boolean, {value, constant(zero_of(dtype))});
    all = all.empty() ? one : let(Fn::bit_and, DType::boolean, {all, one});
  }
  return all.empty() ? constant(Scalar::of_int(DType::boolean, 1)) : all;
}

void Body::store(const std::string& buffer, std::vector<Expr> index, const std::string& value, std::vector<Cond> guard, Combiner combiner) {
  block_.push_back(make_stmt(Store{buffer, std::move(index), value, std::move(guard), combiner}));
}

void Body::check(Cond cond, ErrorCode code) { block_.push_back(make_stmt(Check{cond, code})); }

}  // namespace deplo::loop_ir
