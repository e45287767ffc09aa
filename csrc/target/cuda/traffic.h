#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernel_ir/ir.h"

namespace deplo {

/// What a kernel's accesses do to memory, from its text and sizes alone: threads of a few blocks are followed, and counted for all of them.
struct Traffic {
  double global_bytes = 0;                   ///< asked for
  std::map<std::string, double> of_buffers;  ///< the same by parameter
  double global_sectors = 0;                 ///< of 32 bytes, touched by the requests of warps, each request by itself
  double least_sectors = 0;                  ///< as many as the bytes of each request need, one at least
  double global_requests = 0;                ///< of warps, up to 16 bytes a thread
  double wide_bytes = 0;                     ///< of those asked for, in accesses of 16 bytes a thread
  double shared_requests = 0;
  double shared_ways = 0;   ///< turns that the banks need for them: as many as requests without conflicts
  double barriers = 0;      ///< of warps
  double instructions = 0;  ///< of warps, about: statements by their lanes, without what indices cost
  double clocks =
      0;  ///< of the warp that takes longest, about, if nothing else runs: its instructions, and a latency for each turn of a loop that loads
  bool complete = true;  ///< every address was known; those that are not count as a sector for each thread
};

Traffic measure_traffic(const kernel_ir::Kernel& kernel, const std::map<std::string, int64_t>& symbols);

}  // namespace deplo
