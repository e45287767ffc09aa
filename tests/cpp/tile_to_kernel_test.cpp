#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <random>

#include "base/error.h"
#include "codegen/codegen.h"
#include "kernel_ir/interpret.h"
#include "kernel_ir/ir.h"
#include "lower/lower.h"
#include "passes/kernel/expand_math.h"
#include "tile_ir/interpret.h"
#include "tile_ir/ir.h"

using namespace deplo;

namespace {

using Sizes = std::map<std::string, int64_t>;

// ---- arrays as memory ----

void put(char* at, DType dtype, const Scalar& s) {
  auto write = [&](auto value) { std::memcpy(at, &value, sizeof value); };
  switch (dtype) {
    case DType::boolean:
    case DType::u8: return write(static_cast<uint8_t>(s.i));
    case DType::i8: return write(static_cast<int8_t>(s.i));
    case DType::i16: return write(static_cast<int16_t>(s.i));
    case DType::i32: return write(static_cast<int32_t>(s.i));
    case DType::i64: return write(s.i);
    case DType::f16: return write(f32_to_f16(static_cast<float>(s.f)));
    case DType::bf16: return write(f32_to_bf16(static_cast<float>(s.f)));
    case DType::f32: return write(static_cast<float>(s.f));
    case DType::f64: return write(s.f);
  }
}

template <class T>
T read(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

Scalar take(const char* at, DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8: return Scalar::of_int(dtype, read<uint8_t>(at));
    case DType::i8: return Scalar::of_int(dtype, read<int8_t>(at));
    case DType::i16: return Scalar::of_int(dtype, read<int16_t>(at));
    case DType::i32: return Scalar::of_int(dtype, read<int32_t>(at));
    case DType::i64: return Scalar::of_int(dtype, read<int64_t>(at));
    case DType::f16: return Scalar::of_float(dtype, f16_to_f32(read<uint16_t>(at)));
    case DType::bf16: return Scalar::of_float(dtype, bf16_to_f32(read<uint16_t>(at)));
    case DType::f32: return Scalar::of_float(dtype, read<float>(at));
    case DType::f64: return Scalar::of_float(dtype, read<double>(at));
  }
  return {};
}

// The elements of a strided parameter, with a border that nothing may touch.
struct Bytes {
  static constexpr int64_t kBorder = 64;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<char> data;
  int64_t origin = 0;

  Bytes(const tile_ir::Param& p, const Array& array, const Sizes& sizes) : dtype(p.dtype), shape(array.shape) {
    int64_t low = 0;
    int64_t high = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      strides.push_back(evaluate(p.strides[d], sizes));
      int64_t reach = strides[d] * std::max<int64_t>(0, shape[d] - 1);
      (reach < 0 ? low : high) += reach;
    }
    origin = kBorder - low * size_of(dtype);
    data.assign(static_cast<size_t>(2 * kBorder + (high - low + 1) * size_of(dtype)), 0x5a);
    for_each([&](int64_t flat, char* at) { put(at, dtype, array.get(flat)); });
  }

  template <class F>
  void for_each(const F& f) {
    int64_t count = 1;
    for (int64_t n : shape) count *= n;
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat;
      int64_t offset = 0;
      for (size_t d = shape.size(); d-- > 0;) {
        offset += rest % shape[d] * strides[d];
        rest /= shape[d];
      }
      f(flat, data.data() + origin + offset * size_of(dtype));
    }
  }

  void* base() { return data.data() + origin; }
  bool border_intact() const {
    for (size_t k = 0; k < kBorder; ++k)
      if (data[k] != 0x5a || data[data.size() - 1 - k] != 0x5a) return false;
    return true;
  }
};

// ---- running ----

int run_native(const tile_ir::Kernel& tile, const std::vector<Array*>& arguments, const Sizes& sizes, int vector_bytes, int threads) {
  PassContext context;
  context.target = cpu_target_info("");
  context.target.vector_bytes = vector_bytes;
  tile_ir::Module module;
  module.kernels.push_back(std::make_shared<tile_ir::Kernel>(tile));
  kernel_ir::Module lowered = lower_tile_to_kernel(module, context);
  INFO(kernel_ir::print(lowered));
  kernel_ir::verify(*lowered.kernels[0]);
  CHECK(kernel_ir::parse(kernel_ir::print(lowered)) == lowered);
  lowered = expand_math(lowered, context);
  CodegenStats stats;
  auto compiled = compile_cpu_kernels(lowered.kernels, context, {}, &stats).front();
  std::vector<Bytes> memory;
  std::vector<void*> buffers;
  for (size_t k = 0; k < arguments.size(); ++k) memory.emplace_back(tile.params[k], *arguments[k], sizes);
  for (Bytes& bytes : memory) buffers.push_back(bytes.base());
  std::vector<int64_t> symbols;
  for (const std::string& s : lowered.kernels[0]->symbols) symbols.push_back(sizes.at(s));
  std::vector<char> scratch(static_cast<size_t>(evaluate(lowered.kernels[0]->scratch_bytes, sizes)) + 64);
  int32_t error = 0;
  auto aligned = reinterpret_cast<uintptr_t>(scratch.data());
  KernelArgs args{buffers.data(), symbols.data(), &error, reinterpret_cast<void*>((aligned + 63) / 64 * 64)};
  for (int t = 0; t < threads; ++t) compiled->function()(&args, t, threads);
  for (size_t k = 0; k < arguments.size(); ++k) {
    CHECK(memory[k].border_intact());
    memory[k].for_each([&](int64_t flat, char* at) { arguments[k]->set(flat, take(at, memory[k].dtype)); });
  }
  return error;
}

Array filled(DType dtype, std::vector<int64_t> shape, std::mt19937& rng) {
  Array a = Array::zeros(dtype, std::move(shape));
  std::uniform_real_distribution<double> real(-2, 2);
  std::uniform_int_distribution<int64_t> integer(0, 7);
  for (int64_t k = 0; k < a.count(); ++k) {
    int64_t n = integer(rng);
    a.set(k, is_float(dtype)           ? Scalar::of_float(dtype, real(rng))
             : dtype == DType::boolean ? Scalar::of_int(dtype, n & 1)
                                       : Scalar::of_int(dtype, is_signed(dtype) && n == 0 ? -3 : n + 1));
  }
  return a;
}

/// What an array may be off by, from the same computed in float64: as much as the interpreter's own roundings put it off (sums are formed in
/// another order here), and two units of its dtype and of float32, in which 16 bits are computed, for the functions around them.
double allowed_error(const Array& typed, const Array& exact) {
  double worst = 0;
  double largest = 0;
  for (int64_t k = 0; k < typed.count(); ++k) {
    if (!std::isfinite(typed.get(k).f) || !std::isfinite(exact.get(k).f)) continue;
    worst = std::max(worst, std::abs(typed.get(k).f - exact.get(k).f));
    largest = std::max(largest, std::abs(exact.get(k).f));
  }
  double unit = std::ldexp(1.0, typed.dtype == DType::f64 ? -52 : typed.dtype == DType::f32 ? -23 : typed.dtype == DType::f16 ? -10 : -7);
  return 2 * worst + 2 * unit * largest;
}

void same(const Array& wanted, const Array& exact, const Array& got, const std::string& name) {
  double allowed = is_float(wanted.dtype) ? allowed_error(wanted, exact) : 0;
  for (int64_t k = 0; k < wanted.count(); ++k) {
    Scalar w = wanted.get(k);
    Scalar g = got.get(k);
    INFO(name << "[" << k << "]: wanted " << w.as_double() << ", got " << g.as_double());
    if (!is_float(w.dtype)) {
      REQUIRE(w.i == g.i);
    } else if (std::isnan(w.f) || std::isinf(w.f)) {
      REQUIRE(((std::isnan(w.f) && std::isnan(g.f)) || w.f == g.f));
    } else {
      REQUIRE(std::abs(g.f - exact.get(k).f) <= allowed);
    }
  }
}

using Prepare = std::function<void(std::vector<Array>&)>;

std::vector<Array*> pointers(std::vector<Array>& arrays) {
  std::vector<Array*> out;
  for (Array& a : arrays) out.push_back(&a);
  return out;
}

// The Tile interpreter and the compiled Kernel IR agree at every vector width and number of threads.
void agree(const std::string& text, const Sizes& sizes = {}, const Prepare& prepare = {}) {
  tile_ir::Module module = tile_ir::parse(text);
  tile_ir::verify(module);
  const tile_ir::Kernel& kernel = *module.kernels[0];
  std::mt19937 rng(7);
  std::vector<Array> inputs;
  for (const auto& p : kernel.params) inputs.push_back(filled(p.dtype, evaluate_shape(p.shape, sizes), rng));
  if (prepare) prepare(inputs);
  std::vector<Array> wanted = inputs;
  std::vector<Array> exact = inputs;
  bool wanted_error = false;
  for (Mode mode : {Mode::exact, Mode::typed}) try {
      tile_ir::interpret(kernel, pointers(mode == Mode::exact ? exact : wanted), sizes, mode);
    } catch (const IndexError&) {
      wanted_error = true;
    } catch (const UserError&) {
      wanted_error = true;
    }
  for (int bytes : {4, 16, 32, 64})
    for (int threads : {1, 3}) {
      if (threads > 1 && kernel.chunks.is(1)) continue;
      INFO(text << "\nvector bytes " << bytes << ", threads " << threads);
      std::vector<Array> got = inputs;
      int error = run_native(kernel, pointers(got), sizes, bytes, threads);
      CHECK((error != 0) == wanted_error);
      for (size_t k = 0; k < got.size(); ++k)
        if (kernel.params[k].kind != loop_ir::ParamKind::in) same(wanted[k], exact[k], got[k], kernel.params[k].name);
    }
}

}  // namespace

TEST_CASE("lanes loops: full vectors, single vectors, masked tails") {
  for (int64_t n : {0, 1, 3, 8, 17, 64, 100, 131})
    agree(R"(tile @k(x: f32[n], y: f32[n], s: f32[1], out z: f32[n]) where n in 0..
  for lanes i in 0..n by 2:
    a = load x[i]
    b = load y[i]
    c = load s[0]
    d = mul(a, c)
    e = add(d, b)
    store z[i] = e
)",
          {{"n", n}});
  for (const char* n : {"1", "5", "12", "16", "29", "200"})
    agree(fmt::format(R"(tile @k(x: f32[3, {0}], out z: f32[3, {0}]) chunks 3
  parallel r in 0..3:
    for lanes i in 0..{0} by 3:
      a = load x[r, i]
      b = exp(a)
      store z[r, i] = b
)",
                      n));
}

TEST_CASE("reductions along and across the lanes") {
  const char* softmax = R"(tile @k(x: f32[m, n], out y: f32[m, n]) where m in 0.., n in 0.. chunks m
  parallel i in 0..m:
    reduce m0: f32 = max(a) over lanes j in 0..n by 4:
      a = load x[i, j]
    reduce s: f32 = sum(e) over lanes j in 0..n by 2:
      a = load x[i, j]
      d = sub(a, m0)
      e = exp(d)
      store y[i, j] = e
    for lanes j in 0..n by 2:
      e = load y[i, j]
      r = div(e, s)
      store y[i, j] = r
)";
  for (int64_t n : {1, 7, 8, 40, 77}) agree(softmax, {{"m", 5}, {"n", n}});
  agree(R"(tile @k(x: f32[m, n], out y: f32[n]) where m in 0.., n in 1..
  for lanes j in 0..n by 2:
    reduce s: f32 = sum(a) over i in 0..m by 3:
      a = load x[i, j]
    store y[j] = s
)",
        {{"m", 10}, {"n", 21}});
  agree(R"(tile @k(x: f32[4, 9, 13], w: f32[9], out y: f32[4], out z: f32[4], out p: f32[4]) chunks 4
  parallel b in 0..4:
    reduce s: f32 = sum(q) over i in 0..9, lanes j in 0..13:
      a = load x[b, i, j]
      v = load w[i]
      q = mul(a, v)
    store y[b] = s
    reduce t: f32 = min(a) over i in 0..9 by 2:
      a = load x[b, i, 3]
    store z[b] = t
    reduce u: f32 = prod(a) over lanes j in 0..13, i in 0..2:
      a = load x[b, i, j]
    store p[b] = u
)");
  const char* products = R"(tile @k(x: f64[m, n], out y: f64[m], out z: f64[n]) where m in 1.., n in 1..
  for i in 0..m:
    reduce p: f64 = prod(a) over lanes j in 0..n by 2:
      a = load x[i, j]
    store y[i] = p
  for lanes j in 0..n by 2:
    reduce q: f64 = prod(a) over i in 0..m:
      a = load x[i, j]
    store z[j] = q
)";
  // Powers of two: products that are exact in any order. How others round is measured against wider arithmetic.
  auto powers = [](std::vector<Array>& a) {
    for (int64_t k = 0; k < a[0].count(); ++k)
      a[0].set(k, Scalar::of_float(DType::f64, std::copysign(std::exp2(std::round(a[0].get(k).f)), a[0].get(k).f)));
  };
  for (int64_t n : {1, 7, 40, 77}) agree(products, {{"m", 6}, {"n", n}}, powers);
  agree(products, {{"m", 6}, {"n", 19}}, [&](std::vector<Array>& a) {
    powers(a);
    double inf = std::numeric_limits<double>::infinity();
    for (auto [at, value] : {std::pair{3, -0.0}, {21, inf}, {40, NAN}, {58, inf}, {59, 0.0}, {77, 1e300}, {78, 1e300}, {96, 5e-324}})
      a[0].set(at, Scalar::of_float(DType::f64, value));
  });
}

TEST_CASE("tuple reductions") {
  const char* text =
      R"(tile @k(x: f32[m, n], out v: f32[m], out k: i64[m], out mean: f32[m], out m2: f32[m], out top: f32[m], out sum: f32[m]) where m in 1.., n in 1.. chunks m
  parallel i in 0..m:
    reduce a0: f32, a1: i64 = argmax(a, c) over lanes j in 0..n by 2:
      a = load x[i, j]
      c: i64 = index j
    store v[i] = a0
    store k[i] = a1
    reduce w0: f32, w1: f32 = welford(a) over lanes j in 0..n by 2:
      a = load x[i, j]
    store mean[i] = w0
    store m2[i] = w1
    reduce o0: f32, o1: f32 = online_softmax(a) over lanes j in 0..n by 2:
      a = load x[i, j]
    store top[i] = o0
    store sum[i] = o1
)";
  for (int64_t n : {1, 6, 8, 33, 90}) agree(text, {{"m", 4}, {"n", n}});
  double inf = std::numeric_limits<double>::infinity();
  agree(text, {{"m", 6}, {"n", 19}}, [&](std::vector<Array>& a) {
    a[0].set(3, Scalar::of_float(DType::f32, NAN));
    a[0].set(9, Scalar::of_float(DType::f32, NAN));
    for (int64_t j = 0; j < 19; ++j) a[0].set(19 + j, Scalar::of_float(DType::f32, -inf));
    for (int64_t j = 0; j < 19; ++j) a[0].set(38 + j, Scalar::of_float(DType::f32, 1));  // ties
    a[0].set(57 + 11, Scalar::of_float(DType::f32, inf));
    a[0].set(76, Scalar::of_float(DType::f32, -inf));
  });
  agree(R"(tile @k(x: i64[m, n], out k: i64[n], out v: i64[n]) where m in 1.., n in 1..
  for lanes j in 0..n:
    reduce a0: i64, a1: i64 = argmin(a, c) over i in 0..m:
      a = load x[i, j]
      c: i64 = index i
    store k[j] = a1
    store v[j] = a0
)",
        {{"m", 9}, {"n", 11}});
}

TEST_CASE("a softmax of no scores, and of scores that are all -inf") {
  const char* text = R"(tile @k(x: f32[m, n], out top: f32[2], out sum: f32[2]) where m in 0.., n in 0..
  for r in 0..2:
    reduce o0: f32, o1: f32 = online_softmax(a) over i in 0..m, lanes j in 0..n by 2:
      a = load x[i, j]
    store top[r] = o0
    store sum[r] = o1
)";
  double inf = std::numeric_limits<double>::infinity();
  for (auto [m, n] : {std::pair<int64_t, int64_t>{0, 9}, {3, 0}, {0, 0}, {2, 19}}) agree(text, {{"m", m}, {"n", n}});
  agree(text, {{"m", 2}, {"n", 19}}, [&](std::vector<Array>& a) {
    for (int64_t k = 0; k < 38; ++k) a[0].set(k, Scalar::of_float(DType::f32, -inf));
  });
}

TEST_CASE("guards, strides, gathers and reversed axes") {
  agree(
      R"(tile @k(x: f32[40], w: f32[7, 40], t: i64[40], out a: f32[44], out b: f32[40], out c: f32[20], out d: f32[40], out e: f32[40], out f: f32[40])
  for lanes i in 0..44 by 2:
    p = load x[i - 2] if i - 2 >= 0 and -i + 41 >= 0 else 1.5
    store a[i] = p
  for lanes i in 0..40:
    p = load x[-i + 39]
    store b[i] = p
  for lanes i in 0..20:
    p = load x[i*2 + 1]
    store c[i] = p
  for lanes i in 0..40:
    k = load t[i]
    check k >= 0 else index_out_of_range
    check -k + 39 >= 0 else index_out_of_range
    p = load x[k] if k >= 0 and -k + 39 >= 0 else 0.0
    q = load w[(i % 7), i]
    r = add(p, q)
    store d[i] = r
  for lanes i in 0..40:
    p = load x[i // 8*8 + (i % 8)]
    q = load x[i // 16]
    r = add(p, q)
    store e[-i + 39] = r
  for lanes i in 0..40:
    if i - 5 >= 0 and i != 17:
      p = load x[i - 5]
      q = load x[3]
      r = add(p, q)
      store f[i] = r
    if 5 - i > 0:
      z: f32 = constant -1.0
      store f[i] = z
    if i == 17:
      z: f32 = index i*3
      store f[i] = z
)");
}

TEST_CASE("a failed check or a division by zero sets the error word") {
  const char* gather = R"(tile @k(t: i64[30], x: f32[8], out y: f32[30])
  for lanes i in 0..30:
    k = load t[i]
    check k >= 0 else index_out_of_range
    check -k + 7 >= 0 else index_out_of_range
    p = load x[k] if k >= 0 and -k + 7 >= 0 else 0.0
    store y[i] = p
)";
  auto indices = [](int64_t bad) {
    return [bad](std::vector<Array>& a) {
      for (int64_t k = 0; k < 30; ++k) a[0].set(k, Scalar::of_int(DType::i64, k % 8));
      if (bad) a[0].set(29, Scalar::of_int(DType::i64, bad));
    };
  };
  agree(gather, {}, indices(0));
  agree(gather, {}, indices(8));
  agree(gather, {}, indices(-1));
  const char* divide = R"(tile @k(x: i32[n], y: i32[n], out z: i32[n], out r: i32[n]) where n in 1..
  for lanes i in 0..n:
    a = load x[i]
    b = load y[i]
    q = floor_div(a, b)
    t = remainder(a, b)
    store z[i] = q
    store r[i] = t
)";
  agree(divide, {{"n", 21}});
  agree(divide, {{"n", 21}}, [](std::vector<Array>& a) { a[1].set(20, Scalar::of_int(DType::i32, 0)); });
}

TEST_CASE("register blocks of a contraction") {
  for (const char* width : {"16", "8", "12", "32"})
    agree(fmt::format(R"(tile @k(pa: f32[5, 20, 6], pb: f32[4, 20, {0}], bias: f32[n], out c: f32[m, n]) where m in 0..30, n in 0..{1} chunks 5
  parallel t in 0..5:
    for p in 0..4:
      alloc acc: f32[6, {0}] register
      unroll r in 0..6:
        for lanes c0 in 0..{0}:
          z: f32 = constant 0.0
          store acc[r, c0] = z
      for k in 0..20 by 4:
        prefetch pb[p, k + 8, 0]
        unroll r in 0..6:
          a = load pa[t, k, r]
          for lanes c0 in 0..{0}:
            b = load pb[p, k, c0]
            s = load acc[r, c0]
            f = fma(a, b, s)
            store acc[r, c0] = f
      unroll r in 0..6:
        if t*6 + r < m:
          for lanes c0 in 0..{0}:
            s = load acc[r, c0]
            v = load bias[p*{0} + c0] if p*{0} + c0 < n else 0.0
            w = add(s, v)
            store c[t*6 + r, p*{0} + c0] = w if p*{0} + c0 < n
)",
                      width, std::stoi(width) * 4),
          {{"m", 28}, {"n", std::stoi(width) * 4 - 3}});
}

TEST_CASE("register arrays keep values that are overwritten") {
  agree(R"(tile @k(x: f32[4, 20], out y: f32[4, 20], out z: f32[3])
  alloc acc: f32[2, 20] register
  alloc one: f32[2] register
  unroll r in 0..2:
    for lanes c in 0..20:
      a = load x[r, c]
      store acc[r, c] = a
  for i in 0..3:
    for lanes c in 0..20:
      old = load acc[0, c]
      other = load acc[1, c]
      store acc[0, c] = other
      a = load x[i + 1, c]
      b = add(old, a)
      store acc[1, c] = b
  unroll r in 0..2:
    for lanes c in 0..20:
      a = load acc[r, c]
      store y[r, c] = a
      store y[r + 2, c] = a
  z0: f32 = constant 2.0
  store one[0] = z0
  store one[1] = z0
  first = load one[0]
  for i in 0..3:
    a = load one[0]
    b = add(a, first)
    store one[0] = b
    c = load one[1]
    d = mul(c, a)
    store one[1] = d
    store z[i] = d
)");
}

TEST_CASE("register arrays whose lanes begin inside of them") {
  agree(R"(tile @k(x: f32[40], out y: f32[40])
  alloc acc: f32[40] register
  for lanes c in 2..34:
    a = load x[c]
    store acc[c + 2] = a
  for i in 0..3:
    for lanes c in 2..34:
      a = load acc[c + 2]
      b = load x[c + i]
      s = add(a, b)
      store acc[c + 2] = s
  for lanes c in 2..34:
    a = load acc[c + 2]
    store y[c] = a
)");
}

TEST_CASE("all dtypes in vectors") {
  for (const char* dtype : {"f64", "bf16", "f16", "i32", "i16", "i8", "u8", "i64"})
    agree(fmt::format(R"(tile @k(x: {0}[37], y: {0}[37], c: bool[37], out z: {0}[37], out e: bool[37], out f: f32[37], out s: f32[1])
  for lanes i in 0..37 by 2:
    a = load x[i]
    b = load y[i]
    p = load c[i]
    m = max(a, b)
    w = where(p, m, a)
    q = lt(a, b)
    r = bit_xor(q, p)
    t: f32 = cast(w)
    u: f32 = exp(t)
    store z[i] = w
    store e[i] = r
    store f[i] = t
  reduce g: f32 = sum(t) over lanes i in 0..37:
    a = load x[i]
    t: f32 = cast(a)
  store s[0] = g
)",
                      dtype));
}

TEST_CASE("f16 of a float64 with another's sign is rounded through float32") {
  agree(R"(tile @k(x: f16[19], out y: f16[19])
  for lanes i in 0..19:
    a = load x[i]
    wide: f64 = cast(a)
    square = mul(wide, wide)
    signed = copysign(square, wide)
    single: f32 = cast(signed)
    half: f16 = cast(single)
    store y[i] = half
)");
}

TEST_CASE("strided loads of an unrolled axis are transposed in registers") {
  std::string text = R"(tile @k(x: {0}[37, 40], out y: {0}[40, 37], inout z: {0}[40, 40])
  for b in 0..2:
    for lanes i in 0..37:
      unroll u in 0..20:
        v = load x[i, b*20 + u]
        w = load x[i, b*20 + 19 - u]
        s = add(v, w)
        store y[b*20 + u, i] = s
  for lanes i in 0..16:
    unroll u in 0..16:
      v = load z[i, u]
      store z[u + 20, i] = v
      if u < 3:
        w = load z[i, u + 1]
        store z[u + 20, i + 20] = w
  for lanes i in 0..16:
    unroll u in 0..16:
      v = load z[i, u]
      w = add(v, v)
      store z[i, u] = w
)";
  for (const char* dtype : {"f32", "f64", "bf16", "i32", "u8"}) agree(fmt::format(fmt::runtime(text), dtype));
  // Whole squares take no strided access.
  tile_ir::Module module = tile_ir::parse(R"(tile @k(x: f32[32, 64], out y: f32[64, 32])
  for b in 0..4:
    for lanes i in 0..32:
      unroll u in 0..16:
        v = load x[i, b*16 + u]
        store y[b*16 + u, i] = v
)");
  for (int bytes : {16, 32, 64}) {
    PassContext context;
    context.target.vector_bytes = bytes;
    std::string lowered = kernel_ir::print(lower_tile_to_kernel(module, context));
    CHECK(lowered.find("stride") == std::string::npos);
    CHECK(lowered.find("shuffle") != std::string::npos);
  }
}

TEST_CASE("small strides read whole vectors and pick") {
  std::string text = R"(tile @k(x: {0}[n], out y: {0}[3, 37]) where n in 0..
  for lanes i in 0..37:
    a = load x[i*2 + 1]
    store y[0, i] = a
    b = load x[i*3 - 4] if i*3 - 4 >= 0 and i < 30 else 2.0
    store y[1, i] = b
    c = load x[i*4] if i*4 < n and n > 150 else 0.0
    store y[2, i] = c
)";
  for (const char* dtype : {"f32", "bf16", "f64"})
    for (int64_t n : {86, 128, 148, 160}) agree(fmt::format(fmt::runtime(text), dtype), {{"n", n}});
}

TEST_CASE("a mask with one lane stores one element") {
  for (const char* dtype : {"bf16", "f16", "u8", "i16"})
    agree(fmt::format(R"(tile @k(x: f32[9], inout y: {0}[9], inout z: {0}[30])
  for lanes i in 0..9:
    a = load x[i]
    b: {0} = cast(a)
    store y[i] = b
  for lanes i in 0..30:
    a = load x[(i // 4)]
    b: {0} = cast(a)
    store z[i] = b if -i + 20 >= 0
)",
                      dtype));
}

TEST_CASE("combining stores, scans, stack and scratch arrays") {
  agree(R"(tile @k(x: f32[50], t: i64[50], inout h: f32[10], inout v: f32[50])
  for lanes i in 0..50:
    k = load t[i]
    a = load x[i]
    store sum h[k] = a if k >= 0
    store sum v[i] = a
    store max h[9] = a
)");
  agree(R"(tile @k(x: f32[m, n], out y: f32[m, n], out z: f32[m, n]) where m in 1.., n in 1.. chunks m
  alloc row: f32[n] scratch
  alloc col: f32[n, 3] scratch
  parallel i in 0..m:
    scan s: f32 = sum(a) over j in 0..n:
      a = load x[i, j]
    then:
      store row[j] = s
      store col[j, 1] = s
    for lanes j in 0..n:
      a = load row[j]
      b = load col[j, 1]
      c = add(a, b)
      store y[i, j] = c
  alloc few: f32[4] stack
  for r in 0..4:
    a: f32 = index r
    store few[r] = a
  for lanes j in 0..n:
    scan s: f32 = prod(b) over i in 0..m:
      a = load x[i, j]
      c = load few[(i % 4)]
      b = add(a, c)
    then:
      store z[i, j] = s
)",
        {{"m", 6}, {"n", 19}});
}

TEST_CASE("loops that cannot be vectors run element by element") {
  agree(R"(tile @k(x: f32[20, 20], out y: f32[20], out z: f32[20])
  for lanes i in 0..20:
    reduce s: f32 = sum(a) over j in 0..i + 1:
      a = load x[i, j]
    store y[i] = s
  for lanes i in 0..20:
    alloc own: f32[3] stack
    for j in 0..3:
      a = load x[i, j]
      store own[j] = a
    a = load own[2]
    b = load own[0]
    c = sub(a, b)
    store z[i] = c
)");
}

TEST_CASE("non-contiguous parameters") {
  agree(
      R"(tile @k(x: f32[9, 21] strides [1, 9], y: f32[9, 21] strides [0, 1], w: f32[9, 21] strides [-21, -1], out z: f32[9, 21] strides [22, 1]) chunks 9
  parallel i in 0..9:
    for lanes j in 0..21 by 2:
      a = load x[i, j]
      b = load y[i, j]
      c = load w[i, j]
      d = fma(a, b, c)
      store z[i, j] = d
)",
      {}, [](std::vector<Array>& a) {
        for (int64_t k = 21; k < a[1].count(); ++k) a[1].set(k, a[1].get(k % 21));
      });
}

TEST_CASE("long float sums stay accurate") {
  const char* text = R"(tile @k(x: f32[n], out y: f32[1]) where n in 1..
  reduce s: f32 = sum(a) over lanes i in 0..n by 4:
    a = load x[i]
  store y[0] = s
)";
  tile_ir::Module module = tile_ir::parse(text);
  struct Case {
    int64_t n;
    double each;
  };
  for (auto [n, each] : {Case{10'000'000, 1}, Case{40'000'000, 0.5}, Case{3'000'001, 0.1}})
    for (const char* dtype : {"f32"}) {
      INFO(dtype);
      Array x = Array::filled(DType::f32, {n}, Scalar::of_float(DType::f32, each));
      Array y = Array::zeros(DType::f32, {1});
      std::vector<Array*> arguments{&x, &y};
      run_native(*module.kernels[0], arguments, {{"n", n}}, 32, 1);
      double wanted = x.get(0).f * static_cast<double>(n);
      if (each == 0.1)
        CHECK(y.get(0).f == Approx(wanted).epsilon(2e-6));
      else
        CHECK(y.get(0).f == wanted);
    }
}

namespace {

// A random kernel: nests that read inputs at random affine places, under random guards, and store each to an output of its own.
class RandomKernel {
 public:
  explicit RandomKernel(unsigned seed) : rng_(seed) {}

  std::string text(Sizes* sizes) {
    (*sizes)["m"] = pick(1, 6);
    (*sizes)["n"] = pick(1, 45);
    bool parallel = pick(0, 1);
    std::string rows = pick(0, 1) ? "m" : std::to_string((*sizes)["m"]);
    std::string columns = pick(0, 1) ? "n" : std::to_string((*sizes)["n"]);
    std::string body;
    int nests = static_cast<int>(pick(1, 3));
    for (int k = 0; k < nests; ++k) body += nest(k, columns);
    std::string outputs;
    for (int k = 0; k < nests; ++k) outputs += fmt::format(", out y{}: {}[m, n]", k, types_[static_cast<size_t>(k)]);
    return fmt::format("tile @k(x: f32[m, n], w: f32[n, m], h: bf16[m, n], t: i64[n]{}) where m in 1.., n in 1.. chunks {}\n  {} i in 0..{}:\n{}",
                       outputs, parallel ? "m" : "1", parallel ? "parallel" : "for", rows, body);
  }

 private:
  int64_t pick(int64_t lo, int64_t hi) { return std::uniform_int_distribution<int64_t>(lo, hi)(rng_); }
  template <class T>
  T one_of(std::initializer_list<T> options) {
    return *(options.begin() + pick(0, static_cast<int64_t>(options.size()) - 1));
  }
  std::string fresh() { return fmt::format("v{}", next_++); }
  void line(std::string& out, int indent, const std::string& text) { out += std::string(static_cast<size_t>(indent), ' ') + text + "\n"; }

  // A load of f32 at lane axis j, whose place is in range for all j in [0, n).
  std::string load(std::string& out, int indent) {
    std::string v = fresh();
    switch (pick(0, 6)) {
      case 0: line(out, indent, v + " = load x[i, j]"); return v;
      case 1: line(out, indent, v + " = load w[j, i]"); return v;
      case 2: line(out, indent, v + " = load x[i, -j + n - 1]"); return v;
      case 3: line(out, indent, v + " = load x[i, 0]"); return v;
      case 4: {
        int64_t shift = pick(-3, 3);
        line(out, indent,
             fmt::format("{} = load x[i, j + {}] if j + {} >= 0 and j + {} < n else {}", v, shift, shift, shift, one_of({"0.0", "1.5"})));
        return v;
      }
      case 5: {
        std::string k = fresh();
        line(out, indent, k + " = load t[j]");
        line(out, indent, fmt::format("{} = load x[i, {}] if {} >= 0 and {} < n else -1.0", v, k, k, k));
        return v;
      }
      default: {
        std::string b = fresh();
        line(out, indent, b + " = load h[i, (j // 3)]");
        line(out, indent, v + ": f32 = cast(" + b + ")");
        return v;
      }
    }
  }

  std::string value(std::string& out, int indent, int depth) {
    if (depth == 0) return load(out, indent);
    std::string a = value(out, indent, depth - 1);
    std::string v = fresh();
    switch (pick(0, 4)) {
      case 0: line(out, indent, v + " = tanh(" + a + ")"); return v;
      case 1: {
        std::string b = fresh();
        std::string c = load(out, indent);
        line(out, indent, b + " = lt(" + a + ", " + c + ")");
        line(out, indent, v + " = where(" + b + ", " + a + ", " + c + ")");
        return v;
      }
      case 2: {
        std::string k = fresh();
        line(out, indent, k + ": f32 = index j*2 + i");
        line(out, indent, v + " = add(" + a + ", " + k + ")");
        return v;
      }
      default: {
        std::string b = load(out, indent);
        line(out, indent, v + " = " + one_of({"mul", "sub", "max"}) + "(" + a + ", " + b + ")");
        return v;
      }
    }
  }

  std::string nest(int k, const std::string& columns) {
    std::string out;
    std::string kind = one_of({"lanes j in 0..{} by 2", "lanes j in 0..{}", "j in 0..{}", "lanes j in 0..{} by 4"});
    std::string axis = fmt::format(fmt::runtime(kind), columns);
    std::string type = one_of({"f32", "f32", "bf16", "f64"});
    types_.push_back(type);
    std::string total;
    if (pick(0, 1)) {
      std::string inner;
      std::string v = value(inner, 6, static_cast<int>(pick(0, 2)));
      total = fresh();
      std::string combiner = one_of({"sum", "max", "min"});
      line(out, 4, fmt::format("reduce {}: f32 = {}({}) over {}:", total, combiner, v, axis));
      out += inner;
    }
    line(out, 4, fmt::format("for {}:", axis));
    std::string v = value(out, 6, static_cast<int>(pick(0, 2)));
    if (!total.empty()) {
      std::string s = fresh();
      line(out, 6, s + " = add(" + v + ", " + total + ")");
      v = s;
    }
    if (pick(0, 2) == 0) {
      std::string s = fresh();
      std::string p = fresh();
      std::string sum = fresh();
      line(out, 6, fmt::format("reduce {}: f32 = sum({}) over q in 0..m by {}:", s, p, pick(1, 2)));
      line(out, 8, p + " = load w[j, q]");
      line(out, 6, sum + " = add(" + v + ", " + s + ")");
      v = sum;
    }
    if (type != "f32") {
      std::string c = fresh();
      line(out, 6, c + ": " + type + " = cast(" + v + ")");
      v = c;
    }
    bool branch = pick(0, 2) == 0;
    if (branch) line(out, 6, fmt::format("if {}:", one_of({"j - 2 >= 0", "j*3 - i < 17", "(j % 3) == 0", "i - 1 >= 0"})));
    line(out, branch ? 8 : 6, fmt::format("store y{}[i, j] = {}{}", k, v, pick(0, 3) == 0 ? " if -j + 20 >= 0" : ""));
    return out;
  }

  std::mt19937 rng_;
  int next_ = 0;
  std::vector<std::string> types_;
};

}  // namespace

TEST_CASE("matrix units: the interpreters of both levels agree, and compiled code where the CPU has a unit") {
  const std::string text = R"(tile @k(a: bf16[48, 96], b: bf16[3, 2, 16, 32, 2], c: f32[64, 64], out y: f32[48, 64]) chunks 3
  parallel i in 0..3:
    for j in 0..2:
      alloc t: f32[16, 32] matrix
      matrix t = c[i*16, j*32]
      for k in 0..3:
        matrix t += a[i*16, k*32] * b[k, j, 0, 0, 0]
      matrix y[i*16, j*32] = t
      matrix t = 0
      matrix t += a[i*16, 64] * b[2, j, 0, 0, 0]
      alloc s: f32[16, 32] scratch
      matrix s[0, 0] = t
      for r in 0..16:
        for lanes l in 0..32:
          u = load s[r, l]
          v = load y[i*16 + r, j*32 + l]
          w = mul(u, v)
          store y[i*16 + r, j*32 + l] = w
)";
  tile_ir::Module module = tile_ir::parse(text);
  CHECK(tile_ir::parse(tile_ir::print(module)) == module);
  tile_ir::verify(module);
  const tile_ir::Kernel& tile = *module.kernels[0];
  std::mt19937 rng(11);
  std::vector<Array> inputs;
  for (const auto& p : tile.params) inputs.push_back(filled(p.dtype, evaluate_shape(p.shape, {}), rng));
  std::vector<Array> exact = inputs;
  std::vector<Array> typed = inputs;
  tile_ir::interpret(tile, pointers(exact), {}, Mode::exact);
  tile_ir::interpret(tile, pointers(typed), {}, Mode::typed);
  PassContext context;
  context.target.vector_bytes = 64;
  kernel_ir::Module lowered = lower_tile_to_kernel(module, context);
  INFO(kernel_ir::print(lowered));
  kernel_ir::verify(*lowered.kernels[0]);
  CHECK(kernel_ir::parse(kernel_ir::print(lowered)) == lowered);
  std::vector<Array> kernel = inputs;
  kernel_ir::interpret(*lowered.kernels[0], pointers(kernel), {}, Mode::typed);
  for (int64_t k = 0; k < typed[3].count(); ++k) REQUIRE(kernel[3].get(k).f == typed[3].get(k).f);
  if (!cpu_target_info("").features.contains("amx-bf16")) return;
  for (int threads : {1, 3}) {
    std::vector<Array> got = inputs;
    CHECK(run_native(tile, pointers(got), {}, 64, threads) == 0);
    same(typed[3], exact[3], got[3], "y");
  }
}

TEST_CASE("random kernels") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    Sizes sizes;
    std::string text = RandomKernel(seed).text(&sizes);
    INFO("seed " << seed << ", m " << sizes["m"] << ", n " << sizes["n"]);
    auto indices = [&](std::vector<Array>& a) {
      for (int64_t k = 0; k < a[3].count(); ++k) a[3].set(k, Scalar::of_int(DType::i64, (k * 7) % (sizes["n"] + 2) - 1));
    };
    agree(text, sizes, indices);
  }
}
