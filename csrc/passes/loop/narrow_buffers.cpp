#include "passes/loop/narrow_buffers.h"

#include <map>
#include <optional>
#include <string>

#include "analysis/casts.h"
#include "passes/loop/program_graph.h"

namespace deplo {
namespace {

using namespace loop_ir;

struct Casts {
  std::map<std::string, std::pair<std::string, DType>> narrower;  ///< value that casts -> its operand, and of which dtype that is
};

Casts casts_of(const Block& body) {
  std::map<std::string, DType> dtypes;
  Casts found;
  visit(body, [&](const Stmt& stmt, const auto&) {
    if (const auto* load = std::get_if<Load>(&stmt.node)) dtypes[load->name] = load->dtype;
    const auto* let = std::get_if<Let>(&stmt.node);
    if (!let) return;
    dtypes[let->name] = let->dtype;
    if (let->fn != Fn::cast) return;
    auto operand = dtypes.find(let->operands[0]);
    if (operand != dtypes.end() && analysis::is_lossless(operand->second, let->dtype)) found.narrower[let->name] = *operand;
  });
  return found;
}

struct Narrower {
  ProgramGraph graph;

  /// The dtype that all stores to the buffer cast from.
  std::optional<DType> dtype_of(const std::string& name) {
    if (graph.program().find_buffer(name)->kind != BufferKind::temp || !graph.is_private(name)) return std::nullopt;
    const auto& writers = graph.writers(name);
    if (writers.size() != 1) return std::nullopt;
    const auto& node = graph.nodes()[writers[0]];
    if (!node.alive || !node.is_kernel || node.updated.count(name)) return std::nullopt;
    const Casts casts = casts_of(node.body);
    std::optional<DType> found;
    bool fits = true;
    visit(node.body, [&](const Stmt& stmt, const auto&) {
      const auto* store = std::get_if<Store>(&stmt.node);
      if (!store || store->buffer != name) return;
      auto cast = casts.narrower.find(store->value);
      fits = fits && store->combiner == Combiner::set && cast != casts.narrower.end() && (!found || *found == cast->second.second);
      if (fits) found = cast->second.second;
    });
    auto reads = [&](const Stmt& stmt, const auto&) {
      const auto* load = std::get_if<Load>(&stmt.node);
      if (load && load->buffer == name && !load->guard.empty()) fits = fits && load->fill == Scalar{load->dtype, 0, 0};
    };
    visit(node.body, reads);
    for (size_t reader : graph.readers(name)) {
      if (!graph.nodes()[reader].is_kernel) return std::nullopt;
      visit(graph.nodes()[reader].body, reads);
    }
    return fits ? found : std::nullopt;
  }

  static Block narrowed(const Block& body, const std::string& name, DType dtype) {
    Kernel kernel;
    kernel.body = body;
    Names names;
    names.reserve(kernel);
    const Casts casts = casts_of(body);
    return rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
      if (const auto* store = std::get_if<Store>(&stmt->node); store && store->buffer == name) {
        Store s = *store;
        s.value = casts.narrower.at(s.value).first;
        return {make_stmt(std::move(s))};
      }
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || load->buffer != name) return {stmt};
      Load s = *load;
      s.name = names.fresh(load->name);
      s.dtype = dtype;
      s.fill = Scalar{dtype, 0, 0};
      Let cast;
      cast.name = load->name;
      cast.dtype = load->dtype;
      cast.fn = Fn::cast;
      cast.operands = {s.name};
      return {make_stmt(std::move(s)), make_stmt(std::move(cast))};
    });
  }

  Module run() {
    std::vector<std::string> buffers;
    for (const Buffer& buffer : graph.program().buffers) buffers.push_back(buffer.name);
    for (const std::string& name : buffers) {
      auto dtype = dtype_of(name);
      if (!dtype) continue;
      std::set<size_t> users = graph.readers(name);
      users.insert(graph.writers(name)[0]);
      graph.set_dtype(name, *dtype);
      for (size_t at : users) graph.set_body(at, clean(narrowed(graph.nodes()[at].body, name, *dtype), graph.program().symbols));
    }
    return graph.finish();
  }
};

}  // namespace

Module narrow_buffers(Module module, const PassContext&) { return Narrower{ProgramGraph(std::move(module))}.run(); }

}  // namespace deplo
