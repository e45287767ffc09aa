#include "analysis/cost.h"

#include <algorithm>
#include <map>
#include <set>

#include "analysis/tf32.h"
#include "loop_ir/params.h"

namespace deplo::analysis {
namespace {

using loop_ir::Block;

struct Counter {
  KernelCost cost;
  std::map<std::string, Expr> touched;  ///< elements addressed per buffer

  Block constants;  ///< so far, also of outer blocks

  void block(const Block& body, Expr points) {
    for (const auto& stmt : body)
      if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node); let && let->fn == Fn::constant) constants.push_back(stmt);
    Block known = constants;
    known.insert(known.end(), body.begin(), body.end());
    const std::set<std::string> roundings = tf32_steps(known);
    for (const auto& stmt : body)
      std::visit(Overloaded{[&](const loop_ir::Let& s) {
                              int weight = roundings.count(s.name) > 0 ? 0 : cost_of(s.fn);
                              cost.operations = cost.operations + points * weight;
                              if (weight > 0) cost.flops = cost.flops + points;
                            },
                            [&](const loop_ir::Load& s) { touched[s.buffer] = touched[s.buffer] + points; },
                            [&](const loop_ir::Store& s) { touched[s.buffer] = touched[s.buffer] + points; },
                            [&](const loop_ir::For& s) { block(s.body, points * s.extent); },
                            [&](const loop_ir::Reduce& s) {
                              Expr inner = points;
                              for (const auto& axis : s.axes) inner = inner * axis.extent;
                              int weight = s.combiner == Combiner::online_softmax ? 20 : s.combiner == Combiner::welford ? 8 : 1;
                              cost.operations = cost.operations + inner * weight;
                              cost.flops = cost.flops + inner;
                              block(s.body, inner);
                            },
                            [&](const loop_ir::Scan& s) {
                              Expr inner = points * s.axis.extent;
                              cost.operations = cost.operations + inner;
                              cost.flops = cost.flops + inner;
                              block(s.body, inner);
                              block(s.then, inner);
                            },
                            [](const loop_ir::Local&) {}, [](const loop_ir::Check&) {}},
                 stmt->node);
  }
};

}  // namespace

int cost_of(Fn fn) {
  switch (fn) {
    case Fn::constant: return 0;
    case Fn::div:
    case Fn::sqrt: return 4;
    case Fn::gelu:
    case Fn::logaddexp:
    case Fn::logaddexp2: return 50;
    case Fn::sigmoid:
    case Fn::softplus:
    case Fn::silu:
    case Fn::mish:
    case Fn::gelu_tanh:
    case Fn::logit: return 25;
    case Fn::trunc_div:
    case Fn::floor_div:
    case Fn::fmod:
    case Fn::remainder: return 8;
    default: break;
  }
  double ulp = info(fn).max_ulp;  // functions that are not exact are polynomials
  return ulp > 0 ? 10 : 1;
}

KernelCost cost_of(const loop_ir::Kernel& kernel) {
  Counter counter;
  counter.block(kernel.body, 1);
  for (const auto& access : loop_ir::accesses(kernel.body)) {
    const loop_ir::Param* p = kernel.find_param(access.buffer);
    if (!p) continue;
    // A window of a buffer is cheaper than the whole.
    Expr bytes = min(product(p->shape), counter.touched[p->name]) * size_of(p->dtype);
    if (access.reads) counter.cost.bytes_read = counter.cost.bytes_read + bytes;
    if (access.writes) counter.cost.bytes_written = counter.cost.bytes_written + bytes;
  }
  return counter.cost;
}

double estimate(Expr e, const SizeHints& hints, const Ranges& symbols) {
  if (e.is_constant()) return static_cast<double>(e.value());
  std::map<std::string, int64_t> values;
  for (const std::string& name : symbols_of(e)) {
    // Anything but a size (an axis in the extent of an inner loop) counts as its first value.
    int64_t value = symbols.count(name) ? 64 : 0;
    if (auto range = symbols.find(name); range != symbols.end()) {
      if (range->second.lo) value = std::max(value, bounds(*range->second.lo, symbols).lo.value_or(value));
      if (range->second.hi) value = std::min(value, bounds(*range->second.hi, symbols).hi.value_or(value));
    }
    if (auto hint = hints.find(name); hint != hints.end()) value = hint->second;
    values[name] = value;
  }
  return static_cast<double>(evaluate(e, values));
}

}  // namespace deplo::analysis
