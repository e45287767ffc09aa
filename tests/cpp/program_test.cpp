#include "runtime/program.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <map>

#include "base/error.h"
#include "runtime/binding.h"
#include "runtime/compile.h"
#include "runtime/guard.h"

using namespace deplo;
using namespace deplo::runtime;

namespace {

/// A tensor with memory of its own.
struct Owned {
  std::vector<float> values;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  uint64_t version = 0;

  explicit Owned(std::vector<int64_t> shape, float first = 0) : sizes(std::move(shape)) {
    int64_t count = 1;
    strides.resize(sizes.size());
    for (size_t d = sizes.size(); d-- > 0;) {
      strides[d] = count;
      count *= sizes[d];
    }
    for (int64_t i = 0; i < count; ++i) values.push_back(first + static_cast<float>(i));
  }
  CallArgument argument() {
    CallArgument made;
    made.tensor = {reinterpret_cast<char*>(values.data()), DType::f32, static_cast<int>(sizes.size()), sizes.data(), strides.data(), this, version};
    return made;
  }
};

struct TestHost final : Host {
  std::map<size_t, std::vector<char>> outputs;
  std::vector<std::string> events;
  void release(size_t buffer) override { events.push_back(fmt::format("release {}", buffer)); }
  char* allocate(size_t buffer, DType /*dtype*/, const BufferShape& shape) override {
    events.push_back(fmt::format("allocate {}", buffer));
    outputs[buffer].resize(static_cast<size_t>(shape.bytes));
    return outputs[buffer].data();
  }
  std::shared_ptr<void> watch(size_t /*input*/) override { return nullptr; }
  std::vector<float> floats(size_t buffer) {
    const std::vector<char>& bytes = outputs.at(buffer);
    std::vector<float> values(bytes.size() / sizeof(float));
    if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
};

CompileOptions quiet_options() { return parse_options(R"({"cache_dir": ""})"); }

CompiledGraph compiled(const std::string& text) { return compile_text(text, quiet_options(), nullptr); }

TensorView view(char* data, std::vector<int64_t>& sizes, std::vector<int64_t>& strides) {
  return {data, DType::f32, static_cast<int>(sizes.size()), sizes.data(), strides.data(), nullptr, 0};
}

// y = (x + x) + (x + x) over [n, 4], through one temporary; n is found from x's size.
const char* const kDouble = R"(program @twice(x: f32[s0, 4] user) where s0 in 0..1000
  buffer t: f32[s0, 4]
  buffer y: f32[s0, 4] output
  call @double(x, t)
  call @double(t, y)
  return y, s0*4, none

kernel @double(a: ptr f32, out b: ptr f32) symbols (s0) chunks s0 scratch 0
  for i in (s0*thread // threads)*4..(s0*(thread + 1) // threads)*4 step 1:
    v: f32 = load a[i]
    w: f32 = add(v, v)
    store b[i] = w
)";

}  // namespace

TEST_CASE("a program finds its sizes, uses temporaries and fills outputs") {
  CompiledGraph graph = compiled(kDouble);
  for (int threads : {1, 2, 3})
    for (int64_t n : {0, 1, 3, 100}) {
      Owned x({n, 4}, 1);
      TestHost host;
      CallArgument argument = x.argument();
      auto plan = graph.program->run(&argument, 1, host, threads);
      CHECK(plan->integers[1] == 4 * n);
      std::vector<float> y = host.floats(*graph.program->layout().outputs[0].buffer);
      REQUIRE(y.size() == x.values.size());
      for (size_t i = 0; i < y.size(); ++i) REQUIRE(y[i] == 4 * x.values[i]);
    }
}

TEST_CASE("an input that nobody else holds goes after its last step, before outputs of later ones are made") {
  std::string text = kDouble;
  const auto replace = [&](const std::string& from, const std::string& to) { text.replace(text.find(from), from.size(), to); };
  replace("in 0..1000", "in 0..100000");
  replace("  buffer y:", "  buffer u: f32[s0, 4]\n  buffer y:");
  replace("  call @double(t, y)", "  call @double(t, u)\n  call @double(u, y)");
  CompiledGraph graph = compiled(text);
  const size_t x_buffer = *graph.program->layout().input_order[0];
  const size_t y_buffer = *graph.program->layout().outputs[0].buffer;
  constexpr int64_t kMany = 30'000;  // 480 KB of them; few are not worth it
  for (int64_t n : {int64_t{10}, kMany})
    for (bool is_last : {false, true}) {
      Owned x({n, 4}, 1);
      TestHost host;
      CallArgument argument = x.argument();
      argument.is_last = is_last;
      graph.program->run(&argument, 1, host, 2);
      std::vector<float> y = host.floats(y_buffer);
      REQUIRE(y.size() == x.values.size());
      for (size_t i = 0; i < y.size(); ++i) REQUIRE(y[i] == 8 * x.values[i]);
      std::vector<std::string> expected{fmt::format("release {}", x_buffer), fmt::format("allocate {}", y_buffer)};
      if (!is_last || n < kMany) expected.erase(expected.begin());
      CHECK(host.events == expected);
    }
}

TEST_CASE("guarded kernels work on copies, and one that writes outside of a buffer is named") {
  CompileOptions options = parse_options(R"({"cache_dir": "", "guard": true})");
  std::string beyond = kDouble;
  beyond.replace(beyond.find("store b[i]"), 10, "store b[i + 1]");
  for (const std::string& text : {std::string(kDouble), beyond}) {
    CompiledGraph graph = compile_text(text, options, nullptr);
    for (int threads : {1, 2})
      for (int64_t n : {0, 3, 5, 1000}) {
        Owned x({n, 4}, 1);
        TestHost host;
        CallArgument argument = x.argument();
        if (text == beyond && n > 0 && n % 4 != 0) {  // the pattern follows the last element where no page does
          CHECK_THROWS_WITH(graph.program->run(&argument, 1, host, threads),
                            Catch::Contains("kernel double of program twice wrote byte " + std::to_string(16 * n) + " of t, which has"));
        } else if (text != beyond) {
          graph.program->run(&argument, 1, host, threads);
          std::vector<float> y = host.floats(*graph.program->layout().outputs[0].buffer);
          for (size_t i = 0; i < y.size(); ++i) REQUIRE(y[i] == 4 * x.values[i]);
        }
      }
  }
}

TEST_CASE("guarded memory lies between pages and tells what has changed around it") {
  GuardedMemory memory(100, 64, 3);
  CHECK(reinterpret_cast<uintptr_t>(memory.data()) % 64 == 0);
  int64_t where = 0;
  for (int64_t k = 0; k < 3; ++k) poison(memory.data() + k * memory.stride(), 100);
  CHECK(memory.intact(where));
  memory.data()[memory.stride() + 100] = 0;
  CHECK((!memory.intact(where) && where == 100));
  memory.data()[memory.stride() + 100] = 0x5A;
  memory.data()[2 * memory.stride() - 1] = 0;
  CHECK((!memory.intact(where) && where == -1));
}

TEST_CASE("inputs that do not fit are refused by name") {
  CompiledGraph graph = compiled(kDouble);
  TestHost host;
  auto error_of = [&](Owned x) {
    CallArgument argument = x.argument();
    try {
      graph.program->run(&argument, 1, host, 1);
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(error_of(Owned({3, 5})).find("input x: expected f32 of sizes (3, 4) and strides (4, 1), got f32 of sizes (3, 5)") == 0);
  CHECK(error_of(Owned({12})).find("input x: expected") == 0);
  CHECK(error_of(Owned({1001, 4})).find("s0 is 1001, outside the range 0..1000") == 0);
  Owned transposed({4, 3});
  transposed.sizes = {3, 4};
  transposed.strides = {1, 3};
  CHECK(error_of(transposed).find("strides (1, 3)") != std::string::npos);
  Owned row({1, 4});
  row.strides = {77, 1};
  CHECK(error_of(row).empty());
}

TEST_CASE("static inputs are packed once per version and shared between programs") {
  const std::string text = R"(program @net(x: f32[40, 50] user, w: f32[40, 50] parameter static)
  buffer q: f32[40, 50] packed
  buffer p: f32[40, 50] packed
  buffer y: f32[40, 50] output
  once call @pack(w, q)
  once call @pack(q, p)
  call @sum(x, q, p, y)
  return y

kernel @pack(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..2000 step 1:
    v: f32 = load a[i]
    w: f32 = add(v, v)
    store b[i] = w

kernel @sum(a: ptr f32, unread: ptr f32, b: ptr f32, out c: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..2000 step 1:
    v: f32 = load a[i]
    w: f32 = load b[i]
    s: f32 = add(v, w)
    store c[i] = s
)";
  CompiledGraph first = compiled(text);
  CompiledGraph second = compiled(text);
  Owned x({40, 50}, 0);
  Owned w({40, 50}, 10);
  constexpr size_t kPlace = 20;  // no line of memory that is compared holds it
  auto run = [&](CompiledGraph& graph) {
    TestHost host;
    CallArgument arguments[2] = {x.argument(), w.argument()};
    graph.program->run(arguments, 2, host, 1);
    return host.floats(*graph.program->layout().outputs[0].buffer)[kPlace];
  };
  CHECK(run(first) == 20 + 4 * 30);
  int64_t bytes = packed_bytes();
  CHECK(bytes == 40 * 50 * 4);  // what only the other `once` step reads is not kept
  w.values[kPlace] = 50;        // a write that nobody was told of
  CHECK(run(first) == 20 + 4 * 30);
  CHECK(run(second) == 20 + 4 * 30);
  CHECK(packed_bytes() == bytes);
  w.version = 1;
  CHECK(run(first) == 20 + 4 * 50);
  CHECK(run(second) == 20 + 4 * 50);
  w.values[kPlace] = 60;
  forget_packed();
  CHECK(run(first) == 20 + 4 * 60);
  // A write of the whole, a row or a column changes the sample.
  for (float& value : w.values) value += 1;
  CHECK(run(first) == 20 + 4 * 61);
  CHECK(run(second) == 20 + 4 * 61);
  for (size_t column = 0; column < 50; ++column) w.values[column] += 1;
  CHECK(run(first) == 20 + 4 * 62);
  for (size_t row = 0; row < 40; ++row) w.values[row * 50 + kPlace] += 1;
  CHECK(run(first) == 20 + 4 * 63);
  CHECK(run(second) == 20 + 4 * 63);
}

namespace {

// y = x + 1 up to two rows, beyond that x + 2 * w with a packed weight.
const char* const kVersions = R"(program @net(x: f32[s0, 4] user, w: f32[4] parameter static) where s0 in 0..
  buffer p: f32[4] packed
  buffer y: f32[s0, 4] output
  once call @pack(w, p)
  call @few(x, y) when -s0 + 1 >= 0
  or call @few(x, y) when s0 - 2 == 0
  or call @many(x, p, y)
  return y

kernel @pack(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..4 step 1:
    v: f32 = load a[i]
    w: f32 = add(v, v)
    store b[i] = w

kernel @few(a: ptr f32, out b: ptr f32) symbols (s0) chunks 1 scratch 0
  for i in 0..s0*4 step 1:
    v: f32 = load a[i]
    one: f32 = constant 1.0
    w: f32 = add(v, one)
    store b[i] = w

kernel @many(a: ptr f32, p: ptr f32, out b: ptr f32) symbols (s0) chunks 1 scratch 0
  for i in 0..s0*4 step 1:
    v: f32 = load a[i]
    k: f32 = load p[i % 4]
    w: f32 = add(v, k)
    store b[i] = w
)";

}  // namespace

TEST_CASE("of alternatives the first that holds for the sizes runs, and packing waits for a step that reads it") {
  CompiledGraph graph = compiled(kVersions);
  Owned w({4}, 10);
  auto run = [&](int64_t rows) {
    Owned x({rows, 4}, 1);
    TestHost host;
    CallArgument arguments[2] = {x.argument(), w.argument()};
    graph.program->run(arguments, 2, host, 1);
    return host.floats(*graph.program->layout().outputs[0].buffer);
  };
  CHECK(run(0).empty());
  CHECK(run(1) == std::vector<float>{2, 3, 4, 5});
  CHECK(run(2)[7] == 9);
  CHECK(graph.program->packed_bytes() == 0);
  CHECK(run(3)[0] == 1 + 2 * 10);
  CHECK(graph.program->packed_bytes() > 0);
  w.values[0] = 30;
  w.version = 1;
  CHECK(run(2)[0] == 2);  // reads no weight: what was packed from the old one goes, nothing is packed from the new one
  CHECK(graph.program->packed_bytes() == 0);
  CHECK(run(5)[4] == 5 + 2 * 30);
  CHECK(run(1)[0] == 2);
  CHECK(graph.program->packed_bytes() > 0);
}

TEST_CASE("alternatives must end with one that always holds and write the same") {
  auto refused = [](const std::string& was, const std::string& is, const std::string& message) {
    std::string text = kVersions;
    REQUIRE(text.find(was) != std::string::npos);
    text.replace(text.find(was), was.size(), is);
    CHECK_THROWS_WITH(kernel_ir::verify(kernel_ir::parse(text)), Catch::Contains(message));
  };
  kernel_ir::verify(kernel_ir::parse(kVersions));
  refused("  or call @many(x, p, y)\n", "", "its last call has a `when` and no alternative");
  refused("  or call @many", "  call @many", "must be an alternative");
  refused("call @few(x, y) when -s0 + 1 >= 0", "call @few(x, y)", "is an alternative of no call");
  refused("or call @few(x, y)", "or call @few(x, p)", "writes other buffers");
  refused("when s0 - 2 == 0", "when s1 - 2 == 0", "asks for the symbol s1, which has no range");
}

TEST_CASE("a kernel's error becomes an exception") {
  CompiledGraph graph = compiled(R"(program @check(x: f32[4] user)
  buffer y: f32[4] output
  call @fail(x, y)
  return y

kernel @fail(a: ptr f32, out b: ptr f32) symbols () chunks 1 scratch 0
  v: f32 = load a[0]
  z: f32 = constant 0.0
  c: bool = lt(v, z)
  error index_out_of_range if c
  store b[0] = v
)");
  TestHost host;
  Owned good({4}, 1);
  Owned bad({4}, -1);
  CallArgument argument = good.argument();
  graph.program->run(&argument, 1, host, 1);
  argument = bad.argument();
  CHECK_THROWS_AS(graph.program->run(&argument, 1, host, 1), IndexError);
}

TEST_CASE("a written input must not share memory with another") {
  CompiledGraph graph = compiled(R"(program @inplace(x: f32[4] user, y: f32[4] user)
  call @add(x, y)
  return

kernel @add(a: ptr f32, inout b: ptr f32) symbols () chunks 1 scratch 0
  for i in 0..4 step 1:
    v: f32 = load a[i]
    w: f32 = load b[i]
    s: f32 = add(v, w)
    store b[i] = s
)");
  TestHost host;
  Owned x({4}, 1);
  Owned y({4}, 10);
  CallArgument arguments[2] = {x.argument(), y.argument()};
  graph.program->run(arguments, 2, host, 1);
  CHECK(y.values[2] == 15);
  arguments[1] = x.argument();
  CHECK_THROWS_WITH(graph.program->run(arguments, 2, host, 1), Catch::Contains("input y, which the program writes, shares memory with input x"));
}

TEST_CASE("overlap of strided tensors is decided exactly") {
  std::vector<char> memory(4096);
  std::vector<int64_t> sizes{8};
  std::vector<int64_t> even{2};
  std::vector<int64_t> dense{1};
  CHECK_FALSE(may_share_memory(view(memory.data(), sizes, even), view(memory.data() + 4, sizes, even)));
  CHECK(may_share_memory(view(memory.data(), sizes, even), view(memory.data() + 8, sizes, even)));
  CHECK(may_share_memory(view(memory.data(), sizes, even), view(memory.data() + 2, sizes, even)));
  CHECK(may_share_memory(view(memory.data(), sizes, dense), view(memory.data() + 28, sizes, dense)));
  CHECK_FALSE(may_share_memory(view(memory.data(), sizes, dense), view(memory.data() + 32, sizes, dense)));
  std::vector<int64_t> block{4, 2};
  std::vector<int64_t> rows{8, 1};
  CHECK_FALSE(may_share_memory(view(memory.data(), block, rows), view(memory.data() + 8, block, rows)));
  CHECK(may_share_memory(view(memory.data(), block, rows), view(memory.data() + 4, block, rows)));
}

TEST_CASE("symbols follow from sizes, strides and inputs of their own") {
  kernel_ir::Module module =
      kernel_ir::parse(R"(program @f(a: f32[s0*2, s1 + 3] strides [s1 + 3, 1] user, s2: sym) where s0 in 0.., s1 in 0.., s2 in 0..
  return s0, s1, s2
)");
  SymbolSolver solver(module);
  Owned a({10, 7});
  CallArgument arguments[2] = {a.argument(), {}};
  arguments[1].is_tensor = false;
  arguments[1].integer = 42;
  std::vector<int64_t> values;
  solver.solve(arguments, values);
  CHECK(values == std::vector<int64_t>{5, 4, 42});
  Owned odd({9, 7});
  arguments[0] = odd.argument();
  CHECK_THROWS_WITH(solver.solve(arguments, values), Catch::Contains("size 9 of dimension 0 is not of the form"));
}
