#include "target/target.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>

#include "base/error.h"
#include "kernel_ir/interpret.h"
#include "lower/loop_to_tile/convert.h"
#include "runtime/compile.h"

using namespace deplo;

// A target from outside: every loop serial, kernels by the interpreter, on memory of their own.

namespace {

tile_ir::Block in_series(const loop_ir::Block& block) {
  using loop_to_tile::make;
  tile_ir::Block out;
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::For& s) { out.push_back(make(tile_ir::For{{s.axis, 0, s.extent}, in_series(s.body)})); },
                          [&](const loop_ir::Let& s) { out.push_back(make(s)); }, [&](const loop_ir::Load& s) { out.push_back(make(s)); },
                          [&](const loop_ir::Store& s) { out.push_back(make(s)); },
                          [](const auto&) { throw UnsupportedError("toy kernels are pointwise"); }},
               stmt->node);
  return out;
}

class ToyScheduler final : public Scheduler {
 public:
  void add_kernel(const loop_ir::Kernel& kernel, const std::map<std::string, Schedule>& /*given*/, tile_ir::Module& out) override {
    tile_ir::Kernel made;
    made.name = kernel.name;
    made.params = kernel.params;
    made.symbols = kernel.symbols;
    made.body = in_series(kernel.body);
    made.schedule = {"toy", {}};
    out.kernels.push_back(std::make_shared<tile_ir::Kernel>(std::move(made)));
  }
};

/// Addresses are no pointers, so that one that the runtime takes for a pointer shows. All buffers are float32.
class ToyDevice final : public DeviceKernels {
 public:
  explicit ToyDevice(kernel_ir::Module module) : module_(std::move(module)) {}

  std::string describe_device() const override { return "abacus (4 beads)"; }
  uint64_t allocate(int64_t bytes) override {
    uint64_t pointer = next_;
    blocks_[pointer].resize(static_cast<size_t>(bytes));
    next_ += static_cast<uint64_t>(bytes) + 64;
    return pointer;
  }
  void free(uint64_t pointer) noexcept override { blocks_.erase(pointer); }
  void copy_to_device(uint64_t to, const void* from, int64_t bytes) override { std::memcpy(at(to).data, from, static_cast<size_t>(bytes)); }
  void copy_to_host(void* to, uint64_t from, int64_t bytes) override { std::memcpy(to, at(from).data, static_cast<size_t>(bytes)); }
  void fill(uint64_t pointer, unsigned char value, int64_t bytes) override { std::memset(at(pointer).data, value, static_cast<size_t>(bytes)); }
  void synchronize() override {}

  void launch(const std::string& kernel, const std::vector<uint64_t>& buffers, const std::map<std::string, int64_t>& symbols,
              uint64_t /*error*/) override {
    std::vector<Array> arrays;
    for (uint64_t buffer : buffers) {
      Place place = at(buffer);
      arrays.push_back(Array::zeros(DType::f32, {static_cast<int64_t>(place.bytes / sizeof(float))}));
      const auto* floats = reinterpret_cast<const float*>(place.data);
      std::copy_n(floats, arrays.back().floats.size(), arrays.back().floats.begin());
    }
    std::vector<Array*> pointers;
    for (Array& array : arrays) pointers.push_back(&array);
    const kernel_ir::Kernel& found = *module_.find_kernel(kernel);
    kernel_ir::interpret(found, pointers, symbols, Mode::typed);
    for (size_t i = 0; i < buffers.size(); ++i)
      if (found.params[i].kind != loop_ir::ParamKind::in)
        for (size_t k = 0; k < arrays[i].floats.size(); ++k)
          reinterpret_cast<float*>(at(buffers[i]).data)[k] = static_cast<float>(arrays[i].floats[k]);
  }

  bool is_empty() const { return blocks_.empty(); }

 private:
  struct Place {
    char* data;
    size_t bytes;  ///< to the end of its block
  };
  Place at(uint64_t pointer) {
    auto block = std::prev(blocks_.upper_bound(pointer));
    size_t offset = pointer - block->first;
    REQUIRE(offset <= block->second.size());
    return {block->second.data() + offset, block->second.size() - offset};
  }

  kernel_ir::Module module_;
  uint64_t next_ = 64;
  std::map<uint64_t, std::vector<char>> blocks_;
};

TargetTraits traits() {
  TargetTraits made;
  made.name = "toy";
  made.most_vector_bytes = 4;
  made.device = "abacus";
  made.options = {{"beads", "4"}};
  made.texts = {{"tally", [](const kernel_ir::Module& module, const PassContext&) { return std::to_string(module.kernels.size()) + " kernels\n"; }}};
  return made;
}

class ToyTarget final : public Target {
 public:
  ToyTarget() : Target(traits()) {}
  std::unique_ptr<Scheduler> make_scheduler(const loop_ir::Module& /*module*/, const PassContext& /*context*/) const override {
    return std::make_unique<ToyScheduler>();
  }
  TargetInfo machine(const TargetOptions& options) const override {
    TargetInfo machine;
    machine.features = {"beads" + options["beads"]};
    return machine;
  }
  KernelCode compile(const kernel_ir::Module& module, const PassContext& /*context*/, const TargetOptions& options,
                     CodegenStats& stats) const override {
    if (options["beads"] == "0") return {{}, nullptr, "no beads"};
    stats.compiled = static_cast<int>(module.kernels.size());
    return {{}, std::make_shared<ToyDevice>(module), ""};
  }
};

/// Options for the target, which is registered once.
CompileOptions toy(const std::string& beads = "4") {
  [[maybe_unused]] static const bool registered = (register_target(std::make_unique<ToyTarget>()), true);
  return parse_options(R"({"target": "toy", "beads": ")" + beads + "\"}");
}

struct ToyHost final : Host {
  std::map<size_t, std::vector<float>> outputs;
  char* allocate(size_t buffer, DType /*dtype*/, const BufferShape& shape) override {
    outputs[buffer].resize(static_cast<size_t>(shape.bytes) / sizeof(float));
    return reinterpret_cast<char*>(outputs[buffer].data());
  }
  std::shared_ptr<void> watch(size_t /*input*/) override { return nullptr; }
};

const char* const kSquare = R"(tensor @square(%x: f32[s0, 4] strides [4, 1] user) where s0 in 0..1000
  %y: f32[s0, 4] = mul(%x, %x)
  return %y strides [4, 1]
)";

}  // namespace

TEST_CASE("a target that a test registers is one like those of the repository") {
  CompileOptions options = toy();
  CHECK(options.context.target.name == "toy");
  CHECK(options.context.target.features == std::set<std::string>{"beads4"});
  CHECK(toy("7").context.target.features == std::set<std::string>{"beads7"});
  std::vector<std::string> names = target_names();
  CHECK(std::count(names.begin(), names.end(), "toy") == 1);
  CHECK_THROWS_AS(register_target(std::make_unique<ToyTarget>()), UserError);
  CHECK(find_target("").is_default);
  CHECK_THROWS_WITH(find_target("abakus"), Catch::Contains("toy"));
  CHECK_THROWS_WITH(parse_options(R"({"marbles": "1"})"), Catch::Contains("beads"));

  CHECK(lower_text(kSquare, "square.ir", "tile", options).find(": toy\n") != std::string::npos);
  CHECK(lower_text(kSquare, "square.ir", "tally", options) == "1 kernels\n");
  CHECK_THROWS_WITH(lower_text(kSquare, "square.ir", "tally", parse_options("")), "level tally needs the option target = toy");
}

TEST_CASE("a program of such a target runs on its device") {
  CompileOptions options = toy();
  CompiledGraph graph = compile_text(kSquare, options, nullptr);
  CHECK(graph.report.codegen.compiled == 1);
  CHECK(describe(graph, options).find(R"json("device":"abacus (4 beads)")json") != std::string::npos);
  std::vector<float> x{1, 2, 3, 4, -5, 6, 7, 8};
  std::vector<int64_t> sizes{2, 4};
  std::vector<int64_t> strides{4, 1};
  CallArgument argument;
  argument.tensor = {reinterpret_cast<char*>(x.data()), DType::f32, 2, sizes.data(), strides.data(), x.data(), 0};
  ToyHost host;
  graph.program->run(&argument, 1, host, 1);
  CHECK(host.outputs.at(*graph.program->layout().outputs[0].buffer) == std::vector<float>{1, 4, 9, 16, 25, 36, 49, 64});
  CHECK(dynamic_cast<const ToyDevice&>(*graph.program->device()).is_empty());

  CompiledGraph without = compile_text(kSquare, toy("0"), nullptr);
  CHECK(without.program->missing() == "no beads");
  CHECK_THROWS_WITH(without.program->run(&argument, 1, host, 1), "no beads");
}
