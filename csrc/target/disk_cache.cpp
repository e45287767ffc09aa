#include "target/disk_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/sha256.h"

namespace deplo {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kMagic = "deplo-kernel-2\n";

std::string checksum_of(const DiskCache::Entry& entry) { return sha256_hex(entry.symbol + '\n' + entry.object); }

/// Code of another owner, or that others may write, is never loaded.
bool trusted(const fs::path& path) {
  struct stat status{};
  return lstat(path.c_str(), &status) == 0 && !S_ISLNK(status.st_mode) && status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// A key (SHA-256 in hexadecimal) and ".o": the folder may hold files of others, which the size limit must not remove.
bool is_entry_name(const std::string& name) { return name.size() == 66 && name.ends_with(".o") && name.find_first_not_of("0123456789abcdef") == 64; }

}  // namespace

// magic, key, symbol, checksum of symbol and object: a line each; then the object.
std::string DiskCache::to_bytes(const std::string& key, const Entry& entry) {
  return fmt::format("{}{}\n{}\n{}\n", kMagic, key, entry.symbol, checksum_of(entry)) + entry.object;
}

std::optional<std::pair<std::string, DiskCache::Entry>> DiskCache::from_bytes(const std::string& bytes) {
  if (!bytes.starts_with(kMagic)) return std::nullopt;
  size_t at = kMagic.size();
  auto line = [&]() -> std::string {
    size_t end = bytes.find('\n', at);
    if (end == std::string::npos) return "";
    std::string text = bytes.substr(at, end - at);
    at = end + 1;
    return text;
  };
  std::string key = line();
  Entry entry;
  entry.symbol = line();
  std::string checksum = line();
  entry.object = bytes.substr(at);
  if (!is_entry_name(key + ".o") || entry.symbol.empty() || checksum_of(entry) != checksum) return std::nullopt;
  return std::pair(std::move(key), std::move(entry));
}

DiskCache::DiskCache(std::string folder, int64_t limit_bytes) : folder_(std::move(folder)), limit_bytes_(limit_bytes) {
  if (folder_.empty()) return;
  std::error_code ignored;
  if (fs::create_directories(folder_, ignored)) fs::permissions(folder_, fs::perms::owner_all, ignored);
}

bool DiskCache::usable() const { return !folder_.empty() && trusted(folder_); }

std::optional<DiskCache::Entry> DiskCache::find(const std::string& key) const {
  if (!usable()) return std::nullopt;
  fs::path path = fs::path(folder_) / (key + ".o");
  if (!trusted(path)) return std::nullopt;
  std::ifstream in(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << in.rdbuf();
  if (!in) return std::nullopt;
  auto found = from_bytes(bytes.str());
  if (!found || found->first != key) return std::nullopt;
  std::error_code ignored;
  // The time of last use decides what goes first when the folder is full.
  fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);
  return std::move(found->second);
}

void DiskCache::store(const std::string& key, const Entry& entry) const {
  if (!usable()) return;
  static std::atomic<int> serial{0};
  static std::atomic<int64_t> unchecked_bytes{INT64_MAX / 2};
  fs::path target = fs::path(folder_) / (key + ".o");
  fs::path temporary = fs::path(folder_) / fmt::format("{}.{}.{}.tmp", key, getpid(), serial++);
  std::error_code failed;
  {
    std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
    std::string bytes = to_bytes(key, entry);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    out.close();
    if (!out) {
      fs::remove(temporary, failed);
      return;
    }
  }
  fs::permissions(temporary, fs::perms::owner_read | fs::perms::owner_write, failed);
  fs::rename(temporary, target, failed);
  if (failed) {
    fs::remove(temporary, failed);
    return;
  }
  // Reading the whole folder after each entry would cost more than the entry.
  unchecked_bytes += static_cast<int64_t>(entry.object.size());
  if (unchecked_bytes < limit_bytes_ / 16) return;
  unchecked_bytes = 0;
  trim();
}

void DiskCache::trim() const {
  struct File {
    fs::path path;
    int64_t bytes;
    fs::file_time_type used;
  };
  std::vector<File> files;
  int64_t total = 0;
  std::error_code failed;
  // Advanced by hand: the ++ of a range-for throws when the folder becomes unreadable.
  for (fs::directory_iterator item(folder_, failed), end; !failed && item != end; item.increment(failed)) {
    std::error_code vanished;
    if (!is_entry_name(item->path().filename().string())) continue;
    auto bytes = static_cast<int64_t>(item->file_size(vanished));
    if (vanished) continue;
    files.push_back({item->path(), bytes, item->last_write_time(vanished)});
    total += bytes;
  }
  if (total <= limit_bytes_) return;
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used < b.used; });
  for (const File& file : files) {
    if (total <= limit_bytes_) break;
    if (fs::remove(file.path, failed)) total -= file.bytes;
  }
}

}  // namespace deplo
