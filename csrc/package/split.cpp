#include "package/split.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "runtime/packed.h"
#include "runtime/plan.h"

namespace deplo::package {
namespace {

bool is_constant(const std::vector<Expr>& exprs) {
  return std::all_of(exprs.begin(), exprs.end(), [](Expr e) { return symbols_of(e).empty(); });
}

/// The program for inputs of which these facts hold and the others do not: what serves a package does not look at the elements of its weights.
kernel_ir::Module without_facts(kernel_ir::Module module, const std::set<std::string>& holding) {
  Ranges known;
  Substitution values;
  for (const Fact& fact : module.facts) {
    const int64_t value = holding.contains(fact.symbol) ? 1 : 0;
    known[fact.symbol] = {Expr(value), Expr(value)};
    values[fact.symbol] = value;
    module.symbols.erase(fact.symbol);
  }
  module.facts.clear();
  for (auto& kernel : module.kernels) {
    // Kernels that reckon with a fact are told whether it holds.
    Substitution mine;
    for (const std::string& name : kernel->symbols)
      if (auto value = values.find(name); value != values.end()) mine.insert(*value);
    if (mine.empty()) continue;
    auto told = std::make_shared<kernel_ir::Kernel>(*kernel);
    std::erase_if(told->symbols, [&](const auto& name) { return mine.count(name) > 0; });
    for (kernel_ir::Size& size : told->sizes) size.value = substitute(size.value, mine);
    told->chunks = substitute(told->chunks, mine);
    told->scratch_bytes = substitute(told->scratch_bytes, mine);
    for (const auto& [name, value] : mine) told->sizes.push_back({name, value});
    kernel = std::move(told);
  }
  std::vector<Step> steps;
  bool open = false;    // a call before has a `when` that the sizes decide
  bool closed = false;  // one of the alternatives runs at all sizes: those behind it never do
  for (Step& step : module.steps) {
    auto* call = std::get_if<CallStep>(&step);
    if (!call || call->once) {
      steps.push_back(std::move(step));
      continue;
    }
    if (!call->is_alternative) open = closed = false;
    const bool never =
        std::any_of(call->when.begin(), call->when.end(), [&](const Cond& c) { return decide(c, known) == std::optional<bool>(false); });
    if (never || closed) continue;
    std::erase_if(call->when, [&](const Cond& c) { return decide(c, known) == std::optional<bool>(true); });
    call->is_alternative = open;
    open = !call->when.empty();
    closed = !open;
    steps.push_back(std::move(step));
  }
  std::set<std::string> read;
  for (const Step& step : steps)
    if (const auto* call = std::get_if<CallStep>(&step); call && !call->once) read.insert(call->arguments.begin(), call->arguments.end());
  std::erase_if(steps, [&](const Step& step) {
    const auto* call = std::get_if<CallStep>(&step);
    if (!call || !call->once) return false;
    return std::none_of(call->arguments.begin(), call->arguments.end(), [&](const std::string& name) {
      const Buffer* buffer = module.find_buffer(name);
      return buffer && buffer->kind == BufferKind::packed && read.contains(name);
    });
  });
  module.steps = std::move(steps);
  return module;
}

/// Static inputs that a kernel is given and does not read need not be there: the kernel is given another argument of the call in their place, of the
/// same dtype if there is one. Else, where no call gives it an input of the user, the parameter takes the dtype of that argument: to what is not read
/// it is all one.
kernel_ir::Module without_unread(kernel_ir::Module module) {
  std::map<std::string, std::set<std::string>> loads_of;  // by kernel
  std::set<std::pair<std::string, size_t>> fixed;         // kernels' parameters that some call needs as they are
  for (const Step& step : module.steps)
    if (const auto* call = std::get_if<CallStep>(&step))
      for (size_t p = 0; p < call->arguments.size(); ++p)
        if (call->once || !module.find_buffer(call->arguments[p])->is_static) fixed.emplace(call->kernel, p);
  for (Step& step : module.steps) {
    auto* call = std::get_if<CallStep>(&step);
    if (!call || call->once) continue;
    auto& kernel = *std::find_if(module.kernels.begin(), module.kernels.end(), [&](const auto& k) { return k->name == call->kernel; });
    auto [loads, is_new] = loads_of.try_emplace(kernel->name);
    if (is_new) loads->second = runtime::loaded_params(*kernel);
    auto is_read = [&](size_t p) { return kernel->params[p].kind == loop_ir::ParamKind::in && loads->second.contains(kernel->params[p].name); };
    for (size_t p = 0; p < kernel->params.size(); ++p) {
      if (!module.find_buffer(call->arguments[p])->is_static || kernel->params[p].kind != loop_ir::ParamKind::in || is_read(p)) continue;
      std::optional<size_t> instead;
      for (size_t other = 0; other < kernel->params.size(); ++other) {
        const bool fits = is_read(other) && kernel->params[other].dtype == kernel->params[p].dtype;
        if (fits || (is_read(other) && !instead && !fixed.contains({kernel->name, p}))) instead = other;
        if (fits) break;
      }
      if (!instead) continue;
      call->arguments[p] = call->arguments[*instead];
      if (kernel->params[*instead].dtype == kernel->params[p].dtype) continue;
      auto changed = std::make_shared<kernel_ir::Kernel>(*kernel);
      changed->params[p].dtype = kernel->params[*instead].dtype;
      kernel = std::move(changed);
    }
  }
  return module;
}

class Splitter {
 public:
  explicit Splitter(const kernel_ir::Module& module) : module_(module), layout_(runtime::make_layout(module)) {}

  SplitProgram split() {
    for (const runtime::OnceGroup& group : runtime::find_once_groups(module_, layout_))
      if (is_same_for_all_sizes(group)) baked_.insert(group.steps.begin(), group.steps.end());
    for (size_t s = 0; s < layout_.steps.size(); ++s)
      for (size_t b : layout_.steps[s].buffers) (baked_.contains(s) ? used_once_ : used_).insert(b);
    for (const runtime::Layout::Output& output : layout_.outputs)
      if (output.buffer) used_.insert(*output.buffer);
    make_packing();
    make_serving();
    return std::move(split_);
  }

 private:
  bool is_same_for_all_sizes(const runtime::OnceGroup& group) const {
    auto buffer_is = [&](size_t b) { return is_constant(module_.buffers[b].shape) && is_constant(module_.buffers[b].strides); };
    auto kernel_is = [&](size_t step) {
      const kernel_ir::Kernel& kernel = *module_.kernels[*layout_.steps[step].kernel];
      return kernel.symbols.empty() && kernel.sizes.empty() && is_constant({kernel.chunks, kernel.scratch_bytes});
    };
    return std::all_of(group.steps.begin(), group.steps.end(), kernel_is) && std::all_of(group.packed.begin(), group.packed.end(), buffer_is) &&
           std::all_of(group.inputs.begin(), group.inputs.end(), buffer_is);
  }

  /// Kernels of the module's steps, each once, in the module's order.
  void take_kernels(kernel_ir::Module& into, bool strip) const {
    std::map<std::string, bool> wanted;  // and whether a `once` step calls it
    for (const Step& step : into.steps)
      if (const auto* call = std::get_if<CallStep>(&step)) wanted[call->kernel] = wanted[call->kernel] || call->once;
    for (const auto& kernel : module_.kernels) {
      auto found = wanted.find(kernel->name);
      if (found == wanted.end()) continue;
      kernel_ir::Kernel copy = *kernel;
      // What is packed at run time is shared by what its kernels do: these keep their bodies.
      if (strip && !found->second) copy.body.clear();
      into.kernels.push_back(std::make_shared<kernel_ir::Kernel>(std::move(copy)));
    }
  }

  void make_packing() {
    kernel_ir::Module& packing = split_.packing;
    packing.name = module_.name + "_pack";
    for (size_t i = 0; i < layout_.input_order.size(); ++i) {
      const auto& buffer = layout_.input_order[i];
      if (!buffer || !used_once_.contains(*buffer)) continue;
      packing.buffers.push_back(module_.buffers[*buffer]);
      packing.input_order.push_back(module_.buffers[*buffer].name);
      split_.packs_from.push_back(i);
    }
    for (size_t b = 0; b < module_.buffers.size(); ++b) {
      if (module_.buffers[b].kind != BufferKind::packed || !used_once_.contains(b)) continue;
      packing.buffers.push_back(module_.buffers[b]);
      packing.buffers.back().kind = used_.contains(b) ? BufferKind::output : BufferKind::temp;
      if (!used_.contains(b)) continue;
      packing.outputs.push_back({ValueName{module_.buffers[b].name}});
      packed_.push_back(b);
    }
    for (size_t s : baked_) {
      auto call = std::get<CallStep>(module_.steps[s]);
      call.once = false;
      packing.steps.emplace_back(std::move(call));
    }
    take_kernels(packing, /*strip=*/false);
  }

  void make_serving() {
    kernel_ir::Module& serving = split_.serving;
    static_cast<ProgramBody&>(serving) = static_cast<const ProgramBody&>(module_);
    serving.buffers.clear();
    serving.input_order.clear();
    serving.steps.clear();
    for (size_t i = 0; i < layout_.input_order.size(); ++i) {
      const auto& at = layout_.input_order[i];
      const Buffer* buffer = at ? &module_.buffers[*at] : nullptr;
      if (buffer && buffer->input_kind != torch_ir::InputKind::user && !used_.contains(*at)) continue;
      serving.input_order.push_back(module_.input_order[i]);
      split_.arguments.push_back({false, i});
      if (buffer) serving.buffers.push_back(*buffer);
    }
    for (size_t k = 0; k < packed_.size(); ++k) {
      Buffer buffer = module_.buffers[packed_[k]];
      buffer.kind = BufferKind::input;
      buffer.input_kind = torch_ir::InputKind::constant;
      buffer.is_static = true;
      serving.input_order.push_back(buffer.name);
      split_.arguments.push_back({true, k});
      serving.buffers.push_back(std::move(buffer));
    }
    for (size_t b = 0; b < module_.buffers.size(); ++b) {
      const Buffer& buffer = module_.buffers[b];
      const bool is_baked = buffer.kind == BufferKind::packed && used_once_.contains(b);
      if (buffer.kind != BufferKind::input && !is_baked) serving.buffers.push_back(buffer);
    }
    for (size_t s = 0; s < module_.steps.size(); ++s)
      if (!baked_.contains(s)) serving.steps.push_back(module_.steps[s]);
    take_kernels(serving, /*strip=*/true);
  }

  const kernel_ir::Module& module_;
  runtime::Layout layout_;
  std::set<size_t> baked_;      ///< steps
  std::set<size_t> used_once_;  ///< buffers of these
  std::set<size_t> used_;       ///< buffers of the others, and results
  std::vector<size_t> packed_;  ///< buffers, in the order of the packing's outputs
  SplitProgram split_;
};

}  // namespace

SplitProgram split_once(const kernel_ir::Module& module, const std::set<std::string>& holding) {
  const kernel_ir::Module served = without_unread(module.facts.empty() ? module : without_facts(module, holding));
  return Splitter(served).split();
}

}  // namespace deplo::package
