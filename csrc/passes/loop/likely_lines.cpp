#include "passes/loop/likely_lines.h"

#include <algorithm>
#include <vector>

#include "loop_ir/rewrite.h"

namespace deplo {

using namespace loop_ir;

/// Whether the load runs along axes that the store does not.
static bool is_summed(const Load& load, const Store& store) {
  std::set<std::string> stored;
  for (Expr e : store.index) collect_symbols(e, stored);
  std::set<std::string> loaded;
  for (Expr e : load.index) collect_symbols(e, loaded);
  return !std::includes(stored.begin(), stored.end(), loaded.begin(), loaded.end());
}

LikelyLines::Line LikelyLines::line(const std::string& buffer) {
  if (const auto it = known_.find(buffer); it != known_.end()) return it->second;
  const Buffer& b = graph_.buffer(buffer);
  Line found{b.shape.empty() ? 0 : b.shape.size() - 1, 1};
  for (const Expr& extent : b.shape) found.elements *= size_(extent);
  for (size_t d = 0; d < b.shape.size(); ++d)
    if (b.strides[d].is(1) && !b.shape[d].is(1)) found.dimension = d;
  known_[buffer] = found;  // also of what is made of itself
  if (b.shape.size() > 1 && graph_.is_private(buffer)) found = as_made(buffer, found);
  return known_[buffer] = found;
}

LikelyLines::Line LikelyLines::as_made(const std::string& buffer, Line otherwise) {
  const Buffer& made = graph_.buffer(buffer);
  std::vector<double> votes(made.shape.size(), 0.0);
  for (size_t w : graph_.writers(buffer)) {
    const auto& node = graph_.nodes()[w];
    if (!node.is_kernel) continue;
    const Store* store = nullptr;
    std::vector<const Load*> loads;
    visit(node.body, [&](const Stmt& stmt, const std::vector<Axis>&) {
      if (const auto* load = std::get_if<Load>(&stmt.node); load && load->buffer != buffer && graph_.find_buffer(load->buffer)) loads.push_back(load);
      if (const auto* s = std::get_if<Store>(&stmt.node); s && s->buffer == buffer) store = s;
    });
    if (!store) continue;
    for (const Load* load : loads) {
      if (load->index.empty()) continue;
      const Line source = line(load->buffer);
      bool kept = false;
      // Results of products lie in their own order, whichever way an operand does.
      const bool multiplies =
          is_summed(*load, *store) && std::all_of(load->index.begin(), load->index.end(), [](Expr e) { return e.is_symbol() || e.is_constant(); });
      for (size_t d = 0; d < store->index.size(); ++d) {
        if (!store->index[d].is_symbol()) continue;
        const auto along = linear_coefficient(load->index[source.dimension], store->index[d].name());
        if (!along || !along->is(1)) continue;
        votes[d] += multiplies ? 0 : source.elements;
        kept = true;
      }
      if (!kept && load->index.size() == made.shape.size()) votes[source.dimension] += source.elements;
    }
  }
  const auto most = std::max_element(votes.begin(), votes.end());
  return *most > 0 ? Line{static_cast<size_t>(most - votes.begin()), *most} : otherwise;
}

}  // namespace deplo
