#include "passes/loop/hoist_static.h"

#include "passes/loop/program_graph.h"

namespace deplo {

loop_ir::Module hoist_static(loop_ir::Module module, const PassContext&) {
  ProgramGraph graph(std::move(module));
  std::vector<bool> is_static = graph.static_nodes();
  for (size_t at = 0; at < is_static.size(); ++at) {
    if (!is_static[at]) continue;
    graph.nodes()[at].once = true;
    for (const std::string& b : graph.nodes()[at].writes) graph.set_kind(b, BufferKind::packed);
  }
  return graph.finish();
}

}  // namespace deplo
