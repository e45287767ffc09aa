#include "runtime/step_memory.h"

#include <algorithm>

#include "runtime/guard.h"

namespace deplo::runtime {
namespace {

constexpr int64_t kPageBytes = 4096;

/// Whether as much memory ends in the call as a large temporary takes.
bool has_large_ends(const Layout& layout, const Plan& plan, const CallArgument* arguments) {
  int64_t bytes = 0;
  for (const Layout::Ending& ending : layout.endings)
    if (ending.argument && arguments[*ending.argument].is_last) bytes += plan.shapes[ending.buffer].bytes;
  return bytes >= kLargeTemporary;
}

}  // namespace

StepMemory::StepMemory(const ProgramBody& program, const Layout& layout, const Plan& plan, const CallArgument* arguments, char** pointers, Host& host,
                       Options options)
    : program_(program),
      layout_(layout),
      plan_(plan),
      arguments_(arguments),
      pointers_(pointers),
      host_(host),
      options_(options),
      has_ends_(options.inputs_end && has_large_ends(layout, plan, arguments)) {
  const std::vector<int64_t>& offsets = has_ends_ ? plan.rest_offsets : plan.offsets;
  const int64_t bytes = round_up(has_ends_ ? plan.rest_bytes : plan.arena_bytes, kPageBytes);
  arena_ = block(bytes + options.scratch_bytes);
  scratch_ = arena_.data() + bytes;
  for (size_t t = 0; t < layout.temporaries.size(); ++t)
    if (offsets[t] >= 0) pointers[layout.temporaries[t].buffer] = arena_.data() + offsets[t];
  if (has_ends_) large_.resize(layout.temporaries.size());
  if (!has_ends_ && options.is_on_device) finish();  // its steps start together
}

StepMemory::Block StepMemory::block(int64_t bytes) {
  if (options_.is_on_device) return {Memory(), host_.allocate_on_device(bytes)};
  return {Memory(bytes), DeviceBlock()};
}

void StepMemory::allocate_output(size_t place) {
  const size_t buffer = layout_.allocated[place];
  pointers_[buffer] = host_.allocate(buffer, program_.buffers[buffer].dtype, plan_.shapes[buffer]);
  if (options_.poisons) poison(pointers_[buffer], plan_.shapes[buffer].bytes);
}

void StepMemory::before(size_t step) {
  const int now = static_cast<int>(step);
  for (; allocated_ < layout_.allocated.size() && layout_.allocated_first[allocated_] <= now; ++allocated_) allocate_output(allocated_);
  if (!has_ends_ && !options_.poisons) return;
  for (; first_ < layout_.temporaries.size() && layout_.temporaries[first_].first <= now; ++first_) {
    const size_t buffer = layout_.temporaries[first_].buffer;
    if (has_ends_ && plan_.rest_offsets[first_] < 0) {
      large_[first_] = block(plan_.shapes[buffer].bytes);
      pointers_[buffer] = large_[first_].data();
    }
    if (options_.poisons) poison(pointers_[buffer], plan_.shapes[buffer].bytes);
  }
}

void StepMemory::after(size_t step) {
  const int now = static_cast<int>(step);
  for (; ending_ < layout_.endings.size() && layout_.endings[ending_].last <= now; ++ending_) {
    const Layout::Ending& ending = layout_.endings[ending_];
    if (!ending.argument || (has_ends_ && arguments_[*ending.argument].is_last)) host_.release(ending.buffer);
  }
  if (!has_ends_) return;
  for (; last_ < layout_.last_used.size() && layout_.temporaries[layout_.last_used[last_]].last <= now; ++last_)
    large_[layout_.last_used[last_]] = {};
}

size_t StepMemory::calm_until(size_t step) const {
  size_t until = layout_.steps.size();
  if (!has_ends_) return until;
  // Of each order what comes next is the earliest, but for what no one waits for.
  const auto meet = [&](int at) { until = std::min(until, std::max(static_cast<size_t>(at), step + 1)); };
  if (allocated_ < layout_.allocated.size()) meet(layout_.allocated_first[allocated_]);
  for (size_t t = first_; t < layout_.temporaries.size(); ++t) {
    if (plan_.rest_offsets[t] >= 0) continue;
    meet(layout_.temporaries[t].first);
    break;
  }
  for (size_t k = last_; k < layout_.last_used.size(); ++k) {
    if (!large_[layout_.last_used[k]].data()) continue;
    meet(layout_.temporaries[layout_.last_used[k]].last + 1);
    break;
  }
  for (size_t e = ending_; e < layout_.endings.size(); ++e) {
    const Layout::Ending& ending = layout_.endings[e];
    if (!ending.argument || !arguments_[*ending.argument].is_last) continue;
    meet(ending.last + 1);
    break;
  }
  return until;
}

void allocate_outputs(const ProgramBody& program, const Layout& layout, const Plan& plan, char** pointers, Host& host) {
  for (size_t buffer : layout.allocated) pointers[buffer] = host.allocate(buffer, program.buffers[buffer].dtype, plan.shapes[buffer]);
}

}  // namespace deplo::runtime
