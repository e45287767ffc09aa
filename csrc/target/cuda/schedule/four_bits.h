#pragma once

#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::loop_to_tile {

/// A load of bytes that may fit 4 bits, and the summed axes around it in the order in which memory runs.
struct Codes {
  const loop_ir::Load* load = nullptr;
  std::vector<loop_ir::Axis> k;
};

/// A kernel that reads such bytes two in one.
struct FourBits {
  loop_ir::Kernel kernel;  ///< with packed buffers as the params of the same places
  struct Packed {
    std::string param;       ///< of codes in the kernel as it was
    int64_t lo = 0, hi = 0;  ///< in which all of them must be
    loop_ir::Kernel pack;    ///< from the codes
    std::vector<Expr> shape;
  };
  std::vector<Packed> packed;  ///< none: nothing can be packed
};

/// Byte j of each 16 holds the codes j and 16 + j of 32 along k, so that what a thread takes from it are numbers for two instructions of a matrix
/// unit, at places that it has there anyway. Signed codes are 8 more.
FourBits with_four_bits(const loop_ir::Kernel& kernel, const std::vector<Codes>& codes);

}  // namespace deplo::loop_to_tile
