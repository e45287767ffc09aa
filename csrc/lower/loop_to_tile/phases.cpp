#include "lower/loop_to_tile/phases.h"

#include <algorithm>
#include <map>
#include <utility>

#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {
namespace {

using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Stmt;

/// Names that a block reads, at any depth; and those that it defines.
struct NameUse {
  std::set<std::string> read;
  std::set<std::string> defined;

  void note(Expr e) { collect_symbols(e, read); }
  void note(const std::vector<Expr>& exprs) {
    for (Expr e : exprs) note(e);
  }
  void note(const std::vector<Cond>& conds) {
    for (const Cond& c : conds) note(c.expr);
  }
  void note(const std::vector<std::string>& names) { read.insert(names.begin(), names.end()); }

  void visit(const Block& block) {
    visit_all(block, [&](const Stmt& stmt) {
      std::visit(Overloaded{[&](const loop_ir::Let& s) {
                              note(s.operands);
                              note(s.index);
                              defined.insert(s.name);
                            },
                            [&](const loop_ir::Load& s) {
                              note(s.index);
                              note(s.guard);
                              defined.insert(s.name);
                            },
                            [&](const loop_ir::Store& s) {
                              note(s.index);
                              note(s.guard);
                              read.insert(s.value);
                            },
                            [&](const loop_ir::For& s) { note(s.extent); },
                            [&](const loop_ir::Reduce& s) {
                              for (const Axis& a : s.axes) note(a.extent);
                              note(s.operands);
                              defined.insert(s.results.begin(), s.results.end());
                            },
                            [&](const loop_ir::Scan& s) {
                              note(s.axis.extent);
                              note(s.operands);
                              defined.insert(s.results.begin(), s.results.end());
                            },
                            [&](const loop_ir::Local& s) { note(s.shape); }, [&](const loop_ir::Check& s) { note(s.cond.expr); }},
                 stmt.node);
    });
  }
};

class Cutter {
 public:
  Cutter(const CutRules& rules, loop_ir::Names& names) : rules_(rules), names_(names) {}

  Phases cut(const Block& body) {
    for (const auto& stmt : body) {
      if (const auto* local = std::get_if<loop_ir::Local>(&stmt->node)) {
        out_.locals.push_back(*local);
        continue;
      }
      const auto* loop = std::get_if<loop_ir::For>(&stmt->node);
      if (loop && rules_.apart(*loop)) {
        out_.all.push_back({{stmt}, loop});
        continue;
      }
      if (out_.all.empty() || out_.all.back().nest) out_.all.push_back({});
      out_.all.back().body.push_back(stmt);
    }
    for (size_t p = 0; p < out_.all.size(); ++p)
      for (const auto& stmt : out_.all[p].body) define(stmt, p);
    std::vector<Block> prefixes(out_.all.size());
    for (size_t p = 0; p < out_.all.size(); ++p) {
      NameUse use;
      use.visit(out_.all[p].body);
      std::set<std::string> done = use.defined;
      for (const std::string& name : use.read) bring(name, p, done, prefixes[p]);
    }
    for (size_t p = 0; p < out_.all.size(); ++p) out_.all[p].body.insert(out_.all[p].body.begin(), prefixes[p].begin(), prefixes[p].end());
    for (const auto& [name, local] : kept_) {
      out_.all[defined_.at(name).first].body.push_back(loop_ir::make_stmt(loop_ir::Store{local.name, {}, name, {}, Combiner::set}));
      out_.locals.push_back(local);
    }
    return std::move(out_);
  }

 private:
  void define(const Ref<Stmt>& stmt, size_t phase) {
    auto add = [&](const std::string& name) { defined_[name] = {phase, stmt}; };
    if (const auto* s = std::get_if<loop_ir::Let>(&stmt->node)) add(s->name);
    if (const auto* s = std::get_if<loop_ir::Load>(&stmt->node)) add(s->name);
    if (const auto* s = std::get_if<loop_ir::Reduce>(&stmt->node))
      for (const auto& r : s->results) add(r);
    if (const auto* s = std::get_if<loop_ir::Scan>(&stmt->node))
      for (const auto& r : s->results) add(r);
  }

  static DType dtype_of(const Stmt& stmt, const std::string& name) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return let->dtype;
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) return load->dtype;
    DType dtype = DType::f32;
    auto of_results = [&](const auto& s) {
      for (size_t k = 0; k < s.results.size(); ++k)
        if (s.results[k] == name) dtype = s.dtypes[k];
    };
    if (const auto* s = std::get_if<loop_ir::Reduce>(&stmt.node)) of_results(*s);
    if (const auto* s = std::get_if<loop_ir::Scan>(&stmt.node)) of_results(*s);
    return dtype;
  }

  /// Makes a value of another phase known at the start of this one.
  void bring(const std::string& name, size_t phase, std::set<std::string>& done, Block& prefix) {
    auto it = defined_.find(name);
    if (it == defined_.end() || it->second.first == phase || !done.insert(name).second) return;
    const Stmt& stmt = *it->second.second;
    if (rules_.again(stmt)) {
      NameUse use;
      use.visit({it->second.second});
      for (const std::string& operand : use.read) bring(operand, phase, done, prefix);
      prefix.push_back(it->second.second);
      return;
    }
    auto kept = kept_.find(name);
    const DType dtype = dtype_of(stmt, name);
    if (kept == kept_.end()) kept = kept_.emplace(name, loop_ir::Local{names_.fresh(name + "_rows"), dtype, {}}).first;
    prefix.push_back(loop_ir::make_stmt(loop_ir::Load{name, dtype, kept->second.name, {}, {}, {}}));
  }

  const CutRules& rules_;
  loop_ir::Names& names_;
  Phases out_;
  std::map<std::string, std::pair<size_t, Ref<Stmt>>> defined_;
  std::map<std::string, loop_ir::Local> kept_;
};

}  // namespace

Phases cut_into_phases(const loop_ir::Block& body, const CutRules& rules, loop_ir::Names& names) { return Cutter(rules, names).cut(body); }

loop_ir::Block with_place(const loop_ir::Block& body, const std::vector<loop_ir::Local>& locals, Expr place, bool last) {
  std::set<std::string> names;
  for (const auto& l : locals) names.insert(l.name);
  auto placed = [&](auto access) {
    access.index.insert(last ? access.index.end() : access.index.begin(), place);
    return Block{loop_ir::make_stmt(std::move(access))};
  };
  return loop_ir::rewrite(body, [&](const Ref<Stmt>& stmt) -> Block {
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node); load && names.count(load->buffer)) return placed(*load);
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node); store && names.count(store->buffer)) return placed(*store);
    return {stmt};
  });
}

loop_ir::Kernel with_locals(const loop_ir::Kernel& kernel, loop_ir::Block body, const std::vector<loop_ir::Local>& locals) {
  loop_ir::Kernel out;
  out.name = kernel.name;
  out.params = kernel.params;
  out.symbols = kernel.symbols;
  for (const auto& l : locals) out.params.push_back({l.name, loop_ir::ParamKind::inout, l.dtype, l.shape, contiguous_strides(l.shape), false});
  out.body = std::move(body);
  return out;
}

}  // namespace deplo::loop_to_tile
