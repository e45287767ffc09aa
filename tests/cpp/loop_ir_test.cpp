#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "base/error.h"
#include "loop_ir/interpret.h"
#include "loop_ir/ir.h"

using namespace deplo;

namespace {

Array random_array(std::vector<int64_t> shape, unsigned seed) {
  Array a = Array::zeros(DType::f32, std::move(shape));
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> distribution(-2, 2);
  for (double& x : a.floats) x = distribution(rng);
  return a;
}

void round_trip(const std::string& text) {
  loop_ir::Module module = loop_ir::parse(text);
  loop_ir::verify(module);
  CHECK(loop_ir::print(module) == text);
}

constexpr const char* kSoftmax = R"(program @softmax(x: f32[s0, 8] user) where s0 in 2..
  buffer y: f32[s0, 8] output
  call @k0_softmax(x, y)
  return y

loop @k0_softmax(x: f32[s0, 8], out y: f32[s0, 8]) where s0 in 2.. from "softmax"
  for i in s0:
    reduce m: f32 = max(a) over j in 8:
      a = load x[i, j]
    reduce s: f32 = sum(e) over j in 8:
      a = load x[i, j]
      d = sub(a, m)
      e = exp(d)
    for j in 8:
      a = load x[i, j]
      d = sub(a, m)
      e = exp(d)
      r = div(e, s)
      store y[i, j] = r
)";

constexpr const char* kMatmul = R"(program @matmul(a: f32[4, 5] user, b: f32[5, 3] strides [1, 5] parameter static)
  buffer c: f32[4, 3] output
  call @k0(a, b, c)
  return c

loop @k0(a: f32[4, 5], b: f32[5, 3] strides [1, 5] static, out c: f32[4, 3])
  for i in 4:
    for j in 3:
      reduce s: f32 = sum(p) over k in 5:
        x = load a[i, k]
        y = load b[k, j]
        p = mul(x, y)
      store c[i, j] = s
)";

}  // namespace

TEST_CASE("Loop IR text reads back") {
  round_trip(kSoftmax);
  round_trip(kMatmul);
  round_trip(R"(program @net(x: bf16[4, s0] user, s1: sym, idx: i64[4] constant static) where s0 in 2..64, s1 in ..9
  buffer t0: f32[4, s0] strides [1, 4]
  buffer p0: f32[4] packed
  buffer v: f32[4, s0]
  buffer k: i64[4, s0]
  once call @k1(idx, p0)
  call @k0(x, idx, t0)
  library aten.sort.stable(self=t0, dim=-1, stable=true) -> v, k reason "sort"
  return v, s1 + 1, none

loop @k0(x: bf16[4, s0], idx: i64[4], inout t0: f32[4, s0] strides [1, 4]) where s0 in 2..64 from "a", "b.c"
  for i in 4:
    j = load idx[i]
    check j >= 0 else index_out_of_range
    check -j + 3 >= 0 else index_out_of_range
    local row: f32[s0]
    for c in s0:
      h = load x[j, c] if j >= 0 and -j + 3 >= 0 else 0.0
      f: f32 = cast(h)
      n: i64 = index c + i
      z: i64 = constant -3
      g = gt(n, z)
      w: f32 = constant -inf
      r = where(g, f, w)
      store row[c] = r
    scan t: f32 = sum(o) over c in s0:
      o = load row[c]
    then:
      store sum t0[i, c] = t if c - 1 >= 0

loop @k1(idx: i64[4] static, out p0: f32[4])
  for i in 4:
    j = load idx[i]
    f: f32 = cast(j)
    store p0[i] = f
)");
}

TEST_CASE("softmax and matmul in Loop IR give their numbers") {
  Array x = random_array({3, 8}, 1);
  Array y = loop_ir::interpret(loop_ir::parse(kSoftmax), {x}, {}, Mode::exact).at(0);
  for (int64_t i = 0; i < 3; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 8; ++j) sum += std::exp(x.get(i * 8 + j).f);
    for (int64_t j = 0; j < 8; ++j) CHECK(y.get(i * 8 + j).f == Approx(std::exp(x.get(i * 8 + j).f) / sum).epsilon(1e-12));
  }
  Array a = random_array({4, 5}, 2);
  Array b = random_array({5, 3}, 3);
  Array c = loop_ir::interpret(loop_ir::parse(kMatmul), {a, b}, {}, Mode::exact).at(0);
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 3; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < 5; ++k) sum += a.get(i * 5 + k).f * b.get(k * 3 + j).f;
      CHECK(c.get(i * 3 + j).f == Approx(sum).epsilon(1e-12));
    }
}

TEST_CASE("the verifier refuses what has no meaning") {
  auto refuses = [](const std::string& body, const std::string& complaint) {
    loop_ir::Module module = loop_ir::parse("loop @k(x: f32[4], out y: f32[4])\n" + body);
    CHECK_THROWS_WITH(loop_ir::verify(module), Catch::Contains(complaint));
  };
  refuses("  for i in 4:\n    a = load x[i, i]\n", "x has 1 dimensions");
  refuses("  for i in 4:\n    a = load x[j]\n", "uses j");
  refuses("  for i in 4:\n    for i in 4:\n      pass\n", "defined twice");
  refuses("  for i in 4:\n    a = load x[i]\n    store x[i] = a\n", "store to the input");
  refuses("  for i in 4:\n    a = load x[i]\n  store y[0] = a\n", "not defined here");
  CHECK_THROWS_WITH(loop_ir::parse("loop @k(x: f32[4])\n  a = load z[0]\n"), Catch::Contains("<loop>:2:12: unknown buffer 'z'"));
}
