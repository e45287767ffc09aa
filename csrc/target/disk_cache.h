#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace deplo {

/// Object files by content key in one folder, owner-only. Every trouble (no folder, no space, a damaged, foreign or unsafe
/// entry) is a miss or a skipped write, never an error.
class DiskCache {
 public:
  struct Entry {
    std::string symbol;
    std::string object;
  };

  /// What the file of an entry holds.
  static std::string to_bytes(const std::string& key, const Entry& entry);
  /// The entry and its key; nothing if the bytes are damaged, or of another format.
  static std::optional<std::pair<std::string, Entry>> from_bytes(const std::string& bytes);

  DiskCache(std::string folder, int64_t limit_bytes);
  std::optional<Entry> find(const std::string& key) const;
  /// Written under a temporary name and renamed, so that a reader sees all or nothing. Removes the oldest entries above the limit.
  void store(const std::string& key, const Entry& entry) const;

 private:
  bool usable() const;
  void trim() const;
  std::string folder_;
  int64_t limit_bytes_;
};

}  // namespace deplo
