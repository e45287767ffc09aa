#pragma once

#include <map>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace deplo {

/// Schedules that measurements chose.
class TunedSchedules {
 public:
  virtual ~TunedSchedules() = default;
  TunedSchedules() = default;
  TunedSchedules(const TunedSchedules&) = delete;
  TunedSchedules& operator=(const TunedSchedules&) = delete;
  /// Those of a kernel by its tuning_key: from what the names of its versions have beside its own ("" for itself, "_small") to their schedules. Empty
  /// where nothing was measured, or what was kept does not read.
  virtual std::map<std::string, Schedule> find(const std::string& key) const = 0;
};

/// One decision of a schedule, and the schedule with other choices of it. They need not all fit the kernel.
struct Direction {
  std::string name;
  std::vector<Schedule> schedules;
};

}  // namespace deplo
