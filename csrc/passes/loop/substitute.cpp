#include "passes/loop/substitute.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "loop_ir/places.h"
#include "loop_ir/text.h"

namespace deplo {
namespace {

using namespace loop_ir;

bool same_bits(const Scalar& a, const Scalar& b) {
  if (a.dtype != b.dtype) return false;
  if (is_float(a.dtype)) return a.f == b.f && std::signbit(a.f) == std::signbit(b.f);
  return a.i == b.i;
}

// The producer's value when every load gives zero; nothing if it depends on a coordinate.
std::optional<Scalar> value_at_zero(const PointwiseNest& p) {
  std::map<std::string, Scalar> values;
  for (const auto& stmt : p.body) {
    if (const auto* load = std::get_if<Load>(&stmt->node)) {
      values[load->name] = zero_of(load->dtype);
    } else if (const auto* let = std::get_if<Let>(&stmt->node)) {
      if (let->fn == Fn::constant) {
        values[let->name] = let->literal;
        continue;
      }
      Scalar operands[3];
      bool known = let->fn != Fn::index;
      for (size_t k = 0; k < let->operands.size(); ++k) {
        auto it = values.find(let->operands[k]);
        known = known && it != values.end();
        if (known) operands[k] = it->second;
      }
      bool error = false;
      if (known) values[let->name] = apply(let->fn, let->dtype, operands, Mode::typed, &error);
      if (error) return std::nullopt;
    }
  }
  auto it = values.find(p.value);
  if (it == values.end()) return std::nullopt;
  return it->second;
}

// All guards of the body are empty: a load under the consumer's guard then gives its fill and nothing else.
bool has_guard(const PointwiseNest& p) {
  return std::any_of(p.body.begin(), p.body.end(), [](const auto& stmt) {
    const auto* load = std::get_if<Load>(&stmt->node);
    return load && !load->guard.empty();
  });
}

bool has_check(const PointwiseNest& p) {
  return std::any_of(p.body.begin(), p.body.end(), [](const auto& stmt) { return std::holds_alternative<Check>(stmt->node); });
}

struct Substituter {
  const PointwiseNest& producer;
  Names& names;
  Ranges ranges;
  std::optional<Scalar> at_zero;
  std::map<std::string, std::string> available;  ///< place and guard of a replaced load -> its name, for what the current scope sees
  Renaming equal;                                ///< loads of the current block that an earlier one stands for

  Block block(const Block& body) {
    Renaming around = std::move(equal);
    equal = {};
    auto saved = available;
    Block out;
    for (const auto& stmt : body) statement(stmt, out);
    if (!equal.values.empty()) out = copy_block(out, equal, nullptr);
    available = std::move(saved);
    inner = std::move(equal);
    equal = std::move(around);
    return out;
  }

  Renaming inner;  ///< `equal` of the block that was left last

  // The body of a reduction or scan, which defines its operands itself.
  Block operand_block(const Block& body, std::vector<std::string>& operands) {
    auto saved = std::move(available);
    available.clear();
    Block out = block(body);
    available = std::move(saved);
    for (std::string& operand : operands)
      if (auto it = inner.values.find(operand); it != inner.values.end()) operand = it->second;
    return out;
  }

  // True if an equal load was replaced before.
  bool is_known(const Load& load) {
    std::string text = print(load);
    auto [it, fresh] = available.emplace(text.substr(text.find('=')), load.name);
    if (!fresh) equal.value(load.name, it->second);
    return !fresh;
  }

  void statement(const Ref<Stmt>& stmt, Block& out) {
    if (const auto* load = std::get_if<Load>(&stmt->node); load && load->buffer == producer.buffer) {
      if (!is_known(*load)) replace(*load, out);
      return;
    }
    if (const auto* s = std::get_if<For>(&stmt->node)) {
      auto saved = enter({{s->axis, s->extent}});
      out.push_back(make_for({s->axis, s->extent}, block(s->body)));
      ranges = std::move(saved);
    } else if (const auto* s = std::get_if<Reduce>(&stmt->node)) {
      auto saved = enter(s->axes);
      Reduce copy = *s;
      copy.body = operand_block(s->body, copy.operands);
      out.push_back(make_stmt(std::move(copy)));
      ranges = std::move(saved);
    } else if (const auto* s = std::get_if<Scan>(&stmt->node)) {
      auto saved = enter({s->axis});
      Scan copy = *s;
      copy.body = operand_block(s->body, copy.operands);
      copy.then = block(inner.values.empty() ? s->then : copy_block(s->then, inner, nullptr));
      out.push_back(make_stmt(std::move(copy)));
      ranges = std::move(saved);
    } else {
      out.push_back(stmt);
    }
  }

  Ranges enter(const std::vector<Axis>& axes) {
    Ranges saved = ranges;
    for (const Axis& axis : axes) ranges[axis.name] = axis_range(axis.extent);
    return saved;
  }

  // A copy of the producer at the load's place, whose last value takes the load's name.
  void replace(const Load& load, Block& out) {
    Renaming renaming;
    for (size_t d = 0; d < load.index.size(); ++d) renaming.exprs[producer.axes[d].name] = load.index[d];
    bool guarded = !load.guard.empty();
    // Where the guard fails, loads give zero; if that makes the value the fill, no select is needed.
    const Load* only = guarded ? only_load() : nullptr;
    bool moves = guarded && !has_guard(producer) && at_zero && same_bits(*at_zero, load.fill);
    bool select = guarded && !moves && !only;
    Block copy = copy_block(producer.body, renaming, &names);
    std::string value = copied_value(copy);
    for (size_t at = 0; at < copy.size(); ++at) {
      bool fills = only && std::get_if<Load>(&producer.body[at]->node) == only;
      if (guarded && may_divide_by_zero(at))
        divide_under(load, copy[at], out);
      else
        out.push_back(simplified(guarded ? with_guard(copy[at], load, fills, at) : copy[at]));
    }
    std::string result = value;
    if (select) {
      Body body(names);
      std::string fill = body.constant(load.fill);
      std::string truth = body.truth(load.guard, ranges);
      result = body.let(Fn::where, load.dtype, {truth, value, fill});
      for (auto& stmt : body.take()) out.push_back(std::move(stmt));
    }
    rename_definition(out, result, load.name);
  }

  // An integer division by anything but a constant other than 0.
  bool may_divide_by_zero(size_t at) const {
    const auto* let = std::get_if<Let>(&producer.body[at]->node);
    if (!let || !divides_integers(*let)) return false;
    for (const auto& stmt : producer.body) {
      const auto* divisor = std::get_if<Let>(&stmt->node);
      if (divisor && divisor->name == let->operands[1]) return divisor->fn != Fn::constant || divisor->literal.i == 0;
    }
    return true;
  }

  // Where the guard fails, loads give zero: dividing by that would report an error that no element has.
  void divide_under(const Load& load, const Ref<Stmt>& stmt, Block& out) {
    Let division = std::get<Let>(stmt->node);
    Body body(names);
    std::string truth = body.truth(load.guard, ranges);
    std::string one = body.constant(Scalar::of_int(division.dtype, 1));
    division.operands[1] = body.let(Fn::where, division.dtype, {truth, division.operands[1], one});
    for (auto& made : body.take()) out.push_back(std::move(made));
    out.push_back(make_stmt(std::move(division)));
  }

  // The producer is one load (its value): the fill can be the consumer's.
  const Load* only_load() const {
    const Load* found = nullptr;
    for (const auto& stmt : producer.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (load && load->name == producer.value) found = load;
    }
    return found && found->guard.empty() ? found : nullptr;
  }

  // `fills`: where the guard fails, the load gives what the consumer asked for.
  Ref<Stmt> with_guard(const Ref<Stmt>& stmt, const Load& load, bool fills, size_t at) const {
    if (const auto* check = std::get_if<Check>(&producer.body[at]->node);
        check && check->cond.kind == Cond::Kind::ge0 && uses_index(check->cond.expr))
      return under_guard(std::get<Check>(stmt->node), load.guard);
    const auto* own = std::get_if<Load>(&stmt->node);
    if (!own) return stmt;
    Load copy = *own;
    if (own->guard.empty()) copy.fill = fills ? load.fill : zero_of(copy.dtype);
    copy.guard.insert(copy.guard.begin(), load.guard.begin(), load.guard.end());
    return make_stmt(std::move(copy));
  }

  // Whether coordinates take part in the producer's value `e`, other than as places of loads.
  bool uses_index(Expr e) const {
    std::set<std::string> wanted = symbols_of(e);
    bool found = std::any_of(producer.axes.begin(), producer.axes.end(), [&](const Axis& axis) { return wanted.count(axis.name) > 0; });
    for (size_t at = producer.body.size(); at-- > 0;) {
      const auto* let = std::get_if<Let>(&producer.body[at]->node);
      if (!let || wanted.count(let->name) == 0) continue;
      wanted.insert(let->operands.begin(), let->operands.end());
      found = found || let->fn == Fn::index;
    }
    return found;
  }

  // The check where the guard holds; elsewhere it passes.
  static Ref<Stmt> under_guard(Check check, const std::vector<Cond>& guard) {
    for (const Cond& cond : guard) {
      const Expr size = max(cond.expr, Expr(0) - cond.expr);
      const Expr fails = cond.kind == Cond::Kind::ge0 ? Expr(-1) - cond.expr : cond.kind == Cond::Kind::eq0 ? size - 1 : Expr(0) - size;
      check.cond.expr = max(check.cond.expr, fails);
    }
    return make_stmt(check);
  }

  std::string copied_value(const Block& copy) const {
    for (size_t at = 0; at < copy.size(); ++at) {
      const auto* let = std::get_if<Let>(&producer.body[at]->node);
      const auto* load = std::get_if<Load>(&producer.body[at]->node);
      if ((let && let->name == producer.value) || (load && load->name == producer.value))
        return std::visit(
            Overloaded{[](const Let& s) { return s.name; }, [](const Load& s) { return s.name; }, [](const auto&) { return std::string(); }},
            copy[at]->node);
    }
    DEPLO_ASSERT(false, "the value {} of {} is not in its body", producer.value, producer.buffer);
  }

  Ref<Stmt> simplified(const Ref<Stmt>& stmt) const {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (!load) return stmt;
    Load copy = *load;
    for (Expr& e : copy.index) e = simplify(e, ranges);
    std::vector<Cond> open;
    for (const Cond& cond : copy.guard) {
      Cond c = simplify(cond, ranges);
      auto known = decide(c, ranges);
      if (known == std::optional<bool>(false)) return make_stmt(Let{copy.name, copy.dtype, Fn::constant, {}, copy.fill, {}});
      if (!known) add_cond(open, c);
    }
    copy.guard = std::move(open);
    return make_stmt(std::move(copy));
  }

  // Of two bounds that differ by a constant, the tighter one.
  static void add_cond(std::vector<Cond>& open, const Cond& cond) {
    for (Cond& other : open) {
      if (other == cond) return;
      if (other.kind != Cond::Kind::ge0 || cond.kind != Cond::Kind::ge0) continue;
      if (auto difference = (cond.expr - other.expr).as_constant()) {
        if (*difference < 0) other = cond;
        return;
      }
    }
    open.push_back(cond);
  }

  // The statement that defines `from` is near the end of `out`, and nothing but its copy uses that name yet.
  static void rename_definition(Block& out, const std::string& from, const std::string& to) {
    Renaming renaming;
    renaming.value(from, to);
    for (size_t at = out.size(); at-- > 0;) {
      bool here = std::visit(
          Overloaded{[&](const Let& s) { return s.name == from; }, [&](const Load& s) { return s.name == from; }, [](const auto&) { return false; }},
          out[at]->node);
      out[at] = copy_block({out[at]}, renaming, nullptr)[0];
      if (here) return;
    }
  }
};

}  // namespace

std::vector<Expr> PointwiseNest::index() const {
  std::vector<Expr> result;
  for (const Axis& axis : axes) result.push_back(Expr::symbol(axis.name));
  return result;
}

const Block& innermost(const Block& kernel_body) {
  const Block* body = &kernel_body;
  while (body->size() == 1) {
    const auto* loop = std::get_if<For>(&body->front()->node);
    if (!loop) break;
    body = &loop->body;
  }
  return *body;
}

std::optional<PointwiseNest> as_pointwise(const Block& kernel_body) {
  const Block& body = innermost(kernel_body);
  if (body.empty()) return std::nullopt;
  const auto* store = std::get_if<Store>(&body.back()->node);
  if (!store || !store->guard.empty() || store->combiner != Combiner::set) return std::nullopt;
  bool simple = std::all_of(body.begin(), body.end() - 1, [](const auto& stmt) {
    return std::holds_alternative<Let>(stmt->node) || std::holds_alternative<Load>(stmt->node) || std::holds_alternative<Check>(stmt->node);
  });
  if (!simple) return std::nullopt;
  std::vector<Axis> axes;
  for (const Block* outer = &kernel_body; outer != &body;) {
    const auto& loop = std::get<For>(outer->front()->node);
    axes.push_back({loop.axis, loop.extent});
    outer = &loop.body;
  }
  PointwiseNest p{std::move(axes), {body.begin(), body.end() - 1}, store->buffer, store->value};
  if (store->index != p.index()) return std::nullopt;
  return p;
}

bool can_substitute(const Block& body, const PointwiseNest& producer, const Ranges& symbols) {
  if (!has_check(producer)) return true;
  // Under a guard, coordinates read as 0: the check holds only if there is an element 0.
  for (const auto& stmt : producer.body)
    if (const auto* check = std::get_if<Check>(&stmt->node)) {
      Substitution zero;
      for (const std::string& name : symbols_of(check->cond.expr))
        if (!symbols.count(name)) zero[name] = 0;
      if (decide(substitute(check->cond, zero), symbols) == std::optional<bool>(true)) continue;
      bool guarded = false;
      visit(body, [&](const Stmt& s, const auto&) {
        const auto* load = std::get_if<Load>(&s.node);
        guarded = guarded || (load && load->buffer == producer.buffer && !load->guard.empty());
      });
      if (guarded) return false;
    }
  return true;
}

Block substitute_producer(const Block& body, const PointwiseNest& producer, const Ranges& symbols, Names& names) {
  return Substituter{producer, names, symbols, value_at_zero(producer), {}, {}, {}}.block(body);
}

}  // namespace deplo
