#include "expr/expr.h"

#include <catch2/catch.hpp>
#include <random>

#include "base/error.h"
#include "expr/facts.h"

using namespace deplo;

TEST_CASE("equal expressions are one object") {
  Expr i = Expr::symbol("i");
  Expr j = Expr::symbol("j");
  CHECK(i + j == j + i);
  CHECK((i + j) * 2 == i * 2 + j + j);
  CHECK(i * j == j * i);
  CHECK(i - i == Expr(0));
  CHECK(floordiv(i * 8 + 4, 8) == i);
  CHECK(mod(i * 8 + 4, 8) == Expr(4));
  CHECK(floordiv(Expr(-7), 2) == Expr(-4));
  CHECK(mod(Expr(-7), 2) == Expr(1));
}

TEST_CASE("ranges remove floordiv and mod") {
  Expr i = Expr::symbol("i");
  Expr j = Expr::symbol("j");
  Expr s = Expr::symbol("s0");
  Ranges ranges{{"i", axis_range(16)}, {"j", axis_range(s)}, {"s0", {Expr(2), std::nullopt}}};
  CHECK(simplify(floordiv(i, 16), ranges) == Expr(0));
  CHECK(simplify(mod(i, 16), ranges) == i);
  CHECK(simplify(floordiv(i * s + j, s), ranges) == i);
  CHECK(simplify(mod(i * s + j, s), ranges) == j);
  CHECK(simplify(floordiv(j * 16 + i, 64), ranges) == floordiv(j, 4));
  CHECK(simplify(floordiv(j, 7) * 7 + mod(j, 7), ranges) == j);
  CHECK(decide(less(j, s), ranges) == std::optional<bool>(true));
  CHECK(decide(less(i, 15), ranges) == std::nullopt);
}

TEST_CASE("padding to a multiple and back is one expression") {
  Ranges ranges{{"s0", {Expr(2), std::nullopt}}};
  auto simple = [&](const char* text) { return simplify(parse_expr(text), ranges); };
  CHECK(simple("s0 + (-(s0 % 4)) % 4") == simple("((s0 + 3) // 4) * 4"));
  CHECK(simple("0 - (0 - s0) // 4") == simple("(s0 + 3) // 4"));
  CHECK(simple("(s0 + (-(s0 % 4)) % 4) // ((s0 + (-(s0 % 4)) % 4) // 4)") == Expr(4));
  CHECK(simple("(s0 % 8 + 3) % 4") == simple("(s0 + 3) % 4"));
  Expr square = parse_expr("s0*s0 + 2*s0*((-s0) % 4) + ((-s0) % 4)*((-s0) % 4)");
  CHECK(simplify(expand_mods(square), ranges) == simple("((s0 + 3) // 4) * ((s0 + 3) // 4) * 16"));
}

TEST_CASE("facts rewrite the larger side") {
  std::vector<Expr> zeros{parse_expr("s0 // 2 - s1"), parse_expr("s2*s3 - s1*6")};
  CHECK(rewrite_by_facts(parse_expr("(s0 // 2)*7 + s4"), zeros) == parse_expr("s1*7 + s4"));
  CHECK(rewrite_by_facts(parse_expr("(s0 // 2 + 3) // s1"), {zeros[0]}) == parse_expr("(s1 + 3) // s1"));
  CHECK(rewrite_by_facts(parse_expr("s2*s3*s5 + 1"), {zeros[1]}) == parse_expr("s1*s5*6 + 1"));
  CHECK(rewrite_by_facts(parse_expr("s2 + s3"), zeros) == parse_expr("s2 + s3"));
}

namespace {

Expr random_expr(std::mt19937& rng, int depth) {
  auto pick = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  if (depth == 0 || pick(4) == 0) return pick(2) ? Expr(pick(20) - 6) : Expr::symbol(std::string(1, static_cast<char>('a' + pick(3))));
  Expr a = random_expr(rng, depth - 1);
  switch (pick(6)) {
    case 0: return a + random_expr(rng, depth - 1);
    case 1: return a - random_expr(rng, depth - 1);
    case 2: return a * (pick(5) + 1);
    case 3: return floordiv(a, pick(6) + 1);
    case 4: return mod(a, pick(6) + 1);
    default: return pick(2) ? min(a, random_expr(rng, depth - 1)) : max(a, random_expr(rng, depth - 1));
  }
}

}  // namespace

TEST_CASE("simplify keeps the value, bounds hold, text reads back") {
  std::mt19937 rng(7);
  Ranges ranges{{"a", axis_range(5)}, {"b", {Expr(-3), Expr(4)}}, {"c", axis_range(12)}};
  for (int round = 0; round < 3000; ++round) {
    Expr e = random_expr(rng, 4);
    Expr s = simplify(e, ranges);
    INFO(print(e) << "  ->  " << print(s));
    CHECK(parse_expr(print(e)) == e);
    CHECK(simplify(s, ranges) == simplify(simplify(s, ranges), ranges));
    Interval range = bounds(e, ranges);
    for (int point = 0; point < 20; ++point) {
      std::map<std::string, int64_t> values{
          {"a", static_cast<int64_t>(rng() % 5)}, {"b", static_cast<int64_t>(rng() % 8) - 3}, {"c", static_cast<int64_t>(rng() % 12)}};
      int64_t v = evaluate(e, values);
      CHECK(evaluate(s, values) == v);
      CHECK(evaluate(expand_mods(e), values) == v);
      if (range.lo) CHECK(*range.lo <= v);
      if (range.hi) CHECK(v <= *range.hi);
    }
  }
}

TEST_CASE("bounds of one operation are as narrow as they can be") {
  Expr x = Expr::symbol("x");
  for (int64_t lo = -7; lo <= 7; ++lo)
    for (int64_t hi = lo; hi <= 9; ++hi)
      for (int64_t c = 1; c <= 5; ++c) {
        Ranges ranges{{"x", {Expr(lo), Expr(hi)}}};
        for (const Expr& e : {floordiv(x, c), x + c, Expr(c) - x, x * c, x * -c, min(x, c), max(x, c), min(x, -c), max(x, -c)}) {
          std::optional<int64_t> least;
          std::optional<int64_t> most;
          for (int64_t at = lo; at <= hi; ++at) {
            int64_t value = evaluate(e, {{"x", at}});
            least = least ? std::min(*least, value) : value;
            most = most ? std::max(*most, value) : value;
          }
          INFO(print(e) << " for x in " << lo << ".." << hi);
          Interval range = bounds(e, ranges);
          CHECK(range.lo == least);
          CHECK(range.hi == most);
        }
        Interval rest = bounds(mod(x, c), ranges);
        CHECK(rest.lo == std::optional<int64_t>(0));
        CHECK(rest.hi == std::optional<int64_t>(lo >= 0 ? std::min(hi, c - 1) : c - 1));
      }
}

TEST_CASE("what is not negative has no negative product, bounded or not") {
  Expr x = Expr::symbol("x");
  Expr y = Expr::symbol("y");
  for (int64_t lo : {0, 1, 3})
    for (bool bounded : {false, true}) {
      std::optional<Expr> hi = bounded ? std::optional<Expr>(5) : std::nullopt;
      Ranges ranges{{"x", {Expr(lo), hi}}, {"y", {Expr(2), std::nullopt}}};
      Interval range = bounds(x * y, ranges);
      CHECK(range.lo == std::optional<int64_t>(2 * lo));
      CHECK(!range.hi);
      CHECK(bounds(x * y * -3, ranges).hi == std::optional<int64_t>(-6 * lo));
      CHECK(bounds(x * 4, ranges).hi == (bounded ? std::optional<int64_t>(20) : std::nullopt));
    }
}

TEST_CASE("a malformed expression names line and column") { CHECK_THROWS_WITH(parse_expr("i + // 2"), Catch::Contains("<expr>:1:5")); }
