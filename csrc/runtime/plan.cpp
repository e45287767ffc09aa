#include "runtime/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "runtime/binding.h"

namespace deplo::runtime {
namespace {

class LayoutMaker {
 public:
  explicit LayoutMaker(const kernel_ir::Module& module) : module_(module) {
    for (size_t i = 0; i < module.buffers.size(); ++i) buffers_[module.buffers[i].name] = i;
    for (size_t i = 0; i < module.kernels.size(); ++i) kernels_[module.kernels[i]->name] = i;
  }

  Layout make() {
    for (const std::string& name : module_.input_order) {
      auto found = buffers_.find(name);
      layout_.input_order.push_back(found == buffers_.end() ? std::nullopt : std::optional(found->second));
    }
    size_t libraries = 0;
    for (const Step& step : module_.steps) {
      if (const auto* call = std::get_if<CallStep>(&step))
        add_call(*call);
      else
        add_library(std::get<LibraryStep>(step), libraries++);
    }
    for (const Attribute& output : module_.outputs) add_output(output);
    add_temporaries();
    for (size_t i = 0; i < layout_.input_order.size(); ++i)
      if (layout_.input_order[i] && written_.contains(*layout_.input_order[i])) layout_.written_inputs.push_back(i);
    return std::move(layout_);
  }

 private:
  size_t buffer(const std::string& name) const {
    auto found = buffers_.find(name);
    DEPLO_ASSERT(found != buffers_.end(), "program {} has no buffer {}", module_.name, name);
    return found->second;
  }

  void add_call(const CallStep& call) {
    auto found = kernels_.find(call.kernel);
    DEPLO_ASSERT(found != kernels_.end(), "program {} has no kernel {}", module_.name, call.kernel);
    const kernel_ir::Kernel& kernel = *module_.kernels[found->second];
    DEPLO_ASSERT(kernel.params.size() == call.arguments.size(), "{} takes {} buffers, called with {}", call.kernel, kernel.params.size(),
                 call.arguments.size());
    Layout::Step step;
    step.kernel = found->second;
    step.once = call.once;
    for (size_t a = 0; a < call.arguments.size(); ++a) {
      size_t index = buffer(call.arguments[a]);
      step.buffers.push_back(index);
      if (kernel.params[a].kind == loop_ir::ParamKind::in || module_.buffers[index].kind != BufferKind::input) continue;
      step.writes_input = true;
      written_.insert(index);
    }
    layout_.steps.push_back(std::move(step));
  }

  void add_operands(const Attribute& attribute, std::vector<size_t>& operands) {
    if (const auto* value = std::get_if<ValueName>(&attribute.value)) operands.push_back(buffer(value->name));
    if (const auto* list = std::get_if<std::vector<Attribute>>(&attribute.value))
      for (const Attribute& element : *list) add_operands(element, operands);
  }

  void add_library(const LibraryStep& library, size_t index) {
    Layout::Step step;
    step.library = index;
    for (const auto& [name, attribute] : library.arguments) add_operands(attribute, step.buffers);
    // Collectives read their operands until somebody waits for them.
    if (library.op.starts_with("_c10d_functional.")) held_.insert(step.buffers.begin(), step.buffers.end());
    for (const std::string& result : library.results) {
      if (result.empty()) continue;
      step.buffers.push_back(buffer(result));
      from_library_.insert(buffer(result));
    }
    layout_.steps.push_back(std::move(step));
  }

  void add_output(const Attribute& output) {
    Layout::Output made;
    if (const auto* value = std::get_if<ValueName>(&output.value)) {
      made.buffer = buffer(value->name);
      passed_on_.insert(*made.buffer);
      if (module_.buffers[*made.buffer].kind != BufferKind::input) returned_.insert(*made.buffer);
      DEPLO_ASSERT(module_.buffers[*made.buffer].kind != BufferKind::packed, "{} returns the packed buffer {}", module_.name, value->name);
    } else if (const auto* integer = std::get_if<Expr>(&output.value)) {
      made.integer = *integer;
    }
    layout_.outputs.push_back(made);
  }

  void add_temporaries() {
    const int past = static_cast<int>(layout_.steps.size());
    std::map<size_t, std::pair<int, int>> lifetimes;
    for (size_t s = 0; s < layout_.steps.size(); ++s)
      for (size_t b : layout_.steps[s].buffers) {
        auto [at, fresh] = lifetimes.try_emplace(b, static_cast<int>(s), static_cast<int>(s));
        at->second.second = static_cast<int>(s);
      }
    for (size_t b : held_) lifetimes.at(b).second = past - 1;
    std::vector<std::pair<int, size_t>> allocated;
    for (size_t b = 0; b < module_.buffers.size(); ++b) {
      BufferKind kind = module_.buffers[b].kind;
      if (kind == BufferKind::input || kind == BufferKind::packed || from_library_.contains(b)) continue;
      auto found = lifetimes.find(b);
      if (returned_.contains(b))
        allocated.emplace_back(found == lifetimes.end() ? past : found->second.first, b);
      else if (found != lifetimes.end())
        layout_.temporaries.push_back({b, found->second.first, found->second.second});
    }
    std::sort(allocated.begin(), allocated.end());
    for (const auto& [first, b] : allocated) {
      layout_.allocated.push_back(b);
      layout_.allocated_first.push_back(first);
    }
    const auto& temporaries = layout_.temporaries;
    std::sort(layout_.temporaries.begin(), layout_.temporaries.end(),
              [](const auto& a, const auto& b) { return std::pair(a.first, a.buffer) < std::pair(b.first, b.buffer); });
    layout_.last_used.resize(temporaries.size());
    std::iota(layout_.last_used.begin(), layout_.last_used.end(), size_t{0});
    std::sort(layout_.last_used.begin(), layout_.last_used.end(),
              [&](size_t a, size_t b) { return std::pair(temporaries[a].last, a) < std::pair(temporaries[b].last, b); });
    add_endings(lifetimes);
  }

  void add_endings(const std::map<size_t, std::pair<int, int>>& lifetimes) {
    std::map<size_t, size_t> arguments;  // by buffer
    for (size_t i = 0; i < layout_.input_order.size(); ++i)
      if (layout_.input_order[i]) arguments[*layout_.input_order[i]] = i;
    for (const auto& [b, lifetime] : lifetimes) {
      const Buffer& buffer = module_.buffers[b];
      const bool is_input = buffer.kind == BufferKind::input;
      if ((is_input && (buffer.is_static || written_.contains(b))) || (!is_input && !from_library_.contains(b)) || passed_on_.contains(b)) continue;
      layout_.endings.push_back({b, is_input ? std::optional(arguments.at(b)) : std::nullopt, lifetime.second});
    }
    std::sort(layout_.endings.begin(), layout_.endings.end(),
              [](const auto& a, const auto& b) { return std::pair(a.last, a.buffer) < std::pair(b.last, b.buffer); });
  }

  const kernel_ir::Module& module_;
  Layout layout_;
  std::map<std::string, size_t> buffers_;
  std::map<std::string, size_t> kernels_;
  std::set<size_t> written_;
  std::set<size_t> from_library_;
  std::set<size_t> returned_;
  std::set<size_t> held_;       ///< to the end
  std::set<size_t> passed_on_;  ///< those, and inputs that are outputs
};

void check_range(const std::string& name, const Range& range, const std::map<std::string, int64_t>& symbols) {
  int64_t value = symbols.at(name);
  bool low = range.lo && value < evaluate(*range.lo, symbols);
  bool high = range.hi && value > evaluate(*range.hi, symbols);
  DEPLO_CHECK(!low && !high, "{} is {}, outside the range {}..{} for which the program was compiled", name, value, range.lo ? print(*range.lo) : "",
              range.hi ? print(*range.hi) : "");
}

/// The steps that are taken at these sizes, without the packing that only others need.
std::vector<bool> running_steps(const kernel_ir::Module& module, const Layout& layout, const std::map<std::string, int64_t>& symbols) {
  std::vector<bool> runs = taken_steps(module, symbols);
  std::set<size_t> read;
  for (size_t s = layout.steps.size(); s-- > 0;) {
    const std::vector<size_t>& buffers = layout.steps[s].buffers;
    // A once step reads and writes packed buffers: one that is wanted makes those that it touches wanted.
    if (layout.steps[s].once) runs[s] = std::any_of(buffers.begin(), buffers.end(), [&](size_t b) { return read.contains(b); });
    if (!runs[s]) continue;
    for (size_t b : buffers)
      if (module.buffers[b].kind == BufferKind::packed) read.insert(b);
  }
  return runs;
}

}  // namespace

Layout make_layout(const kernel_ir::Module& module) { return LayoutMaker(module).make(); }

std::shared_ptr<Plan> make_plan(const kernel_ir::Module& module, const Layout& layout, const std::vector<std::string>& names,
                                const std::vector<int64_t>& values) {
  auto plan = std::make_shared<Plan>();
  plan->symbols = values;
  std::map<std::string, int64_t> symbols;
  for (size_t i = 0; i < names.size(); ++i) symbols[names[i]] = values[i];
  for (const auto& [name, range] : module.symbols) check_range(name, range, symbols);
  run_size_checks(module.checks, symbols);
  for (const Buffer& buffer : module.buffers) plan->shapes.push_back(evaluate_shape(buffer, symbols));
  for (const Layout::Output& output : layout.outputs) plan->integers.push_back(output.integer ? evaluate(*output.integer, symbols) : 0);
  std::vector<bool> runs = running_steps(module, layout, symbols);
  for (size_t s = 0; s < layout.steps.size(); ++s) {
    const Layout::Step& step = layout.steps[s];
    Plan::Step made;
    made.runs = runs[s];
    if (step.kernel && (made.runs || step.once)) {
      const kernel_ir::Kernel& kernel = *module.kernels[*step.kernel];
      made.chunks = std::max<int64_t>(1, evaluate(kernel.chunks, symbols));
      made.symbols = kernel_ir::passed_values(kernel, symbols);
      plan->scratch_bytes = std::max(plan->scratch_bytes, evaluate(kernel.scratch_bytes, symbols));
    }
    plan->steps.push_back(std::move(made));
  }
  std::vector<Lifetime> lifetimes;
  for (const Layout::Temporary& temporary : layout.temporaries)
    lifetimes.push_back({plan->shapes[temporary.buffer].bytes, temporary.first, temporary.last});
  MemoryPlan memory = plan_memory(lifetimes, kAlignment);
  plan->offsets = std::move(memory.offsets);
  plan->arena_bytes = memory.bytes;
  plan->peak_bytes = peak_bytes(lifetimes, kAlignment);
  plan->rest_offsets = plan->offsets;
  plan->rest_bytes = plan->arena_bytes;
  if (layout.endings.empty()) return plan;
  std::vector<bool> is_large;
  for (Lifetime& lifetime : lifetimes) {
    is_large.push_back(lifetime.bytes >= kLargeTemporary);
    if (is_large.back()) lifetime.bytes = 0;
  }
  memory = plan_memory(lifetimes, kAlignment);
  plan->rest_bytes = memory.bytes;
  for (size_t t = 0; t < lifetimes.size(); ++t) plan->rest_offsets[t] = is_large[t] ? -1 : memory.offsets[t];
  return plan;
}

}  // namespace deplo::runtime
