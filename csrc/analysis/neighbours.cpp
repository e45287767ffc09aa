#include "analysis/neighbours.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <vector>

#include "loop_ir/rewrite.h"

namespace deplo::analysis {

using namespace loop_ir;

namespace {

constexpr int64_t kInterleaved = 4;  ///< elements of pieces that lie between each other's

bool reaches(Expr index, const std::vector<Axis>& loops, const std::set<std::string>& reduced) {
  for (const Axis& point : loops) {
    if (reduced.count(point.name) > 0 || !uses(index, point.name)) continue;
    const auto step = linear_coefficient(index, point.name);
    if (!step || !step->is_constant()) continue;
    int64_t reach = 1;
    for (const Axis& tap : loops) {
      if (reduced.count(tap.name) == 0 || !tap.extent.is_constant()) continue;
      const auto apart = linear_coefficient(index, tap.name);
      if (apart && apart->is_constant()) reach += std::abs(apart->value()) * (tap.extent.value() - 1);
    }
    if (reach > 1 && overlaps(step->value(), reach)) return true;
  }
  return false;
}

}  // namespace

bool overlaps(int64_t step, int64_t reach) {
  step = std::abs(step);
  return step < reach || (step == reach && step <= kInterleaved);
}

bool sums_neighbours(const std::vector<Axis>& axes, const Block& body) {
  std::set<std::string> reduced;
  bool found = false;
  visit(body, [&](const Stmt& stmt, const std::vector<Axis>& inside) {
    if (const auto* reduce = std::get_if<Reduce>(&stmt.node))
      for (const Axis& axis : reduce->axes) reduced.insert(axis.name);
    const auto* load = std::get_if<Load>(&stmt.node);
    if (found || !load) return;
    std::vector<Axis> loops = axes;
    loops.insert(loops.end(), inside.begin(), inside.end());
    found = std::any_of(load->index.begin(), load->index.end(), [&](Expr e) { return reaches(e, loops, reduced); });
  });
  return found;
}

}  // namespace deplo::analysis
