#include "target/target.h"

#include <mutex>

#include "base/error.h"
#include "base/text.h"

namespace deplo {
namespace {

/// Never destroyed: compilations may outlive static destruction.
struct Registry {
  std::mutex mutex;
  std::vector<std::unique_ptr<const Target>> targets;
};

Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

const Target* look_up(std::string_view name) {
  std::lock_guard lock(registry().mutex);
  for (const auto& target : registry().targets)
    if (name.empty() ? target->is_default : target->name == name) return target.get();
  return nullptr;
}

[[noreturn]] void refuse_resident(const DeviceKernels& kernels) {
  throw InternalError(fmt::format("{} has no tensors of its own", kernels.describe_device()));
}

}  // namespace

std::unique_ptr<DeviceLaunches> DeviceKernels::prepare(const std::vector<DeviceStep>& /*steps*/, const std::map<std::string, int64_t>& /*symbols*/,
                                                       bool /*replay*/) {
  refuse_resident(*this);
}

std::unique_ptr<SharedMemory> DeviceKernels::share(int64_t /*bytes*/) { refuse_resident(*this); }

void DeviceKernels::copy_on_stream(uint64_t /*to*/, const void* /*from*/, int64_t /*bytes*/, void* /*stream*/) { refuse_resident(*this); }

std::vector<Schedule> Scheduler::proposals(const loop_ir::Kernel& /*kernel*/, const std::string& /*version*/) const { return {}; }

std::vector<Direction> Scheduler::directions(const loop_ir::Kernel& /*kernel*/, const std::string& /*version*/, const Schedule& /*base*/,
                                             bool /*wide*/) const {
  return {};
}

void Scheduler::add_call(const CallStep& call, tile_ir::Module& out) { out.steps.emplace_back(call); }

const std::string& TargetOptions::operator[](const std::string& option) const {
  auto found = values.find(option);
  DEPLO_ASSERT(found != values.end(), "no target declares the option '{}'", option);
  return found->second;
}

std::string Target::find_device(const TargetOptions& /*options*/) const { throw InternalError(fmt::format("target {} has no devices", name)); }

std::string Target::assemble(const std::string& /*text*/, const TargetOptions& /*options*/) const {
  throw UnsupportedError(fmt::format("target {} makes machine code of no text", name));
}

std::string Target::known_devices() const { return "[]"; }

std::string Target::estimate_times(const tile_ir::Module& /*module*/, const std::map<std::string, int64_t>& /*sizes*/, const PassContext& /*context*/,
                                   const std::string& /*figures*/, double /*resident*/) const {
  return "[]";
}

std::string Target::measure_traffic(const kernel_ir::Kernel& /*kernel*/, const std::map<std::string, int64_t>& /*sizes*/) const {
  throw UnsupportedError(fmt::format("target {} has no model of its kernels' memory", name));
}

std::string Target::describe(const TargetOptions& /*options*/) const { return "{}"; }

void register_target(std::unique_ptr<const Target> target) {
  DEPLO_CHECK(!target->name.empty() && !look_up(target->name), "there is already a target '{}'", target->name);
  DEPLO_CHECK(!target->is_default || !look_up(""), "target '{}' is no second default", target->name);
  std::lock_guard lock(registry().mutex);
  registry().targets.push_back(std::move(target));
}

std::vector<const Target*> all_targets() {
  std::lock_guard lock(registry().mutex);
  std::vector<const Target*> all;
  for (const auto& target : registry().targets) all.push_back(target.get());
  return all;
}

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const Target* target : all_targets()) names.push_back(target->name);
  return names;
}

const Target& find_target(std::string_view name) {
  if (const Target* found = look_up(name)) return *found;
  throw UserError(fmt::format("unknown target '{}': the targets are {}", name, joined(target_names())));
}

}  // namespace deplo
