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

/// A part of a machine as hwloc sees it: `machine`, `package`, `group`, `numa`, `l3`, `l2`, `core`, `pu` and what else it knows.
struct TopologyNode {
  std::string kind;
  int index = -1;     ///< the system's number; -1: it has none
  int64_t bytes = 0;  ///< of a cache, or of a NUMA node's memory
  std::vector<TopologyNode> children;
  std::vector<TopologyNode> memory;  ///< NUMA nodes next to it
};

/// The tree of this machine, or, where one is given, of hwloc's synthetic text (`package:2 numa:2 l3:4 core:4 pu:2`) or XML file. Throws UserError
/// for text and files that hwloc does not take, and where there is no hwloc.
TopologyNode topology_tree(const std::string& synthetic = "", const std::string& xml = "");

}  // namespace deplo
