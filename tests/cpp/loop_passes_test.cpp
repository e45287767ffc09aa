#include <catch2/catch.hpp>
#include <cmath>
#include <random>
#include <set>

#include "base/error.h"
#include "base/flat_set.h"
#include "base/text.h"
#include "loop_ir/interpret.h"
#include "loop_ir/rewrite.h"
#include "lower/lower.h"
#include "passes/loop/fuse_nests.h"
#include "passes/loop/program_graph.h"
#include "passes/loop/repeats.h"
#include "pipeline.h"
#include "tensor_ir/interpret.h"

using namespace deplo;

namespace {

using Sizes = std::map<std::string, int64_t>;

Array random_input(const tensor_ir::Input& input, const Sizes& sizes, std::mt19937& rng) {
  Array a = Array::zeros(input.type.dtype, evaluate_shape(input.type.shape, sizes));
  std::uniform_real_distribution<double> distribution(-1, 1);
  for (double& x : a.floats) x = distribution(rng);
  for (int64_t& x : a.ints) x = static_cast<int64_t>(rng() % 2);
  return a;
}

double worst_difference(const Array& a, const Array& b) {
  REQUIRE(a.shape == b.shape);
  double worst = 0;
  for (int64_t i = 0; i < a.count(); ++i) {
    double x = a.get(i).as_double();
    double y = b.get(i).as_double();
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    worst = std::max(worst, std::isnan(x - y) ? 1.0 : std::fabs(x - y) / std::max(1.0, std::fabs(y)));
  }
  return worst;
}

/// Lowers the graph, runs every loop pass, and compares the interpreter with that of Tensor IR after each.
loop_ir::Module compile(const std::string& text, const Sizes& sizes = {}) {
  tensor_ir::Graph graph = tensor_ir::parse(text);
  tensor_ir::verify(graph);
  std::mt19937 rng(5);
  std::vector<Array> inputs;
  for (const auto& input : graph.inputs) inputs.push_back(random_input(input, sizes, rng));
  std::vector<Array> expected = tensor_ir::interpret(graph, inputs, sizes, Mode::exact);
  PassContext context;
  for (const auto& [name, size] : sizes) context.hints[name] = size;
  loop_ir::Module module = lower_tensor_to_loop(graph, context);
  auto check = [&](const std::string& pass) {
    std::string printed = loop_ir::print(module);
    INFO("after " << pass << "\n" << text << "\n" << printed);
    loop_ir::verify(module);
    CHECK(loop_ir::parse(printed) == module);
    std::vector<Array> got = loop_ir::interpret(module, inputs, sizes, Mode::exact);
    REQUIRE(got.size() == expected.size());
    for (size_t k = 0; k < got.size(); ++k) CHECK(worst_difference(got[k], expected[k]) < 1e-9);
  };
  check("lower_to_loop");
  for (const auto& pass : loop_passes()) {
    module = pass.run(std::move(module), context);
    check(pass.name);
  }
  return module;
}

size_t kernels(const std::string& text, const Sizes& sizes = {}) { return compile(text, sizes).steps.size(); }

// Parts of graphs over %x: f32[s0, 8].
const std::string kFusedSoftmax = R"(
  %m: f32[s0] = reduce max(%x) axes=[1]
  %b: f32[s0, 8] = map (i, j) -> %m[i]
  %d: f32[s0, 8] = sub(%x, %b)
  %e: f32[s0, 8] = exp(%d)
  %s: f32[s0] = reduce sum(%e) axes=[1]
  %t: f32[s0, 8] = map (i, j) -> %s[i]
  %y: f32[s0, 8] = div(%e, %t)
)";

}  // namespace

TEST_CASE("a row computation is one kernel") {
  std::string head = "tensor @f(%x: f32[s0, 8] strides [8, 1] user) where s0 in 2..\n";
  CHECK(kernels(head + kFusedSoftmax + "  return %y strides [8, 1]\n", {{"s0", 5}}) == 1);
  CHECK(kernels(head + kFusedSoftmax + "  return %y strides [8, 1], %e strides [8, 1]\n", {{"s0", 5}}) == 1);
  CHECK(kernels(head + R"(
  %n: f32[s0] = constant 0.125
  %s: f32[s0] = reduce sum(%x) axes=[1]
  %mean: f32[s0] = mul(%s, %n)
  %mb: f32[s0, 8] = map (i, j) -> %mean[i]
  %d: f32[s0, 8] = sub(%x, %mb)
  %q: f32[s0, 8] = mul(%d, %d)
  %v: f32[s0] = reduce sum(%q) axes=[1]
  %r: f32[s0] = sqrt(%v)
  %rb: f32[s0, 8] = map (i, j) -> %r[i]
  %y: f32[s0, 8] = div(%d, %rb)
  return %y strides [8, 1]
)",
                {{"s0", 5}}) == 1);
}

TEST_CASE("kernels are joined up to a number of statements") {
  // How many statements two kernels over the same rows have, and how many steps are left of them; each is a loop, a load, operations and a store.
  auto steps = [](size_t first, size_t second) {
    auto kernel = [](const std::string& name, const std::string& from, const std::string& to, size_t statements) {
      std::string body = fmt::format("\nloop @{0}({1}: f32[64], out {2}: f32[64])\n  for i in 64:\n    v0 = load {1}[i]\n", name, from, to);
      size_t made = 1;
      for (; made + 2 < statements; ++made) body += fmt::format("    v{} = tanh(v{})\n", made, made - 1);
      return body + fmt::format("    store {}[i] = v{}\n", to, made - 1);
    };
    std::string text =
        "program @f(x: f32[64] user)\n  buffer t: f32[64] output\n  buffer y: f32[64] output\n  call @a(x, t)\n  call @b(t, y)\n  return t, y\n";
    loop_ir::Module module = loop_ir::parse(text + kernel("a", "x", "t", first) + kernel("b", "t", "y", second));
    size_t total = 0;
    for (const auto& k : module.kernels) total += loop_ir::count_statements(k->body);
    PassContext context;
    return std::pair(total, fuse_nests(std::move(module), context).steps.size());
  };
  CHECK(steps(512, 512) == std::pair(kMostStatements, size_t{1}));
  CHECK(steps(512, 513) == std::pair(kMostStatements + 1, size_t{2}));
}

TEST_CASE("pointwise chains and index maps are one kernel that computes only what is asked") {
  loop_ir::Module module = compile(R"(tensor @f(%x: f32[16] strides [1] user)
  %n: f32[16] = neg(%x)
  %s: f32[3] = map (i) -> %n[i + 5]
  %y: f32[3] = exp(%s)
  return %y strides [1]
)");
  REQUIRE(module.kernels.size() == 1);
  CHECK(loop_ir::print(*module.kernels[0]).find("for i0 in 3:") != std::string::npos);
  CHECK(kernels(R"(tensor @f(%x: f32[4, 6] strides [6, 1] user)
  %a: f32[4, 6] = exp(%x)
  %b: f32[4, 6] = tanh(%a)
  %c: f32[4, 6] = mul(%a, %b)
  %t: f32[6, 4] = map (i, j) -> %c[j, i]
  return %t strides [4, 1]
)") == 1);
}

TEST_CASE("a contraction takes its prologue and epilogue, and stays apart from the next") {
  std::string head =
      R"(tensor @f(%x: f32[8, 64] strides [64, 1] user, %w: f32[256, 64] strides [64, 1] parameter static, %v: f32[64, 256] strides [256, 1] parameter static)
  %xm: f32[8, 256, 64] = map (i, n, k) -> %x[i, k]
  %wm: f32[8, 256, 64] = map (i, n, k) -> %w[n, k]
  %p: f32[8, 256, 64] = mul(%xm, %wm)
  %c: f32[8, 256] = reduce sum(%p) axes=[2]
  %z: f32[8, 256] = constant 0.0
  %h: f32[8, 256] = max(%c, %z)
)";
  CHECK(kernels(head + "  return %h strides [256, 1]\n") == 1);
  CHECK(kernels(head + R"(
  %hm: f32[8, 64, 256] = map (i, n, k) -> %h[i, k]
  %vm: f32[8, 64, 256] = map (i, n, k) -> %v[n, k]
  %q: f32[8, 64, 256] = mul(%hm, %vm)
  %o: f32[8, 64] = reduce sum(%q) axes=[2]
  return %o strides [64, 1]
)") == 2);
}

TEST_CASE("attention is one kernel whose scores stay in a row") {
  loop_ir::Module module = compile(
      R"(tensor @f(%q: f32[2, 4, s0, 4] strides [16*s0, 4*s0, 4, 1] user, %k: f32[2, 2, s0, 4] strides [8*s0, 4*s0, 4, 1] user, %v: f32[2, 2, s0, 4] strides [8*s0, 4*s0, 4, 1] user) where s0 in 2..
  %qm: f32[2, 4, s0, s0, 4] = map (b, h, i, j, d) -> %q[b, h, i, d]
  %km: f32[2, 4, s0, s0, 4] = map (b, h, i, j, d) -> %k[b, h // 2, j, d]
  %p: f32[2, 4, s0, s0, 4] = mul(%qm, %km)
  %c: f32[2, 4, s0, s0] = reduce sum(%p) axes=[4]
  %z: f32[2, 4, s0, s0] = constant 0.5
  %x: f32[2, 4, s0, s0] = mul(%c, %z)
  %m: f32[2, 4, s0] = reduce max(%x) axes=[3]
  %b: f32[2, 4, s0, s0] = map (b, h, i, j) -> %m[b, h, i]
  %d: f32[2, 4, s0, s0] = sub(%x, %b)
  %e: f32[2, 4, s0, s0] = exp(%d)
  %s: f32[2, 4, s0] = reduce sum(%e) axes=[3]
  %t: f32[2, 4, s0, s0] = map (b, h, i, j) -> %s[b, h, i]
  %y: f32[2, 4, s0, s0] = div(%e, %t)
  %ym: f32[2, 4, s0, 4, s0] = map (b, h, i, d, j) -> %y[b, h, i, j]
  %vm: f32[2, 4, s0, 4, s0] = map (b, h, i, d, j) -> %v[b, h // 2, j, d]
  %pv: f32[2, 4, s0, 4, s0] = mul(%ym, %vm)
  %o: f32[2, 4, s0, 4] = reduce sum(%pv) axes=[4]
  %ot: f32[2, s0, 4, 4] = map (b, i, h, d) -> %o[b, h, i, d]
  return %ot strides [16*s0, 16, 4, 1]
)",
      {{"s0", 5}});
  REQUIRE(module.kernels.size() == 1);
  CHECK(module.buffers.size() == 4);
  CHECK(loop_ir::print(*module.kernels[0]).find("//") == std::string::npos);
}

TEST_CASE("an update that is written back happens in place") {
  std::string head = "tensor @f(%c: f32[4, 6] strides [6, 1] user, %u: f32[2, 6] strides [6, 1] user, %i: i64[2] strides [1] user)\n";
  loop_ir::Module slice = compile(head + R"(
  %n: f32[4, 6] = map (i, j) -> %u[i - 1, j] if i - 1 >= 0 and i < 3 | %c[i, j]
  %y: f32[4, 6] = exp(%n)
  write %n to %c
  return %y strides [6, 1]
)");
  CHECK(slice.steps.size() == 2);
  CHECK(loop_ir::print(*slice.kernels[0]).find("for i0 in 2:") != std::string::npos);
  loop_ir::Module scatter = compile(head + R"(
  %n: f32[4, 6] = scatter set(%c, %u) (r, j) with k = %i[r] in 0..4 -> [k, j]
  %y: f32[4, 6] = exp(%n)
  write %n to %c
  return %y strides [6, 1]
)");
  CHECK(scatter.steps.size() == 2);
  // The old value is returned: it must be kept.
  CHECK(compile(head + R"(
  %n: f32[4, 6] = scatter set(%c, %u) (r, j) with k = %i[r] in 0..4 -> [k, j]
  write %n to %c
  return %c strides [6, 1], %n strides [6, 1]
)")
            .steps.size() >= 3);
}

TEST_CASE("writes see the inputs as the call found them") {
  compile(R"(tensor @swap(%a: f32[4] strides [1] user, %b: f32[4] strides [1] user)
  %r: f32[4] = map (i) -> %a[3 - i]
  %e: f32[4] = exp(%b)
  write %b to %a
  write %r to %b
  return %a strides [1], %e strides [1]
)");
}

TEST_CASE("long reductions have two phases") {
  PassContext context;
  auto lowered = [&](const std::string& text) { return lower_tensor_to_loop(tensor_ir::parse(text), context); };
  loop_ir::Module module =
      lowered("tensor @f(%x: f32[1000, 1000] strides [1000, 1] user)\n  %s: f32[] = reduce sum(%x) axes=[0, 1]\n  return %s strides []\n");
  for (const auto& pass : loop_passes()) module = pass.run(std::move(module), context);
  CHECK(module.steps.size() == 2);
  CHECK(compile("tensor @f(%x: f32[2, 300000] strides [300000, 1] user)\n  %m: f32[2], %v: f32[2] = reduce welford(%x) axes=[1]\n  return %m strides "
                "[1], %v strides [1]\n")
            .steps.size() == 2);
}

TEST_CASE("what only parameters decide runs once") {
  loop_ir::Module module = compile(R"(tensor @f(%x: f32[4, 6] strides [6, 1] user, %v: f32[6] strides [1] buffer static)
  %e: f32[6] = exp(%v)
  %s: f32[6] = sqrt(%e)
  %b: f32[4, 6] = map (i, j) -> %s[j]
  %y: f32[4, 6] = div(%x, %b)
  return %y strides [6, 1]
)");
  REQUIRE(module.steps.size() == 2);
  CHECK(std::get<CallStep>(module.steps[0]).once);
}

namespace {

/// Random programs over small tensors: pointwise functions, index maps of every kind, reductions, contractions, scans, scatters.
struct Generator {
  std::mt19937 rng;
  std::string text;
  std::vector<std::pair<std::string, std::vector<int64_t>>> values;
  int next = 0;

  int pick(size_t n) { return static_cast<int>(rng() % n); }

  static std::string list(const std::vector<int64_t>& shape) {
    std::vector<std::string> parts;
    for (int64_t s : shape) parts.push_back(std::to_string(s));
    return "[" + joined(parts) + "]";
  }

  static std::string strides(const std::vector<int64_t>& shape) {
    std::vector<int64_t> result(shape.size(), 1);
    for (size_t d = shape.size(); d-- > 1;) result[d - 1] = result[d] * shape[d];
    return list(result);
  }

  std::string add(const std::vector<int64_t>& shape, const std::string& op) {
    std::string name = "%v" + std::to_string(next++);
    text += "  " + name + ": f32" + list(shape) + " = " + op + "\n";
    values.emplace_back(name, shape);
    return name;
  }

  static std::string axes(size_t rank) {
    std::vector<std::string> names;
    for (size_t d = 0; d < rank; ++d) names.push_back("i" + std::to_string(d));
    return "(" + joined(names) + ")";
  }

  // A map whose source coordinate d is `index[d]`.
  void map(const std::vector<int64_t>& shape, const std::string& source, const std::vector<std::string>& index, const std::string& guard = "") {
    add(shape, "map " + axes(shape.size()) + " -> " + source + "[" + joined(index) + "]" + guard);
  }

  std::vector<std::string> identity(size_t rank) {
    std::vector<std::string> index;
    for (size_t d = 0; d < rank; ++d) index.push_back("i" + std::to_string(d));
    return index;
  }

  void step() {
    auto [name, shape] = values[static_cast<size_t>(pick(values.size()))];
    size_t rank = shape.size();
    auto index = identity(rank);
    size_t d = rank ? static_cast<size_t>(pick(rank)) : 0;
    int kind = pick(12);
    if (kind <= 2 || rank == 0) {
      const char* names[] = {"tanh", "exp", "neg", "abs"};
      std::string a = name;
      if (kind == 1) a = add(shape, "tanh(" + name + ")");
      add(shape, std::string(names[pick(4)]) + "(" + (kind == 1 ? add(shape, "tanh(" + a + ")") : add(shape, "tanh(" + name + ")")) + ")");
    } else if (kind <= 4) {
      for (size_t at = values.size(); at-- > 0;)
        if (values[at].second == shape && (values[at].first != name || at == 0)) {
          std::string other = values[at].first;
          add(shape, std::string(pick(2) ? "add(" : "mul(") + name + ", " + other + ")");
          return;
        }
    } else if (kind == 5) {
      auto reduced = shape;
      reduced.erase(reduced.begin() + static_cast<long>(d));
      add(reduced, std::string("reduce ") + (pick(2) ? "max(" : "sum(") + name + ") axes=[" + std::to_string(d) + "]");
      // Often the row is used with its reduction again.
      if (pick(2)) {
        std::string result = values.back().first;
        auto kept = index;
        kept.erase(kept.begin() + static_cast<long>(d));
        map(shape, result, kept);
        std::string spread = values.back().first;
        add(shape, "sub(" + name + ", " + spread + ")");
      }
    } else if (kind == 6 && rank >= 2) {
      std::swap(shape[0], shape[d]);
      std::swap(index[0], index[d]);
      map(shape, name, index);
    } else if (kind == 7) {
      int64_t extent = shape[d];
      if (extent < 2) return;
      shape[d] = extent - 1;
      index[d] += " + 1";
      map(shape, name, index);
    } else if (kind == 8) {
      index[d] = std::to_string(shape[d] - 1) + " - " + index[d];
      map(shape, name, index);
    } else if (kind == 9) {
      int64_t extent = shape[d];
      shape[d] = extent + 2;
      std::string i = index[d];
      index[d] = i + " - 1";
      map(shape, name, index, " if " + i + " - 1 >= 0 and " + i + " - 1 < " + std::to_string(extent) + " else " + (pick(2) ? "0.0" : "1.5"));
    } else if (kind == 10 && rank >= 2) {
      int64_t inner = shape[1];
      std::vector<int64_t> flat{shape[0] * inner};
      flat.insert(flat.end(), shape.begin() + 2, shape.end());
      std::vector<std::string> source{"i0 // " + std::to_string(inner), "i0 % " + std::to_string(inner)};
      for (size_t k = 2; k < rank; ++k) source.push_back("i" + std::to_string(k - 1));
      map(flat, name, source);
    } else if (kind == 11 && rank == 2) {
      // a @ a.T
      std::vector<int64_t> space{shape[0], shape[0], shape[1]};
      map(space, name, {"i0", "i2"});
      std::string a = values.back().first;
      map(space, name, {"i1", "i2"});
      std::string b = values.back().first;
      std::string p = add(space, "mul(" + a + ", " + b + ")");
      add({shape[0], shape[0]}, "reduce sum(" + p + ") axes=[2]");
    } else {
      add(shape, "scan sum(" + name + ") axis=" + std::to_string(d));
    }
  }

  std::string program(unsigned seed) {
    rng.seed(seed);
    text = "tensor @random(%x: f32[4, 6] strides [6, 1] user, %y: f32[2, 3, 4] strides [12, 4, 1] user)\n";
    values = {{"%x", {4, 6}}, {"%y", {2, 3, 4}}};
    for (int k = 0; k < 14 && text.size() < 2500; ++k) step();
    std::vector<std::string> outputs;
    for (int k = 0; k < 3; ++k) {
      auto [name, shape] = k == 0 ? values.back() : values[static_cast<size_t>(2 + pick(values.size() - 2))];
      outputs.push_back(name + " strides " + strides(shape));
    }
    return text + "  return " + joined(outputs) + "\n";
  }
};

}  // namespace

TEST_CASE("random programs keep their numbers through every loop pass") {
  for (unsigned seed = 0; seed < 60; ++seed) compile(Generator{}.program(seed));
}

namespace {

/// Attention-free layers of two kinds in turn, with weights of their own.
std::string layers(int count) {
  std::string inputs = "%x: f32[s0, 64] user";
  std::string body;
  std::string x = "%x";
  for (int k = 0; k < count; ++k) {
    inputs += fmt::format(", %w{0}: f32[64, 64] parameter static, %n{0}: f32[64] parameter static", k);
    body += fmt::format("  %m{0}: f32[s0, 64] = aten.mm.default(self={1}, mat2=%w{0})\n", k, x);
    body += fmt::format("  %a{0}: f32[s0, 64] = aten.{1}.default(self=%m{0})\n", k, k % 2 ? "gelu" : "relu");
    body += fmt::format("  %s{0}: f32[s0, 64] = aten._softmax.default(self=%a{0}, dim=-1, half_to_float=false)\n", k);
    body += fmt::format("  %p{0}: f32[s0, 64] = aten.mul.Tensor(self=%s{0}, other=%n{0})\n", k);
    body += fmt::format("  %x{0}: f32[s0, 64] = aten.add.Tensor(self=%p{0}, other={1})\n", k, x);
    x = fmt::format("%x{}", k);
  }
  return fmt::format("torch @net({}) where s0 in 2..\n{}  return {}\n", inputs, body, x);
}

loop_ir::Module fused(const std::string& text, bool repeats) {
  PassContext context;
  if (!repeats) context.disabled.insert("share_repeats");
  PipelineOptions options;
  options.stop_after = "loop";
  return run_pipeline_from_text(text, "<layers>", context, options).loop;
}

/// How many parts of the program fusion has worked on.
size_t made(const std::string& text) {
  const size_t before = Repeats::made();
  fused(text, true);
  return Repeats::made() - before;
}

}  // namespace

TEST_CASE("fusion works on equal layers once, however many there are") {
  CHECK(made(layers(6)) > 0);
  CHECK(made(layers(24)) == made(layers(6)));
  CHECK(fused(layers(9), true) == fused(layers(9), false));
}

TEST_CASE("flat sets hold what sets hold") {
  std::mt19937 rng(3);
  FlatSet<int> flat;
  std::set<int> set;
  for (int k = 0; k < 2000; ++k) {
    const int value = static_cast<int>(rng() % 40);
    switch (rng() % 4) {
      case 0: REQUIRE(flat.erase(value) == set.erase(value)); break;
      case 1: REQUIRE(flat.count(value) == set.count(value)); break;
      case 2: {
        const int more[] = {value, 3, value + 1};
        flat.insert(std::begin(more), std::end(more));
        set.insert(std::begin(more), std::end(more));
        break;
      }
      default: {
        auto [it, fresh] = flat.insert(value);
        REQUIRE(*it == value);
        REQUIRE(fresh == set.insert(value).second);
      }
    }
    REQUIRE(std::equal(flat.begin(), flat.end(), set.begin(), set.end()));
    REQUIRE(flat.empty() == set.empty());
  }
}

TEST_CASE("a choice stays where somebody sees its other side") {
  const auto cleaned = [](const std::string& statements) {
    auto module =
        loop_ir::parse("loop @k(x: f32[8], t: bool[1], out y: f32[8], out z: f32[8])\n  c = load t[0]\n  n: f32 = constant 0.0\n" + statements);
    loop_ir::Kernel kernel = *module.kernels.at(0);
    kernel.body = loop_ir::clean(kernel.body, kernel.symbols);
    return loop_ir::print(kernel);
  };
  const auto choices = [](const std::string& text) {
    size_t count = 0;
    for (size_t at = text.find("where("); at != std::string::npos; at = text.find("where(", at + 1)) ++count;
    return count;
  };
  const std::string both = "    v = load x[i]\n    w = where(c, v, n)\n    u = add(w, w)\n    q = where(c, u, n)\n";
  CHECK(choices(cleaned("  for i in 8:\n" + both + "    store y[i] = q\n")) == 1);
  CHECK(choices(cleaned("  for i in 8:\n" + both + "    store y[i] = q\n    store z[i] = w\n")) == 2);
  // What follows a scan's step reads its values.
  const std::string scan = "  scan r: f32 = sum(q) over i in 8:\n" + both + "  then:\n    store y[i] = r\n";
  CHECK(choices(cleaned(scan)) == 1);
  CHECK(choices(cleaned(scan + "    store z[i] = w\n")) == 2);
}
