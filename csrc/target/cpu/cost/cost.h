#pragma once

#include <map>
#include <string>

#include "base/context.h"
#include "tile_ir/ir.h"

namespace deplo::cpu_cost {

/// What a machine does, as `deplo env` measures it: operations (a multiply-add is two) and bytes a second of one core, and seconds.
struct Figures {
  double f32 = 60e9;
  double bf16 = 0;  ///< 0: no such instruction
  double int8 = 0;
  double l1 = 200e9;
  double l2 = 80e9;
  double l3 = 40e9;
  double memory = 15e9;
  double memory_all = 20e9;  ///< by all threads
  double barrier = 1e-6;
  int threads = 1;
};

/// Seconds that a kernel takes, and where they go.
struct Estimate {
  double seconds = 0;
  double core = 0;    ///< instructions, with what they take from the first cache
  double second = 0;  ///< what comes from the second cache
  double third = 0;
  double memory = 0;
};

/// Of one run by a schedule. `resident`: bytes that are read or written from one run to the next, the kernel's own or those of a whole program: what
/// is less than a cache holds is found there.
Estimate estimate(const tile_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes, const PassContext& context, const Figures& figures,
                  double resident);

}  // namespace deplo::cpu_cost
