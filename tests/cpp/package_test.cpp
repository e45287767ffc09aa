#include <catch2/catch.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "package/checksum.h"
#include "package/split.h"

namespace deplo::package {
namespace {

TEST_CASE("SHA-256 of the standard's examples, and of lengths around a block's end") {
  CHECK(sha256_hex("", 0) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256_hex("abc", 3) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK(sha256_hex(two_blocks.data(), two_blocks.size()) == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const std::string million(1000000, 'a');
  CHECK(sha256_hex(million.data(), million.size()) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("the quick checksum is the same with and without the instruction, and sees each bit") {
  std::vector<unsigned char> bytes(200);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(1));
  for (size_t count = 0; count <= bytes.size(); ++count) {
    const uint32_t sum = quick_checksum(bytes.data(), count);
    REQUIRE(sum == quick_checksum_by_table(bytes.data(), count));
    for (size_t at = 0; at < count; ++at) {
      bytes[at] ^= 1U << (at % 8);
      REQUIRE(quick_checksum(bytes.data(), count) != sum);
      bytes[at] ^= 1U << (at % 8);
    }
  }
}

constexpr const char* kProgram =
    R"(program @net(x: f32[s0, 4] user, w: f32[4, 4] parameter static, v: f32[4, 4] parameter static, unread: f32[4] buffer static) where s0 in 1..8
  buffer p0: f32[4, 4] packed
  buffer p1: f32[s0, 4] packed
  buffer y: f32[s0, 4] output
  once call @pack(w, p0)
  once call @pack_rows(v, p1)
  call @use(x, p0, p1, v, y)
  return y
kernel @pack(w: ptr f32, out p0: ptr f32) symbols () chunks 1 scratch 0
  a: f32 = load w[0]
  store p0[0] = a
kernel @pack_rows(v: ptr f32, out p1: ptr f32) symbols (s0) chunks s0 scratch 0
  a: f32 = load v[0]
  store p1[0] = a
kernel @use(x: ptr f32, p0: ptr f32, p1: ptr f32, v: ptr f32, out y: ptr f32) symbols (s0) chunks s0 scratch 0
  a: f32 = load x[0]
  b: f32 = load p0[0]
  c: f32 = load p1[0]
  d: f32 = load v[0]
  store y[0] = a
)";

TEST_CASE("what is packed for all sizes alike becomes a constant; what depends on sizes stays") {
  const kernel_ir::Module module = kernel_ir::parse(kProgram);
  const SplitProgram split = split_once(module);
  CHECK(split.packing.input_order == std::vector<std::string>{"w"});
  CHECK(split.packs_from == std::vector<size_t>{1});
  CHECK(split.packing.outputs.size() == 1);
  CHECK(split.packing.steps.size() == 1);
  CHECK(split.serving.input_order == std::vector<std::string>{"x", "v", "p0"});
  REQUIRE(split.arguments.size() == 3);
  CHECK((!split.arguments[0].is_packed && split.arguments[0].place == 0));
  CHECK((!split.arguments[1].is_packed && split.arguments[1].place == 2));
  CHECK((split.arguments[2].is_packed && split.arguments[2].place == 0));
  CHECK(split.serving.steps.size() == 2);
  CHECK(split.serving.find_buffer("p0")->is_static);
  // Bodies are left out but for kernels that pack at run time.
  REQUIRE(split.serving.kernels.size() == 2);
  CHECK(!split.serving.find_kernel("pack_rows")->body.empty());
  CHECK(split.serving.find_kernel("use")->body.empty());
  CHECK(kernel_ir::parse(kernel_ir::print(split.serving)) == split.serving);
}

constexpr const char* kWithFacts = R"(
program @f(x: f32[4] user, w: i8[4] parameter static) where few0 in 0..1
  fact few0 = all w in -8..7
  buffer p0: u8[2] packed
  buffer y: f32[4] output
  once call @pack(w, p0)
  call @use_halves(x, w, p0, y) when few0 - 1 >= 0
  or call @use(x, w, p0, y)
  return y
kernel @pack(w: ptr i8, out p0: ptr u8) symbols () chunks 1 scratch 0
  a: i8 = load w[0]
  b: u8 = cast(a)
  store p0[0] = b
kernel @use_halves(x: ptr f32, w: ptr i8, p0: ptr u8, out y: ptr f32) symbols () chunks 1 scratch 0
  a: f32 = load x[0]
  b: u8 = load p0[0]
  store y[0] = a
kernel @use(x: ptr f32, w: ptr i8, p0: ptr u8, out y: ptr f32) symbols () chunks 1 scratch 0
  a: f32 = load x[0]
  b: i8 = load w[0]
  store y[0] = a
)";

TEST_CASE("facts that hold choose a schedule for good") {
  const kernel_ir::Module module = kernel_ir::parse(kWithFacts);
  auto calls = [](const SplitProgram& split) {
    std::vector<std::string> names;
    for (const Step& step : split.serving.steps) names.push_back(std::get<CallStep>(step).kernel);
    return names;
  };
  CHECK(calls(split_once(module)) == std::vector<std::string>{"use"});
  const SplitProgram split = split_once(module, {"few0"});
  CHECK(calls(split) == std::vector<std::string>{"use_halves"});
  CHECK(std::get<CallStep>(split.serving.steps[0]).when.empty());
  CHECK(split.serving.symbols.empty());
  CHECK_NOTHROW(kernel_ir::verify(split.serving));
}

TEST_CASE("what a kernel is given and does not read need not be there") {
  std::string text = kProgram;
  const std::string given = "call @use(x, p0, p1, v, y)";
  const size_t at = text.find(given);
  text.replace(at, given.size(), "call @use(x, p0, w, v, y)");
  text.erase(text.rfind("  c: f32 = load p1[0]"));  // and v
  text += "  store y[0] = a\n";
  const SplitProgram split = split_once(kernel_ir::parse(text));
  CHECK(split.serving.input_order == std::vector<std::string>{"x", "v", "p0"});
}

}  // namespace
}  // namespace deplo::package
