#include "base/error.h"
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
  PipelineOptions options;
  options.verify_each = true;
  Compiled made = run_pipeline_from_text(c.text, c.name, context, options);
  {
    INFO("loop\n" << loop_ir::print(made.loop));
    require_close(loop_ir::interpret(made.loop, inputs, c.sizes, Mode::exact), wanted, 1e-9);
  }
  {
    INFO("tile\n" << tile_ir::print(made.tile));
    require_close(tile_ir::interpret(made.tile, inputs, c.sizes, Mode::exact), wanted, 1e-9);
  }
  INFO("kernel\n" << kernel_ir::print(made.kernel));
  CHECK(print(kernel_ir::parse(print(made.kernel))) == print(made.kernel));
  require_close(kernel_ir::interpret(made.kernel, inputs, c.sizes, Mode::exact), wanted, 1e-9);
}

}  // namespace

TEST_CASE("all levels agree at every vector width") {
  for (int bytes : {16, 32, 64})
    for (const Case& c : cases()) {
      PassContext context;
      context.target.vector_bytes = bytes;
      context.target.vector_registers = bytes == 64 ? 32 : 16;
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

TEST_CASE("verify notices a module whose text does not read back") {
  torch_ir::Graph graph = torch_ir::parse("torch @f(%x: f32[2] user)\n  return %x\n");
  PassContext context;
  PipelineOptions options;
  options.verify_each = true;
  CHECK_NOTHROW(run_pipeline(graph, context, options));
  graph.name = "f g";
  CHECK_THROWS_AS(run_pipeline(graph, context, options), InternalError);
}
