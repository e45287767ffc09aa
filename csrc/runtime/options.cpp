#include "runtime/options.h"

#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text.h"

namespace deplo {
namespace {

using nlohmann::json;

struct Reader {
  CompileOptions& options;
  std::string target{};

  std::map<std::string, std::function<void(const json&)>> keys() {
    std::map<std::string, std::function<void(const json&)>> known{
        {"target", [&](const json& v) { target = v.get<std::string>(); }},
        {"strict", [](const json&) {}},  // what a failure leads to is the caller's business
        {"threads", [&](const json& v) { options.target.threads = v.get<int>(); }},
        {"disable",
         [&](const json& v) {
           for (const json& name : v) options.context.disabled.insert(name.get<std::string>());
         }},
        {"dump", [&](const json& v) { options.dump = v.get<std::string>(); }},
        {"dump_dir", [&](const json& v) { options.dump_dir = v.get<std::string>(); }},
        {"stop_after", [&](const json& v) { options.stop_after = v.get<std::string>(); }},
        {"verify", [&](const json& v) { options.verify = v.get<bool>(); }},
        {"time", [&](const json& v) { options.time = v.get<bool>(); }},
        {"debug", [&](const json& v) { options.target.debug = v.get<bool>(); }},
        {"guard", [&](const json& v) { options.guard = v.get<bool>(); }},
        {"device", [&](const json& v) { options.target.device = v.get<int>(); }},
        {"replay", [&](const json& v) { options.replay = v.get<bool>(); }},
        {"schedule", [&](const json& v) { options.context.schedules = v.get<std::map<std::string, std::string>>(); }},
        {"cache_dir",
         [&](const json& v) {
           auto folder = v.get<std::string>();
           options.target.cache_dir = folder == "off" ? "" : folder;
         }},
        {"weight_checks", [&](const json& v) { options.sampled = v.get<std::string>() != "versions"; }},
        {"memory_limit", [&](const json& v) { options.memory_limit = v.get<int64_t>(); }},
        {"tune", [&](const json& v) { options.tune = v.get<std::string>(); }},
        {"deterministic", [&](const json& v) { options.context.deterministic = v.get<bool>(); }},
        {"training", [&](const json& v) { options.context.training = v.get<bool>(); }},
        {"weights",
         [&](const json& v) {
           // own pack: as pack does, for graphs of which several programs share what is packed.
           const auto text = v.get<std::string>();
           const bool packs = text == "pack" || text == "own pack";
           options.context.weights = text == "original" ? Weights::original : packs ? Weights::packed : Weights::automatic;
           options.own = text.starts_with("own");
         }},
        {"hints", [&](const json& v) { options.context.hints = v.get<SizeHints>(); }},
    };
    for (const Target* each : all_targets())
      for (const TargetOption& option : each->options)
        known[option.name] = [&, name = option.name](const json& v) { options.target.values[name] = v.get<std::string>(); };
    return known;
  }

  void read(const json& given) {
    const auto known_keys = keys();
    for (const auto& [name, value] : given.items()) {
      auto key = known_keys.find(name);
      if (key == known_keys.end()) throw UserError(fmt::format("unknown option '{}'; known options: {}", name, joined(option_names())));
      try {
        key->second(value);
      } catch (const json::exception& error) {
        throw UserError(fmt::format("option '{}' is {}: {}", name, value.dump(), error.what()));
      }
    }
  }
};

}  // namespace

std::vector<std::string> option_names() {
  CompileOptions unused;
  std::vector<std::string> names;
  for (const auto& [name, reader] : Reader{unused}.keys()) names.push_back(name);
  return names;
}

std::string default_cache_dir() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache) return std::string(cache) + "/deplo";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.cache/deplo";
  return "";
}

CompileOptions parse_options(const std::string& text) {
  CompileOptions options;
  options.target.cache_dir = default_cache_dir();
  for (const Target* target : all_targets())
    for (const TargetOption& option : target->options) options.target.values[option.name] = option.initial;
  Reader reader{options};
  try {
    json given = json::parse(text.empty() ? "{}" : text);
    DEPLO_CHECK(given.is_object(), "options are {}, expected an object", text);
    reader.read(given);
  } catch (const json::parse_error& error) {
    throw UserError(fmt::format("options are not JSON: {}", error.what()));
  }
  const Target& target = find_target(reader.target);
  options.context.target = target.machine(options.target);
  options.context.target.name = target.name;
  return options;
}

}  // namespace deplo
