#include <catch2/catch.hpp>
#include <cmath>

#include "base/error.h"
#include "kernel_ir/ir.h"
#include "lower/lower.h"
#include "tile_agreement.h"

using namespace deplo;

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
