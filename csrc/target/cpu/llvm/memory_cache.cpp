#include "target/cpu/llvm/memory_cache.h"

namespace deplo {

std::shared_ptr<CompiledKernel> MemoryCache::find(const std::string& key) {
  std::lock_guard lock(mutex_);
  auto it = kernels_.find(key);
  if (it == kernels_.end()) return nullptr;
  if (it->second.is_kept) kept_.splice(kept_.begin(), kept_, it->second.place);
  return it->second.kernel.lock();
}

void MemoryCache::store(const std::string& key, const std::shared_ptr<CompiledKernel>& kernel) {
  std::list<Kept> dropped;  // unloaded when the lock is gone
  std::lock_guard lock(mutex_);
  Entry& entry = kernels_[key];
  if (entry.is_kept) drop(entry, dropped);
  kept_.push_front({key, kernel});
  entry = {kernel, kept_.begin(), true};
  while (kept_.size() > most_) drop(kernels_.at(kept_.back().key), dropped);
  if (kernels_.size() > next_sweep_) {
    std::erase_if(kernels_, [](const auto& item) { return item.second.kernel.expired(); });
    next_sweep_ = 2 * kernels_.size() + 256;
  }
}

void MemoryCache::clear() {
  std::list<Kept> dropped;
  std::lock_guard lock(mutex_);
  while (!kept_.empty()) drop(kernels_.at(kept_.back().key), dropped);
}

void MemoryCache::drop(Entry& entry, std::list<Kept>& dropped) {
  dropped.splice(dropped.end(), kept_, entry.place);
  entry.is_kept = false;
}

}  // namespace deplo
