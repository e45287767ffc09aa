#pragma once

#include <map>
#include <string>
#include <vector>

#include "runtime/options.h"

namespace deplo {

// What a search for schedules works on. Texts are JSON; it runs in Python, where time is measured.

/// The kernels that IR text becomes and schedules can be searched for, each as a program of its own: [{"kernel": "k0_linear", "ops": [...],
/// "key": ..., "text": Loop IR, "version": that of the sizes at hand, "schedules": {version: text}, "proposals": [text], "inputs": [{"dtype",
/// "shape", "strides", "static", "written"}, or {"size"} of a symbol]}]. `key` is that of winners.
std::string tuning_tasks(const std::string& text, const CompileOptions& options);

/// Schedules of such a program's kernel that differ from `base` in one decision: [{"name", "schedules": [text]}].
std::string tuning_directions(const std::string& task_text, const std::string& version, const std::string& base, bool wide,
                              const CompileOptions& options);

/// Seconds of a run of the kernel that stands alone in `task_text` by each of the schedules, as the target estimates them from what the machine does
/// (`Target::estimate_times`): a JSON list of numbers, null where a schedule does not fit or the target does not know.
std::string tuning_estimates(const std::string& task_text, const std::string& version, const std::vector<std::string>& schedules,
                             const std::map<std::string, std::string>& others, const std::string& figures, double resident,
                             const CompileOptions& options);

/// The same of all kernels of a program that IR text becomes: what `Target::estimate_times` says.
std::string estimate_program(const std::string& text, const std::string& figures, const CompileOptions& options);

}  // namespace deplo
