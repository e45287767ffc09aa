#include "expr/expr.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "base/error.h"
#include "expr/facts.h"
#include "expr/points.h"
#include "lower/torch_to_tensor/sizes.h"

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
  CHECK(simplify(floordiv(j, 21) * 42 + floordiv(mod(j, 21), 7) * 14 + mod(j, 7) * 2, ranges) == j * 2);
  CHECK(simplify(floordiv(j + 5, 9) * 9 + mod(floordiv(j + 5, 3), 3) * 3 + mod(j + 5, 3), ranges) == j + 5);
  // Of a quotient between 0 and a symbol, and of what a step of an enlarged image reads.
  const Expr t = Expr::symbol("t");
  ranges["t"] = {Expr(1), s * 2 - 2};
  CHECK(simplify(floordiv(-1, s), ranges) == Expr(-1));
  CHECK(simplify(mod(-1, s), ranges) == s - 1);
  CHECK(simplify(min(s - 1, floordiv(t + 1, 2) - 1), ranges) == floordiv(t + 1, 2) - 1);
  CHECK(simplify(min(s - 1, floordiv(t + 1, 2)), ranges) == floordiv(t + 1, 2));
  CHECK(simplify(max(floordiv(t + 3, 4) * -3 + s * 2, 0), ranges) == floordiv(t + 3, 4) * -3 + s * 2);
  CHECK(simplify(max(floordiv(t + 3, 4) * -5 + s * 2, 0), ranges) == max(floordiv(t + 3, 4) * -5 + s * 2, 0));
  CHECK(bounds(floordiv(t + 1, 2) * 2 - s * 2, ranges).hi == std::optional<int64_t>(-1));
  CHECK(decide(less(j, s), ranges) == std::optional<bool>(true));
  CHECK(decide(less(i, 15), ranges) == std::nullopt);
  CHECK(decide(less(j, s - 1), ranges) == std::nullopt);
  CHECK(bounds(s - 1 - j, ranges).lo == std::optional<int64_t>(0));
  CHECK(bounds(j - s, ranges).hi == std::optional<int64_t>(-1));
  // The sign of the factor is open: neither end of j is the extreme one.
  ranges["t"] = {Expr(-3), Expr(3)};
  CHECK(!bounds(j * t - s * t, ranges).lo);
  CHECK(!bounds(j * t - s * t, ranges).hi);
}

TEST_CASE("products of what has one bound are bounded where the other factor is one number") {
  Expr s = Expr::symbol("s0");
  Ranges ranges{{"s0", {Expr(2), std::nullopt}}};
  for (const char* name : {"a", "t"})  // before and behind s0 in a product
    for (int64_t factor : {-3, 3}) {
      INFO(name << " is " << factor);
      ranges[name] = {Expr(factor), Expr(factor)};
      Interval b = bounds(s * Expr::symbol(name), ranges);
      CHECK(b.lo == (factor > 0 ? std::optional<int64_t>(6) : std::nullopt));
      CHECK(b.hi == (factor > 0 ? std::nullopt : std::optional<int64_t>(-6)));
      ranges[name] = {Expr(-1), Expr(factor + 3)};
      b = bounds(s * Expr::symbol(name), ranges);
      CHECK(!b.lo);
      CHECK(!b.hi);
    }
}

TEST_CASE("ranges that refer to themselves or to each other bound nothing") {
  for (const char* limit :
       {"i", "j + 1", "i // 2", "8 // i", "i % 8", "8 % i", "min(i, 5)", "max(5, i)", "min(i, j)", "max(i, j)", "i*2 + 3", "min(j, i // j)"})
    for (bool upper : {true, false}) {
      Expr e = parse_expr(limit);
      Ranges ranges;
      for (const char* name : {"i", "j"}) ranges[name] = upper ? Range{std::nullopt, e} : Range{e, std::nullopt};
      INFO(limit << (upper ? " above" : " below"));
      Expr i = Expr::symbol("i");
      CHECK(decide(upper ? less(i, Expr(-1000)) : less(Expr(1000), i), ranges) == std::nullopt);
      CHECK(simplify(Expr::symbol("j"), ranges) == Expr::symbol("j"));
    }
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

TEST_CASE("sizes are equal by ranges, by facts and where remainders cancel") {
  rules::KnownSizes known{{{"s0", {Expr(2), std::nullopt}}, {"s1", {Expr(4), Expr(4)}}}, {parse_expr("s2 // 2 - s3")}, {}};
  auto equal_sizes = [&](const char* a, const char* b) { return rules::provably_equal(parse_expr(a), parse_expr(b), known); };
  CHECK(equal_sizes("s0*s1", "s0*4"));
  CHECK(equal_sizes("(s2 // 2)*7 + s0", "s3*7 + s0"));
  CHECK(equal_sizes("s0*s0 + 2*s0*((-s0) % 4) + ((-s0) % 4)*((-s0) % 4)", "((s0 + 3) // 4) * ((s0 + 3) // 4) * 16"));
  CHECK(!equal_sizes("s0", "0 - s0"));
  CHECK(!equal_sizes("s2", "s3*2"));
  CHECK(!equal_sizes("s0 + 1", "s0"));
}

TEST_CASE("facts rewrite the larger side") {
  std::vector<Expr> zeros{parse_expr("s0 // 2 - s1"), parse_expr("s2*s3 - s1*6")};
  CHECK(rewrite_by_facts(parse_expr("(s0 // 2)*7 + s4"), zeros) == parse_expr("s1*7 + s4"));
  CHECK(rewrite_by_facts(parse_expr("(s0 // 2 + 3) // s1"), {zeros[0]}) == parse_expr("(s1 + 3) // s1"));
  CHECK(rewrite_by_facts(parse_expr("s2*s3*s5 + 1"), {zeros[1]}) == parse_expr("s1*s5*6 + 1"));
  CHECK(rewrite_by_facts(parse_expr("s2 + s3"), zeros) == parse_expr("s2 + s3"));
}

namespace {

/// Of either sign: a number, or a symbol or a sum whose range leaves 0 out.
Expr random_divisor(std::mt19937& rng) {
  auto pick = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  const Expr divisors[] = {pick(6) + 1, -1 - pick(6), Expr::symbol("d"), Expr::symbol("d") - Expr::symbol("a"), Expr::symbol("a") + 1 + pick(3)};
  return divisors[pick(5)];
}

Expr random_expr(std::mt19937& rng, int depth) {
  auto pick = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  if (depth == 0 || pick(4) == 0) return pick(2) ? Expr(pick(20) - 6) : Expr::symbol(std::string(1, "abcn"[pick(4)]));
  Expr a = random_expr(rng, depth - 1);
  switch (pick(6)) {
    case 0: return a + random_expr(rng, depth - 1);
    case 1: return a - random_expr(rng, depth - 1);
    case 2: return a * (pick(5) + 1);
    case 3: return floordiv(a, random_divisor(rng));
    case 4: return mod(a, random_divisor(rng));
    default: return pick(2) ? min(a, random_expr(rng, depth - 1)) : max(a, random_expr(rng, depth - 1));
  }
}

}  // namespace

TEST_CASE("simplify keeps the value, bounds hold, text reads back") {
  std::mt19937 rng(7);
  Ranges ranges{{"a", axis_range(5)},
                {"b", {Expr(-3), Expr(4)}},
                {"c", axis_range(Expr::symbol("n") * 2)},
                {"d", {Expr(-4), Expr(-1)}},
                {"n", {Expr(1), Expr(6)}}};
  for (int round = 0; round < 3000; ++round) {
    Expr e = random_expr(rng, 4);
    Expr s = simplify(e, ranges);
    INFO(print(e) << "  ->  " << print(s));
    CHECK(parse_expr(print(e)) == e);
    CHECK(simplify(s, ranges) == simplify(simplify(s, ranges), ranges));
    Interval range = bounds(e, ranges);
    for (int point = 0; point < 20; ++point) {
      const int64_t n = 1 + static_cast<int64_t>(rng() % 6);
      std::map<std::string, int64_t> values{{"a", static_cast<int64_t>(rng() % 5)},
                                            {"b", static_cast<int64_t>(rng() % 8) - 3},
                                            {"c", static_cast<int64_t>(rng()) % (2 * n)},
                                            {"n", n},
                                            {"d", -1 - static_cast<int64_t>(rng() % 4)}};
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
        Ranges ranges{{"x", {Expr(lo), Expr(hi)}}, {"c", {Expr(c), Expr(c)}}, {"minus", {Expr(-c), Expr(-c)}}};
        for (Expr e : {floordiv(x, c), floordiv(x, -c), floordiv(x, Expr::symbol("c")), floordiv(x, Expr::symbol("minus")), x + c, Expr(c) - x, x * c,
                       x * -c, min(x, c), max(x, c), min(x, -c), max(x, -c)}) {
          std::optional<int64_t> least;
          std::optional<int64_t> most;
          for (int64_t at = lo; at <= hi; ++at) {
            int64_t value = evaluate(e, {{"x", at}, {"c", c}, {"minus", -c}});
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
        rest = bounds(mod(x, Expr::symbol("minus")), ranges);
        CHECK(rest.hi == std::optional<int64_t>(0));
        CHECK(rest.lo == std::optional<int64_t>(hi <= 0 ? std::max(lo, 1 - c) : 1 - c));
      }
}

TEST_CASE("quotients and remainders are floored whatever the signs") {
  // Python's, for each pair of signs; either side is a number or a symbol, of which its sign or nothing is known.
  for (int64_t a = -9; a <= 9; ++a)
    for (int64_t b = -9; b <= 9; ++b) {
      if (b == 0) continue;
      const int64_t quotient = static_cast<int64_t>(std::floor(static_cast<double>(a) / static_cast<double>(b)));
      const Range sides[] = {{}, {Expr(-9), Expr(9)}, {a < 0 ? Expr(-9) : Expr(0), a < 0 ? Expr(-1) : Expr(9)}, {Expr(a), Expr(a)}};
      for (Expr left : {Expr(a), Expr::symbol("a")})
        for (Expr right : {Expr(b), Expr::symbol("b"), Expr(0) - Expr::symbol("minus_b")})
          for (const Range& known : sides) {
            const Ranges ranges{{"a", known}, {"b", b < 0 ? Range{Expr(-9), Expr(-1)} : Range{Expr(0), Expr(9)}}, {"minus_b", {Expr(-b), Expr(-b)}}};
            const std::map<std::string, int64_t> at{{"a", a}, {"b", b}, {"minus_b", -b}};
            for (auto [e, wanted] : {std::pair(floordiv(left, right), quotient), std::pair(mod(left, right), a - b * quotient)}) {
              INFO(print(e) << " where a is " << a << " and b is " << b);
              REQUIRE(evaluate(e, at) == wanted);
              REQUIRE(evaluate(simplify(e, ranges), at) == wanted);
              REQUIRE(evaluate(parse_expr(print(e)), at) == wanted);
              const Interval range = bounds(e, ranges);
              REQUIRE((!range.lo || *range.lo <= wanted));
              REQUIRE((!range.hi || wanted <= *range.hi));
            }
          }
    }
  CHECK_THROWS_WITH(evaluate(parse_expr("7 // s"), {{"s", 0}}), Catch::Contains("ZeroDivisionError"));
  CHECK_THROWS_WITH(evaluate(parse_expr("7 % s"), {{"s", 0}}), Catch::Contains("ZeroDivisionError"));
  Expr x = Expr::symbol("x");
  Expr y = Expr::symbol("y");
  for (const Expr& e : {x, Expr(0) - x, Expr(3) - x, Expr(0) - x - y, x - y, x * -6 + 3, x * 4 - y * 2})
    for (int64_t c = -6; c <= 6; ++c)
      for (bool symbolic : {false, true}) {
        if (c == 0) continue;
        Expr by = symbolic ? Expr::symbol("c") : Expr(c);
        for (int64_t a = -7; a <= 7; ++a) {
          std::map<std::string, int64_t> at{{"x", a}, {"y", 5 - 2 * a}, {"c", c}};
          INFO(print(e) << " by " << c << " where x is " << a);
          CHECK(evaluate(floordiv(e, by), at) == floor_divide(evaluate(e, at), c));
          CHECK(evaluate(mod(e, by), at) == floor_mod(evaluate(e, at), c));
        }
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

namespace {

/// Random nests of up to three loops with guards and an index; every point of them is visited.
struct RandomNest {
  std::mt19937 rng;
  std::vector<std::string> names;
  std::vector<std::vector<Expr>> loops;  ///< lo, hi, step
  std::vector<Cond> guard;
  std::vector<Cond> failed;

  explicit RandomNest(unsigned seed) : rng(seed) {
    for (int d = draw(1, 3); d > 0; --d) {
      std::vector<Expr> loop = {term(1), Expr(draw(-1, 7)), Expr(draw(1, 3))};
      if (draw(0, 2) == 0) loop[1] = loop[0] + draw(0, 5);
      loops.push_back(loop);
      names.push_back("i" + std::to_string(names.size()));
    }
    for (int k = draw(0, 2); k > 0; --k) guard.push_back(condition());
    for (int k = draw(0, 2); k > 0; --k) failed.push_back(condition());
  }

  int draw(int lo, int hi) { return lo + static_cast<int>(rng() % static_cast<unsigned>(hi - lo + 1)); }
  Expr term(int most) {
    Expr e = draw(-3, 3);
    for (const std::string& name : names) e = e + Expr::symbol(name) * draw(-most, most);
    return e;
  }
  Cond condition() {
    Cond::Kind kinds[] = {Cond::Kind::ge0, Cond::Kind::ge0, Cond::Kind::eq0, Cond::Kind::ne0};
    return {kinds[draw(0, 3)], term(2)};
  }
  Expr index() {
    Expr e = term(3);
    int kind = draw(0, 4);
    return kind == 0 ? floordiv(e, draw(1, 4)) : kind == 1 ? mod(e, draw(1, 4)) : e;
  }

  template <class F>
  void visit(const F& f, std::map<std::string, int64_t>& at, size_t depth = 0) const {
    auto is = [&](const Cond& c) { return evaluate(c, at); };
    if (depth == loops.size()) {
      bool runs = std::all_of(guard.begin(), guard.end(), is) && (failed.empty() || !std::all_of(failed.begin(), failed.end(), is));
      if (runs) f(at);
      return;
    }
    for (int64_t i = evaluate(loops[depth][0], at); i < evaluate(loops[depth][1], at); i += loops[depth][2].value()) {
      at[names[depth]] = i;
      visit(f, at, depth + 1);
    }
    at.erase(names[depth]);
  }
};

}  // namespace

TEST_CASE("an index that is said to leave its buffer does, and one that is affine and unguarded is found out") {
  int found = 0;
  int missed = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    RandomNest nest(seed);
    Expr index = nest.index();
    int64_t size = nest.draw(0, 12);
    Points points{{}};
    for (size_t d = 0; d < nest.loops.size(); ++d) points.add_axis(nest.names[d], nest.loops[d][0], nest.loops[d][1], nest.loops[d][2].value());
    if (!nest.failed.empty()) points.add_failed(nest.failed);
    auto said = points.escape("x", {index}, {size}, nest.guard);
    bool leaves = false;
    std::map<std::string, int64_t> at;
    nest.visit([&](const auto& point) { leaves = leaves || evaluate(index, point) < 0 || evaluate(index, point) >= size; }, at);
    INFO("seed " << seed << ": " << print(index) << " of " << size << (said ? ": " + *said : ""));
    if (said) CHECK(leaves);
    found += said ? 1 : 0;
    missed += leaves && !said ? 1 : 0;
    bool box = nest.guard.empty() && nest.failed.empty() && index.kind() != ExprKind::floordiv && index.kind() != ExprKind::mod;
    for (const auto& loop : nest.loops) box = box && loop[0].is_constant() && loop[1].is_constant();
    if (box) CHECK(said.has_value() == leaves);
  }
  CHECK(found > 3 * missed);
}

TEST_CASE("with symbolic sizes an index must leave its buffer for every size") {
  Ranges symbols{{"n", Range{Expr(1), std::nullopt}}, {"m", Range{Expr(0), std::nullopt}}};
  Expr n = Expr::symbol("n");
  Expr i = Expr::symbol("i");
  Points points(symbols);
  points.add_axis("i", 0, n);
  CHECK(!points.escape("x", {i}, {n}));
  CHECK(points.escape("x", {i + 1}, {n}) == "index i + 1 of dimension 0 of x is n at i = n - 1, outside 0..n");
  CHECK(points.escape("x", {i, i - 1}, {n, n}) == "index i - 1 of dimension 1 of x is -1 at i = 0, outside 0..n");
  CHECK(!points.escape("x", {i}, {8}));                  // n may be 8
  CHECK(!points.escape("x", {i}, {Expr::symbol("m")}));  // m may be n
  CHECK(!points.escape("x", {i + 1}, {n}, {less(i + 1, n)}));
  CHECK(points.escape("x", {i + 1}, {n}, {less_equal(i, n)}));
  Points unknown = points;
  unknown.add_unknown();
  CHECK(!unknown.escape("x", {i + 1}, {n}));
  points.add_axis("j", 0, Expr::symbol("m"));  // may run for no j
  CHECK(!points.escape("x", {i + 1}, {n}));
}
