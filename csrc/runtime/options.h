#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/context.h"

namespace deplo {

/// What one compilation was asked for; deplo/options.py documents and checks the same keys.
struct CompileOptions {
  PassContext context;  ///< target, hints, disabled passes, schedules
  int threads = 0;      ///< of a call; 0: as many as the tensor library uses
  std::string dump;     ///< a level, a pass or "all": IR to standard error
  std::string dump_dir;
  std::string stop_after;
  bool verify = false;  ///< the IR after every pass
  bool time = false;
  bool debug = false;     ///< name kernels for perf and gdb
  bool guard = false;     ///< guard pages and patterns around what kernels work on
  std::string cache_dir;  ///< resolved; empty: no disk cache
  std::string features;
  std::string cuda_arch = "sm_80";
  std::string cuda_driver;   ///< path of libcuda; empty: the loader's own search
  std::string nvrtc;         ///< path of libnvrtc; empty: the loader's own search
  int64_t memory_limit = 0;  ///< bytes; 0: any
  std::string tune = "off";
};

/// Reads the options' JSON and finds the target's properties. Throws UserError for unknown keys and bad values.
CompileOptions parse_options(const std::string& json);
/// The keys that parse_options knows, sorted.
std::vector<std::string> option_names();
/// The user's folder of compiled kernels, where no option names one; "" if there is no home.
std::string default_cache_dir();
/// Processors that this process may use (affinity).
int available_processors();

}  // namespace deplo
