#include "loop_ir/structure.h"

#include <bit>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "loop_ir/build.h"

namespace deplo::loop_ir {
namespace {

struct Writer {
  Structure out;
  bool numbers_values;                ///< what the block defines is a number; else its name is
  std::vector<std::string>* buffers;  ///< if those are numbers, too
  std::unordered_map<std::string, size_t> numbers;
  std::unordered_map<std::string, size_t> places;  ///< of buffers
  Substitution renamed;                            ///< in expressions, if values are numbers

  void define(const std::string& name) {
    if (!numbers_values) return out.add(name);
    const size_t number = numbers.size();
    numbers[name] = number;
    renamed[name] = Expr::symbol("$" + std::to_string(number));
    out.add(number);
  }

  void value(const std::string& name) {
    auto it = numbers.find(name);
    if (it == numbers.end()) {
      out.add('n');
      out.add(name);
    } else {
      out.add('#');
      out.add(it->second);
    }
  }

  void buffer(const std::string& name) {
    if (!buffers) return value(name);
    auto [it, fresh] = places.try_emplace(name, buffers->size());
    if (fresh) buffers->push_back(name);
    out.add(it->second);
  }

  Expr expr(Expr e) const { return renamed.empty() ? e : substitute(e, renamed); }
  void exprs(const std::vector<Expr>& list) {
    out.add(list.size());
    for (const Expr& e : list) out.add(expr(e));
  }
  void guard(const std::vector<Cond>& list) {
    out.add(list.size());
    for (const Cond& cond : list) condition(cond);
  }
  void condition(const Cond& cond) {
    out.add(static_cast<char>(cond.kind));
    out.add(expr(cond.expr));
  }
  void values(const std::vector<std::string>& list) {
    out.add(list.size());
    for (const std::string& name : list) value(name);
  }
  void axis(const Axis& axis) {
    out.add(expr(axis.extent));
    define(axis.name);
  }
  void results(const std::vector<std::string>& names, const std::vector<DType>& dtypes, Combiner combiner) {
    out.add(static_cast<char>(combiner));
    for (DType dtype : dtypes) out.add(static_cast<char>(dtype));
    for (const std::string& name : names) define(name);
  }

  void block(const Block& body) {
    out.add(body.size());
    for (const auto& stmt : body) statement(*stmt);
  }

  void statement(const Stmt& stmt) {
    out.add(static_cast<char>(stmt.node.index()));
    std::visit([&](const auto& s) { write(s); }, stmt.node);
  }

  void write(const Let& s) {
    out.add(static_cast<char>(s.dtype));
    out.add(static_cast<char>(s.fn));
    if (s.fn == Fn::constant) out.add(s.literal);
    if (s.fn == Fn::index) out.add(expr(s.index));
    values(s.operands);
    define(s.name);
  }
  void write(const Load& s) {
    out.add(static_cast<char>(s.dtype));
    buffer(s.buffer);
    exprs(s.index);
    guard(s.guard);
    if (!s.guard.empty()) out.add(s.fill);
    define(s.name);
  }
  void write(const Store& s) {
    out.add(static_cast<char>(s.combiner));
    buffer(s.buffer);
    exprs(s.index);
    guard(s.guard);
    value(s.value);
  }
  void write(const For& s) {
    axis({s.axis, s.extent});
    block(s.body);
  }
  void write(const Reduce& s) {
    out.add(s.axes.size());
    for (const Axis& a : s.axes) axis(a);
    block(s.body);
    values(s.operands);
    results(s.results, s.dtypes, s.combiner);
  }
  void write(const Scan& s) {
    axis(s.axis);
    block(s.body);
    values(s.operands);
    results(s.results, s.dtypes, s.combiner);
    block(s.then);
  }
  void write(const Local& s) {
    out.add(static_cast<char>(s.dtype));
    exprs(s.shape);
    if (buffers)
      buffer(s.name);
    else
      define(s.name);
  }
  void write(const Check& s) {
    out.add(static_cast<char>(s.code));
    condition(s.cond);
  }
};

}  // namespace

void Structure::add(const std::string& name) {
  add(name.size());
  bytes_ += name;
}

void Structure::add(Expr e) { add(static_cast<int64_t>(reinterpret_cast<intptr_t>(e.node()))); }

void Structure::add(const std::vector<Expr>& list) {
  add(list.size());
  for (const Expr& e : list) add(e);
}

void Structure::add(const std::vector<Cond>& guard) {
  add(guard.size());
  for (const Cond& cond : guard) {
    add(static_cast<char>(cond.kind));
    add(cond.expr);
  }
}

void Structure::add(const Scalar& literal) {
  add(static_cast<char>(literal.dtype));
  if (!is_float(literal.dtype)) return add(literal.i);
  // All that is no number prints alike.
  add(std::bit_cast<int64_t>(std::isnan(literal.f) ? std::numeric_limits<double>::quiet_NaN() : literal.f));
}

std::string structure_of(const Block& block, std::vector<std::string>& buffers) {
  Writer writer{{}, false, &buffers, {}, {}, {}};
  for (size_t k = 0; k < buffers.size(); ++k) writer.places.emplace(buffers[k], k);
  writer.block(block);
  return writer.out.take();
}

std::string structure_of(const Stmt& stmt) {
  Writer writer{{}, true, nullptr, {}, {}, {}};
  writer.statement(stmt);
  return writer.out.take();
}

Block rename_buffers(const Block& block, const std::unordered_map<std::string, std::string>& names) {
  Block result;
  result.reserve(block.size());
  for (const auto& stmt : block) {
    auto change = [&](auto copy, std::string decltype(copy)::* name) {
      auto it = names.find(copy.*name);
      if (it == names.end()) return stmt;
      copy.*name = it->second;
      return make_stmt(std::move(copy));
    };
    result.push_back(std::visit(
        Overloaded{
            [&](const Load& s) { return change(s, &Load::buffer); }, [&](const Store& s) { return change(s, &Store::buffer); },
            [&](const Local& s) { return change(s, &Local::name); },
            [&](const For& s) { return make_stmt(For{s.axis, s.extent, rename_buffers(s.body, names)}); },
            [&](const Reduce& s) { return make_stmt(Reduce{s.results, s.dtypes, s.combiner, s.operands, s.axes, rename_buffers(s.body, names)}); },
            [&](const Scan& s) {
              return make_stmt(
                  Scan{s.results, s.dtypes, s.combiner, s.operands, s.axis, rename_buffers(s.body, names), rename_buffers(s.then, names)});
            },
            [&](const auto&) { return stmt; }},
        stmt->node));
  }
  return result;
}

}  // namespace deplo::loop_ir
