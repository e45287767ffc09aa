#include "runtime/memory_plan.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <vector>

#include "base/memory.h"
#include "pipeline.h"
#include "runtime/plan.h"

using namespace deplo;
using namespace deplo::runtime;

namespace {

bool overlaps(const MemoryPlan& plan, const std::vector<Lifetime>& lifetimes, size_t a, size_t b) {
  if (lifetimes[a].last < lifetimes[b].first || lifetimes[b].last < lifetimes[a].first) return false;
  return plan.offsets[a] < plan.offsets[b] + lifetimes[b].bytes && plan.offsets[b] < plan.offsets[a] + lifetimes[a].bytes;
}

}  // namespace

TEST_CASE("a chain of buffers reuses two places") {
  std::vector<Lifetime> chain{{256, 0, 1}, {256, 1, 2}, {256, 2, 3}, {256, 3, 4}};
  MemoryPlan plan = plan_memory(chain, 64);
  CHECK(plan.bytes == 512);
  CHECK(plan.bytes == peak_bytes(chain, 64));
}

TEST_CASE("a buffer goes to the tightest gap") {
  // Two large blocks alive throughout leave gaps of 128 and 64 bytes once their small neighbours have died.
  std::vector<Lifetime> lifetimes{{1024, 0, 9}, {128, 0, 1}, {64, 5, 6}};
  MemoryPlan plan = plan_memory(lifetimes, 64);
  CHECK(plan.bytes == 1152);
  CHECK(plan.offsets[2] == 1024);
}

TEST_CASE("empty buffers take no memory") {
  CHECK(plan_memory({}, 64).bytes == 0);
  CHECK(plan_memory({{0, 0, 3}}, 64).bytes == 0);
}

TEST_CASE("random lifetimes never overlap and stay near the peak") {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    std::vector<Lifetime> lifetimes;
    for (int i = 0; i < 60; ++i) {
      int first = static_cast<int>(random() % 50);
      lifetimes.push_back({static_cast<int64_t>(random() % 5000), first, first + static_cast<int>(random() % 10)});
    }
    MemoryPlan plan = plan_memory(lifetimes, 64);
    for (size_t a = 0; a < lifetimes.size(); ++a) {
      REQUIRE(plan.offsets[a] % 64 == 0);
      REQUIRE(plan.offsets[a] + lifetimes[a].bytes <= plan.bytes);
      for (size_t b = 0; b < a; ++b) REQUIRE_FALSE(overlaps(plan, lifetimes, a, b));
    }
    CHECK(plan.bytes <= 2 * peak_bytes(lifetimes, 64));
  }
}

TEST_CASE("memory that a round of many blocks gives back is there for the next round") {
  constexpr int64_t kBlock = 1 << 20;
  constexpr int64_t kBlocks = 1000;  // four times of what is kept at least
  trim_memory();
  const int64_t before = memory_stats().used_bytes;
  for (int round = 0; round < 3; ++round) {
    std::vector<Memory> blocks;
    for (int64_t k = 0; k < kBlocks; ++k) blocks.emplace_back(kBlock + k % 7);
    CHECK(memory_stats().used_bytes - before >= kBlocks * kBlock);
    while (!blocks.empty()) blocks.pop_back();
    CHECK(memory_stats().free_bytes >= kBlocks * kBlock * 9 / 10);
  }
  // A program of other sizes takes the place of one that is gone.
  for (int round = 0; round < 2; ++round) {
    std::vector<Memory> blocks;
    for (int64_t k = 0; k < kBlocks / 4; ++k) blocks.emplace_back(4 * kBlock);
    if (round == 1) CHECK(memory_stats().free_bytes <= kBlocks * kBlock / 10);
  }
  // A result larger than what is kept at least, dropped before the next call makes it again, lies where it lay.
  trim_memory();
  for (int call = 0; call < 3; ++call) {
    Memory result(2 * (int64_t{256} << 20));
    CHECK(memory_stats().free_bytes == 0);
    result = Memory();
    CHECK(memory_stats().free_bytes >= 2 * (int64_t{256} << 20));
  }
  trim_memory();
  // What was in use at once long ago is not kept.
  for (int64_t k = 0; k < 100 * kBlocks; ++k) Memory block(kBlock);
  CHECK(memory_stats().free_bytes <= (256 << 20) + 2 * kBlock);
  trim_memory();
  CHECK(memory_stats().free_bytes == 0);
}

TEST_CASE("memory of one size serves others, and is whole again afterwards") {
  constexpr int64_t kSaved = 3'211'264;
  trim_memory();
  const auto held = [] { return memory_stats().used_bytes + memory_stats().free_bytes; };
  const auto take = [](int64_t count, int64_t bytes) {
    std::vector<Memory> blocks;
    for (int64_t k = 0; k < count; ++k) blocks.emplace_back(bytes);
    return blocks;
  };
  take(16, kSaved);
  const int64_t most = held();
  for (int round = 0; round < 3; ++round) {
    std::vector<Memory> saved = take(16, kSaved);
    std::vector<Memory> made;
    // As a gradient's program does it: what it has read goes, and what it makes, of other sizes, takes its place.
    while (saved.size() > 1) {
      saved.pop_back();
      saved.pop_back();
      made.emplace_back(2 * kSaved - 100'000);
      made.emplace_back(60'000);
    }
    CHECK(held() <= most + (2 << 20));
    for (const Memory& block : made) std::memset(block.data(), 1, static_cast<size_t>(block.bytes()));
  }
  trim_memory();
  CHECK(memory_stats().free_bytes == 0);
}

TEST_CASE("what a collective reads lives until the program ends") {
  for (const auto& [op, lives] : {std::pair("_c10d_functional.all_reduce.default", true), std::pair("aten.celu.default", false)}) {
    const std::string text =
        std::string("tensor @f(%x: f32[64, 64] user)\n  %s: f32[64, 64] = neg(%x)\n  %a: f32[64, 64] = library ") + op +
        "(self=%s) strides [64, 1] reason \"a test\"\n  %b: f32[64, 64] = library aten.celu.default(self=%a) strides [64, 1] reason \"a test\"\n"
        "  %c: f32[64, 64] = exp(%b)\n  return %c strides [64, 1]\n";
    const Layout layout = make_layout(run_pipeline_from_text(text, "f.ir", {}, {}).kernel);
    REQUIRE(layout.temporaries.size() == 1);  // s
    CHECK(layout.temporaries[0].last == (lives ? static_cast<int>(layout.steps.size()) - 1 : 1));
  }
}
