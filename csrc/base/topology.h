#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deplo {

/// What hwloc says about the machine (without it: what /sys says, with fewer facts).
struct Topology {
  int packages = 0;
  int numa_nodes = 0;
  int cores = 0;
  int processors = 0;
  int64_t memory_bytes = 0;
  int64_t l1_bytes = 0;  ///< data cache of one core; 0: unknown
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
  std::string cpu;     ///< the model's name
  std::string source;  ///< "hwloc" or "sysfs"
};

/// Read once; zeros where the system tells nothing.
const Topology& topology();

}  // namespace deplo
