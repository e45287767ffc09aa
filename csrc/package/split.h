#pragma once

#include <set>
#include <string>
#include <vector>

#include "kernel_ir/ir.h"

namespace deplo::package {

/// A program in two: what is done once with static inputs, and what each call does.
struct SplitProgram {
  kernel_ir::Module packing;       ///< takes static inputs, returns what it packs; without steps where nothing is packed for all sizes alike
  kernel_ir::Module serving;       ///< the program with packed buffers as constants; kernels without bodies but for those of its own `once` steps
  std::vector<size_t> packs_from;  ///< by input of `packing`: its place among the inputs of the whole
  struct Argument {
    bool is_packed = false;
    size_t place = 0;  ///< among the outputs of `packing`, or the inputs of the whole
  };
  std::vector<Argument> arguments;  ///< by input of `serving`
};

/// Packing that depends on sizes stays with `serving`, and so do inputs of the user; other inputs that nothing reads are left out. `holding` are the
/// symbols of facts that are known to hold of the inputs for good.
SplitProgram split_once(const kernel_ir::Module& module, const std::set<std::string>& holding = {});

}  // namespace deplo::package
