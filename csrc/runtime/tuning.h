#pragma once

#include <string>

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

}  // namespace deplo
