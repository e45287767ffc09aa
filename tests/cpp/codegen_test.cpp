#include "target/cpu/codegen.h"

#include <elf.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <type_traits>

#include "base/error.h"
#include "base/memory.h"
#include "kernel_ir/interpret.h"
#include "kernel_ir/ir.h"
#include "passes/kernel/expand_math.h"
#include "target/cpu/llvm/memory_cache.h"
#include "target/disk_cache.h"

using namespace deplo;

// GDB's JIT interface, as a debugger reads it.
struct DebuggerObject {
  DebuggerObject* next;
  DebuggerObject* previous;
  const char* bytes;
  uint64_t size;
};
struct DebuggerList {
  uint32_t version;
  uint32_t action;
  DebuggerObject* relevant;
  DebuggerObject* first;
};
extern "C" DebuggerList __jit_debug_descriptor;  // NOLINT(bugprone-reserved-identifier)

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

TEST_CASE("powers of 2 of weights are within 2^-20, 0 below 2^-126, and infinite or NaN where those of exp2 are") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> x{0, -kInf, kInf, std::nanf("1"), 128, 127.99F, 127.5F, 129, 1e30F, -1e30F, -126, -126.01F, -125.5F, -125.49F, -150, 1e-30F};
  for (int k = 0; k < 4096; ++k) x.push_back(-130.0F + static_cast<float>(k) * 0.063F);
  const std::string text = fmt::format(
      "kernel @k(x: ptr f32, out y: ptr f32) symbols () chunks 1 scratch 0\n"
      "  for i in 0..{} step 16:\n    a: f32x16 = load x[i]\n    b: f32x16 = exp2_near(a)\n    store y[i] = b\n",
      x.size());
  REQUIRE(apply(Fn::exp2_near, DType::f32, std::array{Scalar::of_float(DType::f32, 3)}.data(), Mode::typed, nullptr).f == 8);
  REQUIRE(apply(Fn::reciprocal_near, DType::f32, std::array{Scalar::of_float(DType::f32, 4)}.data(), Mode::typed, nullptr).f == 0.25);
  for (const std::string& features : feature_sets()) {
    std::vector<float> y(x.size());
    Machine(features).run(text, {x.data(), y.data()});
    for (size_t k = 0; k < x.size(); ++k) {
      INFO(features << " 2^" << x[k] << " = " << y[k]);
      const double exact = std::exp2(static_cast<double>(x[k]));
      if (std::isnan(x[k]))
        REQUIRE(std::isnan(y[k]));
      else if (x[k] >= 128 || x[k] < -126)
        REQUIRE(y[k] == (x[k] < 0 ? 0.0F : kInf));
      else
        REQUIRE(std::abs(y[k] / exact - 1) <= 0x1p-20);
    }
  }
}

TEMPLATE_TEST_CASE("masks that are partly constant hold in registers of any width", "", int64_t, double, float, int32_t) {
  const std::string dtype = std::is_same_v<TestType, int64_t>  ? "i64"
                            : std::is_same_v<TestType, double> ? "f64"
                            : std::is_same_v<TestType, float>  ? "f32"
                                                               : "i32";
  for (const int lanes : {8, 16}) {
    // Row r loads the lanes of [from, to), where h is not negative.
    std::vector<std::pair<int, int>> rows;
    std::string text = fmt::format("kernel @masks(x: ptr {0}, out y: ptr {0}) symbols (h) chunks 1 scratch 0\n", dtype);
    text += fmt::format("  zero: i64 = constant 0\n  n: i64 = index h\n  holds: bool = ge(n, zero)\n  all: boolx{} = splat holds\n", lanes);
    for (int from = 0; from < lanes; ++from)
      for (int to = from; to <= lanes; ++to) {
        const auto r = rows.size();
        rows.emplace_back(from, to);
        text += fmt::format("  a{0}: boolx{1} = first {2}\n  b{0}: boolx{1} = bit_not(a{0})\n  c{0}: boolx{1} = first {3}\n", r, lanes, from, to);
        text += fmt::format("  d{0}: boolx{1} = bit_and(b{0}, c{0})\n  m{0}: boolx{1} = bit_and(all, d{0})\n", r, lanes);
        text += fmt::format("  v{0}: {1}x{2} = load x[0] mask m{0}\n  store y[{3}] = v{0}\n", r, dtype, lanes, static_cast<int>(r) * lanes);
      }
    std::vector<TestType> x(static_cast<size_t>(lanes));
    for (int l = 0; l < lanes; ++l) x[static_cast<size_t>(l)] = static_cast<TestType>(l + 1);
    for (const std::string& features : feature_sets())
      for (const int64_t h : {0, -1}) {
        Machine machine(features);
        std::vector<TestType> y(rows.size() * x.size(), TestType{99});
        machine.run(text, {x.data(), y.data()}, {h});
        for (size_t r = 0; r < rows.size(); ++r)
          for (int l = 0; l < lanes; ++l) {
            const bool on = h >= 0 && l >= rows[r].first && l < rows[r].second;
            INFO(features << " " << dtype << " lanes " << rows[r].first << " to " << rows[r].second << " of " << lanes << ", lane " << l << ", h "
                          << h);
            REQUIRE(y[r * x.size() + static_cast<size_t>(l)] == (on ? x[static_cast<size_t>(l)] : TestType{0}));
          }
      }
  }
}

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

TEST_CASE("dot products of pairs agree with the interpreter bit by bit on every instruction set") {
  std::mt19937 random(7);
  for (const char* dtype : {"bf16", "f16"})
    for (int lanes : {1, 4, 8, 16}) {
      const std::string wide = lanes == 1 ? "" : fmt::format("x{}", lanes);
      const std::string text =
          fmt::format(R"(kernel @dot(a: ptr {0}, b: ptr {0}, c: ptr f32, out y: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..64 step {1}:
    p: {0} = load a[i]
    q: {0} = load a[i + 1]
    {2}
    b0: {0}{3} = load b[i*2] stride 2
    b1: {0}{3} = load b[i*2 + 1] stride 2
    z: f32{3} = load c[i]
    s: f32{3} = dot2({4}, b0, b1, z)
    store y[i] = s
)",
                      dtype, lanes, lanes == 1 ? "r: f32 = load c[i]" : fmt::format("pv: {0}x{1} = splat p\n    qv: {0}x{1} = splat q", dtype, lanes),
                      wide, lanes == 1 ? "p, q" : "pv, qv");
      const DType type = *parse_dtype(dtype);
      std::vector<uint16_t> a(65);
      std::vector<uint16_t> b(128);
      std::vector<float> c(64);
      std::vector<float> y(64);
      auto any = [&] { return std::ldexp(static_cast<float>(random() % 512) - 256.0F, static_cast<int>(random() % 9) - 8); };
      auto fill = [&](std::vector<uint16_t>& values) {
        for (uint16_t& v : values) v = type == DType::bf16 ? f32_to_bf16(any()) : f32_to_f16(any());
      };
      fill(a);
      fill(b);
      for (float& v : c) v = any() * 1.0009765F;
      auto value = [&](uint16_t bits) { return type == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits); };
      for (const std::string& features : feature_sets()) {
        INFO(features << " " << text);
        Machine(features).run(text, {a.data(), b.data(), c.data(), y.data()});
        for (size_t i = 0; i < 64; ++i) {
          const size_t first = i / static_cast<size_t>(lanes) * static_cast<size_t>(lanes);
          CHECK(y[i] == std::fmaf(value(a[first]), value(b[2 * i]), std::fmaf(value(a[first + 1]), value(b[2 * i + 1]), c[i])));
        }
      }
      kernel_ir::Module module = kernel_ir::parse(text);
      std::vector<Array> arrays{Array::zeros(type, {65}), Array::zeros(type, {128}), Array::zeros(DType::f32, {64}), Array::zeros(DType::f32, {64})};
      for (size_t i = 0; i < 65; ++i) arrays[0].floats[i] = value(a[i]);
      for (size_t i = 0; i < 128; ++i) arrays[1].floats[i] = value(b[i]);
      for (size_t i = 0; i < 64; ++i) arrays[2].floats[i] = c[i];
      interpret(*module.kernels[0], {&arrays[0], &arrays[1], &arrays[2], &arrays[3]}, {}, Mode::typed);
      for (size_t i = 0; i < 64; ++i) CHECK(arrays[3].floats[i] == y[i]);
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

TEST_CASE("index expressions divide as Python does, whatever the signs") {
  // Of loop variables and of symbols, by both; of numbers and by numbers.
  std::string text = "kernel @divide(out y: ptr i64) symbols (s, t) sizes (h = s // t, r = s % t) chunks 1 scratch 0\n  for i in -9..10 step 1:\n";
  std::vector<std::string> values{"i // s", "i % s", "s // t", "s % t", "(i + 20) // s", "(i + 20) % s", "h", "r"};
  for (int c = -9; c <= 9; ++c) {
    if (c == 0) continue;
    for (const char* op : {"//", "%"}) {
      values.push_back(fmt::format("i {} ({})", op, c));
      values.push_back(fmt::format("({}) {} s", c, op));
    }
  }
  for (size_t k = 0; k < values.size(); ++k)
    text += fmt::format("    v{0}: i64 = index {1}\n    store y[(i + 9)*{2} + {0}] = v{0}\n", k, values[k], values.size());
  const Machine machine;
  auto kernel = Machine(machine).compile(text);
  const kernel_ir::Kernel parsed = *kernel_ir::parse(text).kernels[0];
  for (int64_t s = -9; s <= 9; ++s)
    for (int64_t t : {-9, -4, -1, 3, 9}) {
      if (s == 0) continue;
      std::vector<int64_t> y(19 * values.size(), -999);
      std::vector<int64_t> sizes = kernel_ir::passed_values(parsed, {{"s", s}, {"t", t}});
      std::vector<void*> buffers{y.data()};
      int32_t error = 0;
      KernelArgs args{buffers.data(), sizes.data(), &error, nullptr};
      kernel->function()(&args, 0, 1);
      for (int64_t i = -9; i <= 9; ++i)
        for (size_t k = 0; k < values.size(); ++k) {
          INFO(values[k] << " where i is " << i << ", s " << s << ", t " << t);
          REQUIRE(y[static_cast<size_t>(i + 9) * values.size() + k] ==
                  evaluate(parse_expr(values[k]), {{"i", i}, {"s", s}, {"t", t}, {"h", sizes[2]}, {"r", sizes[3]}}));
        }
    }
  // What runs no iteration may be computed before the loop: it must not trap.
  std::vector<int64_t> none(19 * values.size());
  std::vector<void*> buffers{none.data()};
  for (int64_t s : {int64_t{0}, INT64_MIN})
    for (int64_t t : {int64_t{0}, int64_t{-1}}) {
      std::vector<int64_t> sizes{s, t, 0, 0};
      int32_t error = 0;
      KernelArgs args{buffers.data(), sizes.data(), &error, nullptr};
      kernel->function()(&args, 0, 1);
    }
}

TEST_CASE("products of four bytes are exact on every instruction set, also where codes of 4 bits allow another one") {
  std::mt19937 rng(3);
  for (const std::string& features : feature_sets())
    for (int32_t mask : {-1, 0x0f0f0f0f, 0x7f0f0f0f}) {
      Machine machine(features);
      for (int lanes : {1, 4, 8, 16, 32}) {
        const std::string type = lanes == 1 ? "i32" : fmt::format("i32x{}", lanes);
        const std::string text = fmt::format(
            "kernel @dot(x: ptr i32, y: ptr i32, z: ptr i32, out s: ptr i32) symbols () chunks 1 scratch 0\n"
            "  w: {0} = load x[0]\n  m: {0} = constant {1}\n  a: {0} = bit_and(w, m)\n"
            "  b: {0} = load y[0]\n  c: {0} = load z[0]\n  d: {0} = dot4(a, b, c)\n  store s[0] = d\n",
            type, mask);
        std::vector<int32_t> x(32), y(32), z(32), s(32);
        for (size_t i = 0; i < 32; ++i) {
          x[i] = i <= 1 ? -1 : static_cast<int32_t>(rng());
          y[i] = i == 0 ? static_cast<int32_t>(0x80808080) : i == 1 ? 0x7f7f7f7f : static_cast<int32_t>(rng());
          z[i] = i == 2 ? INT32_MAX : static_cast<int32_t>(rng());
        }
        machine.run(text, {x.data(), y.data(), z.data(), s.data()});
        for (size_t i = 0; i < static_cast<size_t>(lanes); ++i) {
          const int32_t a = x[i] & mask;
          const Scalar operands[] = {Scalar::of_int(DType::i32, a), Scalar::of_int(DType::i32, y[i]), Scalar::of_int(DType::i32, z[i])};
          INFO(features << ", mask " << mask << ", " << lanes << " lanes, lane " << i);
          CHECK(s[i] == apply(Fn::dot4, DType::i32, operands, Mode::typed, nullptr).i);
          int64_t sum = z[i];
          for (int byte = 0; byte < 4; ++byte)
            sum += static_cast<int64_t>(static_cast<uint8_t>(a >> (8 * byte))) * static_cast<int8_t>(static_cast<uint8_t>(y[i] >> (8 * byte)));
          CHECK(s[i] == static_cast<int32_t>(sum));
        }
      }
    }
}

TEST_CASE("products of four bytes are one instruction where vectors of 32 bytes have it") {
  if (cpu_target_info("").vector_bytes < 32) return;  // LLVM's other features come from the CPU at hand
  PassContext context;
  context.target = cpu_target_info("avx2");
  context.target.features.insert("avxvnni");
  const auto module = kernel_ir::parse(
      "kernel @dot(x: ptr i32, y: ptr i32, out s: ptr i32) symbols () chunks 1 scratch 0\n"
      "  a: i32x8 = load x[0]\n  b: i32x8 = load y[0]\n  c: i32x8 = load s[0]\n  d: i32x8 = dot4(a, b, c)\n  store s[0] = d\n");
  const std::string text = cpu_assembly_text(*module.kernels[0], context);
  CHECK(text.find("{vex}\tvpdpbusd") != std::string::npos);
  CHECK(text.find("vpmaddwd") == std::string::npos);
}

TEST_CASE("the cache in memory has all that is held, and of the rest what was used last") {
  struct Code final : CompiledKernel {
    KernelFn function() const override { return nullptr; }
    const std::string& key() const override { return name; }
    std::string image() const override { return name; }
    std::string name;
  };
  MemoryCache cache(2);
  auto held = std::make_shared<Code>();
  cache.store("held", held);
  for (const char* key : {"a", "b"}) cache.store(key, std::make_shared<Code>());
  CHECK(cache.find("held") == held);  // dropped, but alive
  CHECK(cache.find("a") != nullptr);  // used after b now
  cache.store("c", std::make_shared<Code>());
  CHECK(cache.find("b") == nullptr);
  CHECK(cache.find("a") != nullptr);
  cache.store("c", held);  // as after a race of two compilations
  CHECK(cache.find("c") == held);
  CHECK(cache.find("a") != nullptr);
  cache.clear();
  CHECK(cache.find("a") == nullptr);
  CHECK(cache.find("c") == held);
  held.reset();
  CHECK(cache.find("c") == nullptr);
}

TEST_CASE("the cache on disk drops what was used longest ago above its limit") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("deplo-disk-test-{}", getpid());
  fs::remove_all(folder);
  const DiskCache cache(folder.string(), 2000);
  const std::string object(700, 'x');
  std::vector<std::string> keys;
  for (const char digit : {'a', 'b', 'c'}) keys.emplace_back(64, digit);
  auto age = [&](const std::string& key, int minutes) {
    for (const auto& file : fs::directory_iterator(folder))
      if (file.path().filename().string().find(key) != std::string::npos)
        fs::last_write_time(file.path(), fs::file_time_type::clock::now() - std::chrono::minutes(minutes));
  };
  cache.store(keys[0], {"f", object});
  age(keys[0], 2);
  cache.store(keys[1], {"f", object});
  age(keys[1], 3);
  CHECK(cache.find(keys[0]).has_value());
  age(keys[0], 2);
  cache.store(keys[2], {"f", object});
  CHECK_FALSE(cache.find(keys[1]).has_value());
  CHECK(cache.find(keys[0]).has_value());
  CHECK(cache.find(keys[2]).has_value());
  fs::remove_all(folder);
}

TEST_CASE("the bytes of an entry read back, and damaged ones do not") {
  const std::string key(64, 'a');
  const std::string bytes = DiskCache::to_bytes(key, {"f", std::string("x\n\0y", 4)});
  auto found = DiskCache::from_bytes(bytes);
  REQUIRE(found.has_value());
  CHECK(found->first == key);
  CHECK(found->second.symbol == "f");
  CHECK(found->second.object == std::string("x\n\0y", 4));
  CHECK_FALSE(DiskCache::from_bytes(bytes + "z").has_value());
  CHECK_FALSE(DiskCache::from_bytes(bytes.substr(1)).has_value());
  CHECK_FALSE(DiskCache::from_bytes(DiskCache::to_bytes("../up", {"f", "x"})).has_value());
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
  CHECK(machine.stats.memory_hits == 1);
  trim_memory();
  machine.compile(text);
  CHECK(machine.stats.disk_hits == 1);
  for (const auto& file : fs::directory_iterator(folder)) {
    std::fstream damaged(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(200);
    damaged.put('x');
  }
  forget_unused_kernels();
  machine.compile(text);
  CHECK(machine.stats.compiled == 1);
  fs::remove_all(folder);
}

namespace {

/// Names of the functions in what a debugger would read now, with the address of each one's section.
std::map<std::string, uint64_t> functions_for_debuggers() {
  std::map<std::string, uint64_t> found;
  for (const DebuggerObject* item = __jit_debug_descriptor.first; item; item = item->next) {
    std::string object(item->bytes, item->size);
    Elf64_Ehdr file;
    std::memcpy(&file, object.data(), sizeof file);
    std::vector<Elf64_Shdr> sections(file.e_shnum);
    std::memcpy(sections.data(), object.data() + file.e_shoff, sections.size() * sizeof(Elf64_Shdr));
    for (const Elf64_Shdr& table : sections) {
      if (table.sh_type != SHT_SYMTAB) continue;
      std::vector<Elf64_Sym> symbols(table.sh_size / sizeof(Elf64_Sym));
      std::memcpy(symbols.data(), object.data() + table.sh_offset, table.sh_size);
      for (const Elf64_Sym& symbol : symbols)
        if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
          found[object.data() + sections[table.sh_link].sh_offset + symbol.st_name] = sections[symbol.st_shndx].sh_addr + symbol.st_value;
    }
  }
  return found;
}

}  // namespace

TEST_CASE("perf and gdb are told the names of kernels while they live") {
  Machine machine;
  const std::string text = "kernel @k0_relu_add(out y: ptr f32) symbols () chunks 1 scratch 0\n  a: f32 = constant 41.5\n  store y[0] = a\n";
  machine.compile(text);
  CHECK(functions_for_debuggers().empty());
  machine.options.debug = true;
  auto kernel = machine.compile(text);
  auto functions = functions_for_debuggers();
  REQUIRE(functions.size() == 1);
  auto [name, address] = *functions.begin();
  CHECK_THAT(name, Catch::StartsWith("deplo_k0_relu_add_"));
  CHECK(address == reinterpret_cast<uint64_t>(kernel->function()));
  std::string path = fmt::format("/tmp/perf-{}.map", getpid());
  std::ifstream map(path);
  std::string lines((std::istreambuf_iterator<char>(map)), {});
  CHECK_THAT(lines, Catch::StartsWith(fmt::format("{:x} ", address)) && Catch::EndsWith(" " + name + "\n"));
  std::filesystem::remove(path);
  kernel = nullptr;
  forget_unused_kernels();
  CHECK(functions_for_debuggers().empty());
}

TEST_CASE("equal kernels under different names compile once") {
  std::string body = "(x: ptr f32, out y: ptr f32) symbols () chunks 1 scratch 0\n  a: f32 = load x[0]\n  b: f32 = add(a, a)\n  store y[0] = b\n";
  auto module = kernel_ir::parse("kernel @first" + body + "\nkernel @second" + body);
  Machine machine;
  auto kernels = compile_cpu_kernels(module.kernels, machine.context, machine.options, &machine.stats);
  CHECK(machine.stats.compiled == 1);
  CHECK(kernels[0] == kernels[1]);
}

namespace {

/// Random straight-line kernels over vectors of every dtype, as text.
class RandomKernel {
 public:
  static constexpr int kCount = 64;  ///< elements of each input
  static const std::vector<DType>& dtypes() {
    static const std::vector<DType> all{DType::boolean, DType::u8,  DType::i8,   DType::i16, DType::i32,
                                        DType::i64,     DType::f16, DType::bf16, DType::f32, DType::f64};
    return all;
  }

  RandomKernel(uint32_t seed, int lanes) : random_(seed), lanes_(lanes) {
    for (DType d : dtypes()) {
      params_ += fmt::format("in_{0}: ptr {0}, out out_{0}: ptr {0}, ", to_string(d));
      line("{}: {} = load in_{}[{}]", fresh(d), type(d), to_string(d), below(kCount - lanes));
      line("{}: {} = load in_{}[{}] stride {}", fresh(d), type(d), to_string(d), below(8), below(kCount / lanes - 1));
    }
    line("{}: boolx{} = first {}", fresh(DType::boolean), lanes, below(lanes + 2));
    line("gather: i64x{} = index {} step {}", lanes, kCount - 1, -static_cast<int>(below(kCount / lanes)));
    for (int k = 0; k < 60; ++k) statement();
    // Every value is seen: all of them are stored.
    for (DType d : dtypes())
      for (size_t k = 0; k < names_[d].size(); ++k) line("store out_{}[{}] = {}", to_string(d), k * static_cast<size_t>(lanes), names_[d][k]);
  }

  std::string text() const {
    return fmt::format("kernel @random({}) symbols () chunks 1 scratch 0\n{}", params_.substr(0, params_.size() - 2), body_);
  }

 private:
  uint32_t below(int n) { return static_cast<uint32_t>(random_() % static_cast<uint32_t>(n)); }
  std::string type(DType d) const { return fmt::format("{}x{}", to_string(d), lanes_); }
  std::string any(DType d) { return names_[d][below(static_cast<int>(names_[d].size()))]; }
  DType any_dtype() { return dtypes()[below(static_cast<int>(dtypes().size()))]; }
  std::string fresh(DType d) {
    names_[d].push_back(fmt::format("v{}", next_++));
    return names_[d].back();
  }
  template <class... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    body_ += "  " + fmt::format(format, std::forward<Args>(args)...) + "\n";
  }

  void statement() {
    DType d = any_dtype();
    switch (below(8)) {
      case 0: {
        std::string other = any(d);
        std::string mask = any(DType::boolean);
        line("{}: {} = load in_{}[0] gather gather mask {} else {}", fresh(d), type(d), to_string(d), mask, other);
        return;
      }
      case 1: {
        std::string a = any(d);
        std::string b = any(d);
        std::string lanes;
        for (int l = 0; l < lanes_; ++l) lanes += fmt::format("{}{}", l ? ", " : "", below(2 * lanes_));
        line("{}: {} = shuffle {}, {} [{}]", fresh(d), type(d), a, b, lanes);
        return;
      }
      case 2: {
        DType to = any_dtype();
        std::string a = any(d);
        line("{}: {} = cast({})", fresh(to), type(to), a);
        return;
      }
      case 3: {
        std::string a = any(d);
        std::string scalar = fmt::format("s{}", next_++);
        line("{}: {} = lanes {}({})", scalar, to_string(d), below(2) ? "max" : "min", a);
        line("{}: {} = splat {}", fresh(d), type(d), scalar);
        return;
      }
      default: apply(d);
    }
  }

  void apply(DType d) {
    // Those that round once, whatever computes them; libm's and the expanded ones have tests with tolerances.
    static const std::vector<std::string> any_dtype_functions{"min", "max", "eq", "ne", "lt", "le", "gt", "ge", "where"};
    static const std::vector<std::string> floating{"add",  "sub",   "mul",   "div",  "neg",      "abs",     "sqrt",     "floor",
                                                   "ceil", "trunc", "round", "fmod", "copysign", "signbit", "remainder"};
    static const std::vector<std::string> integral{"add",     "sub",    "mul",     "neg", "abs", "trunc_div", "floor_div", "fmod",   "remainder",
                                                   "bit_and", "bit_or", "bit_xor", "shl", "shr", "bit_not",   "pow",       "signbit"};
    std::vector<std::string> choice = any_dtype_functions;
    const auto& more = is_float(d) ? floating : integral;
    choice.insert(choice.end(), more.begin(), more.end());
    Fn fn = *parse_fn(choice[below(static_cast<int>(choice.size()))]);
    if (d == DType::boolean && (fn == Fn::shl || fn == Fn::shr)) return;  // PyTorch has no such shift
    std::vector<DType> operands(static_cast<size_t>(info(fn).arity), d);
    if (fn == Fn::where) operands[0] = DType::boolean;
    DType result = info(fn).signature == Signature::predicate ? DType::boolean : d;
    if (!type_error(fn, result, operands.data(), static_cast<int>(operands.size())).empty()) return;
    std::string arguments;
    for (DType o : operands) arguments += (arguments.empty() ? "" : ", ") + any(o);
    line("{}: {} = {}({})", fresh(result), type(result), to_string(fn), arguments);
  }

  std::mt19937 random_;
  int lanes_;
  int next_ = 0;
  std::string params_;
  std::string body_;
  std::map<DType, std::vector<std::string>> names_;
};

/// Values with every special one among them.
Array random_array(DType dtype, int count, std::mt19937& random) {
  Array a = Array::zeros(dtype, {count});
  const std::vector<double> specials{0.0,   -0.0, 1,    -1,   INFINITY,     -INFINITY,     NAN, 1e-40,
                                     65504, 3e9,  -3e9, 1e19, 2147483648.0, -2147483649.0, 0.5, 2.5};
  for (int k = 0; k < count; ++k) {
    if (is_float(dtype)) {
      double v = random() % 4 == 0 ? specials[random() % specials.size()] : static_cast<double>(static_cast<int>(random() % 20001) - 10000) / 64;
      a.set(k, Scalar::of_float(dtype, v));
    } else if (dtype == DType::boolean) {
      a.set(k, Scalar::of_int(dtype, static_cast<int64_t>(random() % 2)));
    } else {
      auto v = static_cast<int64_t>((static_cast<uint64_t>(random()) << 32) | random());
      a.set(k, Scalar::of_int(dtype, random() % 2 ? v : static_cast<int64_t>(random() % 40) - 20));
    }
  }
  return a;
}

std::vector<char> to_bytes(const Array& a) {
  std::vector<char> bytes(static_cast<size_t>(a.count() * size_of(a.dtype)));
  auto put = [&](int64_t k, auto v) { std::memcpy(&bytes[static_cast<size_t>(k) * sizeof v], &v, sizeof v); };
  for (int64_t k = 0; k < a.count(); ++k) {
    Scalar s = a.get(k);
    switch (a.dtype) {
      case DType::f64: put(k, s.f); break;
      case DType::f32: put(k, static_cast<float>(s.f)); break;
      case DType::f16: put(k, f32_to_f16(static_cast<float>(s.f))); break;
      case DType::bf16: put(k, f32_to_bf16(static_cast<float>(s.f))); break;
      default: std::memcpy(&bytes[static_cast<size_t>(k * size_of(a.dtype))], &s.i, static_cast<size_t>(size_of(a.dtype)));
    }
  }
  return bytes;
}

/// The element as bits; all NaNs are one.
uint64_t canonical_bits(const std::vector<char>& bytes, DType dtype, int64_t k) {
  uint64_t bits = 0;
  auto size = static_cast<size_t>(size_of(dtype));
  std::memcpy(&bits, &bytes[static_cast<size_t>(k) * size], size);
  bool nan = false;
  if (dtype == DType::f64) nan = std::isnan(__builtin_bit_cast(double, bits));
  if (dtype == DType::f32) nan = std::isnan(__builtin_bit_cast(float, static_cast<uint32_t>(bits)));
  if (dtype == DType::f16) nan = std::isnan(f16_to_f32(static_cast<uint16_t>(bits)));
  if (dtype == DType::bf16) nan = std::isnan(bf16_to_f32(static_cast<uint16_t>(bits)));
  return nan ? ~0ULL : bits;
}

void compare_with_interpreter(Machine& machine, const std::string& text, uint32_t seed) {
  auto module = kernel_ir::parse(text);
  verify(module);
  const auto& kernel = *module.kernels[0];
  std::mt19937 random(seed);
  std::vector<Array> arrays;
  for (const auto& p : kernel.params)
    arrays.push_back(p.kind == loop_ir::ParamKind::in ? random_array(p.dtype, RandomKernel::kCount, random) : Array::zeros(p.dtype, {4096}));
  std::vector<std::vector<char>> memory;
  std::vector<void*> buffers;
  std::vector<Array*> pointers;
  for (Array& a : arrays) {
    memory.push_back(to_bytes(a));
    pointers.push_back(&a);
  }
  for (auto& m : memory) buffers.push_back(m.data());
  bool division = false;
  try {
    interpret(kernel, pointers, {}, Mode::typed);
  } catch (const ExecutionError&) {
    division = true;
  }
  machine.run(text, buffers);
  CHECK((machine.error != 0) == division);
  for (size_t p = 0; p < arrays.size(); ++p) {
    auto wanted = to_bytes(arrays[p]);
    DType dtype = arrays[p].dtype;
    for (int64_t k = 0; k < arrays[p].count(); ++k)
      if (canonical_bits(memory[p], dtype, k) != canonical_bits(wanted, dtype, k))
        FAIL(fmt::format("{}[{}] is {:x}, the interpreter says {:x}", kernel.params[p].name, k, canonical_bits(memory[p], dtype, k),
                         canonical_bits(wanted, dtype, k)));
  }
}

}  // namespace

TEST_CASE("compiled random kernels agree with the interpreter bit by bit on every instruction set") {
  for (const std::string& features : feature_sets()) {
    Machine machine(features);
    for (uint32_t seed = 0; seed < 24; ++seed) {
      int lanes = 4 << (seed % 3);
      std::string text = RandomKernel(seed, lanes).text();
      INFO(features << " seed " << seed << "\n" << text);
      compare_with_interpreter(machine, text, seed);
    }
  }
}
