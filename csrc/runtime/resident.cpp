#include "runtime/resident.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "runtime/kernel_error.h"

namespace deplo::runtime {
namespace {

constexpr int64_t kScalarBytes = 16;  // each number from the host has a place of its own, aligned for every dtype

/// Never destroyed: programs may outlive static destructors.
struct Residents {
  std::mutex mutex;
  std::set<Resident*> programs;
};
Residents& residents() {
  static auto* made = new Residents;
  return *made;
}

}  // namespace

Resident::Resident(DeviceKernels& kernels, const kernel_ir::Module& module, const Layout& layout, std::vector<std::string> names, int device,
                   bool replay)
    : kernels_(kernels),
      module_(module),
      layout_(layout),
      names_(std::move(names)),
      device_(device),
      replay_(replay),
      errors_(kernels.share(static_cast<int64_t>(std::max<size_t>(layout.steps.size(), 1) * sizeof(int32_t)))) {
  std::lock_guard lock(residents().mutex);
  residents().programs.insert(this);
}

Resident::~Resident() {
  std::lock_guard lock(residents().mutex);
  residents().programs.erase(this);
}

void Resident::prepare(Plan& plan) const {
  std::map<std::string, int64_t> symbols;
  for (size_t i = 0; i < names_.size(); ++i) symbols[names_[i]] = plan.symbols[i];
  std::vector<DeviceStep> steps;
  plan.launch_of.assign(layout_.steps.size(), std::nullopt);
  for (size_t s = 0; s < layout_.steps.size(); ++s) {
    const Layout::Step& step = layout_.steps[s];
    if (!step.kernel || !plan.steps[s].runs) continue;
    plan.launch_of[s] = steps.size();
    steps.push_back({module_.kernels[*step.kernel]->name, step.buffers, errors_->address + s * sizeof(int32_t)});
  }
  plan.launches = kernels_.prepare(steps, symbols, replay_);
}

DeviceBlock Resident::bind(const CallArgument* arguments, char** pointers, Host& host) const {
  std::vector<size_t> scalars;
  for (size_t i = 0; i < layout_.input_order.size(); ++i) {
    if (!layout_.input_order[i]) continue;
    const TensorView& given = arguments[i].tensor;
    const Buffer& buffer = module_.buffers[*layout_.input_order[i]];
    pointers[*layout_.input_order[i]] = given.data;
    if (given.device < 0 && given.rank == 0) {
      scalars.push_back(i);
      continue;
    }
    DEPLO_SUPPORT(given.device == device_, "input {} is on {}, the program on device {}", buffer.name,
                  given.device < 0 ? "the host" : fmt::format("device {}", given.device), device_);
    DEPLO_CHECK(reinterpret_cast<uintptr_t>(given.data) % static_cast<uintptr_t>(size_of(buffer.dtype)) == 0,
                "input {} starts at an address that is no multiple of its elements' {} bytes", buffer.name, size_of(buffer.dtype));
  }
  if (scalars.empty()) return {};
  DEPLO_SUPPORT(std::none_of(layout_.written_inputs.begin(), layout_.written_inputs.end(),
                             [&](size_t written) { return std::count(scalars.begin(), scalars.end(), written) > 0; }),
                "an input that the program writes is on the host");
  DeviceBlock block = host.allocate_on_device(static_cast<int64_t>(scalars.size()) * kScalarBytes);
  for (size_t k = 0; k < scalars.size(); ++k) {
    char* place = block.data + static_cast<int64_t>(k) * kScalarBytes;
    size_t buffer = *layout_.input_order[scalars[k]];
    kernels_.copy_on_stream(reinterpret_cast<uint64_t>(place), pointers[buffer], size_of(module_.buffers[buffer].dtype), host.stream());
    pointers[buffer] = place;
  }
  return block;
}

void Resident::start(size_t step, const Plan& plan, char* const* pointers, char* scratch, void* stream) const {
  start(step, step + 1, plan, pointers, scratch, stream);
}

void Resident::start(size_t first, size_t last, const Plan& plan, char* const* pointers, char* scratch, void* stream) const {
  while (first < last && !plan.launch_of[first]) ++first;
  while (first < last && !plan.launch_of[last - 1]) --last;
  if (first == last) return;
  plan.launches->start(*plan.launch_of[first], *plan.launch_of[last - 1] + 1, pointers, reinterpret_cast<uint64_t>(scratch), stream);
}

void Resident::check_errors() {
  auto* words = reinterpret_cast<int32_t*>(errors_->data);
  for (size_t s = 0; s < layout_.steps.size(); ++s) {
    std::atomic_ref<int32_t> word(words[s]);
    if (word.load(std::memory_order_relaxed) == 0) continue;
    int32_t code = word.exchange(0);
    if (code != 0) throw_kernel_error(code, describe(s) + ", in an earlier call");
  }
}

std::string Resident::describe(size_t step) const {
  const kernel_ir::Kernel& kernel = *module_.kernels[*layout_.steps[step].kernel];
  return kernel.provenance.empty() ? kernel.name : fmt::format("{}: {}", kernel.name, joined(kernel.provenance));
}

void check_kernel_errors() {
  std::lock_guard lock(residents().mutex);
  for (Resident* program : residents().programs) program->check_errors();
}

}  // namespace deplo::runtime
