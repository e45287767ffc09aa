#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "kernel_ir/interpret.h"
#include "kernel_ir/ir.h"
#include "lower/lower.h"
#include "target/cpu/codegen.h"
#include "tile_agreement.h"

using namespace deplo;

namespace {

// A random kernel: nests that read inputs at random affine places, under random guards, and store each to an output of its own.
class RandomTileKernel {
 public:
  explicit RandomTileKernel(unsigned seed) : rng_(seed) {}

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

TEST_CASE("matrix units of bytes: sums are exact, wraps included, for every sign of both factors") {
  for (const std::string a : {"u8", "i8"})
    for (const std::string b : {"u8", "i8"}) {
      const std::string text = "tile @k(a: " + a + R"([48, 192], b: i32[3, 2, 16, 32], c: i32[64, 64], out y: i32[48, 64]) chunks 3
  parallel i in 0..3:
    for j in 0..2:
      alloc t: i32[16, 32] matrix
      if i == 0:
        matrix t = 0
      if i - 1 >= 0:
        matrix t = c[i*16, j*32]
      for k in 0..3:
        matrix t += a[i*16, k*64] * )" +
                               b + R"( b[k, j, 0, 0]
      matrix y[i*16, j*32] = t
)";
      INFO(text);
      const tile_ir::Module module = tile_ir::parse(text);
      CHECK(tile_ir::parse(tile_ir::print(module)) == module);
      tile_ir::verify(module);
      const tile_ir::Kernel& tile = *module.kernels[0];
      std::mt19937 rng(11);
      std::vector<Array> inputs;
      for (const auto& p : tile.params) {
        Array& array = inputs.emplace_back(Array::zeros(p.dtype, evaluate_shape(p.shape, {})));
        for (int64_t k = 0; k < array.count(); ++k) array.set(k, Scalar::of_int(p.dtype, static_cast<int64_t>(rng())));
      }
      // What the statements say, from the words' bytes.
      Array wanted = inputs[3];
      for (int64_t i = 0; i < 48; ++i)
        for (int64_t j = 0; j < 64; ++j) {
          uint64_t sum = i < 16 ? 0 : static_cast<uint64_t>(inputs[2].get(i * 64 + j).i);
          for (int64_t k = 0; k < 192; ++k) {
            const auto word = static_cast<uint32_t>(inputs[1].get(((k / 64 * 2 + j / 32) * 16 + k % 64 / 4) * 32 + j % 32).i);
            const auto byte = static_cast<uint8_t>(word >> (k % 4 * 8));
            sum += static_cast<uint64_t>(inputs[0].get(i * 192 + k).i * (b == "i8" ? static_cast<int8_t>(byte) : byte));
          }
          wanted.set(i * 64 + j, Scalar::of_int(DType::i32, static_cast<int32_t>(static_cast<uint32_t>(sum))));
        }
      auto check = [&](const std::vector<Array>& got) {
        for (int64_t k = 0; k < wanted.count(); ++k) REQUIRE(got[3].get(k).i == wanted.get(k).i);
      };
      std::vector<Array> got = inputs;
      tile_ir::interpret(tile, pointers(got), {}, Mode::typed);
      check(got);
      PassContext context;
      context.target.vector_bytes = 64;
      kernel_ir::Module lowered = lower_tile_to_kernel(module, context);
      INFO(kernel_ir::print(lowered));
      kernel_ir::verify(*lowered.kernels[0]);
      CHECK(kernel_ir::parse(kernel_ir::print(lowered)) == lowered);
      got = inputs;
      kernel_ir::interpret(*lowered.kernels[0], pointers(got), {}, Mode::typed);
      check(got);
      if (!cpu_target_info("").features.contains("amx-int8")) continue;
      for (int threads : {1, 3}) {
        got = inputs;
        CHECK(run_native(tile, pointers(got), {}, 64, threads) == 0);
        check(got);
      }
    }
}

TEST_CASE("random kernels") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    Sizes sizes;
    std::string text = RandomTileKernel(seed).text(&sizes);
    INFO("seed " << seed << ", m " << sizes["m"] << ", n " << sizes["n"]);
    auto indices = [&](std::vector<Array>& a) {
      for (int64_t k = 0; k < a[3].count(); ++k) a[3].set(k, Scalar::of_int(DType::i64, (k * 7) % (sizes["n"] + 2) - 1));
    };
    agree(text, sizes, indices);
  }
}
