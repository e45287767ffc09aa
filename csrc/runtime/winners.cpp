#include "runtime/winners.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/sha256.h"
#include "base/topology.h"
#include "target/target.h"

namespace deplo {
namespace {

using nlohmann::json;

constexpr int64_t kMostBytes = 64 << 20;
constexpr const char* kKind = "winner-1 ";
constexpr const char* kSymbol = "winner-1 " DEPLO_VERSION;  // another version reads its own schedules only

}  // namespace

std::string winners_folder(const std::string& cache_dir) { return cache_dir.empty() ? "" : (std::filesystem::path(cache_dir) / "tuned").string(); }

std::string machine_key(const CompileOptions& options, int threads) {
  const Target& target = target_of(options.context);
  if (target.device.empty()) return fmt::format("{}, {} threads", topology().cpu, threads);
  try {
    return target.find_device(options.target);
  } catch (const Error&) {
    return "no " + target.device;  // where nothing can be measured
  }
}

Winners::Winners(const std::string& folder, std::string machine) : files_(winners_folder(folder), kMostBytes), machine_(std::move(machine)) {}

std::string Winners::file_key(const std::string& key) const { return sha256_hex(key + "\n" + machine_ + "\n" + kSymbol); }

std::optional<Winner> Winners::load(const std::string& key) const {
  auto entry = files_.find(file_key(key));
  if (!entry || entry->symbol != kSymbol) return std::nullopt;
  try {
    json about = json::parse(entry->object);
    if (about.at("key") != key || about.at("machine") != machine_) return std::nullopt;
    return Winner{about.at("schedules").get<std::map<std::string, std::string>>(), about.at("seconds").get<double>(),
                  about.at("usual_seconds").get<double>(), about.at("rest").dump()};
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

void Winners::store(const std::string& key, const Winner& winner) const {
  json about{{"key", key},
             {"machine", machine_},
             {"schedules", winner.schedules},
             {"seconds", winner.seconds},
             {"usual_seconds", winner.usual_seconds},
             {"rest", json::parse(winner.rest)}};
  files_.store(file_key(key), {kSymbol, about.dump()});
}

std::map<std::string, Schedule> Winners::find(const std::string& key) const {
  std::map<std::string, Schedule> schedules;
  auto winner = load(key);
  if (!winner) return {};
  try {
    for (const auto& [version, text] : winner->schedules) schedules.emplace(version, parse_schedule(text, "<winner>"));
  } catch (const UserError&) {
    return {};
  }
  return schedules;
}

std::string list_winners(const std::string& cache_dir) {
  json list = json::array();
  std::error_code failed;
  for (std::filesystem::directory_iterator item(winners_folder(cache_dir), failed), end; !failed && item != end; item.increment(failed)) {
    std::ifstream in(item->path(), std::ios::binary);
    std::ostringstream bytes;
    bytes << in.rdbuf();
    const auto found = in ? DiskCache::from_bytes(bytes.str()) : std::nullopt;
    if (!found || !found->second.symbol.starts_with(kKind)) continue;
    json about = json::parse(found->second.object, nullptr, /*allow_exceptions=*/false);
    if (!about.is_object()) continue;
    about["file"] = item->path().string();
    about["version"] = found->second.symbol.substr(std::string_view(kKind).size());
    list.push_back(std::move(about));
  }
  return list.dump();
}

void use_winners(CompileOptions& options, int threads) {
  const std::string folder = winners_folder(options.target.cache_dir);
  std::error_code ignored;
  if (options.tune == "off" || folder.empty() || !std::filesystem::is_directory(folder, ignored)) return;
  options.winners = std::make_shared<Winners>(options.target.cache_dir, machine_key(options, threads));
  options.context.tuned = options.winners;
}

}  // namespace deplo
