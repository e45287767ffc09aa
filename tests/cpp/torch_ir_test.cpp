#include <catch2/catch.hpp>

#include "base/error.h"
#include "torch_ir/interpret.h"
#include "torch_ir/ir.h"

using namespace deplo;

namespace {

const char* const kTorchSoftmax =
    "torch @softmax(%x: f32[s0, 2048] user, %w: bf16[8, 4] strides [1, 8] parameter static, s1: sym) where s0 in 2..4096, s1 in 2..\n"
    "  %0: f32[s0, 2048] = aten._softmax.default(self=%x, dim=-1, half_to_float=false) at \"net.py:12\" in \"attn.softmax\"\n"
    "  %a: f32[s0], %b: i64[s0] = aten.max.dim(self=%0, dim=1)\n"
    "  %y: bf16[4, 8, 1], %n: none = aten.f.x(size=[s0*2, s1 + 1, (s0 // 2), 0], v=[%w, none], dtype=bf16, memory_format=channels_last, e=1e-05, "
    "p=-inf, n=nan, f=2.0, s=\"a \\\"b\\\"\", device=cpu, lowest=-9223372036854775808, z=[])\n"
    "  aten.check.default(self=%a)\n"
    "  write %a to %x\n"
    "  return %0, s0*3, none\n";

std::string parsed(const std::string& text) { return torch_ir::print(torch_ir::parse(text)); }

std::string error_of(const std::string& text) {
  try {
    torch_ir::verify(torch_ir::parse(text, "f.ir"));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("Torch IR reads back what it prints") {
  CHECK(parsed(kTorchSoftmax) == kTorchSoftmax);
  torch_ir::Graph graph = torch_ir::parse(kTorchSoftmax);
  torch_ir::verify(graph);
  CHECK(torch_ir::parse(torch_ir::print(graph)) == graph);
  CHECK(graph.inputs[1].is_static);
  CHECK(std::get<Word>(graph.nodes[2]->arguments[3].second.value).text == "channels_last");
  CHECK(std::get<double>(graph.nodes[2]->arguments[7].second.value) == 2.0);
  CHECK(std::get<Expr>(graph.nodes[2]->arguments[10].second.value).value() == INT64_MIN);
}

TEST_CASE("Torch IR leaves out contiguous strides and reads explicit ones") {
  CHECK(parsed("torch @f(%x: f32[2, 0, 4] strides [4, 4, 1]) return %x") == "torch @f(%x: f32[2, 0, 4] user)\n  return %x\n");
  CHECK(parsed("torch @f(%x: f32[2, 3] strides [0, 1]) return") == "torch @f(%x: f32[2, 3] strides [0, 1] user)\n  return\n");
  CHECK(parsed("torch @f() return").substr(0, 10) == "torch @f()");
}

TEST_CASE("facts about sizes follow the ranges of the symbols") {
  std::string text =
      "torch @f(%x: f32[s0], %y: f32[s1]) where s0 in 2.., s1 in .., s0 // 2 == s1, s0 < s1*4\n  %a: f32[s0] = aten.relu.default(self=%x)\n  return "
      "%a";
  torch_ir::Graph graph = torch_ir::parse(text);
  torch_ir::verify(graph);
  REQUIRE(graph.facts.size() == 2);
  CHECK(graph.facts[0] == equal(floordiv(Expr::symbol("s0"), 2), Expr::symbol("s1")));
  CHECK(graph.nodes.size() == 1);
  CHECK(torch_ir::parse(torch_ir::print(graph)).facts == graph.facts);
  CHECK(parsed(torch_ir::print(graph)) == torch_ir::print(graph));
  CHECK(error_of("torch @f(%x: f32[s0]) where s0 in 2.., s1 == s0\n  return").find("symbol s1 has no range") != std::string::npos);
  CHECK(error_of("torch @f(%x: f32[s0]) where s0 in 2.., s0 + 1\n  return").find("f.ir:2:3: expected a comparison") == 0);
  Array x = Array::zeros(DType::f32, {4});
  LibraryCall relu = [](const std::string&, const auto&, const auto& arrays) { return std::vector<Array>{arrays.at("%x")}; };
  CHECK(torch_ir::interpret(graph, {x, Array::zeros(DType::f32, {2})}, {}, Mode::typed, relu).size() == 1);
  CHECK_THROWS_WITH(torch_ir::interpret(graph, {x, Array::zeros(DType::f32, {3})}, {}, Mode::typed, relu), Catch::Contains("is for inputs with"));
}

TEST_CASE("malformed Torch IR names line and column") {
  CHECK(error_of("torch @f(%x: f99[2])\n  return %x") == "f.ir:1:14: 'f99' is not a dtype");
  CHECK(error_of("torch f() return") == "f.ir:1:7: expected the graph's name (with @), found 'f'");
  CHECK(error_of("torch @f(%x: f32[2] strides [1, 1]) return") == "f.ir:1:21: 2 strides for 1 dimensions");
  CHECK(error_of("torch @f(x: f32[2]) return").find("f.ir:1:10: 'x'") == 0);
  CHECK(error_of("torch @f(%x: f32[2])\n  %0: f32[2] = aten.neg.default(%x)\n  return %0") == "f.ir:2:35: expected '=', found ')'");
  CHECK(error_of("torch @f(%x: f32[2])\n  return %x\n  %y") == "f.ir:3:3: expected the end after return, found '%y'");
  CHECK(error_of("torch @f(%x: f32[2])\n").find("f.ir:2:1: expected a node, write or return") == 0);
}

TEST_CASE("the Torch IR verifier refuses malformed graphs") {
  CHECK(error_of("torch @f(%x: f32[2]) return %y").find("%y, which is not defined") != std::string::npos);
  CHECK(error_of("torch @f(%x: f32[2], %x: f32[2]) return").find("%x is defined twice") != std::string::npos);
  CHECK(error_of("torch @f(%x: f32[s0]) return").find("symbol s0 has no range") != std::string::npos);
  CHECK(error_of("torch @f(%x: f32[s0*s1]) where s0 in 2.., s1 in 2.. return").find("follows from no input") != std::string::npos);
  CHECK(error_of("torch @f(%x: f32[s0*2, s0*s1]) where s0 in 2.., s1 in 2..\n return").empty());
  CHECK(error_of("torch @f(%x: f32[2])\n %0: f32[2] = aten.neg.default(self=%x)\n write %x to %0\n return").find("%0, which is no tensor input") !=
        std::string::npos);
  CHECK(error_of("torch @f(%x: f32[2]) return 1.5").find("returns 1.5") != std::string::npos);
}

TEST_CASE("the Torch IR interpreter runs views by strides, writes, and integers") {
  torch_ir::Graph graph = torch_ir::parse(
      "torch @f(%x: f32[s0, 2] strides [1, s0], s1: sym) where s0 in 2.., s1 in 0..\n"
      "  %v: f32[s0*2] = aten.as_strided.default(self=%x, size=[s0*2], stride=[1], storage_offset=0)\n"
      "  %w: f32[s0*2] = aten.as_strided_scatter.default(self=%v, src=%x, size=[s0, 2], stride=[2, 1], storage_offset=0)\n"
      "  %n: f32[s0, 2] = test.negate.default(self=%x, times=s1)\n"
      "  write %n to %x\n"
      "  return %v, s0 + s1, none, %w\n");
  torch_ir::verify(graph);
  Array x = Array::zeros(DType::f32, {3, 2});
  for (int i = 0; i < 6; ++i) x.set(i, Scalar::of_float(DType::f32, i));
  Array count = Array::zeros(DType::i64, {});
  count.set(0, Scalar::of_int(DType::i64, 5));
  LibraryCall library = [](const std::string& op, const auto& arguments, const auto& arrays) {
    CHECK(op == "test.negate.default");
    CHECK(std::get<Expr>(arguments[1].second.value).is(5));
    Array result = arrays.at("%x");
    for (double& value : result.floats) value = -value;
    return std::vector<Array>{result};
  };
  auto results = torch_ir::interpret(graph, {x, count}, {}, Mode::typed, library);
  REQUIRE(results.size() == 5);
  CHECK(results[0].floats == std::vector<double>{0, 2, 4, 1, 3, 5});
  CHECK(results[1].ints == std::vector<int64_t>{8});
  CHECK(results[2].shape == std::vector<int64_t>{0});
  CHECK(results[3].floats == std::vector<double>{0, 1, 2, 3, 4, 5});
  CHECK(results[4].floats == std::vector<double>{0, -1, -2, -3, -4, -5});
}
