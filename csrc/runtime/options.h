#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/context.h"
#include "target/target.h"

namespace deplo {

class Winners;

/// What one compilation was asked for; deplo/options.py documents and checks the same keys.
struct CompileOptions {
  PassContext context;   ///< target, hints, disabled passes, schedules
  TargetOptions target;  ///< what the target hears of them
  std::string dump;      ///< a level, a pass or "all": IR to standard error
  std::string dump_dir;
  std::string stop_after;
  bool verify = false;  ///< the IR after every pass
  bool time = false;
  bool guard = false;                                ///< guard pages and patterns around what kernels work on
  bool replay = false;                               ///< launches on a device are recorded, and then repeated
  bool sampled = true;                               ///< elements of weights are compared at each call
  bool own = false;                                  ///< packed copies stand for the weights, which leave memory
  int64_t memory_limit = 0;                          ///< bytes; 0: any
  std::string tune = "auto";                         ///< off: winners are not used
  std::shared_ptr<const Winners> winners = nullptr;  ///< those that context.tuned stands for
};

/// Reads the options' JSON and finds the target's properties. Throws UserError for unknown keys and bad values.
CompileOptions parse_options(const std::string& json);
/// The keys that parse_options knows, those of the targets among them, sorted.
std::vector<std::string> option_names();
/// The user's folder of compiled kernels, where no option names one; "" if there is no home.
std::string default_cache_dir();

}  // namespace deplo
