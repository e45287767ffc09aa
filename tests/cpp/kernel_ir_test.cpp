#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "kernel_ir/interpret.h"
#include "kernel_ir/ir.h"
#include "kernel_ir/rewrite.h"

using namespace deplo;
using namespace deplo::kernel_ir;

namespace {

Array floats(std::vector<double> values) {
  Array a = Array::zeros(DType::f32, {static_cast<int64_t>(values.size())});
  a.floats = std::move(values);
  return a;
}

Array integers(DType dtype, std::vector<int64_t> values) {
  Array a = Array::zeros(dtype, {static_cast<int64_t>(values.size())});
  a.ints = std::move(values);
  return a;
}

void run(const std::string& text, std::vector<Array*> buffers, const std::map<std::string, int64_t>& symbols = {}) {
  Module module = parse(text);
  verify(module);
  interpret(*module.kernels.at(0), buffers, symbols, Mode::typed);
}

/// A kernel over x: f32 and out y: f32 with this body.
std::string with_body(const std::string& body) { return "kernel @k(x: ptr f32, out y: ptr f32) symbols (n) chunks 1 scratch 64\n" + body; }

void check_refused(const std::string& body, const std::string& complaint) {
  INFO(body);
  Module module = parse(with_body(body));
  CHECK_THROWS_WITH(verify(module), Catch::Contains(complaint));
}

}  // namespace

TEST_CASE("Kernel IR text reads back") {
  const std::string text = R"(kernel @k(x: ptr f32, inout y: ptr i64) symbols (s0, s1) chunks (s0 // 4) scratch 256
  alloc t: f32[64] scratch 128
  n: boolx8 = first s0 - 3
  c: f32x8 = constant -inf
  g: i64x8 = index s0*2 step 3
  a: f32x8 = load x[s1] gather g mask n else c
  var v: f32x8 = a
  for i in 0..s0 step 8 unroll 2:
    b: f32x8 = load x[i] stride 4
    d: f32x8 = max(v, b)
    v <- d
  m: f32 = lanes max(v)
  e: f32x8 = splat m
  h: f32x8 = shuffle a, e [0, 8, 1, 9, 2, 10, 3, 11]
  f: f32 = extract h 2
  o: bool = lt(f, m)
  if value o:
    store t[0] = h mask n
  else:
    store sum y[0] = g
  if s0 - 5 >= 0 and s1 == 0:
    error index_out_of_range if o
  prefetch x[s0] level 2
)";
  auto module = kernel_ir::parse(text);
  verify(module);
  CHECK(print(module) == text);
}

TEST_CASE("GPU Kernel IR text reads back") {
  const std::string text = R"(kernel @g(x: ptr f32, out y: ptr f32) symbols (n) chunks 1 scratch 0 grid (n, 2) block (32, 4) from "sum", "exp"
  alloc t: f32[32] shared
  a: f32 = load x[block_x*32 + thread_x]
  store t[thread_x] = a
  barrier
  b: f32 = load t[-thread_x + 31]
  store atomic sum y[block_x] = b
)";
  auto module = parse(text);
  verify(module);
  CHECK(print(module) == text);
}

TEST_CASE("the verifier refuses wrong types, names and places") {
  check_refused("  a: f32x8 = load x[0]\n  b: f32x4 = neg(a)\n", "lanes");
  check_refused("  a: f32 = load x[0]\n  a: f32 = load x[0]\n", "defined twice");
  check_refused("  a: f32 = load z[0]\n", "not declared");
  check_refused("  a: f32 = load x[m]\n", "m is not defined");
  check_refused("  a: f64 = load x[0]\n", "dtype differs");
  check_refused("  a: f32 = load x[0]\n  store x[0] = a\n", "it is an input");
  check_refused("  a: f32x8 = load x[0]\n  m: boolx4 = first 3\n  store y[0] = a mask m\n", "mask m");
  check_refused("  for i in 0..n step 1:\n    a: f32 = load x[i]\n  store y[0] = a\n", "a is not defined");
  check_refused("  a: f32 = load x[0]\n  a <- a\n", "not a var");
  check_refused("  a: f32x8 = load x[0]\n  b: f32 = extract a 8\n", "lane 8");
  check_refused("  alloc t: f32[n] stack\n", "constant size");
}

TEST_CASE("vectors, masks, gathers and lane reductions mean what ir.h says") {
  Array x = floats({5, 1, 4, 2, 3, 9, 7, 8});
  Array y = floats(std::vector<double>(8, -1));
  run(with_body(R"(  m: boolx4 = first n
  c: f32x4 = constant 0.5
  a: f32x4 = load x[1] stride 2 mask m else c
  g: i64x4 = index 7 step -2
  b: f32x4 = load x[0] gather g
  d: f32x4 = add(a, b)
  store y[0] = d mask m
  s: f32 = lanes max(b)
  store y[7] = s
  e: f32x4 = shuffle a, b [0, 7, 3, 4]
  store y[3] = e
)"),
      {&x, &y}, {{"n", 3}});
  // a = 1 2 9 .5, b = 8 9 2 1
  CHECK(y.floats == std::vector<double>{9, 11, 11, 1, 1, 0.5, 8, 9});
}

TEST_CASE("vars carry values around loops, and pieces make up the whole") {
  const std::string text = R"(kernel @sum(x: ptr f32, out y: ptr f32) symbols (n) chunks 3 scratch 0
  z: f32 = constant 0.0
  var s: f32 = z
  for i in (n*thread // threads)..(n*(thread + 1) // threads) step 1:
    a: f32 = load x[i]
    b: f32 = add(s, a)
    s <- b
  store y[thread] = s
)";
  Array x = floats({1, 2, 3, 4, 5, 6, 7});
  Array y = floats({0, 0, 0});
  run(text, {&x, &y}, {{"n", 7}});
  CHECK(y.floats == std::vector<double>{3, 7, 18});
}

TEST_CASE("accesses outside a buffer and reads of undefined memory show") {
  Array x = floats({1, 2, 3, 4});
  Array y = floats({0, 0, 0, 0});
  CHECK_THROWS_WITH(run(with_body("  a: f32x4 = load x[1]\n"), {&x, &y}, {{"n", 0}}), Catch::Contains("lane 3 accesses element 4 of x"));
  run(with_body("  m: boolx4 = first 3\n  a: f32x4 = load x[1] mask m\n  store y[1] = a mask m\n"), {&x, &y}, {{"n", 0}});
  CHECK(y.floats == std::vector<double>{0, 2, 3, 4});
  CHECK_THROWS_WITH(run(with_body("  alloc t: f32[16] scratch 4\n"), {&x, &y}, {{"n", 0}}), Catch::Contains("of 64 bytes of scratch"));
  run(with_body("  alloc t: f32[8] stack\n  a: f32 = load t[3]\n  store y[0] = a\n"), {&x, &y}, {{"n", 0}});
  CHECK(std::isnan(y.floats[0]));
}

TEST_CASE("errors of a kernel become exceptions") {
  Array x = integers(DType::i32, {7, 0});
  Array y = integers(DType::i32, {0, 0});
  const std::string head = "kernel @k(x: ptr i32, out y: ptr i32) symbols (n) chunks 1 scratch 0\n  a: i32 = load x[0]\n  b: i32 = load x[1]\n";
  CHECK_THROWS_AS(run(head + "  c: i32 = floor_div(a, b)\n", {&x, &y}, {{"n", 0}}), ExecutionError);
  CHECK_THROWS_AS(run(head + "  c: bool = gt(a, b)\n  error index_out_of_range if c\n", {&x, &y}, {{"n", 0}}), IndexError);
  CHECK_NOTHROW(run(head + "  c: bool = lt(a, b)\n  error assertion if c\n", {&x, &y}, {{"n", 0}}));
}

TEST_CASE("threads of a block meet at barriers") {
  const std::string text = R"(kernel @reverse(x: ptr f32, out y: ptr f32) symbols (n) chunks 1 scratch 0 grid (n) block (4)
  alloc t: f32[4] shared
  a: f32 = load x[block_x*4 + thread_x]
  store t[thread_x] = a
  barrier
  b: f32 = load t[3 - thread_x]
  store y[block_x*4 + thread_x] = b
)";
  Array x = floats({1, 2, 3, 4, 5, 6, 7, 8});
  Array y = floats(std::vector<double>(8));
  run(text, {&x, &y}, {{"n", 2}});
  CHECK(y.floats == std::vector<double>{4, 3, 2, 1, 8, 7, 6, 5});
}

TEST_CASE("a module lays arrays out by the strides of their buffers") {
  const std::string text = R"(program @net(x: f32[2, 3] strides [1, 2] user)
  buffer y: f32[6]
  call @copy(x, y)
  return y

kernel @copy(x: ptr f32, out y: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..6 step 1:
    a: f32 = load x[i]
    store y[i] = a
)";
  Module module = parse(text);
  verify(module);
  Array x = floats({1, 2, 3, 4, 5, 6});
  x.shape = {2, 3};
  auto results = interpret(module, {x}, {}, Mode::typed);
  REQUIRE(results.size() == 1);
  CHECK(results[0].floats == std::vector<double>{1, 4, 2, 5, 3, 6});
}

TEST_CASE("rewriting keeps what did not change") {
  Module module = parse(with_body(R"(  for i in 0..n step 1:
    a: f32 = load x[i]
    b: bool = lt(a, a)
    if value b:
      store y[i] = a
  c: f32 = load x[0]
)"));
  const Block& body = module.kernels[0]->body;
  auto without = [&](bool stores) {
    return rewrite(body, [&](const Ref<Stmt>& s) {
      Block kept;
      if (!stores || !std::holds_alternative<Store>(s->node)) kept.push_back(s);
      return kept;
    });
  };
  CHECK(without(false) == body);
  Block without_stores = without(true);
  CHECK(without_stores != body);
  CHECK(without_stores[1] == body[1]);
  Uses uses{[](const std::string& name) { return name == "a" ? "q" : name; }, [](Expr e) { return substitute(e, {{"i", 7}}); }};
  int changed = 0;
  visit_all(body, [&](const Stmt& s) {
    auto stmt = std::make_shared<Stmt>(s);
    if (map_uses(stmt, uses) != stmt) ++changed;
  });
  CHECK(changed == 3);  // the first load, lt, the store
}
