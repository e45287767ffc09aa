#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "runtime/options.h"
#include "schedule/tuned.h"
#include "target/disk_cache.h"

namespace deplo {

/// The fastest schedules of a kernel that were found, as a file keeps them.
struct Winner {
  std::map<std::string, std::string> schedules;  ///< by version, as TunedSchedules has them
  double seconds = 0;                            ///< of one run of the kernel alone
  double usual_seconds = 0;                      ///< of the schedules that were there before, measured in turns with it
  std::string rest;                              ///< JSON object of whoever searched: how far that went, what for
};

/// Winners in a folder of files, each with its checksum, for one machine (`machine_key`). What is damaged, of another machine or another version of
/// deplo is a miss.
class Winners final : public TunedSchedules {
 public:
  /// `folder` is that of compiled kernels; winners have one of their own in it.
  Winners(const std::string& folder, std::string machine);
  std::map<std::string, Schedule> find(const std::string& key) const override;
  /// The same with what was measured.
  std::optional<Winner> load(const std::string& key) const;
  void store(const std::string& key, const Winner& winner) const;

 private:
  std::string file_key(const std::string& key) const;
  DiskCache files_;
  std::string machine_;
};

/// JSON list of what winners of any machine a folder of compiled kernels holds: [{"file", "key", "machine", "schedules", "seconds", "usual_seconds",
/// "rest"}].
std::string list_winners(const std::string& cache_dir);
/// The folder of winners in a folder of compiled kernels.
std::string winners_folder(const std::string& cache_dir);
/// What times depend on beside the code: the target's device, or the CPU's model and the number of threads of a call.
std::string machine_key(const CompileOptions& options, int threads);

/// Lets a compilation use what is known, unless the options refuse it (tune: off) or nothing is: `threads` are those of a call.
void use_winners(CompileOptions& options, int threads);

}  // namespace deplo
