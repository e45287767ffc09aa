#include "base/error.h"
#include "divisions.h"
#include "kernel_ir/interpret.h"
#include "loop_ir/interpret.h"
#include "pipeline.h"
#include "programs.h"
#include "tensor_ir/interpret.h"
#include "tile_ir/interpret.h"

using namespace deplo;
using namespace deplo::testing;

namespace {

/// The interpreters of all levels agree on one program in exact mode: what differs first is the guilty lowering.
void agree(const Case& c, const PassContext& context) {
  tensor_ir::Graph graph = tensor_ir::parse(c.text);
  std::vector<Array> inputs = random_inputs(graph, c.sizes);
  std::vector<Array> wanted = tensor_ir::interpret(graph, inputs, c.sizes, Mode::exact);
  double allowed = roundings(graph, c.sizes) * unit_roundoff(DType::f64);
  PipelineOptions options;
  options.verify_each = true;
  Compiled made = run_pipeline_from_text(c.text, c.name, context, options);
  {
    INFO("loop\n" << loop_ir::print(made.loop));
    require_close(loop_ir::interpret(made.loop, inputs, c.sizes, Mode::exact), wanted, allowed);
  }
  {
    INFO("tile\n" << tile_ir::print(made.tile));
    require_close(tile_ir::interpret(made.tile, inputs, c.sizes, Mode::exact), wanted, allowed);
  }
  INFO("kernel\n" << kernel_ir::print(made.kernel));
  CHECK(kernel_ir::parse(print(made.kernel)) == made.kernel);
  require_close(kernel_ir::interpret(made.kernel, inputs, c.sizes, Mode::exact), wanted, allowed);
}

}  // namespace

TEST_CASE("all levels agree at every vector width") {
  for (int bytes : {16, 32, 64})
    for (const Case& c : cases()) {
      PassContext context;
      context.target.vector_bytes = bytes;
      context.target.vector_registers = bytes == 64 ? 32 : 16;
      if (bytes == 64) context.target.features = {"avx512bf16"};
      context.disabled = {"expand_math"};  // exact mode is for what comes before it
      INFO(c.name << ", vectors of " << bytes << " bytes");
      agree(c, context);
    }
}

TEST_CASE("all levels agree on a GPU") {
  for (const Case& c : cases()) {
    PassContext context;
    context.target.name = "cuda";
    context.disabled = {"expand_math"};
    INFO(c.name);
    agree(c, context);
  }
}

TEST_CASE("index expressions divide as Python does at every level") {
  int vectors = 16;
  for (const Divisions& divisions : divisions_by_signs()) {
    const std::string text = divisions.text();
    tensor_ir::Graph graph = tensor_ir::parse(text);
    for (const DivisionPoint& at : divisions.sizes(true)) divisions.check(tensor_ir::interpret(graph, Divisions::inputs(at), {}, Mode::typed), at);
    vectors = 80 - vectors;
    for (int bytes : {0, vectors}) {
      PassContext context;
      context.target.name = bytes == 0 ? "cuda" : "cpu";
      if (bytes != 0) context.target.vector_bytes = bytes;
      INFO(text << "for " << context.target.name << ", vectors of " << bytes << " bytes");
      const Compiled made = run_pipeline_from_text(text, "divisions", context, {});
      for (const DivisionPoint& at : divisions.sizes()) {
        const std::vector<Array> inputs = Divisions::inputs(at);
        {
          INFO("loop\n" << loop_ir::print(made.loop));
          divisions.check(loop_ir::interpret(made.loop, inputs, {}, Mode::typed), at);
        }
        {
          INFO("tile\n" << tile_ir::print(made.tile));
          divisions.check(tile_ir::interpret(made.tile, inputs, {}, Mode::typed), at);
        }
        INFO("kernel\n" << kernel_ir::print(made.kernel));
        divisions.check(kernel_ir::interpret(made.kernel, inputs, {}, Mode::typed), at);
      }
    }
  }
}

TEST_CASE("verify notices a module whose text does not read back") {
  torch_ir::Graph graph = torch_ir::parse("torch @f(%x: f32[2] user)\n  return %x\n");
  PassContext context;
  PipelineOptions options;
  options.verify_each = true;
  CHECK_NOTHROW(run_pipeline(graph, context, options));
  graph.name = "f g";
  CHECK_THROWS_AS(run_pipeline(graph, context, options), InternalError);
}

TEST_CASE("verify notices a field that the text leaves out") {
  torch_ir::Graph graph = torch_ir::parse("torch @f(s0: sym, %x: f32[s0] user) where s0 in 2..\n  return %x\n");
  PipelineOptions options;
  options.verify_each = true;
  CHECK_NOTHROW(run_pipeline(graph, {}, options));
  graph.inputs[0].is_static = true;
  CHECK_THROWS_WITH(run_pipeline(graph, {}, options), Catch::Contains("leaves out a part of the head"));
}

TEST_CASE("modules are equal by what they hold, not where") {
  for (const Case& c : cases()) {
    Compiled a = run_pipeline_from_text(c.text, c.name, {}, {});
    Compiled b = run_pipeline_from_text(c.text, c.name, {}, {});
    CHECK(a.tensor == b.tensor);
    CHECK(a.loop == b.loop);
    CHECK(a.tile == b.tile);
    CHECK(a.kernel == b.kernel);
    auto changed = std::make_shared<kernel_ir::Kernel>(*b.kernel.kernels[0]);
    auto stmt = std::make_shared<kernel_ir::Stmt>(*changed->body.back());
    stmt->node = kernel_ir::Barrier{};
    changed->body.back() = stmt;
    b.kernel.kernels[0] = changed;
    CHECK_FALSE(a.kernel == b.kernel);
  }
}
