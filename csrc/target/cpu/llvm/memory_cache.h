#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "target/cpu/codegen.h"

namespace deplo {

/// Compiled kernels by key: all that some program holds, and of the others those used last, so that a model that is compiled again finds its kernels.
/// Any thread may call.
class MemoryCache {
 public:
  /// Keeps at most `most` kernels alive by itself.
  explicit MemoryCache(size_t most) : most_(most) {}
  std::shared_ptr<CompiledKernel> find(const std::string& key);
  void store(const std::string& key, const std::shared_ptr<CompiledKernel>& kernel);
  /// Keeps none alive any more.
  void clear();

 private:
  struct Kept {
    std::string key;
    std::shared_ptr<CompiledKernel> kernel;
  };
  struct Entry {
    std::weak_ptr<CompiledKernel> kernel;
    std::list<Kept>::iterator place;
    bool is_kept = false;
  };
  void drop(Entry& entry, std::list<Kept>& dropped);

  const size_t most_;
  std::mutex mutex_;
  std::map<std::string, Entry> kernels_;
  std::list<Kept> kept_;  ///< latest use first
  size_t next_sweep_ = 256;
};

/// Unloads the process's kernels that no program holds: one that is wanted again comes from disk, or is compiled.
void forget_unused_kernels();

}  // namespace deplo
