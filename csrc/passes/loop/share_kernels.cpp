#include "passes/loop/share_kernels.h"

#include <algorithm>
#include <map>

#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"

namespace deplo {
namespace {

using namespace loop_ir;

// Names by what they are: a0 inputs, y0 outputs, u0 both, i0 axes, k0 reduce axes, v0 values, r0 results, t0 locals.
struct Canonizer {
  Renaming renaming;
  std::map<char, int> next;

  std::string fresh(char stem) { return stem + std::to_string(next[stem]++); }

  void block(const Block& body) {
    for (const auto& stmt : body)
      std::visit(Overloaded{[&](const Let& s) { renaming.value(s.name, fresh('v')); }, [&](const Load& s) { renaming.value(s.name, fresh('v')); },
                            [](const Store&) {},
                            [&](const For& s) {
                              renaming.value(s.axis, fresh('i'));
                              block(s.body);
                            },
                            [&](const Reduce& s) {
                              for (const Axis& axis : s.axes) renaming.value(axis.name, fresh('k'));
                              block(s.body);
                              for (const std::string& name : s.results) renaming.value(name, fresh('r'));
                            },
                            [&](const Scan& s) {
                              renaming.value(s.axis.name, fresh('k'));
                              block(s.body);
                              for (const std::string& name : s.results) renaming.value(name, fresh('r'));
                              block(s.then);
                            },
                            [&](const Local& s) { renaming.buffers[s.name] = fresh('t'); }, [](const Check&) {}},
                 stmt->node);
  }
};

// Renaming by one table needs names that are defined once in the whole kernel.
Kernel unique(const Kernel& kernel) {
  Names names("n$");
  Kernel copy = kernel;
  copy.body = copy_block(kernel.body, {}, &names);
  return copy;
}

Kernel canonical(const Kernel& original) {
  Kernel kernel = unique(original);
  Canonizer canonizer;
  // A symbol keeps its name: it means the same size in every kernel.
  for (Param& p : kernel.params) {
    std::string name = canonizer.fresh(p.kind == ParamKind::in ? 'a' : p.kind == ParamKind::out ? 'y' : 'u');
    canonizer.renaming.buffers[p.name] = name;
    p.name = name;
  }
  canonizer.block(kernel.body);
  for (const auto& [symbol, range] : kernel.symbols) {
    for (auto& [from, to] : canonizer.renaming.values)
      if (to == symbol) return original;
    for (const Param& p : kernel.params)
      if (p.name == symbol) return original;
  }
  kernel.body = copy_block(kernel.body, canonizer.renaming, nullptr);
  return kernel;
}

}  // namespace

Module share_kernels(Module module, const PassContext&) {
  std::map<std::string, std::shared_ptr<Kernel>> by_text;
  std::map<std::string, std::string> renamed;
  std::vector<std::shared_ptr<Kernel>> kept;
  for (const auto& original : module.kernels) {
    Kernel kernel = canonical(*original);
    auto provenance = std::move(kernel.provenance);
    kernel.provenance.clear();
    kernel.name.clear();
    std::string text = print(kernel);
    auto it = by_text.find(text);
    if (it == by_text.end()) {
      kernel.name = original->name;
      it = by_text.emplace(std::move(text), std::make_shared<Kernel>(std::move(kernel))).first;
      kept.push_back(it->second);
    }
    auto& names = it->second->provenance;
    for (std::string& name : provenance)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
    renamed[original->name] = it->second->name;
  }
  module.kernels.assign(kept.begin(), kept.end());
  for (Step& step : module.steps)
    if (auto* call = std::get_if<CallStep>(&step)) call->kernel = renamed.at(call->kernel);
  return module;
}

}  // namespace deplo
