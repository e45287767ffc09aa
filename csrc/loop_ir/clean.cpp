#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "loop_ir/rewrite.h"
#include "loop_ir/text.h"

namespace deplo::loop_ir {
namespace {

// Walks forward: simplifies expressions, shares equal values.
struct Sharer {
  Ranges ranges;
  std::map<std::string, std::string> available;  ///< right-hand side -> name, for what the current scope sees
  std::map<std::string, std::string> renamed;
  Substitution renamed_exprs;
  std::map<std::string, int> version;  ///< of a written buffer: how many stores so far

  Expr expr(Expr e) const { return simplify(renamed_exprs.empty() ? e : substitute(e, renamed_exprs), ranges); }
  std::string value(const std::string& name) const {
    auto it = renamed.find(name);
    return it == renamed.end() ? name : it->second;
  }

  // The conditions that the ranges leave open; nothing if one is false.
  std::optional<std::vector<Cond>> guard(const std::vector<Cond>& list) const {
    std::vector<Cond> open;
    for (const Cond& cond : list) {
      Cond c{cond.kind, expr(cond.expr)};
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
    available[key] = name;
    added.push_back(key);
    out.push_back(std::move(stmt));
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
    std::string name = s.name;
    std::string text = print(s);
    // The dtype is part of the meaning, the name is not.
    std::string key = std::string(to_string(s.dtype)) + text.substr(text.find('='));
    share(key, name, make_stmt(std::move(s)), out, added);
  }

  void statement(Load s, Block& out, std::vector<std::string>& added) {
    for (Expr& e : s.index) e = expr(e);
    auto open = guard(s.guard);
    if (!open) return statement(Let{s.name, s.dtype, Fn::constant, {}, s.fill, {}}, out, added);
    s.guard = std::move(*open);
    std::string name = s.name;
    std::string text = print(s);
    std::string key = text.substr(text.find('='));
    if (auto it = version.find(s.buffer); it != version.end()) key += " v" + std::to_string(it->second);
    share(key, name, make_stmt(std::move(s)), out, added);
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
    auto saved = ranges;
    for (const Axis& axis : axes) {
      ranges[axis.name] = axis_range(axis.extent);
      defines({axis.name});
    }
    f();
    ranges = std::move(saved);
  }

  void statement(For s, Block& out, std::vector<std::string>&) {
    s.extent = expr(s.extent);
    if (s.extent.is(0)) return;
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

  void statement(Reduce s, Block& out, std::vector<std::string>& added) {
    for (Axis& axis : s.axes) axis.extent = expr(axis.extent);
    with_axes(s.axes, [&] {
      Block body;
      std::vector<std::string> inner;
      statements(s.body, body, inner);
      s.operands = operands(s.operands);
      for (const std::string& key : inner) available.erase(key);
      s.body = std::move(body);
    });
    // Equal reductions have equal text up to their own names; share them by canonical text.
    std::string key = "reduce " + canonical(s);
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
    Names names("$");
    Kernel kernel;
    kernel.body = copy_block({make_stmt(s)}, {}, &names);
    std::string text = print(kernel);
    visit(kernel.body, [&](const Stmt& stmt, const auto&) {
      if (const auto* load = std::get_if<Load>(&stmt.node))
        if (auto it = version.find(load->buffer); it != version.end()) text += fmt::format(" {} v{}", load->buffer, it->second);
    });
    return text;
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

  void statement(Check s, Block& out, std::vector<std::string>&) {
    s.cond.expr = expr(s.cond.expr);
    if (decide(s.cond, ranges) == std::optional<bool>(true)) return;
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

}  // namespace

Block clean(const Block& block, const Ranges& symbols) {
  Sharer sharer{symbols, {}, {}, {}, {}};
  Block shared = sharer.block(block);
  return Dropper{}.block(shared);
}

}  // namespace deplo::loop_ir
