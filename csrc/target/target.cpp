#include "target/target.h"

#include "base/error.h"
#include "base/text.h"

namespace deplo {
namespace {

constexpr const Target* kTargets[] = {&kCpuTarget, &kCudaTarget};

}  // namespace

void Scheduler::add_call(const CallStep& call, tile_ir::Module& out) { out.steps.emplace_back(call); }

const Target& find_target(std::string_view name) {
  for (const Target* target : kTargets)
    if (target->name == name) return *target;
  throw UserError(fmt::format("unknown target '{}': the targets are {}", name, joined(target_names())));
}

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const Target* target : kTargets) names.emplace_back(target->name);
  return names;
}

}  // namespace deplo
