#include "analysis/contraction.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace deplo::analysis {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::For;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Reduce;
using loop_ir::Stmt;

using AxisSet = std::set<std::string>;

struct Finder {
  std::vector<Contraction> found;
  bool vectors = false;
  std::vector<ContractionAxis> enclosing;
  std::map<std::string, AxisSet> depends;        ///< axes behind every value in scope
  std::map<std::string, AxisSet> local_depends;  ///< axes around the declaration of a local, or those of what was stored last

  void expression(Expr e, AxisSet& axes) const {
    for (const std::string& name : symbols_of(e)) {
      if (auto it = depends.find(name); it != depends.end())
        axes.insert(it->second.begin(), it->second.end());
      else if (std::any_of(enclosing.begin(), enclosing.end(), [&](const auto& axis) { return axis.name == name; }))
        axes.insert(name);
    }
  }

  AxisSet axes_of(const Let& s) const {
    AxisSet axes;
    for (const std::string& operand : s.operands)
      if (auto it = depends.find(operand); it != depends.end()) axes.insert(it->second.begin(), it->second.end());
    if (s.fn == Fn::index) expression(s.index, axes);
    return axes;
  }

  AxisSet axes_of(const Load& s) const {
    AxisSet axes;
    for (const Expr& e : s.index) expression(e, axes);
    for (const Cond& cond : s.guard) expression(cond.expr, axes);
    if (auto it = local_depends.find(s.buffer); it != local_depends.end()) axes.insert(it->second.begin(), it->second.end());
    return axes;
  }

  AxisSet enclosing_names() const {
    AxisSet names;
    for (const auto& axis : enclosing) names.insert(axis.name);
    return names;
  }

  void block(const Block& body, bool outermost) {
    for (const auto& stmt : body) statement(*stmt, outermost && body.size() == 1);
  }

  void statement(const Stmt& stmt, bool alone) {
    std::visit(Overloaded{[&](const Let& s) { depends[s.name] = axes_of(s); }, [&](const Load& s) { depends[s.name] = axes_of(s); },
                          [](const loop_ir::Store&) {}, [](const loop_ir::Check&) {},
                          [&](const loop_ir::Local& s) { local_depends[s.name] = enclosing_names(); },
                          [&](const For& s) {
                            enclosing.push_back({s.axis, s.extent, AxisClass::other, alone});
                            block(s.body, alone);
                            enclosing.pop_back();
                          },
                          [&](const Reduce& s) { reduce(s); },
                          [&](const loop_ir::Scan& s) {
                            enclosing.push_back({s.axis.name, s.axis.extent, AxisClass::other, false});
                            block(s.body, false);
                            for (const std::string& name : s.results) depends[name] = enclosing_names();
                            block(s.then, false);
                            enclosing.pop_back();
                          }},
               stmt.node);
  }

  void reduce(const Reduce& s) {
    size_t depth = enclosing.size();
    for (const Axis& axis : s.axes) enclosing.push_back({axis.name, axis.extent, AxisClass::k, false});
    block(s.body, false);
    if (auto contraction = recognise(s, depth)) found.push_back(std::move(*contraction));
    AxisSet axes;
    for (const std::string& operand : s.operands) axes.insert(depends[operand].begin(), depends[operand].end());
    enclosing.resize(depth);
    for (const Axis& axis : s.axes) axes.erase(axis.name);
    for (const std::string& name : s.results) depends[name] = axes;
  }

  // The statements of a straight-line body that `value` needs; nothing if it needs a nested loop.
  std::optional<ContractionOperand> operand(const Reduce& s, const std::string& value) {
    ContractionOperand result;
    result.value = value;
    result.axes = depends[value];
    std::set<std::string> needed{value};
    auto need = [&](Expr e) { collect_symbols(e, needed); };
    std::vector<std::pair<size_t, std::string>> loads;
    for (size_t at = s.body.size(); at-- > 0;) {
      const Stmt& stmt = *s.body[at];
      if (const auto* let = std::get_if<Let>(&stmt.node)) {
        if (!needed.count(let->name)) continue;
        needed.insert(let->operands.begin(), let->operands.end());
        if (let->fn == Fn::index) need(let->index);
      } else if (const auto* load = std::get_if<Load>(&stmt.node)) {
        if (!needed.count(load->name)) continue;
        for (const Expr& e : load->index) need(e);
        for (const Cond& cond : load->guard) need(cond.expr);
        loads.emplace_back(axes_of(*load).size(), load->buffer);
      } else if (!std::holds_alternative<loop_ir::Check>(stmt.node)) {
        return std::nullopt;
      } else {
        continue;
      }
      result.slice.push_back(s.body[at]);
    }
    std::reverse(result.slice.begin(), result.slice.end());
    std::stable_sort(loads.begin(), loads.end(), [](const auto& x, const auto& y) { return x.first > y.first; });
    for (const auto& [count, buffer] : loads)
      if (std::find(result.buffers.begin(), result.buffers.end(), buffer) == result.buffers.end()) result.buffers.push_back(buffer);
    return result;
  }

  // The product behind the reduce operand: `p` itself or a widening cast of it does not count, only a multiplication.
  static const Let* product_of(const Reduce& s) {
    for (const auto& stmt : s.body)
      if (const auto* let = std::get_if<Let>(&stmt->node); let && let->name == s.operands[0]) return let->fn == Fn::mul ? let : nullptr;
    return nullptr;
  }

  std::optional<Contraction> recognise(const Reduce& s, size_t depth) {
    if (s.combiner != Combiner::sum || s.operands.size() != 1 || !(is_float(s.dtypes[0]) || s.dtypes[0] == DType::i32)) return std::nullopt;
    const Let* product = product_of(s);
    if (!product || product->operands[0] == product->operands[1]) return std::nullopt;
    auto a = operand(s, product->operands[0]);
    auto b = operand(s, product->operands[1]);
    if (!a || !b) return std::nullopt;
    Contraction c{&s, s.results[0], s.dtypes[0], std::move(*a), std::move(*b), enclosing};
    int count[5] = {0, 0, 0, 0, 0};
    for (size_t at = 0; at < c.axes.size(); ++at) {
      ContractionAxis& axis = c.axes[at];
      bool in_a = c.a.axes.count(axis.name) > 0;
      bool in_b = c.b.axes.count(axis.name) > 0;
      if (at >= depth)
        axis.kind = AxisClass::k;
      else
        axis.kind = in_a && in_b ? AxisClass::batch : in_a ? AxisClass::m : in_b ? AxisClass::n : AxisClass::other;
      if (axis.kind != AxisClass::k || (in_a && in_b)) ++count[static_cast<int>(axis.kind)];
    }
    auto has = [&](AxisClass kind) { return count[static_cast<int>(kind)] > 0; };
    if (!has(AxisClass::k) || (!vectors && !(has(AxisClass::m) && has(AxisClass::n)))) return std::nullopt;
    return c;
  }
};

}  // namespace

std::vector<ContractionAxis> Contraction::axes_of(AxisClass kind) const {
  std::vector<ContractionAxis> result;
  for (const auto& axis : axes)
    if (axis.kind == kind) result.push_back(axis);
  return result;
}

std::vector<Contraction> find_contractions(const loop_ir::Kernel& kernel, bool vectors) {
  Finder finder;
  finder.vectors = vectors;
  finder.block(kernel.body, true);
  return std::move(finder.found);
}

}  // namespace deplo::analysis
