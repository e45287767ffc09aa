#include "schedule/schedule.h"

#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "base/error.h"
#include "loop_ir/interpret.h"
#include "loop_ir/ir.h"
#include "lower/lower.h"
#include "tile_ir/interpret.h"
#include "tile_ir/ir.h"

using namespace deplo;

namespace {

using Symbols = std::map<std::string, int64_t>;

std::vector<Array> random_inputs(const ProgramBody& program, const Symbols& symbols) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<double> real(-2, 2);
  std::vector<Array> inputs;
  for (const Buffer& b : program.buffers) {
    if (b.kind != BufferKind::input) continue;
    Array a = Array::zeros(b.dtype, evaluate_shape(b.shape, symbols));
    for (double& x : a.floats) x = real(rng);
    for (int64_t& x : a.ints) x = static_cast<int64_t>(rng() % 3);
    inputs.push_back(std::move(a));
  }
  return inputs;
}

void check_equal(const std::vector<Array>& got, const std::vector<Array>& expected) {
  REQUIRE(got.size() == expected.size());
  for (size_t k = 0; k < got.size(); ++k) {
    REQUIRE(got[k].shape == expected[k].shape);
    int64_t wrong = 0;
    for (int64_t i = 0; i < got[k].count(); ++i) {
      double x = got[k].get(i).as_double();
      double y = expected[k].get(i).as_double();
      bool same = x == y || (std::isnan(x) && std::isnan(y)) || std::abs(x - y) <= 1e-9 * (1 + std::abs(y));
      if (!same && wrong++ < 3) FAIL_CHECK("output " << k << " at " << i << ": " << x << ", expected " << y);
    }
    CHECK(wrong == 0);
  }
}

/// One number of the schedule is another, or one operand is packed elsewhere.
Schedule mutated(Schedule schedule, std::mt19937& rng) {
  const int64_t numbers[] = {1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96};
  std::vector<Argument*> places;
  for (Directive& d : schedule.directives)
    for (Argument& a : d.arguments)
      if (a.value.index() != 0) places.push_back(&a);
  if (places.empty()) return schedule;
  Argument& a = *places[rng() % places.size()];
  if (auto* number = std::get_if<int64_t>(&a.value))
    *number = numbers[rng() % std::size(numbers)];
  else
    a.value = std::string(rng() % 2 == 0 ? "program" : "block");
  return schedule;
}

// Of each schedule: fewer under sanitizers, where the interpreters take twenty times as long.
#ifdef __SANITIZE_ADDRESS__
constexpr int kMutations = 1;
#else
constexpr int kMutations = 3;
#endif

struct Mutations {
  int applied = 0;
  int refused = 0;
} mutations;

/// Schedules that differ from those proposed either do not fit or give the same numbers.
void check_mutations(const loop_ir::Module& module, const tile_ir::Module& tiled, PassContext context, const std::vector<Array>& inputs,
                     const Symbols& symbols, const std::vector<Array>& expected, std::mt19937& rng, int count) {
  for (const auto& kernel : tiled.kernels) {
    if (kernel->schedule.kind == "pack") continue;
    Schedule schedule = kernel->schedule;
    for (int i = 0; i < count; ++i) {
      Schedule changed = mutated(schedule, rng);
      REQUIRE(parse_schedule(print(changed)) == changed);
      INFO(print(changed));
      context.schedules = {{kernel->name, print(changed)}};
      tile_ir::Module given;
      try {
        given = lower_loop_to_tile(module, context);
      } catch (const UserError&) {
        ++mutations.refused;
        continue;
      }
      ++mutations.applied;
      schedule = changed;
      REQUIRE(given.find_kernel(kernel->name)->schedule == changed);
      tile_ir::verify(given);
      check_equal(tile_ir::interpret(given, inputs, symbols, Mode::exact), expected);
    }
  }
}

/// Schedules the module for machines of three vector widths and compares what it computes; returns the schedule of the last kernel.
std::string check_schedules(const std::string& text, const Symbols& symbols = {}, const SizeHints& hints = {}, int count = kMutations) {
  loop_ir::Module module = loop_ir::parse(text);
  loop_ir::verify(module);
  std::vector<Array> inputs = random_inputs(module, symbols);
  std::vector<Array> expected = loop_ir::interpret(module, inputs, symbols, Mode::exact);
  std::string schedule;
  std::mt19937 rng(3);
  for (int bytes : {16, 32, 64}) {
    PassContext context;
    context.target.vector_bytes = bytes;
    context.target.vector_registers = bytes == 64 ? 32 : 16;
    context.hints = hints;
    tile_ir::Module tiled = lower_loop_to_tile(module, context);
    INFO(tile_ir::print(tiled));
    tile_ir::verify(tiled);
    CHECK(tile_ir::parse(tile_ir::print(tiled)) == tiled);
    check_equal(tile_ir::interpret(tiled, inputs, symbols, Mode::exact), expected);
    for (const auto& kernel : tiled.kernels) {
      CHECK(parse_schedule(print(kernel->schedule)) == kernel->schedule);
      CHECK(hash(parse_schedule(print(kernel->schedule))) == hash(kernel->schedule));
    }
    check_mutations(module, tiled, context, inputs, symbols, expected, rng, count);
    schedule = print(tiled.kernels.back()->schedule);
  }
  return schedule;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string matmul(const std::string& m, int n, int k, const std::string& w_kind, bool transposed, const std::string& where) {
  std::string w = transposed ? fmt::format("f32[{}, {}]", n, k) : fmt::format("f32[{}, {}]", k, n);
  return fmt::format(R"(program @linear(x: f32[{0}, {2}] user, w: {3} {4}, b: f32[{1}] user){7}
  buffer y: f32[{0}, {1}] output
  call @k0(x, w, b, y)
  return y

loop @k0(x: f32[{0}, {2}], w: {3}{5}, b: f32[{1}], out y: f32[{0}, {1}]){7}
  for i in {0}:
    for n in {1}:
      reduce c: f32 = sum(p) over k in {2}:
        p0 = load x[i, k]
        p1 = load w[{6}]
        p = mul(p0, p1)
      d = load b[n]
      e = add(c, d)
      store y[i, n] = e
)",
                     m, n, k, w, w_kind, contains(w_kind, "static") ? " static" : "", transposed ? "n, k" : "k, n", where);
}

}  // namespace

TEST_CASE("scheduled pointwise and reduction kernels give their numbers") {
  check_schedules(R"(program @p(x: f32[3, s0, 5] user, y: f32[5] user) where s0 in 0..
  buffer z: f32[3, s0, 5] output
  call @k0(x, y, z)
  return z

loop @k0(x: f32[3, s0, 5], y: f32[5], out z: f32[3, s0, 5]) where s0 in 0..
  for a in 3:
    for b in s0:
      for c in 5:
        u = load x[a, b, c]
        v = load y[c]
        w = add(u, v)
        store z[a, b, c] = w
)",
                  {{"s0", 7}});
  check_schedules(R"(program @p(x: f32[6, 70] user)
  buffer y: f32[70] output
  call @k0(x, y)
  return y

loop @k0(x: f32[6, 70], out y: f32[70])
  for j in 70:
    reduce s: f32 = sum(a) over i in 6:
      a = load x[i, j]
    store y[j] = s
)");
  check_schedules(R"(program @p(x: f32[5, 37] user)
  buffer v: f32[5] output
  buffer n: i64[5] output
  buffer m: f32[5] output
  buffer q: f32[5] output
  buffer t: f32[5, 37] output
  call @k0(x, v, n, m, q, t)
  return v, n, m, q, t

loop @k0(x: f32[5, 37], out v: f32[5], out n: i64[5], out m: f32[5], out q: f32[5], out t: f32[5, 37])
  for i in 5:
    reduce a: f32, b: i64 = argmax(e, j0) over j in 37:
      e = load x[i, j]
      j0: i64 = index j
    reduce mean: f32, m2: f32 = welford(f) over j in 37:
      f = load x[i, j]
    scan r: f32 = sum(g) over j in 37:
      g = load x[i, j]
    then:
      store t[i, j] = r
    store v[i] = a
    store n[i] = b
    store m[i] = mean
    store q[i] = m2
)");
  check_schedules(R"(program @p(x: f32[9, 4] user, idx: i64[9] user)
  buffer y: f32[3, 4] output
  call @zero(y)
  call @k0(x, idx, y)
  return y

loop @zero(out y: f32[3, 4])
  for i in 3:
    for j in 4:
      z: f32 = constant 0.0
      store y[i, j] = z

loop @k0(x: f32[9, 4], idx: i64[9], inout y: f32[3, 4])
  for i in 9:
    for j in 4:
      k = load idx[i]
      check k >= 0 else index_out_of_range
      v = load x[i, j]
      store sum y[k, j] = v if k >= 0 and -k + 2 >= 0
)");
  check_schedules(R"(program @p(x: f32[] user)
  buffer y: f32[] output
  call @k0(x, y)
  return y

loop @k0(x: f32[], out y: f32[])
  a = load x[]
  b = exp(a)
  store y[] = b
)");
}

TEST_CASE("scheduled contractions give their numbers") {
  for (bool transposed : {false, true})
    for (const char* kind : {"user", "parameter static"}) {
      CHECK(contains(check_schedules(matmul("13", 37, 19, kind, transposed, "")), "contract"));
      check_schedules(matmul("32", 40, 24, kind, transposed, ""));
      check_schedules(matmul("3", 50, 90, kind, transposed, ""));
      for (int64_t s : {2, 6, 17, 101}) check_schedules(matmul("s0", 33, 20, kind, transposed, " where s0 in 0.."), {{"s0", s}});
      check_schedules(matmul("7", 20, 1100, kind, transposed, ""));
    }
}

TEST_CASE("scheduled batched and gated contractions give their numbers") {
  check_schedules(R"(program @bmm(x: f32[2, 3, 20, 16] user, y: f32[2, 3, 24, 16] user)
  buffer z: f32[2, 3, 20, 24] output
  call @k0(x, y, z)
  return z

loop @k0(x: f32[2, 3, 20, 16], y: f32[2, 3, 24, 16], out z: f32[2, 3, 20, 24])
  for b in 2:
    for h in 3:
      for i in 20:
        for j in 24:
          reduce c: f32 = sum(p) over k in 16:
            p0 = load x[b, h, i, k]
            p1 = load y[b, h, j, k]
            p = mul(p0, p1)
          store z[b, h, i, j] = c
)");
  check_schedules(R"(program @gate(x: f32[s0, 32] user, wg: f32[48, 32] parameter static, wu: f32[48, 32] parameter static) where s0 in 2..
  buffer z: f32[s0, 48] output
  call @k0(x, wg, wu, z)
  return z

loop @k0(x: f32[s0, 32], wg: f32[48, 32] static, wu: f32[48, 32] static, out z: f32[s0, 48]) where s0 in 2..
  for i in s0:
    for n in 48:
      reduce g: f32 = sum(p) over k in 32:
        p0 = load x[i, k]
        p1 = load wg[n, k]
        p = mul(p0, p1)
      reduce u: f32 = sum(q) over l in 32:
        q0 = load x[i, l]
        q1 = load wu[n, l]
        q = mul(q0, q1)
      e = neg(g)
      f = exp(e)
      h = mul(f, u)
      store z[i, n] = h
)",
                  {{"s0", 11}});
}

TEST_CASE("a scheduled convolution gives its numbers") {
  for (const char* kind : {"user", "parameter static"})
    for (int stride : {1, 2}) {
      int out = stride == 1 ? 11 : 6;
      std::string schedule = check_schedules(fmt::format(R"(program @conv(x: f32[2, 5, 11, 11] user, w: f32[30, 5, 3, 3] {0}, b: f32[30] user)
  buffer y: f32[2, 30, {2}, {2}] output
  call @k0(x, w, b, y)
  return y

loop @k0(x: f32[2, 5, 11, 11], w: f32[30, 5, 3, 3]{3}, b: f32[30], out y: f32[2, 30, {2}, {2}])
  for n in 2:
    for o in 30:
      for h in {2}:
        for v in {2}:
          reduce c: f32 = sum(p) over i in 5, kh in 3, kw in 3:
            p0 = load x[n, i, h*{1} + kh - 1, v*{1} + kw - 1] if h*{1} + kh - 1 >= 0 and -h*{1} - kh + 11 >= 0 and v*{1} + kw - 1 >= 0 and -v*{1} - kw + 11 >= 0 else 0.0
            p1 = load w[o, i, kh, kw]
            p = mul(p0, p1)
          d = load b[o]
          e = add(c, d)
          store y[n, o, h, v] = e
)",
                                                         kind, stride, out, std::string(kind) == "user" ? "" : " static"),
                                             {}, {}, 3);
      CHECK(contains(schedule, "windows") == (std::string(kind) != "user"));
    }
}

TEST_CASE("windows of any stride, dilation and size give their numbers") {
  struct Shape {
    int rows, columns, stride, dilation, taps;
  };
  // A weighted sum and a maximum of the same neighbours, and what follows from both.
  auto windows = [](const Shape& s, bool last, const std::string& size, const std::string& where) {
    const std::string rows = size.empty() ? std::to_string(s.rows) : size;
    const int below = (s.taps - 1) * s.dilation;
    const int pad = below / 2;
    const int columns = s.columns * s.stride + below - 2 * pad;
    const std::string height = fmt::format("{}*{} + {}", rows, s.stride, below - 2 * pad);
    const std::string i = fmt::format("i*{} + k*{} - {}", s.stride, s.dilation, pad);
    const std::string j = fmt::format("j*{} + l*{} - {}", s.stride, s.dilation, pad);
    const std::string guard = fmt::format("{0} >= 0 and {1} >= 0 and {2} - ({0}) > 0 and {3} - ({1}) > 0", i, j, height, columns);
    const std::string x = last ? fmt::format("n, {}, {}, c", i, j) : fmt::format("n, c, {}, {}", i, j);
    const std::string y = last ? "n, i, j, c" : "n, c, i, j";
    auto shape = [&](const std::string& h, int w) { return last ? fmt::format("2, {}, {}, 19", h, w) : fmt::format("2, 19, {}, {}", h, w); };
    auto loops = last ? std::array<std::string, 3>{"i in " + rows, fmt::format("j in {}", s.columns), "c in 19"}
                      : std::array<std::string, 3>{"c in 19", "i in " + rows, fmt::format("j in {}", s.columns)};
    return fmt::format(R"(loop @k(x: f32[{0}], w: f32[19, {1}, {1}], b: f32[19], out y: f32[{2}]){3}
  for n in 2:
    for {4}:
      for {5}:
        for {6}:
          g = load b[c]
          reduce s: f32 = sum(p) over k in {1}, l in {1}:
            a = load x[{7}] if {8} else 0.0
            q = add(a, g)
            f = load w[c, k, l]
            p = mul(q, f)
          reduce m: f32 = max(e) over k in {1}, l in {1}:
            e = load x[{7}] if {8} else -inf
          d = sub(m, s)
          o = mul(d, g)
          store y[{9}] = o
)",
                       shape(height, columns), s.taps, shape(rows, s.columns), where, loops[0], loops[1], loops[2], x, guard, y);
  };
  for (bool last : {false, true}) {
    for (const Shape& s : {Shape{6, 40, 1, 1, 3}, Shape{11, 37, 2, 1, 3}, Shape{13, 21, 1, 2, 3}, Shape{9, 18, 3, 2, 5}, Shape{12, 7, 2, 1, 2}})
      CHECK(contains(check_schedules(windows(s, last, "", "")), "window("));
    for (int64_t rows : {1, 2, 7, 29}) check_schedules(windows({0, 20, 2, 1, 3}, last, "s0", " where s0 in 1.."), {{"s0", rows}}, {{"s0", 16}}, 1);
  }
}

TEST_CASE("scheduled attention gives its numbers") {
  auto attention = [](const std::string& s, const std::string& where) {
    return fmt::format(R"(program @attention(q: f32[2, {0}, 16] user, k: f32[2, {0}, 16] user, v: f32[2, {0}, 16] user){1}
  buffer o: f32[2, {0}, 16] output
  call @k0(q, k, v, o)
  return o

loop @k0(q: f32[2, {0}, 16], k: f32[2, {0}, 16], v: f32[2, {0}, 16], out o: f32[2, {0}, 16]){1}
  for h in 2:
    for i in {0}:
      local t: f32[{0}]
      half: f32 = constant 0.25
      for j in {0}:
        reduce c: f32 = sum(p) over d in 16:
          p0 = load q[h, i, d]
          p1 = load k[h, j, d]
          p = mul(p0, p1)
        g = mul(c, half)
        n: f32 = constant -inf
        z: i64 = index i - j
        zero: i64 = constant 0
        keep = ge(z, zero)
        w = where(keep, g, n)
        store t[j] = w
      reduce m: f32 = max(a) over j in {0}:
        a = load t[j]
      reduce l: f32 = sum(e) over j in {0}:
        a = load t[j]
        b = sub(a, m)
        e = exp(b)
      for d in 16:
        reduce c: f32 = sum(p) over j in {0}:
          a = load t[j]
          b = sub(a, m)
          e = exp(b)
          p1 = load v[h, j, d]
          p = mul(e, p1)
        r = div(c, l)
        store o[h, i, d] = r
)",
                       s, where);
  };
  CHECK(contains(check_schedules(attention("40", "")), "rows"));
  for (int64_t s : {2, 31, 77}) check_schedules(attention("s0", " where s0 in 2.."), {{"s0", s}}, {{"s0", 64}});
}

TEST_CASE("columns run each loop before the next, in any schedule") {
  auto columns = [](const std::string& size, const std::string& where) {
    return fmt::format(R"(loop @k(x: f32[24, {0}], m: bool[{0}], out y: f32[24, {0}], out z: f64[{0}]){1}
  for i in {0}:
    local t: f32[24]
    keep = load m[i]
    reduce h: f32 = max(a) over k in 24:
      a = load x[k, i]
    for j in 24:
      b = load x[j, i]
      d = sub(b, h)
      e = exp(d)
      w = where(keep, e, b)
      store t[j] = w
    reduce s: f64 = sum(g) over l in 24:
      f = load t[l]
      g: f64 = cast(f)
    r = sqrt(s)
    store z[i] = r
    c: f32 = cast(r)
    for o in 24:
      reduce n: f32 = sum(u) over p in 3:
        u = load t[o + p - 1] if o + p - 1 >= 0 and 24 - o - p >= 0 else 0.0
      q = div(n, c)
      v = where(keep, q, n)
      store y[o, i] = v
)",
                       size, where);
  };
  CHECK(contains(check_schedules(columns("40", "")), "vectorize(i"));
  for (int64_t s : {2, 31, 77}) check_schedules(columns("s0", " where s0 in 2.."), {{"s0", s}}, {{"s0", 64}});
}

// Any change of a heuristic shows here; whether it is for the better, benchmarks say.
TEST_CASE("what is proposed follows extents and strides") {
  auto proposed = [](const std::string& text) {
    PassContext context;
    return print(lower_loop_to_tile(loop_ir::parse(text), context).kernels.back()->schedule);
  };
  auto reduced = [&](const std::string& shape, const std::string& out, const std::string& loops, int terms, const std::string& index) {
    return proposed(fmt::format(R"(loop @k(x: f32[{}], out y: f32[{}])
{}      reduce s: f32 = sum(a) over j in {}:
        a = load x[{}]
      store y[{}] = s
)",
                                shape, out, loops, terms, index, out.find(',') == std::string::npos ? "i" : "i, k"));
  };
  auto rows = [&](int n) { return reduced(fmt::format("1000, {}", n), "1000", "  for i in 1000:\n", n, "i, j"); };
  CHECK(rows(256) == "nest parallel(i, work=32768) vectorize(j, by=4)");
  CHECK(rows(24) == "nest parallel(i, work=32768) vectorize(j, by=4)");
  CHECK(rows(5) == "nest parallel(i, work=32768) vectorize(j, by=4)");
  CHECK(rows(2) == "nest parallel(i, work=32768) tile(i=64) vectorize(i, by=8)");
  CHECK(reduced("256, 1000", "1000", "  for i in 1000:\n", 256, "j, i") == "nest parallel(i, work=32768) tile(i=64) vectorize(i, by=8)");
  CHECK(reduced("64, 48, 40", "64, 40", "  for i in 64:\n    for k in 40:\n", 48, "i, j, k") == "nest parallel(i, work=32768) vectorize(k, by=8)");
  CHECK(reduced("64, 40, 48", "64, 40", "  for i in 64:\n    for k in 40:\n", 48, "i, k, j") == "nest parallel(i_k, work=32768) vectorize(j, by=4)");
  CHECK(reduced("64, 40, 3", "64, 40", "  for i in 64:\n    for k in 40:\n", 3, "i, k, j") ==
        "nest parallel(i_k, work=32768) tile(i_k=64) vectorize(i_k, by=8)");
  const std::string grid = "  for i in 64:\n    for k in 40:\n";
  CHECK(reduced("64, 42", "64, 40", grid, 3, "i, k + j") == "nest parallel(i, work=32768) tile(i=5) window(i=1) vectorize(k)");
  CHECK(reduced("66, 44", "64, 40", grid, 3, "i + j, k") == "nest parallel(i, work=32768) tile(i=8) window(i=4) vectorize(k)");
  auto product = [&](const char* m, int n, int k, const char* kind) { return proposed(matmul(m, n, k, kind, false, "")); };
  CHECK(product("1", 512, 512, "parameter static") ==
        "contraction parallel(n, i, work=65536) tile(i=1) tile(n=256) vectorize(n) register_block(i=1, n=16) tile(c.k=512) chain(c.k=128) "
        "unroll(c.k=4) pack(c.lanes, at=program) pack(c.rows, at=block, pad=16)");
  CHECK(product("7", 33, 96, "parameter static") ==
        "contraction parallel(n, i, work=65536) tile(i=8) tile(n=48) vectorize(n) register_block(i=4, n=16) tile(c.k=96) chain(c.k=32) unroll(c.k=4) "
        "pack(c.lanes, "
        "at=program) pack(c.rows, at=block, pad=16) epilogue(registers)");
  CHECK(product("300", 300, 300, "parameter static") ==
        "contraction parallel(n, i, work=65536) tile(i=78) tile(n=160) vectorize(n) register_block(i=6, n=16) tile(c.k=300) chain(c.k=100) "
        "unroll(c.k=4) pack(c.lanes, at=program) pack(c.rows, at=block, pad=16)");
  CHECK(product("300", 300, 300, "user") ==
        "contraction parallel(n, i, work=65536) tile(i=150) tile(n=160) vectorize(n) register_block(i=6, n=16) tile(c.k=152) chain(c.k=76) "
        "unroll(c.k=4) pack(c.lanes, at=block) pack(c.rows, at=block, pad=16)");
  CHECK(product("2000", 2000, 16, "user") ==
        "contraction parallel(n, i, work=65536) tile(i=252) tile(n=256) vectorize(n) register_block(i=6, n=16) tile(c.k=16) unroll(c.k=4) "
        "pack(c.lanes, at=block) pack(c.rows, at=block, pad=16) epilogue(registers)");
  auto convolution = [&](int channels, int size, int stride) {
    int out = (size - 3) / stride + 1;
    return proposed(fmt::format(R"(program @conv(x: f32[2, {0}, {1}, {1}] user, w: f32[32, {0}, 3, 3] parameter static)
  buffer y: f32[2, 32, {2}, {2}] output
  call @k0(x, w, y)
  return y

loop @k0(x: f32[2, {0}, {1}, {1}], w: f32[32, {0}, 3, 3] static, out y: f32[2, 32, {2}, {2}])
  for n in 2:
    for o in 32:
      for h in {2}:
        for v in {2}:
          reduce c: f32 = sum(p) over i in {0}, kh in 3, kw in 3:
            p0 = load x[n, i, h*{3} + kh, v*{3} + kw]
            p1 = load w[o, i, kh, kw]
            p = mul(p0, p1)
          store y[n, o, h, v] = c
)",
                                channels, size, out, stride));
  };
  CHECK(convolution(16, 34, 1) ==
        "contraction parallel(n, h, o, work=65536) tile(h=8) tile(o=32) vectorize(o) register_block(h=1, v=6, o=16) tile(c.i*kh*kw=144) "
        "unroll(c.i*kh*kw=3) pack(c.lanes, at=program) pack(c.rows, at=block, windows)");
  CHECK(convolution(64, 58, 1) ==
        "contraction parallel(n, h, o, work=65536) tile(h=4) tile(o=32) vectorize(o) register_block(h=1, v=6, o=16) tile(c.i*kh*kw=288) "
        "chain(c.i*kh*kw=99) unroll(c.i*kh*kw=3) pack(c.lanes, at=program) pack(c.rows, at=block, windows)");
  CHECK(convolution(16, 67, 2) ==
        "contraction parallel(n, h, o, work=65536) tile(h=7) tile(o=32) vectorize(o) register_block(h=1, v=6, o=16) tile(c.i*kh*kw=144) "
        "unroll(c.i*kh*kw=3) pack(c.lanes, at=program) pack(c.rows, at=block, windows)");
  CHECK(convolution(3, 9, 1) ==
        "contraction parallel(n, o, h, work=65536) tile(h=7) tile(o=16) vectorize(o) register_block(h=1, v=4, o=16) tile(c.i*kh*kw=27) "
        "unroll(c.i*kh*kw=3) pack(c.lanes, at=program) pack(c.rows, at=block, windows)");
}

TEST_CASE("schedules that were changed at random fit or are refused") {
  mutations = {};
  check_schedules(matmul("7", 21, 11, "parameter static", false, ""), {}, {}, 6);
  check_schedules(matmul("s0", 20, 9, "user", true, " where s0 in 0.."), {{"s0", 5}}, {}, 6);
  CHECK(mutations.applied > 5);
  CHECK(mutations.refused > 1);
}

TEST_CASE("schedules that do not fit are refused with what is allowed") {
  loop_ir::Module module = loop_ir::parse(matmul("13", 37, 19, "user", false, ""));
  auto refused = [&](const std::string& kernel, const std::string& text, const std::string& message) {
    PassContext context;
    context.schedules = {{kernel, text}};
    INFO(text);
    CHECK_THROWS_AS(lower_loop_to_tile(module, context), UserError);
    try {
      lower_loop_to_tile(module, context);
    } catch (const UserError& error) {
      INFO(error.what());
      CHECK(contains(error.what(), message));
    }
  };
  tile_ir::Module tiled = lower_loop_to_tile(module, {});
  const std::string text = print(tiled.kernels.back()->schedule);
  auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    REQUIRE(contains(text, from));
    return changed.replace(changed.find(from), from.size(), to);
  };
  refused("k7", text, "a schedule is given for kernel k7, which the program does not have; its kernels are k0");
  refused("", text, "names no kernel");
  refused("", "schedule @k1: " + text, "k1");
  refused("k0", with("vectorize(n)", "vectorize(i)"), "packed at=program; allowed otherwise: n");
  refused("k0", with("unroll(c.k=4)", "unroll(c.k=0)"), "unroll(c.k=0): c.k is allowed to be a number from 1 to");
  refused("k0", with("unroll(c.k=4)", "unroll(c.j=4)"), "it needs 'unroll(c.k...)'");
  refused("k0", with("pack(c.lanes, at=block)", "pack(c.lanes, at=program)"), "changes from call to call");
  refused("k0", with("register_block(i=5", "register_block(i=60"), "at most 64 are allowed on a machine of 16 vector registers");
  refused("k0", with("tile(i=15)", "tile(i=16)"), "multiples of the register block's 5");
  refused("k0", text + " stage(x)", "it does not fit a contraction schedule");
  refused("k0", "gpu_points threads(256)", "unknown kind");
  refused("k0", "rows parallel(i, n) tile(n=8)", "hold no contraction");
  refused("k0", "contraction tile(", "expected");
  refused("k0", "nest parallel(i, q, work=8) vectorize(n)", "there is no axis q; allowed: i, n");
  refused("k0", "nest parallel(i, work=8)", "n is missing");
  refused("k0", "nest parallel(i, work=8) window(i=4) vectorize(n)", "i is the axis of the windows; allowed: its tiles, with tile(i=...)");
}
