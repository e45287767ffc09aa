#include "codegen/codegen.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "kernel_ir/ir.h"
#include "passes/kernel/expand_math.h"

using namespace deplo;

namespace {

struct Machine {
  PassContext context;
  CodegenOptions options;
  CodegenStats stats;
  int32_t error = 0;

  explicit Machine(const std::string& features = "") { context.target = cpu_target_info(features); }

  std::shared_ptr<CompiledKernel> compile(const std::string& text) {
    auto module = expand_math(kernel_ir::parse(text), context);
    verify(module);
    return compile_cpu_kernels(module.kernels, context, options, &stats).front();
  }

  void run(const std::string& text, std::vector<void*> buffers, std::vector<int64_t> symbols = {}, int threads = 1) {
    auto kernel = compile(text);
    std::vector<char> scratch(1 << 16);
    error = 0;
    KernelArgs args{buffers.data(), symbols.data(), &error, scratch.data()};
    for (int t = 0; t < threads; ++t) kernel->function()(&args, t, threads);
  }
};

std::vector<std::string> feature_sets() {
  std::vector<std::string> sets{"sse"};
  for (const char* f : {"avx2", "avx512"}) {
    try {
      cpu_target_info(f);
      sets.emplace_back(f);
    } catch (const UserError&) {  // this CPU has no such instructions
    }
  }
  return sets;
}

}  // namespace

TEST_CASE("masked tails, partition and math agree with libm on every instruction set") {
  const std::string text = R"(kernel @tail(x: ptr f32, out y: ptr f32) symbols (n) chunks 4 scratch 0
  for i in (n*thread // threads)..(n*(thread + 1) // threads) step 8:
    m: boolx8 = first (n*(thread + 1) // threads) - i
    a: f32x8 = load x[i] mask m
    b: f32x8 = tanh(a)
    c: f32x8 = sin(a)
    d: f32x8 = fma(a, b, c)
    store y[i] = d mask m
)";
  for (const std::string& features : feature_sets()) {
    INFO(features);
    Machine machine(features);
    int64_t n = 37;
    std::vector<float> x(n);
    std::vector<float> y(n + 1, -7);
    for (int64_t i = 0; i < n; ++i) x[i] = 0.3F * static_cast<float>(i - 18);
    x[5] = 3e30F;  // beyond the vector reduction of sin
    machine.run(text, {x.data(), y.data()}, {n}, 3);
    for (int64_t i = 0; i < n; ++i) {
      double wanted = std::fma(static_cast<double>(x[i]), std::tanh(static_cast<double>(x[i])), std::sin(static_cast<double>(x[i])));
      CHECK(y[i] == Approx(wanted).epsilon(1e-6));
    }
    CHECK(y[n] == -7);
  }
}

TEST_CASE("bf16 and f16 round to nearest even on every instruction set") {
  const std::string text = R"(kernel @narrow(x: ptr f32, out b: ptr bf16, out h: ptr f16, out back: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..64 step 4:
    a: f32x4 = load x[i]
    p: bf16x4 = cast(a)
    q: f16x4 = cast(a)
    r: f32x4 = cast(q)
    store b[i] = p
    store h[i] = q
    store back[i] = r
)";
  std::vector<float> x;
  for (int i = 0; i < 60; ++i) x.push_back(std::ldexp(1.0F + 0.001953F * static_cast<float>(i), i % 40 - 26));
  x.insert(x.end(), {INFINITY, -0.0F, 65520.0F, NAN});
  for (const std::string& features : feature_sets()) {
    INFO(features);
    std::vector<uint16_t> b(64);
    std::vector<uint16_t> h(64);
    std::vector<float> back(64);
    Machine(features).run(text, {x.data(), b.data(), h.data(), back.data()});
    for (size_t i = 0; i < 63; ++i) {
      INFO(x[i]);
      CHECK(b[i] == f32_to_bf16(x[i]));
      CHECK(h[i] == f32_to_f16(x[i]));
      CHECK(back[i] == f16_to_f32(h[i]));
    }
    CHECK(std::isnan(bf16_to_f32(b[63])));
    CHECK(std::isnan(back[63]));
  }
}

TEST_CASE("integer division wraps, never traps, and reports zero") {
  const std::string text = R"(kernel @divide(x: ptr i32, y: ptr i32, out q: ptr i32, out r: ptr i32) symbols () chunks 1 scratch 0
  a: i32x4 = load x[0]
  b: i32x4 = load y[0]
  c: i32x4 = floor_div(a, b)
  d: i32x4 = remainder(a, b)
  store q[0] = c
  store r[0] = d
)";
  std::vector<int32_t> x{-7, 7, INT32_MIN, 5};
  std::vector<int32_t> y{2, -2, -1, 3};
  std::vector<int32_t> q(4);
  std::vector<int32_t> r(4);
  Machine machine;
  machine.run(text, {x.data(), y.data(), q.data(), r.data()});
  CHECK(machine.error == 0);
  CHECK(q == std::vector<int32_t>{-4, -4, INT32_MIN, 1});
  CHECK(r == std::vector<int32_t>{1, -1, 0, 2});
  y[3] = 0;
  machine.run(text, {x.data(), y.data(), q.data(), r.data()});
  CHECK(machine.error == static_cast<int>(loop_ir::ErrorCode::division_by_zero));
}

TEST_CASE("a second compile comes from memory, a later one from disk, and a damaged entry is a miss") {
  const std::string text = R"(kernel @k1(x: ptr f32, out y: ptr f32) symbols () chunks 1 scratch 0
  a: f32 = load x[3]
  b: f32 = exp(a)
  store y[0] = b
)";
  namespace fs = std::filesystem;
  fs::path folder = fs::temp_directory_path() / "deplo-codegen-test";
  fs::remove_all(folder);
  Machine machine;
  machine.options.cache_dir = folder.string();
  auto held = machine.compile(text);
  CHECK(machine.stats.compiled == 1);
  machine.compile(text);
  CHECK(machine.stats.memory_hits == 1);
  held.reset();
  machine.compile(text);
  CHECK(machine.stats.disk_hits == 1);
  for (const auto& file : fs::directory_iterator(folder)) {
    std::fstream damaged(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(200);
    damaged.put('x');
  }
  machine.compile(text);
  CHECK(machine.stats.compiled == 1);
  fs::remove_all(folder);
}

TEST_CASE("equal kernels under different names compile once") {
  std::string body = "(x: ptr f32, out y: ptr f32) symbols () chunks 1 scratch 0\n  a: f32 = load x[0]\n  b: f32 = add(a, a)\n  store y[0] = b\n";
  auto module = kernel_ir::parse("kernel @first" + body + "\nkernel @second" + body);
  Machine machine;
  auto kernels = compile_cpu_kernels(module.kernels, machine.context, machine.options, &machine.stats);
  CHECK(machine.stats.compiled == 1);
  CHECK(kernels[0] == kernels[1]);
}

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
