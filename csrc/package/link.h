#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "target/kernels.h"

namespace deplo::package {

/// Machine code of kernels, linked so that it runs at any address: pages of instructions, pages of constants, and behind them, where it is loaded, a
/// page or more of addresses of the functions that it calls, eight bytes each.
struct LinkedCode {
  std::string bytes;  ///< instructions, then constants
  uint64_t text_bytes = 0;
  uint64_t data_bytes = 0;
  std::vector<uint64_t> entries;       ///< by kernel, from the start
  std::vector<std::string> externals;  ///< in the order of their addresses
};

inline constexpr uint64_t kPage = 4096;

/// Links the object files of kernels; one that stands there twice is there once. Throws UnsupportedError for kernels without object files,
/// InternalError for what compiled kernels do not have: writable data, other relocations than relative ones.
LinkedCode link_code(const std::vector<std::shared_ptr<CompiledKernel>>& kernels);

}  // namespace deplo::package
