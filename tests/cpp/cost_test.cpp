#include "target/cpu/cost/cost.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "lower/lower.h"
#include "tile_ir/ir.h"

using namespace deplo;

namespace {

/// A machine with AVX-512 and round figures: 10^11 float32 operations a second, so that a vector's multiply-add takes 0.32 ns.
cpu_cost::Figures figures(int threads = 1) {
  cpu_cost::Figures made;
  made.f32 = 1e11;
  made.bf16 = 2e11;
  made.int8 = 4e11;
  made.l1 = 2e11;
  made.l2 = 1e11;
  made.l3 = 5e10;
  made.memory = 1e10;
  made.memory_all = 2e10;
  made.barrier = 1e-6;
  made.threads = threads;
  return made;
}

PassContext zen5() {
  PassContext context;
  context.target.features = {"avx", "avx2", "avx512bf16", "avx512bw", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "f16c", "fma"};
  context.target.vector_bytes = 64;
  context.target.vector_registers = 32;
  context.target.threads = 2;
  context.target.l1_bytes = 48 << 10;
  context.target.l2_bytes = 1 << 20;
  context.target.l3_bytes = 32 << 20;
  return context;
}

constexpr double kFar = 1e12;  // bytes between two runs: nothing is in a cache

cpu_cost::Estimate estimate_tile(const std::string& text, const std::map<std::string, int64_t>& sizes = {}, int threads = 1, double resident = kFar) {
  const tile_ir::Module module = tile_ir::parse(text);
  return cpu_cost::estimate(*module.kernels[0], sizes, zen5(), figures(threads), resident);
}

/// Of a layer of float32 by a schedule, the others by heuristics.
double estimate_layer(int64_t m, int64_t n, int64_t k, const std::string& schedule, int threads) {
  const std::string text = fmt::format(R"(program @p(x: f32[{0}, {2}] user, w: f32[{1}, {2}] parameter static)
  buffer y: f32[{0}, {1}] output
  call @k(x, w, y)
  return y

loop @k(x: f32[{0}, {2}], w: f32[{1}, {2}], out y: f32[{0}, {1}])
  for i in {0}:
    for j in {1}:
      reduce s: f32 = sum(c) over k in {2}:
        a = load x[i, k]
        b = load w[j, k]
        c = mul(a, b)
      store y[i, j] = s
)",
                                       m, n, k);
  PassContext context = zen5();
  if (!schedule.empty()) context.schedules["k"] = schedule;
  const tile_ir::Module module = lower_loop_to_tile(loop_ir::parse(text), context);
  for (const auto& kernel : module.kernels)
    if (kernel->name == "k") return cpu_cost::estimate(*kernel, {}, context, figures(threads), kFar).seconds;
  FAIL("no kernel @k");
  return 0;
}

}  // namespace

TEST_CASE("a copy takes the time of its bytes where they are", "[cost]") {
  const std::string copy = R"(program @p(x: f32[s0, 1024] user, s0: sym) where s0 in 2..
  buffer y: f32[s0, 1024] output
  call @k(x, y)
  return y

tile @k(x: f32[s0, 1024], out y: f32[s0, 1024]) where s0 in 2.. chunks s0
  parallel i in 0..s0:
    for lanes j in 0..1024:
      a = load x[i, j]
      store y[i, j] = a
)";
  // 4 MB read, and as much written, each line of which is read first.
  const auto far = estimate_tile(copy, {{"s0", 1024}});
  CHECK(far.memory == Approx(3 * 4194304 / 1e10).epsilon(0.01));
  CHECK(far.seconds == Approx(far.memory).epsilon(0.05));
  const auto third = estimate_tile(copy, {{"s0", 1024}}, 1, 8 << 20);
  CHECK(third.memory == 0);
  CHECK(third.seconds < far.seconds);
  // Two threads take halves, and share what the memory gives.
  const auto both = estimate_tile(copy, {{"s0", 1024}}, 2);
  CHECK(both.seconds == Approx(far.seconds / 2 + 1e-6).epsilon(0.01));
}

TEST_CASE("a column by columns brings a line for each element", "[cost]") {
  auto read = [](const std::string& index) {
    return estimate_tile(R"(program @p(x: f32[4096, 4096] user)
  buffer y: f32[4096] output
  call @k(x, y)
  return y

tile @k(x: f32[4096, 4096], out y: f32[4096]) chunks 1
  for i in 0..256:
    a = load x)" + index +
                         R"(
    store y[i] = a
)");
  };
  CHECK(read("[i, 0]").memory > 5 * read("[0, i]").memory);
}

TEST_CASE("what a loop reads again comes from the cache that holds it", "[cost]") {
  auto sums = [](int64_t floats) {
    return estimate_tile(fmt::format(R"(program @p(x: f32[{0}] user)
  buffer y: f32[1000] output
  call @k(x, y)
  return y

tile @k(x: f32[{0}], out y: f32[1000]) chunks 1
  for i in 0..1000:
    reduce s: f32 = sum(a) over lanes k in 0..{0} by 8:
      a = load x[k]
    store y[i] = s
)",
                                     floats));
  };
  const auto first = sums(4 << 10);        // 16 KB
  const auto second = sums(64 << 10);      // 256 KB
  const auto third = sums(2 << 20);        // 8 MB
  CHECK(first.second < 0.1 * first.core);  // once
  CHECK(second.second == Approx(1000.0 * (256 << 10) / 1e11).epsilon(0.01));
  CHECK(second.third < 0.1 * second.second);
  CHECK(third.third == Approx(1000.0 * (8 << 20) / 5e10).epsilon(0.01));
  CHECK(third.memory < 0.1 * third.third);
}

TEST_CASE("sums that wait for one another take the time of each", "[cost]") {
  auto sum = [](int by) {
    return estimate_tile(fmt::format(R"(program @p(x: f32[4096] user)
  buffer y: f32[1] output
  call @k(x, y)
  return y

tile @k(x: f32[4096], out y: f32[1]) chunks 1
  reduce s: f32 = sum(a) over lanes k in 0..4096 by {}:
    a = load x[k]
  store y[0] = s
)",
                                     by),
                         {}, 1, 0)
        .core;
  };
  CHECK(sum(1) > 2 * sum(4));
  CHECK(sum(4) >= sum(8));
}

TEST_CASE("a product takes the time of its multiply-adds, or that of its loads", "[cost]") {
  auto schedule = [](int64_t rows, int64_t lanes) {
    return fmt::format(
        "contraction parallel(i, j, work=65536) tile(i={}) tile(j=896) vectorize(j) register_block(i={}, j={}) tile(s.k=512) chain(s.k=128) "
        "unroll(s.k=4) pack(s.lanes, at=block) pack(s.rows, at=block)",
        rows * 16, rows, lanes);
  };
  const double flops = 2.0 * 512 * 3584 * 3584;
  const double one = estimate_layer(512, 3584, 3584, "", 1);
  CHECK(one > flops / 1e11);
  CHECK(one < 1.35 * flops / 1e11);
  const double two = estimate_layer(512, 3584, 3584, "", 2);
  CHECK(two > 0.5 * one);
  CHECK(two < 0.6 * one);
  // A load for each multiply-add, and sums that wait for one another.
  CHECK(estimate_layer(512, 3584, 3584, schedule(1, 16), 1) > 2 * estimate_layer(512, 3584, 3584, schedule(6, 64), 1));
}
