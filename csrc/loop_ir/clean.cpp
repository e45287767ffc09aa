#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "base/text.h"
#include "loop_ir/build.h"
#include "loop_ir/params.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "loop_ir/structure.h"

namespace deplo::loop_ir {
namespace {

// Walks forward: simplifies expressions, shares equal values.
struct Sharer {
  Ranges ranges;
  std::unordered_map<std::string, std::string> available;  ///< right-hand side (Structure) -> name, for what the current scope sees
  std::unordered_map<std::string, std::string> renamed;
  Substitution renamed_exprs;
  std::unordered_map<std::string, size_t> version;  ///< of a written buffer: how many stores so far
  std::unordered_map<std::string, Expr> integers;   ///< of index values and constants whose dtype holds them
  std::unordered_map<std::string, bool> truths;     ///< of comparisons that the ranges decide

  Expr expr(Expr e) const { return simplify(renamed_exprs.empty() ? e : substitute(e, renamed_exprs), ranges); }
  Cond condition(const Cond& c) const { return simplify(renamed_exprs.empty() ? c : substitute(c, renamed_exprs), ranges); }
  std::string value(const std::string& name) const {
    auto it = renamed.find(name);
    return it == renamed.end() ? name : it->second;
  }

  // The conditions that the ranges leave open; nothing if one is false.
  std::optional<std::vector<Cond>> guard(const std::vector<Cond>& list) const {
    std::vector<Cond> open;
    for (const Cond& cond : list) {
      const Cond c = condition(cond);
      auto known = decide(c, ranges);
      if (known == std::optional<bool>(false)) return std::nullopt;
      if (!known && std::find(open.begin(), open.end(), c) == open.end()) open.push_back(c);
    }
    return open;
  }

  void share(const std::string& key, const std::string& name, Ref<Stmt> stmt, Block& out, std::vector<std::string>& added) {
    if (auto it = available.find(key); it != available.end()) {
      renamed[name] = it->second;
      renamed_exprs[name] = Expr::symbol(it->second);
      return;
    }
    // A later scope may define the name anew.
    renamed.erase(name);
    renamed_exprs.erase(name);
    note(*stmt, name);
    available[key] = name;
    added.push_back(key);
    out.push_back(std::move(stmt));
  }

  static bool holds(DType dtype, int64_t value) { return Scalar::of_int(dtype, value).i == value; }

  // What is known of a value that is defined now.
  void note(const Stmt& stmt, const std::string& name) {
    integers.erase(name);
    truths.erase(name);
    const auto* let = std::get_if<Let>(&stmt.node);
    if (!let || is_float(let->dtype) || (let->fn != Fn::index && let->fn != Fn::constant)) return;
    if (let->dtype == DType::boolean)
      truths[name] = let->literal.i != 0;
    else if (let->fn == Fn::constant)
      integers[name] = let->literal.i;
    else if (Interval range = bounds(let->index, ranges); range.lo && range.hi && holds(let->dtype, *range.lo) && holds(let->dtype, *range.hi))
      integers[name] = let->index;
    // Accesses and checks at such a value are affine, and mostly need no guard.
    if (auto known = integers.find(name); known != integers.end()) renamed_exprs[name] = known->second;
  }

  // A comparison of integers that the ranges decide.
  std::optional<bool> truth(const Let& s) const {
    if (s.operands.size() != 2) return std::nullopt;
    auto a = integers.find(s.operands[0]);
    auto b = integers.find(s.operands[1]);
    if (a == integers.end() || b == integers.end()) return std::nullopt;
    switch (s.fn) {
      case Fn::lt: return decide(less(a->second, b->second), ranges);
      case Fn::le: return decide(less_equal(a->second, b->second), ranges);
      case Fn::gt: return decide(less(b->second, a->second), ranges);
      case Fn::ge: return decide(less_equal(b->second, a->second), ranges);
      case Fn::eq: return decide(equal(a->second, b->second), ranges);
      case Fn::ne: return decide(not_equal(a->second, b->second), ranges);
      default: return std::nullopt;
    }
  }

  // The operand that a choice or a conjunction comes to, if a truth that is known leaves no other.
  std::optional<std::string> chosen(const Let& s) const {
    auto known = [&](size_t k) -> std::optional<bool> {
      auto it = truths.find(s.operands[k]);
      return it == truths.end() ? std::nullopt : std::optional(it->second);
    };
    if (s.fn == Fn::where) return known(0) ? std::optional(s.operands[*known(0) ? 1 : 2]) : std::nullopt;
    if (s.dtype != DType::boolean || (s.fn != Fn::bit_and && s.fn != Fn::bit_or)) return std::nullopt;
    for (size_t k : {0, 1})
      if (known(k)) return s.operands[*known(k) == (s.fn == Fn::bit_and) ? 1 - k : k];
    return std::nullopt;
  }

  Block block(const Block& body) {
    Block out;
    std::vector<std::string> added;
    statements(body, out, added);
    for (const std::string& key : added) available.erase(key);
    return out;
  }

  void statements(const Block& body, Block& out, std::vector<std::string>& added) {
    for (const auto& stmt : body) std::visit([&](const auto& s) { statement(s, out, added); }, stmt->node);
  }

  void statement(Let s, Block& out, std::vector<std::string>& added) {
    for (std::string& operand : s.operands) operand = value(operand);
    if (s.fn == Fn::index) {
      s.index = expr(s.index);
      if (auto constant = s.index.as_constant()) {
        double as_float = static_cast<double>(*constant);
        s.literal = is_float(s.dtype) ? Scalar::of_float(s.dtype, as_float) : Scalar::of_int(s.dtype, *constant);
        s.fn = Fn::constant;
        s.index = 0;
      }
    }
    if (auto known = truth(s)) s = Let{s.name, s.dtype, Fn::constant, {}, Scalar::of_int(s.dtype, *known), {}};
    std::string name = s.name;
    if (auto operand = chosen(s)) {
      renamed[name] = *operand;
      renamed_exprs[name] = Expr::symbol(*operand);
      return;
    }
    // The dtype is part of the meaning, the name is not.
    Structure key;
    key.add('v');
    key.add(static_cast<char>(s.dtype));
    key.add(static_cast<char>(s.fn));
    if (s.fn == Fn::constant) key.add(s.literal);
    if (s.fn == Fn::index) key.add(s.index);
    for (const std::string& operand : s.operands) key.add(operand);
    share(key.take(), name, make_stmt(std::move(s)), out, added);
  }

  void statement(Load s, Block& out, std::vector<std::string>& added) {
    for (Expr& e : s.index) e = expr(e);
    auto open = guard(s.guard);
    if (!open) return statement(Let{s.name, s.dtype, Fn::constant, {}, s.fill, {}}, out, added);
    s.guard = std::move(*open);
    std::string name = s.name;
    Structure key;
    key.add('l');
    key.add(s.buffer);
    key.add(s.index);
    key.add(s.guard);
    if (!s.guard.empty()) key.add(s.fill);
    if (auto it = version.find(s.buffer); it != version.end()) key.add(it->second);
    share(key.take(), name, make_stmt(std::move(s)), out, added);
  }

  void statement(Store s, Block& out, std::vector<std::string>&) {
    for (Expr& e : s.index) e = expr(e);
    auto open = guard(s.guard);
    if (!open) return;
    s.guard = std::move(*open);
    s.value = value(s.value);
    ++version[s.buffer];
    out.push_back(make_stmt(std::move(s)));
  }

  template <class F>
  void with_axes(const std::vector<Axis>& axes, const F& f) {
    std::vector<std::optional<Range>> outer;
    for (const Axis& axis : axes) {
      auto it = ranges.find(axis.name);
      outer.push_back(it == ranges.end() ? std::nullopt : std::optional(it->second));
      ranges[axis.name] = axis_range(axis.extent);
      defines({axis.name});
    }
    f();
    for (size_t k = axes.size(); k-- > 0;) {
      if (outer[k])
        ranges[axes[k].name] = *outer[k];
      else
        ranges.erase(axes[k].name);
    }
  }

  void statement(For s, Block& out, std::vector<std::string>& added) {
    s.extent = expr(s.extent);
    if (s.extent.is(0)) return;
    if (s.extent.is(1)) {
      renamed_exprs[s.axis] = 0;
      return statements(s.body, out, added);
    }
    with_axes({{s.axis, s.extent}}, [&] { s.body = block(s.body); });
    if (!s.body.empty()) out.push_back(make_stmt(std::move(s)));
  }

  std::vector<std::string> operands(const std::vector<std::string>& list) const {
    std::vector<std::string> result;
    for (const std::string& name : list) result.push_back(value(name));
    return result;
  }

  void defines(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      renamed.erase(name);
      renamed_exprs.erase(name);
    }
  }

  // A combiner whose result over one element is that element.
  static bool keeps_one(Combiner combiner) { return combiner != Combiner::welford && combiner != Combiner::online_softmax; }

  // A sum of one float begins at 0, too: -0 becomes 0.
  void plus_zero(const Reduce& s, Block& out, std::vector<std::string>& added) {
    std::string zero = s.results[0] + "_zero";
    statement(Let{zero, s.dtypes[0], Fn::constant, {}, zero_of(s.dtypes[0]), {}}, out, added);
    statement(Let{s.results[0], s.dtypes[0], Fn::add, {s.operands[0], zero}, {}, {}}, out, added);
  }

  void statement(Reduce s, Block& out, std::vector<std::string>& added) {
    for (Axis& axis : s.axes) axis.extent = expr(axis.extent);
    for (const Axis& axis : s.axes)
      if (axis.extent.is(1)) renamed_exprs[axis.name] = 0;
    bool vanishes = std::all_of(s.axes.begin(), s.axes.end(), [](const Axis& axis) { return axis.extent.is(1); });
    if (vanishes && keeps_one(s.combiner)) {
      statements(s.body, out, added);
      s.operands = operands(s.operands);
      if (s.combiner == Combiner::sum && is_float(s.dtypes[0])) return plus_zero(s, out, added);
      for (size_t k = 0; k < s.results.size(); ++k) {
        renamed[s.results[k]] = s.operands[k];
        renamed_exprs[s.results[k]] = Expr::symbol(s.operands[k]);
      }
      return;
    }
    if (!vanishes) std::erase_if(s.axes, [](const Axis& axis) { return axis.extent.is(1); });
    with_axes(s.axes, [&] {
      Block body;
      std::vector<std::string> inner;
      statements(s.body, body, inner);
      s.operands = operands(s.operands);
      for (const std::string& key : inner) available.erase(key);
      s.body = std::move(body);
    });
    // Equal reductions are the same up to their own names.
    std::string key = canonical(s);
    if (auto it = available.find(key); it != available.end()) {
      auto names = split(it->second);
      for (size_t k = 0; k < s.results.size(); ++k) {
        renamed[s.results[k]] = names[k];
        renamed_exprs[s.results[k]] = Expr::symbol(names[k]);
      }
      return;
    }
    defines(s.results);
    available[key] = joined(s.results, ",");
    added.push_back(key);
    out.push_back(make_stmt(std::move(s)));
  }

  static std::vector<std::string> split(const std::string& list) {
    std::vector<std::string> names(1);
    for (char c : list) {
      if (c == ',')
        names.emplace_back();
      else
        names.back() += c;
    }
    return names;
  }

  std::string canonical(const Reduce& s) const {
    const Ref<Stmt> stmt = make_stmt(s);
    Structure key;
    key.add('r');
    key.add(structure_of(*stmt));
    visit(s.body, [&](const Stmt& inner, const auto&) {
      const auto* load = std::get_if<Load>(&inner.node);
      auto it = load ? version.find(load->buffer) : version.end();
      if (it != version.end()) key.add(it->second);
    });
    return key.take();
  }

  void statement(Scan s, Block& out, std::vector<std::string>&) {
    s.axis.extent = expr(s.axis.extent);
    with_axes({s.axis}, [&] {
      Block body;
      std::vector<std::string> inner;
      statements(s.body, body, inner);
      s.operands = operands(s.operands);
      s.body = std::move(body);
      defines(s.results);
      s.then = block(s.then);
      for (const std::string& key : inner) available.erase(key);
    });
    out.push_back(make_stmt(std::move(s)));
  }

  void statement(Local s, Block& out, std::vector<std::string>&) {
    for (Expr& e : s.shape) e = expr(e);
    version[s.name] = 0;
    out.push_back(make_stmt(std::move(s)));
  }

  void statement(Check s, Block& out, std::vector<std::string>& added) {
    s.cond = condition(s.cond);
    Structure structure;
    structure.add('c');
    structure.add(static_cast<char>(s.code));
    structure.add(std::vector<Cond>{s.cond});
    const std::string key = structure.take();
    if (decide(s.cond, ranges) == std::optional<bool>(true) || available.count(key)) return;
    available[key] = "";
    added.push_back(key);
    out.push_back(make_stmt(s));
  }
};

// Walks backward: drops what nothing uses.
struct Dropper {
  std::set<std::string> used;
  std::set<std::string> loaded;  ///< buffers

  void use(Expr e) { collect_symbols(e, used); }

  Block block(const Block& body) {
    Block kept;
    for (size_t at = body.size(); at-- > 0;)
      if (auto stmt = std::visit([&](const auto& s) { return statement(s, body[at]); }, body[at]->node)) kept.push_back(std::move(stmt));
    std::reverse(kept.begin(), kept.end());
    return kept;
  }

  Ref<Stmt> statement(const Let& s, const Ref<Stmt>& stmt) {
    if (!used.erase(s.name)) return nullptr;
    used.insert(s.operands.begin(), s.operands.end());
    if (s.fn == Fn::index) use(s.index);
    return stmt;
  }
  Ref<Stmt> statement(const Load& s, const Ref<Stmt>& stmt) {
    if (!used.erase(s.name)) return nullptr;
    loaded.insert(s.buffer);
    for (const Expr& e : s.index) use(e);
    for (const Cond& cond : s.guard) use(cond.expr);
    return stmt;
  }
  Ref<Stmt> statement(const Store& s, const Ref<Stmt>& stmt) {
    used.insert(s.value);
    for (const Expr& e : s.index) use(e);
    for (const Cond& cond : s.guard) use(cond.expr);
    return stmt;
  }
  Ref<Stmt> statement(const For& s, const Ref<Stmt>& stmt) {
    Block body = block(s.body);
    if (body.empty()) return nullptr;
    use(s.extent);
    return body == s.body ? stmt : make_stmt(For{s.axis, s.extent, std::move(body)});
  }
  Ref<Stmt> statement(const Reduce& s, const Ref<Stmt>& stmt) {
    bool live = std::any_of(s.results.begin(), s.results.end(), [&](const auto& name) { return used.count(name) > 0; });
    if (!live && !has_effect(s.body)) return nullptr;
    used.insert(s.operands.begin(), s.operands.end());
    for (const Axis& axis : s.axes) use(axis.extent);
    Reduce copy = s;
    copy.body = block(s.body);
    return copy.body == s.body ? stmt : make_stmt(std::move(copy));
  }
  Ref<Stmt> statement(const Scan& s, const Ref<Stmt>& stmt) {
    Scan copy = s;
    copy.then = block(s.then);
    if (copy.then.empty() && !has_effect(s.body)) return nullptr;
    used.insert(s.operands.begin(), s.operands.end());
    use(s.axis.extent);
    copy.body = block(s.body);
    return copy.body == s.body && copy.then == s.then ? stmt : make_stmt(std::move(copy));
  }
  Ref<Stmt> statement(const Local& s, const Ref<Stmt>& stmt) {
    for (const Expr& e : s.shape) use(e);
    return stmt;
  }
  Ref<Stmt> statement(const Check& s, const Ref<Stmt>& stmt) {
    use(s.cond.expr);
    return stmt;
  }

  static bool has_effect(const Block& body) {
    bool effect = false;
    visit(body, [&](const Stmt& stmt, const auto&) {
      effect = effect || std::holds_alternative<Store>(stmt.node) || std::holds_alternative<Check>(stmt.node);
    });
    return effect;
  }
};

// Moves what does not depend on a loop out of it.
struct Hoister {
  Ranges ranges;

  struct Defined {
    std::set<std::string> names;  ///< axes and values that vary in the loop
    std::set<std::string> buffers;
  };

  static bool depends(const Stmt& stmt, const Defined& inside) {
    bool found = false;
    Block one{std::make_shared<Stmt>(stmt)};
    for_each_expr(one, [&](const Expr& e) {
      if (!e.is_constant())
        for (const std::string& name : symbols_of(e)) found = found || inside.names.count(name);
    });
    auto operands = [&](const std::vector<std::string>& list) {
      for (const std::string& name : list) found = found || inside.names.count(name);
    };
    visit(one, [&](const Stmt& s, const auto&) {
      if (const auto* let = std::get_if<Let>(&s.node)) operands(let->operands);
      if (const auto* reduce = std::get_if<Reduce>(&s.node)) operands(reduce->operands);
      if (const auto* load = std::get_if<Load>(&s.node)) found = found || inside.buffers.count(load->buffer);
      found = found || std::holds_alternative<Store>(s.node) || std::holds_alternative<Check>(s.node) || std::holds_alternative<Scan>(s.node) ||
              std::holds_alternative<Local>(s.node) || std::holds_alternative<For>(s.node);
    });
    return found;
  }

  // A load may run where its loop would not: only if it is in range there too, or the loop runs at least once.
  bool safe(const Stmt& stmt, const std::vector<Axis>& loop) const {
    bool runs = std::all_of(loop.begin(), loop.end(), [&](const Axis& axis) { return provably_nonnegative(axis.extent - 1, ranges); });
    bool loads = false;
    visit({std::make_shared<Stmt>(stmt)}, [&](const Stmt& s, const auto&) { loads = loads || std::holds_alternative<Load>(s.node); });
    const auto* let = std::get_if<Let>(&stmt.node);
    return runs || (!loads && !(let && divides_integers(*let)));
  }

  static void define(const Stmt& stmt, Defined& inside) {
    visit({std::make_shared<Stmt>(stmt)}, [&](const Stmt& s, const auto&) {
      std::visit(Overloaded{[&](const Let& x) { inside.names.insert(x.name); }, [&](const Load& x) { inside.names.insert(x.name); },
                            [&](const Store& x) { inside.buffers.insert(x.buffer); }, [](const For&) {},
                            [&](const Reduce& x) { inside.names.insert(x.results.begin(), x.results.end()); },
                            [&](const Scan& x) { inside.names.insert(x.results.begin(), x.results.end()); },
                            [&](const Local& x) { inside.buffers.insert(x.name); }, [](const Check&) {}},
                 s.node);
    });
  }

  // Splits a loop's body; `out` gets what leaves it.
  Block body(const Block& block, const std::vector<Axis>& loop, const std::vector<std::string>& pinned, Block& out) {
    Block inner = walk(block, loop);
    Defined inside;
    for (const Axis& axis : loop) inside.names.insert(axis.name);
    // Everything the loop writes varies in it; values vary until shown otherwise.
    for (const auto& stmt : inner)
      visit({stmt}, [&](const Stmt& s, const auto&) {
        if (const auto* store = std::get_if<Store>(&s.node)) inside.buffers.insert(store->buffer);
        if (const auto* local = std::get_if<Local>(&s.node)) inside.buffers.insert(local->name);
      });
    Block kept;
    for (const auto& stmt : inner) {
      const auto* let = std::get_if<Let>(&stmt->node);
      const auto* load = std::get_if<Load>(&stmt->node);
      std::string name = let ? let->name : load ? load->name : "";
      bool pin = std::find(pinned.begin(), pinned.end(), name) != pinned.end();
      if (!pin && !depends(*stmt, inside) && safe(*stmt, loop)) {
        out.push_back(stmt);
        continue;
      }
      define(*stmt, inside);
      kept.push_back(stmt);
    }
    return kept;
  }

  Block walk(const Block& block, const std::vector<Axis>& around) {
    auto saved = ranges;
    for (const Axis& axis : around) ranges[axis.name] = axis_range(axis.extent);
    Block out;
    for (const auto& stmt : block) {
      if (const auto* s = std::get_if<For>(&stmt->node)) {
        Block kept = body(s->body, {{s->axis, s->extent}}, {}, out);
        if (!kept.empty()) out.push_back(kept == s->body ? stmt : make_for({s->axis, s->extent}, kept));
      } else if (const auto* s = std::get_if<Reduce>(&stmt->node)) {
        // An operand stays in the body that defines it.
        Reduce copy = *s;
        copy.body = body(s->body, s->axes, s->operands, out);
        out.push_back(copy.body == s->body ? stmt : make_stmt(copy));
      } else {
        out.push_back(stmt);
      }
    }
    ranges = std::move(saved);
    return out;
  }
};

}  // namespace

Block hoist_invariants(const Block& block, const Ranges& symbols) { return Hoister{symbols}.walk(block, {}); }

Block clean(const Block& block, const Ranges& symbols) {
  const auto share = [&](const Block& b) { return Sharer{symbols, {}, {}, {}, {}, {}, {}}.block(b); };
  const Block shared = share(block);
  const Block settled = settle_choices(shared, {});
  return Dropper{}.block(settled == shared ? shared : share(settled));
}

}  // namespace deplo::loop_ir
