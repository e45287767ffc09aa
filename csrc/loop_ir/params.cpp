#include "loop_ir/params.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"

namespace deplo::loop_ir {
namespace {

struct Collector {
  std::vector<Access> list;
  std::unordered_map<std::string, size_t> position;
  std::set<std::string> locals;

  void touch(const std::string& buffer, bool reads, bool writes) {
    if (locals.count(buffer)) return;
    auto [it, added] = position.emplace(buffer, list.size());
    if (added) list.push_back({buffer, false, false, reads});
    list[it->second].reads |= reads;
    list[it->second].writes |= writes;
  }

  void block(const Block& body) {
    for (const auto& stmt : body)
      std::visit(Overloaded{[](const Let&) {}, [&](const Load& s) { touch(s.buffer, true, false); },
                            [&](const Store& s) { touch(s.buffer, s.combiner != Combiner::set, true); }, [&](const For& s) { block(s.body); },
                            [&](const Reduce& s) { block(s.body); },
                            [&](const Scan& s) {
                              block(s.body);
                              block(s.then);
                            },
                            [&](const Local& s) { locals.insert(s.name); }, [](const Check&) {}},
                 stmt->node);
  }
};

}  // namespace

std::vector<Access> accesses(const Block& block) {
  Collector collector;
  collector.block(block);
  return std::move(collector.list);
}

std::vector<Param> make_params(const Block& body, const FindBuffer& find_buffer, const std::vector<std::string>& updated) {
  std::vector<Param> inputs;
  std::vector<Param> outputs;
  for (const Access& access : accesses(body)) {
    const Buffer* b = find_buffer(access.buffer);
    DEPLO_ASSERT(b, "a kernel touches {}, which the program does not declare", access.buffer);
    bool keeps = std::find(updated.begin(), updated.end(), b->name) != updated.end();
    ParamKind kind = !access.writes ? ParamKind::in : keeps || access.reads_first ? ParamKind::inout : ParamKind::out;
    (access.writes ? outputs : inputs).push_back({b->name, kind, b->dtype, b->shape, b->strides, b->is_static});
  }
  inputs.insert(inputs.end(), outputs.begin(), outputs.end());
  return inputs;
}

void for_each_expr(const Block& block, const std::function<void(const Expr&)>& f) {
  auto all = [&](const std::vector<Expr>& list) {
    for (const Expr& e : list) f(e);
  };
  auto guard = [&](const std::vector<Cond>& list) {
    for (const Cond& cond : list) f(cond.expr);
  };
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const Let& s) {
                            if (s.fn == Fn::index) f(s.index);
                          },
                          [&](const Load& s) {
                            all(s.index);
                            guard(s.guard);
                          },
                          [&](const Store& s) {
                            all(s.index);
                            guard(s.guard);
                          },
                          [&](const For& s) {
                            f(s.extent);
                            for_each_expr(s.body, f);
                          },
                          [&](const Reduce& s) {
                            for (const Axis& axis : s.axes) f(axis.extent);
                            for_each_expr(s.body, f);
                          },
                          [&](const Scan& s) {
                            f(s.axis.extent);
                            for_each_expr(s.body, f);
                            for_each_expr(s.then, f);
                          },
                          [&](const Local& s) { all(s.shape); }, [&](const Check& s) { f(s.cond.expr); }},
               stmt->node);
}

Ranges used_symbols(const Kernel& kernel, const Ranges& symbols) {
  Ranges result;
  if (symbols.empty()) return result;
  std::unordered_set<Expr> exprs;
  for (const Param& p : kernel.params) {
    exprs.insert(p.shape.begin(), p.shape.end());
    exprs.insert(p.strides.begin(), p.strides.end());
  }
  for_each_expr(kernel.body, [&](const Expr& e) { exprs.insert(e); });
  for (bool grew = true; grew;) {
    grew = false;
    for (const auto& [name, range] : symbols) {
      if (result.count(name) || std::none_of(exprs.begin(), exprs.end(), [&](const Expr& e) { return uses(e, name); })) continue;
      result[name] = range;
      if (range.lo) exprs.insert(*range.lo);
      if (range.hi) exprs.insert(*range.hi);
      grew = true;
    }
  }
  return result;
}

}  // namespace deplo::loop_ir
