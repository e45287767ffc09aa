#include "base/text.h"

#include "base/error.h"
#include "expr/expr.h"
#include "expr/node.h"

namespace deplo {
namespace {

std::string print_dividend(Expr e) { return e.kind() == ExprKind::add ? "(" + print(e) + ")" : print(e); }

std::string print_atom(Expr e) {
  switch (e.kind()) {
    case ExprKind::constant: return std::to_string(e.value());
    case ExprKind::symbol: return e.name();
    case ExprKind::floordiv: return fmt::format("({} // {})", print_dividend(e.operands()[0]), print_atom(e.operands()[1]));
    case ExprKind::mod: return fmt::format("({} % {})", print_dividend(e.operands()[0]), print_atom(e.operands()[1]));
    case ExprKind::min: return fmt::format("min({}, {})", print(e.operands()[0]), print(e.operands()[1]));
    case ExprKind::max: return fmt::format("max({}, {})", print(e.operands()[0]), print(e.operands()[1]));
    case ExprKind::add:
    case ExprKind::mul: break;
  }
  return "(" + print(e) + ")";
}

Expr parse_primary(Lexer& lexer) {
  if (lexer.accept("(")) {
    Expr e = parse_expr(lexer);
    lexer.expect(")");
    return e;
  }
  int sign = 1;
  while (lexer.accept("-")) sign = -sign;
  if (sign < 0) return Expr(-1) * parse_primary(lexer);
  if (lexer.peek().kind == Token::Kind::integer) return lexer.integer("an index expression");
  std::string name = lexer.identifier("an index expression");
  if ((name == "min" || name == "max") && lexer.accept("(")) {
    Expr a = parse_expr(lexer);
    lexer.expect(",");
    Expr b = parse_expr(lexer);
    lexer.expect(")");
    return name == "min" ? min(a, b) : max(a, b);
  }
  return Expr::symbol(name);
}

Expr parse_product(Lexer& lexer) {
  Expr e = parse_primary(lexer);
  while (true) {
    Token where = lexer.peek();
    bool divides = lexer.at("//");
    if (lexer.accept("*")) {
      e = e * parse_primary(lexer);
    } else if (lexer.accept("//") || lexer.accept("%")) {
      Expr divisor = parse_primary(lexer);
      if (divisor.is(0)) lexer.fail(where, "division by zero");
      e = divides ? floordiv(e, divisor) : mod(e, divisor);
    } else {
      return e;
    }
  }
}

}  // namespace

std::string print(Expr e) {
  auto terms = terms_of(e);
  if (terms.empty()) return "0";
  std::string text;
  for (const Term& term : terms) {
    int64_t c = term.coefficient;
    bool negative = c < 0;
    if (text.empty())
      text += negative ? "-" : "";
    else
      text += negative ? " - " : " + ";
    uint64_t magnitude = negative ? 0 - static_cast<uint64_t>(c) : static_cast<uint64_t>(c);
    std::string factors;
    for (const Expr& atom : term.atoms) factors += (factors.empty() ? "" : "*") + print_atom(atom);
    if (factors.empty())
      factors = std::to_string(magnitude);
    else if (magnitude != 1)
      factors += "*" + std::to_string(magnitude);
    text += factors;
  }
  return text;
}

std::string print(const Cond& cond) {
  switch (cond.kind) {
    case Cond::Kind::ge0: return print(cond.expr) + " >= 0";
    case Cond::Kind::eq0: return print(cond.expr) + " == 0";
    case Cond::Kind::ne0: return print(cond.expr) + " != 0";
  }
  return "";
}

std::string print(const std::vector<Cond>& guard) {
  std::string text;
  for (const Cond& cond : guard) text += (text.empty() ? "" : " and ") + print(cond);
  return text;
}

Expr parse_expr(Lexer& lexer) {
  return lexer.fitting(lexer.peek(), [&] {
    Expr e = parse_product(lexer);
    while (true) {
      if (lexer.accept("+"))
        e = e + parse_product(lexer);
      else if (lexer.accept("-"))
        e = e - parse_product(lexer);
      else
        return e;
    }
  });
}

Cond parse_cond(Lexer& lexer) {
  return lexer.fitting(lexer.peek(), [&]() -> Cond {
    Expr a = parse_expr(lexer);
    if (lexer.accept(">=")) return less_equal(parse_expr(lexer), a);
    if (lexer.accept("<=")) return less_equal(a, parse_expr(lexer));
    if (lexer.accept("<")) return less(a, parse_expr(lexer));
    if (lexer.accept(">")) return less(parse_expr(lexer), a);
    if (lexer.accept("==")) return equal(a, parse_expr(lexer));
    if (lexer.accept("!=")) return not_equal(a, parse_expr(lexer));
    lexer.fail(fmt::format("expected a comparison, found '{}'", lexer.peek().text));
  });
}

std::vector<Cond> parse_guard(Lexer& lexer) {
  std::vector<Cond> guard{parse_cond(lexer)};
  while (lexer.accept("and")) guard.push_back(parse_cond(lexer));
  return guard;
}

Expr parse_expr(const std::string& text) {
  Lexer lexer(text, "<expr>", false);
  Expr e = parse_expr(lexer);
  if (!lexer.at_end()) lexer.fail(fmt::format("unexpected '{}' after the expression", lexer.peek().text));
  return e;
}

}  // namespace deplo
