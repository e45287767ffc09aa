#include "passes/loop/share_kernels.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"
#include "loop_ir/structure.h"

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

/// Nothing where a symbol has one of the names.
std::optional<Kernel> canonical(const Kernel& original) {
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
      if (to == symbol) return std::nullopt;
    for (const Param& p : kernel.params)
      if (p.name == symbol) return std::nullopt;
  }
  kernel.body = copy_block(kernel.body, canonizer.renaming, nullptr);
  return kernel;
}

/// Equal for kernels whose canonical forms are equal, if they name their values and axes alike, as those of equal layers do.
std::string structure_of(const Kernel& kernel) {
  std::vector<std::string> buffers;
  Structure key;
  key.add(loop_ir::structure_of(kernel.body, buffers));
  std::unordered_map<std::string, size_t> places;
  for (size_t k = 0; k < buffers.size(); ++k) places.emplace(buffers[k], k);
  for (const Param& p : kernel.params) {
    auto it = places.find(p.name);
    key.add(it == places.end() ? buffers.size() : it->second);
    key.add(static_cast<char>(p.kind));
    key.add(static_cast<char>(p.dtype));
    key.add(static_cast<char>(p.is_static));
    key.add(p.shape);
    key.add(p.strides);
  }
  for (const auto& [name, range] : kernel.symbols) {
    key.add(name);
    for (const auto& bound : {range.lo, range.hi}) key.add(bound ? std::vector<Expr>{*bound} : std::vector<Expr>{});
  }
  return key.take();
}

}  // namespace

Module share_kernels(Module module, const PassContext&) {
  std::map<std::string, std::shared_ptr<Kernel>> by_text;
  std::map<std::string, std::string> renamed;
  std::vector<std::shared_ptr<Kernel>> kept;
  std::unordered_map<std::string, std::shared_ptr<Kernel>> by_structure;
  for (const auto& original : module.kernels) {
    std::shared_ptr<Kernel>& known = by_structure[structure_of(*original)];
    std::shared_ptr<Kernel> shared = known;
    if (!shared) {
      std::optional<Kernel> renumbered = canonical(*original);
      const bool is_numbered = renumbered.has_value();
      Kernel kernel = is_numbered ? *renumbered : *original;
      kernel.provenance.clear();
      kernel.name.clear();
      std::string text = print(kernel);
      auto it = by_text.find(text);
      if (it == by_text.end()) {
        kernel.name = original->name;
        it = by_text.emplace(std::move(text), std::make_shared<Kernel>(std::move(kernel))).first;
        kept.push_back(it->second);
      }
      shared = it->second;
      if (is_numbered) known = shared;
    }
    auto& names = shared->provenance;
    for (const std::string& name : original->provenance)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    renamed[original->name] = shared->name;
  }
  module.kernels.assign(kept.begin(), kept.end());
  for (Step& step : module.steps)
    if (auto* call = std::get_if<CallStep>(&step)) call->kernel = renamed.at(call->kernel);
  return module;
}

}  // namespace deplo
