#include "passes/loop/keep_factors.h"

#include <algorithm>
#include <map>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "passes/loop/fuse_nests.h"
#include "passes/loop/keep_places.h"
#include "passes/loop/kept_factor.h"
#include "passes/loop/program_graph.h"
#include "passes/loop/tiled_products.h"

namespace deplo {
namespace {

using analysis::Contraction;
using analysis::ContractionOperand;
using loop_ir::Check;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Stmt;

constexpr double kMostCopies = 4;  ///< of each element: windows that overlap have more

/// One load at places that loops count, or of nothing beside them, and casts of it.
bool is_plain(const ContractionOperand& factor) {
  const auto loads =
      std::count_if(factor.slice.begin(), factor.slice.end(), [](const auto& stmt) { return std::holds_alternative<Load>(stmt->node); });
  return loads <= 1 && std::all_of(factor.slice.begin(), factor.slice.end(), [&](const Ref<Stmt>& stmt) {
           const auto* load = std::get_if<Load>(&stmt->node);
           const auto* let = std::get_if<Let>(&stmt->node);
           if (!load) return let && let->fn == Fn::cast;
           const auto counts = [&](Expr e) {
             const std::set<std::string> names = symbols_of(e);
             return std::all_of(names.begin(), names.end(), [&](const std::string& name) { return factor.axes.count(name) > 0; });
           };
           return std::all_of(load->index.begin(), load->index.end(), counts) &&
                  std::all_of(load->guard.begin(), load->guard.end(), [&](const Cond& c) { return counts(c.expr); });
         });
}

/// What the factor is computed of; not what says where that lies.
std::set<std::string> sources_of(const ContractionOperand& factor) {
  std::set<std::string> buffers;
  std::vector<std::string> names{factor.value};
  for (size_t k = 0; k < names.size(); ++k)
    for (const auto& stmt : factor.slice) {
      if (loop_ir::name_of(*stmt) != names[k]) continue;
      const auto* let = std::get_if<Let>(&stmt->node);
      if (let)
        names.insert(names.end(), let->operands.begin(), let->operands.end());
      else
        buffers.insert(std::get<Load>(stmt->node).buffer);
    }
  return buffers;
}

/// Whether the product becomes a part of something in a module of fused kernels, an attention, that is multiplied in tiles.
bool is_fused_in_tiles(const loop_ir::Module& fused, const std::string& result, const std::set<std::string>& sources, const PassContext& context) {
  std::set<std::string> written;
  for (const Step& step : fused.steps) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call) continue;
    const loop_ir::Kernel& kernel = *fused.find_kernel(call->kernel);
    std::set<std::string> read;
    std::set<std::string> results;
    for (size_t k = 0; k < call->arguments.size(); ++k) (kernel.params[k].kind == loop_ir::ParamKind::in ? read : results).insert(call->arguments[k]);
    if (results.count(result) > 0) return false;
    if (std::includes(read.begin(), read.end(), sources.begin(), sources.end())) written.merge(results);
  }
  return !written.empty() && find_multiplied(fused, written, context).in_tiles == written;
}

class FactorKeeper {
 public:
  FactorKeeper(loop_ir::Module module, const PassContext& context) : graph_(std::move(module)), context_(context) {}

  /// What the kernels write whose products have a factor that is not plain, and what that is of.
  std::map<std::string, std::set<std::string>> candidates() {
    std::map<std::string, std::set<std::string>> written;
    for (const auto& node : graph_.nodes()) {
      if (!node.alive || !node.is_kernel || node.once) continue;
      for (const Contraction& c : analysis::find_contractions(kernel_of(node.body, graph_.program().symbols)))
        for (const ContractionOperand* factor : {&c.a, &c.b})
          if (!is_plain(*factor))
            for (const std::string& result : node.writes) written[result].merge(sources_of(*factor));
    }
    return written;
  }

  loop_ir::Module run(const std::set<std::string>& results) {
    for (size_t at = 0; at < graph_.nodes().size(); ++at) {
      const auto& writes = graph_.nodes()[at].writes;
      if (!graph_.nodes()[at].alive || std::none_of(writes.begin(), writes.end(), [&](const auto& b) { return results.count(b) > 0; })) continue;
      while (keep_one(at)) continue;
    }
    return graph_.finish();
  }

 private:
  bool keep_one(size_t at) {
    const loop_ir::Kernel kernel = kernel_of(graph_.nodes()[at].body, graph_.program().symbols);
    for (const Contraction& c : analysis::find_contractions(kernel))
      for (const ContractionOperand* factor : {&c.a, &c.b})
        if (!is_plain(*factor) && keep(at, kernel, c, *factor)) return true;
    return false;
  }

  /// False where the factor is the same in every call, or of what the kernel itself makes.
  bool keep(size_t at, const loop_ir::Kernel& kernel, const Contraction& c, const ContractionOperand& factor) {
    const auto computed = find_factor(kernel, factor);
    if (!computed || !may_be_kept(graph_, *computed)) return false;
    std::set<std::string> names = factor.axes;
    double most = 1;  // elements of a result, or of what is read
    double elements = 1;
    for (const auto& axis : c.axes) {
      if (axis.kind != analysis::AxisClass::k) most *= size(axis.extent);
      if (factor.axes.count(axis.name) > 0) elements *= size(axis.extent);
    }
    for (const auto& stmt : computed->body) {
      names.insert(loop_ir::name_of(*stmt));
      if (const auto* load = std::get_if<Load>(&stmt->node)) most = std::max(most, size(product(graph_.buffer(load->buffer).shape)));
    }
    if (elements > kMostCopies * most) return false;
    // What checks the factor's places alone goes along.
    std::vector<Check> moved;
    loop_ir::visit(kernel.body, [&](const Stmt& stmt, const auto&) {
      const auto* check = std::get_if<Check>(&stmt.node);
      if (!check) return;
      const std::set<std::string> used = symbols_of(check->cond.expr);
      const auto is_known = [&](const std::string& name) { return names.count(name) > 0 || kernel.symbols.count(name) > 0; };
      if (std::all_of(used.begin(), used.end(), is_known)) moved.push_back(*check);
    });
    std::vector<KeptDimension> dimensions;
    for (const auto& axis : c.axes)
      if (factor.axes.count(axis.name) > 0) dimensions.push_back({{axis.name, axis.extent}, Expr::symbol(axis.name)});
    keep_factor(graph_, at, kernel, *computed, dimensions, moved);
    return true;
  }

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context_.hints, graph_.program().symbols)); }

  ProgramGraph graph_;
  const PassContext& context_;
};

}  // namespace

loop_ir::Module keep_factors(loop_ir::Module module, const PassContext& context) {
  const std::map<std::string, std::set<std::string>> candidates = FactorKeeper(module, context).candidates();
  std::set<std::string> results;
  for (const auto& [result, sources] : candidates) results.insert(result);
  results = find_multiplied(module, results, context).by_points;
  if (results.empty()) return module;
  const loop_ir::Module fused = keep_places(fuse_nests(module, context), context);
  for (const auto& [result, sources] : candidates)
    if (results.count(result) > 0 && is_fused_in_tiles(fused, result, sources, context)) results.erase(result);
  if (results.empty()) return module;
  return FactorKeeper(std::move(module), context).run(results);
}

}  // namespace deplo
