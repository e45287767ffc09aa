#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "base/error.h"
#include "lower/torch_to_tensor.h"
#include "lower/torch_to_tensor/builder.h"
#include "pipeline.h"
#include "tensor_ir/interpret.h"

using namespace deplo;
using namespace deplo::tensor_ir;

namespace {

Array floats(std::vector<int64_t> shape, std::vector<double> values) { return {DType::f32, std::move(shape), std::move(values), {}}; }
Array integers(std::vector<int64_t> shape, std::vector<int64_t> values) { return {DType::i64, std::move(shape), {}, std::move(values)}; }

std::vector<Array> run(const std::string& text, const std::vector<Array>& inputs, Mode mode = Mode::typed) {
  Graph graph = parse(text);
  verify(graph);
  CHECK(parse(print(graph)) == graph);
  return interpret(graph, inputs, {}, mode);
}

std::vector<Array> run_torch(const std::string& text, const std::vector<Array>& inputs) {
  torch_ir::Graph torch = torch_ir::parse(text);
  torch_ir::verify(torch);
  Graph graph = lower_torch_to_tensor(torch);
  verify(graph);
  INFO(print(graph));
  for (const auto& op : graph.ops) CHECK_FALSE(std::holds_alternative<Library>(op->node));
  return interpret(graph, inputs, {}, Mode::typed);
}

Graph optimised(Graph graph) {
  PassContext context;
  for (const auto& pass : tensor_passes()) {
    graph = pass.run(std::move(graph), context);
    verify(graph);
  }
  return graph;
}

void check_same(const Array& a, const Array& b) {
  REQUIRE(a.shape == b.shape);
  REQUIRE(a.dtype == b.dtype);
  CHECK(a.ints == b.ints);
  for (size_t i = 0; i < a.floats.size(); ++i) {
    bool same =
        a.floats[i] == b.floats[i] ? std::signbit(a.floats[i]) == std::signbit(b.floats[i]) : std::isnan(a.floats[i]) && std::isnan(b.floats[i]);
    CHECK(same);
  }
}

}  // namespace

TEST_CASE("tensor: every op prints and parses", "[tensor_ir]") {
  Graph graph = parse(R"(
tensor @all(%x: f32[s0, 8] user, s1: sym, %w: f32[100, 8] strides [1, 100] parameter static, %idx: i64[s0] user) where s0 in 2..4096, s1 in 1..
  %c: f32[s0, 8] = constant -0.5
  %f: bool[4] = constant true
  %n: i64[s0, 8] = index (i, j) -> i*8 + j - s1
  %a: f32[s0, 8] = sub(%x, %c) from "sub:sub_1"
  %m: f32[s0] = reduce max(%a) axes=[1]
  %v: f32[s0], %k: i64[s0] = reduce argmax(%a, %n) axes=[1]
  %s: f32[s0, 8] = scan sum(%a) axis=1
  %p: f32[s0, 8] = map (i, j) -> %a[i, j - 2] if j - 2 >= 0 | %x[i, (j*3 // 4)] if i != 0 and j == 1 else nan
  %e: f32[s0, 8] = map (i, j) with k = %idx[i] in 0..100, l = %idx[0] in 0..s0 unchecked -> %w[k, j]
  %t: f32[s0, 8] = scatter sum(%p, %e) (i, j) with k = %idx[i] in 0..s0 asserted -> [k, j] if j < 7
  %q: f32[s0, 8], %r: i64[s0, 8] = library aten.sort.stable(self=%t, stable=none, dim=0) strides [8, 1], [8, 1] reason "sort"
  write %q to %x
  return %t strides [8, 1], s0*s1, none, %r strides [8, 1]
)");
  verify(graph);
  CHECK(parse(print(graph)) == graph);
}

TEST_CASE("tensor: malformed graphs are refused", "[tensor_ir]") {
  auto bad = [](const std::string& body) {
    Graph graph = parse("tensor @g(%x: f32[4, 8], %i: i64[4])\n" + body + "\n  return %y strides [8, 1]");
    CHECK_THROWS_AS(verify(graph), InternalError);
  };
  bad("%y: f32[4, 8] = add(%x, %z)");
  bad("%y: f32[4, 8] = add(%x, %i)");
  bad("%y: f32[8, 4] = neg(%x)");
  bad("%y: i64[4, 8] = neg(%x)");
  bad("%y: f32[4, 8] = map (a, b) -> %x[a]");
  bad("%y: f32[4, 8] = map (a, b) -> %x[a, b + 8]");
  bad("%y: f32[4, 8] = map (a, b) -> %x[a, c]");
  bad("%y: f32[4, 8] = map (a, b) with j = %x[a, b] in 0..8 -> %x[a, j]");
  bad("%y: f32[4, 8] = reduce sum(%x) axes=[1]");
  bad("%x: f32[4, 8] = neg(%x)\n  %y: f32[4, 8] = neg(%x)");
  CHECK_THROWS_AS(parse("tensor @g() %y: f32[2] = nothing() return"), UserError);
}

TEST_CASE("tensor: softmax by its primitives", "[tensor_ir]") {
  auto out = run(R"(
tensor @softmax(%x: f32[s0, 3]) where s0 in 1..
  %m: f32[s0] = reduce max(%x) axes=[1]
  %b: f32[s0, 3] = map (i, j) -> %m[i]
  %d: f32[s0, 3] = sub(%x, %b)
  %e: f32[s0, 3] = exp(%d)
  %s: f32[s0] = reduce sum(%e) axes=[1]
  %t: f32[s0, 3] = map (i, j) -> %s[i]
  %y: f32[s0, 3] = div(%e, %t)
  return %y strides [3, 1]
)",
                 {floats({2, 3}, {1, 2, 3, 0, 0, 0})}, Mode::exact);
  double total = std::exp(-2.0) + std::exp(-1.0) + 1;
  CHECK(out[0].floats[0] == Approx(std::exp(-2.0) / total).epsilon(1e-15));
  CHECK(out[0].floats[4] == Approx(1.0 / 3).epsilon(1e-15));
}

TEST_CASE("tensor: maps try their sources in order; indirect coordinates wrap once and are checked", "[tensor_ir]") {
  const char* text = R"(
tensor @g(%x: f32[3], %i: i64[2])
  %p: f32[5] = map (a) -> %x[a - 1] if a - 1 >= 0 and a < 4 else 9.0
  %y: f32[2] = map (a) with j = %i[a] in 0..5 -> %p[j]
  return %p strides [1], %y strides [1]
)";
  auto out = run(text, {floats({3}, {1, 2, 3}), integers({2}, {-2, 0})});
  CHECK(out[0].floats == std::vector<double>{9, 1, 2, 3, 9});
  CHECK(out[1].floats == std::vector<double>{3, 9});
  CHECK_THROWS_AS(run(text, {floats({3}, {1, 2, 3}), integers({2}, {5, 0})}), IndexError);
  CHECK_THROWS_AS(run(text, {floats({3}, {1, 2, 3}), integers({2}, {-6, 0})}), IndexError);
}

TEST_CASE("tensor: an asserted coordinate does not wrap, and fails as an assertion", "[tensor_ir]") {
  const char* text = R"(
tensor @g(%x: f32[3], %i: i64[2])
  %y: f32[2] = map (a) with j = %i[a] in 0..3 asserted -> %x[j]
  return %y strides [1]
)";
  CHECK(run(text, {floats({3}, {1, 2, 3}), integers({2}, {2, 0})})[0].floats == std::vector<double>{3, 1});
  CHECK_THROWS_AS(run(text, {floats({3}, {1, 2, 3}), integers({2}, {3, 0})}), ExecutionError);
  CHECK_THROWS_AS(run(text, {floats({3}, {1, 2, 3}), integers({2}, {-1, 0})}), ExecutionError);
}

TEST_CASE("tensor: scatter combines in row-major order; writes come after the outputs", "[tensor_ir]") {
  auto out = run(R"(
tensor @g(%x: f32[3], %u: f32[4], %i: i64[4])
  %s: f32[3] = scatter sum(%x, %u) (a) with j = %i[a] in 0..3 -> [j]
  %t: f32[3] = scatter set(%x, %u) (a) with j = %i[a] in 0..3 -> [j] if a < 3
  write %s to %x
  return %t strides [1], 7, none
)",
                 {floats({3}, {1, 1, 1}), floats({4}, {10, 20, 30, 40}), integers({4}, {0, 2, 0, -1})});
  REQUIRE(out.size() == 4);
  CHECK(out[0].floats == std::vector<double>{30, 1, 20});
  CHECK(out[1].ints == std::vector<int64_t>{7});
  CHECK(out[3].floats == std::vector<double>{41, 1, 61});
}

TEST_CASE("tensor: empty reductions, scans and arg reductions", "[tensor_ir]") {
  auto out = run(R"(
tensor @g(%x: f32[2, 0], %z: f32[4])
  %s: f32[2] = reduce sum(%x) axes=[1]
  %m: f32[2] = reduce max(%x) axes=[1]
  %n: i64[4] = index (a) -> a
  %v: f32[], %k: i64[] = reduce argmax(%z, %n) axes=[0]
  %c: f32[4] = scan sum(%z) axis=0
  return %s strides [1], %m strides [1], %k strides [], %c strides [1]
)",
                 {floats({2, 0}, {}), floats({4}, {3, 5, 5, 1})});
  CHECK(out[0].floats == std::vector<double>{0, 0});
  CHECK(out[1].floats == std::vector<double>(2, -INFINITY));
  CHECK(out[2].ints == std::vector<int64_t>{1});
  CHECK(out[3].floats == std::vector<double>{3, 8, 13, 14});
}

TEST_CASE("tensor: integer division by zero is an error", "[tensor_ir]") {
  const char* text = "tensor @g(%x: i64[1], %y: i64[1])\n  %z: i64[1] = floor_div(%x, %y)\n  return %z strides [1]";
  CHECK(run(text, {integers({1}, {-7}), integers({1}, {2})})[0].ints[0] == -4);
  CHECK_THROWS_AS(run(text, {integers({1}, {1}), integers({1}, {0})}), UserError);
}

TEST_CASE("rules: arguments that no rule handles keep the call in ATen", "[tensor_ir]") {
  Graph graph = lower_torch_to_tensor(torch_ir::parse(R"(
torch @g(%x: f32[4])
  %0: f32[4] = aten.add.Tensor(self=%x, other=%x, novelty=3)
  %1: f32[4] = aten.unheard_of.default(self=%0)
  %2: f32[1, 1, 2, 2] = aten.view.default(self=%1, size=[1, 1, 2, 2])
  %3: f32[1, 1, 0, 0] = aten._upsample_bilinear2d_aa.default(self=%2, output_size=[0, 0], align_corners=false)
  return %3
)"));
  std::vector<std::string> reasons;
  for (const auto& op : graph.ops)
    if (const auto* library = std::get_if<Library>(&op->node)) reasons.push_back(library->reason);
  CHECK(reasons == std::vector<std::string>{"the rule does not handle novelty", "no decomposition rule", "antialiased sizes 0 from 2"});
}

TEST_CASE("rules: an output has memory of its own", "[tensor_ir]") {
  Graph graph = lower_torch_to_tensor(torch_ir::parse(R"(
torch @g(%x: f32[4])
  %0: f32[4] = aten.clone.default(self=%x)
  %1: f32[4] = aten.neg.default(self=%x)
  %2: f32[4] = aten.clone.default(self=%1)
  %3: f32[4] = aten.alias.default(self=%1)
  return %0, %1, %2, %3
)"));
  graph = optimised(std::move(graph));
  auto name = [&](size_t k) { return std::get<ValueName>(graph.outputs[k].value.value).name; };
  CHECK(name(0) != "%x");
  CHECK(name(1) != name(2));
  CHECK(name(1) == name(3));
}

TEST_CASE("rules: alpha, rounding, comparison and power follow PyTorch", "[tensor_ir]") {
  auto out = run_torch(R"(
torch @g(%x: f32[3], %i: i64[3])
  %0: f32[3] = aten.add.Tensor(self=%x, other=%i, alpha=2)
  %1: i64[3] = aten.div.Tensor_mode(self=%i, other=2, rounding_mode="floor")
  %2: bool[3] = aten.gt.Scalar(self=%i, other=0.5)
  %3: f32[3] = aten.pow.Tensor_Scalar(self=%x, exponent=2)
  %4: f32[3] = aten.div.Tensor_mode(self=%x, other=2.0, rounding_mode="floor")
  %5: i64[3] = aten.remainder.Scalar(self=%i, other=3)
  %6: f32[3] = aten.clamp.default(self=%x, min=none, max=1)
  %7: f32[3] = aten.sign.default(self=%x)
  return %0, %1, %2, %3, %4, %5, %6, %7
)",
                       {floats({3}, {-1.5, 0.25, NAN}), integers({3}, {-3, 0, 5})});
  CHECK(out[0].floats[0] == -7.5);
  CHECK(out[1].ints == std::vector<int64_t>{-2, 0, 2});
  CHECK(out[2].ints == std::vector<int64_t>{0, 0, 1});
  CHECK(out[3].floats[0] == 2.25);
  CHECK(out[4].floats[0] == -1);
  CHECK(out[5].ints == std::vector<int64_t>{0, 0, 2});
  CHECK(out[6].floats[1] == 0.25);
  CHECK(std::isnan(out[6].floats[2]));
  CHECK(out[7].floats == std::vector<double>{-1, 1, 0});
}

TEST_CASE("rules: views are maps", "[tensor_ir]") {
  auto out = run_torch(R"(
torch @g(%x: f32[2, 3])
  %0: f32[3, 2] strides [1, 3] = aten.t.default(self=%x)
  %1: f32[6] = aten.reshape.default(self=%0, shape=[-1])
  %2: f32[2] strides [2] = aten.slice.Tensor(self=%1, dim=0, start=-4, end=9223372036854775807, step=2)
  %3: f32[6] = aten.roll.default(self=%1, shifts=[1], dims=[0])
  %4: f32[2, 3] = aten.as_strided.default(self=%3, size=[2, 3], stride=[1, 2], storage_offset=0)
  %5: f32[4, 3] = aten.cat.default(tensors=[%x, %4])
  %6: f32[2, 3] = aten.tril.default(self=%x, diagonal=0)
  return %1, %2, %3, %4, %5, %6
)",
                       {floats({2, 3}, {1, 2, 3, 4, 5, 6})});
  CHECK(out[0].floats == std::vector<double>{1, 4, 2, 5, 3, 6});
  CHECK(out[1].floats == std::vector<double>{2, 3});
  CHECK(out[2].floats == std::vector<double>{6, 1, 4, 2, 5, 3});
  CHECK(out[3].floats == std::vector<double>{6, 4, 5, 1, 2, 3});
  CHECK(out[4].floats == std::vector<double>{1, 2, 3, 4, 5, 6, 6, 4, 5, 1, 2, 3});
  CHECK(out[5].floats == std::vector<double>{1, 0, 0, 4, 5, 0});
}

TEST_CASE("rules: index tensors stand where PyTorch puts them", "[tensor_ir]") {
  auto out = run_torch(R"(
torch @g(%x: f32[2, 3, 2], %i: i64[2], %j: i64[2])
  %0: f32[2, 2] = aten.index.Tensor(self=%x, indices=[none, %i, %j])
  %1: f32[2, 3] = aten.index.Tensor(self=%x, indices=[%j, none, %j])
  %2: f32[2, 3, 2] = aten.index_put.default(self=%x, indices=[%j, %i], values=%0, accumulate=true)
  return %0, %1, %2
)",
                       {floats({2, 3, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), integers({2}, {2, -3}), integers({2}, {1, 0})});
  CHECK(out[0].floats == std::vector<double>{5, 0, 11, 6});
  CHECK(out[1].floats == std::vector<double>{7, 9, 11, 0, 2, 4});
  CHECK(out[2].floats == std::vector<double>{11, 7, 2, 3, 4, 5, 6, 7, 8, 9, 15, 11});
}

namespace {

/// A graph of random maps, elementwise ops and reductions over small tensors.
Graph random_graph(std::mt19937& random) {
  auto pick = [&](size_t n) { return static_cast<size_t>(random() % n); };
  rules::Builder b;
  Graph graph;
  graph.name = "random";
  std::vector<Value> values;
  for (const char* name : {"%x", "%y"}) {
    TensorType type{DType::f32, {2 + static_cast<int64_t>(pick(3)), 1 + static_cast<int64_t>(pick(4))}};
    values.push_back({name, type});
    b.reserve(name);
    graph.inputs.push_back({name, type, torch_ir::default_strides(type.shape), torch_ir::InputKind::user, false});
  }
  for (int step = 0; step < 12; ++step) {
    Value v = values[pick(values.size())];
    auto rank = static_cast<int64_t>(v.type.shape.size());
    int64_t d = rank > 0 ? static_cast<int64_t>(pick(static_cast<size_t>(rank))) : 0;
    int64_t size = rank > 0 ? v.type.shape[static_cast<size_t>(d)].value() : 1;
    auto zeros = std::vector<Expr>(static_cast<size_t>(rank), Expr(0));
    switch (pick(rank > 0 ? 12 : 3)) {
      case 0: v = b.apply(pick(2) ? Fn::neg : Fn::exp, {v}); break;
      case 1: v = b.apply(pick(2) ? Fn::mul : Fn::add, v, pick(2) ? 1.0 : -0.0); break;
      case 2: v = b.cast(b.cast(v, pick(2) ? DType::f64 : DType::bf16), DType::f32); break;
      case 3: v = b.slice(v, d, static_cast<int64_t>(pick(static_cast<size_t>(size))), 1, 1); break;
      case 4: v = b.reshape(v, {product(v.type.shape)}); break;
      case 5: v = rank > 1 ? b.permute(v, rank == 2 ? std::vector<int64_t>{1, 0} : std::vector<int64_t>{2, 0, 1}) : b.unsqueeze(v, 0); break;
      case 6: {
        auto after = zeros;
        zeros[static_cast<size_t>(d)] = static_cast<int64_t>(pick(3)) - 1;
        if (size == 1) zeros[static_cast<size_t>(d)] = 1;
        after[static_cast<size_t>(d)] = 1;
        v = b.pad(v, zeros, after, pick(2) ? 0.0 : 2.0);
        break;
      }
      case 7: v = b.concatenate({v, b.apply(Fn::neg, {v}), v}, d); break;
      case 8: v = b.reduce(pick(2) ? Combiner::max : Combiner::sum, v, {d}, pick(2) == 0); break;
      case 9:
        v = rank < 3 ? b.broadcast(
                           v,
                           [&] {
                             auto s = v.type.shape;
                             s.insert(s.begin(), Expr(2));
                             return s;
                           }())
                     : v;
        break;
      case 10: {
        Value n = b.index(DType::i64, v.type.shape, rules::axis(d) * 3 - 2);
        v = b.apply(Fn::where, {b.apply(Fn::gt, n, 0), v, b.cast(b.apply(Fn::add, n, 5), DType::f32)});
        break;
      }
      default: {
        IndexMap map;
        for (int64_t k = 0; k < rank; ++k) map.axes.push_back(rules::axis(k).name());
        Value n = b.index(DType::i64, {3}, (rules::axis(0) * 2 - 1));
        Value at = b.apply(Fn::fmod, {n, b.constant_int(DType::i64, {3}, size)});
        map.indirects.push_back({"j", at.name, {mod(rules::axis(d), 3)}, size, true});
        Source source{v.name, {}, {}};
        for (int64_t k = 0; k < rank; ++k) source.index.push_back(k == d ? Expr::symbol("j") : rules::axis(k));
        map.sources.push_back(std::move(source));
        map.fill = {DType::f32, 0, 0};
        v = b.map(v.type, std::move(map));
      }
    }
    values.push_back(v);
  }
  for (size_t k = values.size() - 3; k < values.size(); ++k) {
    const Value& v = values[k];
    graph.outputs.push_back({{ValueName{v.name}}, torch_ir::default_strides(v.type.shape)});
  }
  graph.ops = b.take();
  return graph;
}

Array random_array(const Input& input, std::mt19937& random) {
  Array array = Array::zeros(input.type.dtype, evaluate_shape(input.type.shape, {}));
  const double special[] = {0.0, -0.0, NAN, INFINITY, 1.0};
  for (double& x : array.floats) x = random() % 4 == 0 ? special[random() % 5] : static_cast<float>(static_cast<int>(random() % 2000) - 1000) / 256;
  return array;
}

}  // namespace

TEST_CASE("tensor: random graphs print, parse and keep every bit through the passes", "[tensor_ir]") {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    Graph graph = random_graph(random);
    INFO(print(graph));
    verify(graph);
    CHECK(parse(print(graph)) == graph);
    std::vector<Array> inputs;
    for (const Input& input : graph.inputs) inputs.push_back(random_array(input, random));
    auto before = interpret(graph, inputs, {}, Mode::typed);
    Graph better = optimised(graph);
    INFO(print(better));
    auto after = interpret(better, inputs, {}, Mode::typed);
    REQUIRE(before.size() == after.size());
    for (size_t k = 0; k < before.size(); ++k) check_same(before[k], after[k]);
  }
}
