#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "base/error.h"
#include "loop_ir/interpret.h"
#include "tile_ir/interpret.h"
#include "tile_ir/ir.h"
#include "tile_ir/rewrite.h"

using namespace deplo;

namespace {

Array random_tile_array(std::vector<int64_t> shape, unsigned seed) {
  Array a = Array::zeros(DType::f32, std::move(shape));
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> distribution(-2, 2);
  for (double& x : a.floats) x = distribution(rng);
  return a;
}

constexpr const char* kTileSoftmax = R"(program @softmax(x: f32[s0, 20] user) where s0 in 2..
  buffer y: f32[s0, 20] output
  call @k0_softmax(x, y)
  return y

schedule @k0_softmax: nest parallel(i, work=32768) vectorize(j, by=2) vectorize(j, nth=1) vectorize(j, nth=2, by=4)
tile @k0_softmax(x: f32[s0, 20], out y: f32[s0, 20]) where s0 in 2.. chunks (s0 // 4) from "softmax"
  parallel i in 0..s0:
    reduce m: f32 = max(a) over lanes j in 0..20 by 2:
      a = load x[i, j]
    reduce s: f32 = sum(e) over lanes j in 0..20:
      a = load x[i, j]
      d = sub(a, m)
      e = exp(d)
      store y[i, j] = e
    for lanes j in 0..20 by 4:
      e = load y[i, j]
      r = div(e, s)
      store y[i, j] = r
)";

constexpr const char* kTileMatmul = R"(program @matmul(a: f32[7, 5] user, b: f32[5, 6] user)
  buffer c: f32[7, 6] output
  call @k0(a, b, c)
  return c

tile @k0(a: f32[7, 5], b: f32[5, 6], out c: f32[7, 6])
  alloc acc: f32[2, 6] register
  alloc pb: f32[5, 6] scratch
  for k in 0..5:
    for lanes n in 0..6:
      x = load b[k, n]
      store pb[k, n] = x
  for i in 0..7 step 2:
    unroll r in 0..2:
      for lanes n in 0..6:
        z: f32 = constant 0.0
        store acc[r, n] = z
    for k in 0..5 by 4:
      prefetch pb[k + 4, 0] level 2
      unroll r in 0..2:
        x = load a[i + r, k] if -i - r + 6 >= 0 else 0.0
        for lanes n in 0..6:
          y = load pb[k, n]
          s = load acc[r, n]
          f = fma(x, y, s)
          store acc[r, n] = f
    unroll r in 0..2:
      if -i - r + 6 >= 0:
        for lanes n in 0..6:
          s = load acc[r, n]
          store c[i + r, n] = s
)";

// A block of 8 threads adds 19 numbers; the tree is wrong unless the threads run in step.
constexpr const char* kBlockSum = R"(tile @sum(x: f32[19], out y: f32[1])
  for block_x b in 0..1:
    for thread_x t in 0..8:
      alloc part: f32[8] shared
      reduce own: f32 = sum(a) over i in t..19 step 8:
        a = load x[i]
      store part[t] = own
      barrier
      for h in 0..3:
        v = load part[t] if -t + 3 >= 0 else 0.0
        w = load part[t + 4] if -t + 3 >= 0 else 0.0
        u = add(v, w)
        barrier
        store part[t] = u if -h >= 0 and -t + 3 >= 0
        store part[t + 4] = u if h - 1 >= 0 and -t + 3 >= 0
        barrier
        if -h >= 0:
          barrier
      z = load part[t]
      if -t >= 0:
        store y[0] = z
)";

}  // namespace

TEST_CASE("tile IR text round-trips") {
  for (const char* text : {kTileSoftmax, kTileMatmul, kBlockSum}) {
    tile_ir::Module module = tile_ir::parse(text);
    tile_ir::verify(module);
    CHECK(tile_ir::print(module) == text);
    CHECK(*module.kernels[0] == *tile_ir::parse(text).kernels[0]);
  }
}

TEST_CASE("tile IR runs as scheduled") {
  Array x = random_tile_array({3, 20}, 1);
  Array y = tile_ir::interpret(tile_ir::parse(kTileSoftmax), {x}, {}, Mode::exact).at(0);
  for (int64_t i = 0; i < 3; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 20; ++j) sum += std::exp(x.get(i * 20 + j).f);
    for (int64_t j = 0; j < 20; ++j) CHECK(y.get(i * 20 + j).f == Approx(std::exp(x.get(i * 20 + j).f) / sum).epsilon(1e-12));
  }
  Array a = random_tile_array({7, 5}, 2);
  Array b = random_tile_array({5, 6}, 3);
  Array c = tile_ir::interpret(tile_ir::parse(kTileMatmul), {a, b}, {}, Mode::exact).at(0);
  for (int64_t i = 0; i < 7; ++i)
    for (int64_t n = 0; n < 6; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < 5; ++k) sum += a.get(i * 5 + k).f * b.get(k * 6 + n).f;
      CHECK(c.get(i * 6 + n).f == Approx(sum).epsilon(1e-12));
    }
}

TEST_CASE("Tile threads of a block meet at barriers") {
  Array x = random_tile_array({19}, 4);
  Array y = Array::zeros(DType::f32, {1});
  tile_ir::Module module = tile_ir::parse(kBlockSum);
  std::vector<Array*> arguments{&x, &y};
  tile_ir::interpret(*module.kernels[0], arguments, {}, Mode::exact);
  // One round of the tree leaves x0 + x4 (partial sums of thread 0 and 4) in place 0; later rounds change places 4..7 only.
  double expected = 0;
  for (int64_t i = 0; i < 19; i += 4) expected += x.get(i).f;
  CHECK(y.get(0).f == Approx(expected).epsilon(1e-12));
}

TEST_CASE("tile IR that breaks a rule is refused") {
  auto refuses = [](const std::string& body, const std::string& why) {
    tile_ir::Module module = tile_ir::parse("tile @k(x: f32[8, 8], out y: f32[8, 8])\n" + body);
    CHECK_THROWS_WITH(tile_ir::verify(module), Catch::Contains(why));
  };
  refuses("  for i in 0..8:\n    parallel j in 0..8:\n      pass\n", "outermost");
  refuses("  for lanes i in 0..8:\n    for lanes j in 0..8:\n      pass\n", "lanes inside lanes");
  refuses("  for i in 0..8:\n    unroll j in 0..i:\n      pass\n", "constant bounds");
  refuses("  alloc r: f32[4] register\n  for i in 0..4:\n    a = load r[i]\n", "neither unrolled");
  refuses("  for i in 0..8:\n    a = load x[i, k]\n", "uses k");
  refuses("  for i in 0..8:\n    a = load x[i, i]\n    store x[i, i] = a\n", "store to the input");
  refuses("  for i in 0..8:\n    alloc s: f32[i] scratch\n", "not a size");
  refuses("  for lanes i in 0..8:\n    barrier\n", "barrier inside");
  refuses("  reduce m: f32 = max(a) over thread_x i in 0..8:\n    a = load x[i, i]\n", "no thread_x loop around");
}

TEST_CASE("rewrite keeps what it does not change") {
  tile_ir::Module module = tile_ir::parse(kTileMatmul);
  const auto& body = module.kernels[0]->body;
  CHECK(tile_ir::rewrite(body, [](const Ref<tile_ir::Stmt>& s) { return tile_ir::Block{s}; }) == body);
  auto without = tile_ir::rewrite(
      body, [](const Ref<tile_ir::Stmt>& s) { return std::holds_alternative<tile_ir::Prefetch>(s->node) ? tile_ir::Block{} : tile_ir::Block{s}; });
  CHECK(without != body);
  CHECK(without[2] == body[2]);
}

TEST_CASE("copies go on with the next row in memory, and end with the buffer") {
  const auto copying = [](const std::string& from) {
    return tile_ir::parse(R"(tile @k0(x: f16[2, 3, 5], out y: f16[8])
  for block_x b in 0..1:
    for thread_x t in 0..1:
      alloc line: f16[8] shared
      copy_async line[0] = x[)" +
                          from + R"(] along 2 by 8
      copy_commit
      copy_wait 0
      barrier
      unroll i in 0..8:
        v = load line[i]
        store y[i] = v
)");
  };
  Array x = Array::zeros(DType::f16, {2, 3, 5});
  for (size_t k = 0; k < x.floats.size(); ++k) x.floats[k] = static_cast<double>(k);
  Array y = Array::undefined(DType::f16, {8});
  const tile_ir::Module module = copying("0, 1, 3");
  tile_ir::verify(module);
  tile_ir::interpret(*module.kernels[0], {&x, &y}, {}, Mode::exact);
  for (size_t k = 0; k < y.floats.size(); ++k) CHECK(y.floats[k] == static_cast<double>(k + 8));
  CHECK_THROWS_WITH(tile_ir::verify(copying("1, 2, 0")), Catch::Contains("outside"));
}
