#include "analysis/work.h"

#include <algorithm>

#include "analysis/contraction.h"
#include "analysis/weighted_sum.h"

namespace deplo::analysis {
namespace {

using loop_ir::Axis;
using loop_ir::Block;

/// Whether neighbouring points read the same element along some dimension: an axis of the points takes shorter steps there than the sum is long.
bool overlaps(const Expr& position, const std::vector<Axis>& points, const std::vector<Axis>& summed) {
  for (const Axis& inner : summed) {
    auto step = linear_coefficient(position, inner.name);
    if (!step || !step->is_constant() || step->is(0)) continue;
    for (const Axis& outer : points) {
      auto stride = linear_coefficient(position, outer.name);
      if (!stride || !stride->is_constant() || stride->is(0)) continue;
      if (!inner.extent.is_constant() || std::abs(stride->value()) < std::abs(step->value()) * inner.extent.value()) return true;
    }
  }
  return false;
}

struct WorkFinder {
  std::vector<Axis> points;
  bool reduces = false;
  bool windows = false;

  void block(const Block& body, const std::vector<Axis>& summed) {
    for (const auto& stmt : body)
      std::visit(Overloaded{[&](const loop_ir::For& s) {
                              points.push_back({s.axis, s.extent});
                              block(s.body, summed);
                              points.pop_back();
                            },
                            [&](const loop_ir::Reduce& s) {
                              reduces = true;
                              std::vector<Axis> all = summed;
                              all.insert(all.end(), s.axes.begin(), s.axes.end());
                              block(s.body, all);
                            },
                            [&](const loop_ir::Scan& s) {
                              reduces = true;
                              block(s.body, summed);
                              block(s.then, summed);
                            },
                            [&](const loop_ir::Load& s) {
                              for (const Expr& e : s.index) windows = windows || overlaps(e, points, summed);
                            },
                            [](const auto&) {}},
                 stmt->node);
  }
};

/// What the outermost perfect nest holds.
Block inside(const Block& body) {
  const auto* loop = body.size() == 1 ? std::get_if<loop_ir::For>(&body[0]->node) : nullptr;
  return loop ? inside(loop->body) : body;
}

}  // namespace

Work work_of(const loop_ir::Kernel& kernel) {
  if (find_weighted_sum(kernel, inside(kernel.body), /*vectors=*/true)) return Work::attention;
  WorkFinder finder;
  finder.block(kernel.body, {});
  if (!find_contractions(kernel, /*vectors=*/true).empty()) return finder.windows ? Work::convolution : Work::contraction;
  return finder.windows ? Work::window : finder.reduces ? Work::reduction : Work::points;
}

std::string_view to_string(Work work) {
  switch (work) {
    case Work::attention: return "attention";
    case Work::convolution: return "convolution";
    case Work::contraction: return "contraction";
    case Work::window: return "window";
    case Work::reduction: return "reduction";
    case Work::points: return "points";
  }
  return "";
}

}  // namespace deplo::analysis
