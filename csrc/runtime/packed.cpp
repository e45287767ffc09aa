#include "runtime/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace deplo::runtime {
namespace {

std::atomic<uint64_t> generation{0};

/// Never destroyed: programs may outlive static destructors.
struct Registry {
  std::mutex mutex;
  std::map<std::string, uint64_t> contents;
  std::map<std::pair<uint64_t, std::vector<Identity>>, std::weak_ptr<PackedBlock>> blocks;
};
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

std::string print_without_name(const kernel_ir::Kernel& kernel) {
  kernel_ir::Kernel anonymous = kernel;
  anonymous.name = "@k";
  anonymous.provenance.clear();
  return kernel_ir::print(anonymous);
}

/// The group's steps over its buffers by number, with their types: names do not matter.
std::string content_of(const OnceGroup& group, const kernel_ir::Module& module, const Layout& layout) {
  std::map<size_t, size_t> numbers;
  std::string text;
  auto name = [&](size_t buffer) {
    auto [at, fresh] = numbers.try_emplace(buffer, numbers.size());
    if (!fresh) return fmt::format(" b{}", at->second);
    const Buffer& b = module.buffers[buffer];
    std::string type = fmt::format(" b{}: {}[", at->second, to_string(b.dtype));
    for (Expr size : b.shape) type += print(size) + ",";
    for (Expr stride : b.strides) type += print(stride) + ";";
    return type + "]";
  };
  for (size_t buffer : group.inputs) text += name(buffer);
  for (size_t buffer : group.packed) text += name(buffer);
  for (size_t step : group.steps) {
    text += "\ncall";
    for (size_t buffer : layout.steps[step].buffers) text += name(buffer);
    text += "\n" + print_without_name(*module.kernels[*layout.steps[step].kernel]);
  }
  return text;
}

uint64_t number_of(const std::string& content) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  return all.contents.try_emplace(content, all.contents.size()).first->second;
}

constexpr int64_t kSamples = 8;  ///< elements, spread evenly, that tell a weight that was written unseen

/// A hash of a few elements, so that what writes a whole weight does not go unseen.
uint64_t sample_of(const TensorView& view) {
  int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) count *= view.sizes[d];
  uint64_t hash = 0;
  for (int64_t k = 0; k < std::min(kSamples, count); ++k) {
    int64_t place = count <= kSamples ? k : static_cast<int64_t>((static_cast<double>(k) + 0.5) / kSamples * static_cast<double>(count));
    int64_t offset = 0;
    for (int d = view.rank; d-- > 0; place /= view.sizes[d]) offset += place % view.sizes[d] * view.strides[d];
    uint64_t bits = 0;
    std::memcpy(&bits, view.data + offset * size_of(view.dtype), static_cast<size_t>(size_of(view.dtype)));
    hash = (hash ^ bits) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

Identity identity_of(const TensorView& view) {
  static std::atomic<uint64_t> unknown{1ULL << 63};
  return {view.storage, view.data, view.has_version ? view.version : unknown.fetch_add(1), sample_of(view)};
}

std::vector<OnceGroup> find_once_groups(const kernel_ir::Module& module, const Layout& layout) {
  std::vector<size_t> parent(layout.steps.size());
  std::iota(parent.begin(), parent.end(), size_t{0});
  auto root = [&](size_t step) {
    while (parent[step] != step) step = parent[step];
    return step;
  };
  std::map<size_t, size_t> step_of_packed;
  for (size_t s = 0; s < layout.steps.size(); ++s) {
    if (!layout.steps[s].once) continue;
    for (size_t buffer : layout.steps[s].buffers) {
      if (module.buffers[buffer].kind != BufferKind::packed) continue;
      auto [at, fresh] = step_of_packed.try_emplace(buffer, s);
      if (!fresh) parent[root(s)] = root(at->second);
    }
  }
  std::map<size_t, OnceGroup> groups;
  for (size_t s = 0; s < layout.steps.size(); ++s) {
    if (!layout.steps[s].once) continue;
    OnceGroup& group = groups[root(s)];
    group.steps.push_back(s);
    for (size_t buffer : layout.steps[s].buffers) {
      const Buffer& b = module.buffers[buffer];
      DEPLO_ASSERT(b.kind == BufferKind::packed || (b.kind == BufferKind::input && b.is_static),
                   "a once step of {} uses {}, which is neither a static input nor packed", module.name, b.name);
      auto& list = b.kind == BufferKind::packed ? group.packed : group.inputs;
      if (std::find(list.begin(), list.end(), buffer) == list.end()) list.push_back(buffer);
    }
  }
  std::vector<OnceGroup> result;
  for (auto& [key, group] : groups) {
    group.content = number_of(content_of(group, module, layout));
    result.push_back(std::move(group));
  }
  return result;
}

std::shared_ptr<PackedBlock> share_packed(uint64_t content, const std::vector<Identity>& inputs, const std::function<void(PackedBlock&)>& make) {
  std::shared_ptr<PackedBlock> block;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    std::weak_ptr<PackedBlock>& entry = all.blocks[{content, inputs}];
    block = entry.lock();
    if (!block) {
      block = std::make_shared<PackedBlock>();
      entry = block;
      std::erase_if(all.blocks, [](const auto& item) { return item.second.expired(); });
    }
  }
  std::lock_guard lock(block->making);
  if (!block->ready) make(*block);
  block->ready = true;
  return block;
}

int64_t packed_bytes() {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  int64_t bytes = 0;
  for (const auto& [key, entry] : all.blocks)
    if (auto block = entry.lock()) bytes += block->memory.bytes();
  return bytes;
}

void forget_packed() {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.blocks.clear();
  generation.fetch_add(1);
}

uint64_t packed_generation() { return generation.load(std::memory_order_acquire); }

}  // namespace deplo::runtime
