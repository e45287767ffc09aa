#pragma once

#include <optional>
#include <string>
#include <vector>

#include "target/cuda/schedule/matrix_tile.h"

namespace deplo::loop_to_tile {

// Operands of matrix products that are computed from bytes: quantised weights with their scales and zero points. Bytes travel to shared memory as
// they are; a thread makes the numbers of its matrices from them in registers.

constexpr int64_t kLeastStepOfCodes = 64;  ///< of k: tiles have no edges along it, where a code of 0 may stand for another number

/// The operand as a tile of its bytes, if it is made of one load of bytes along k, of Lets, and of loads of factors that do not change within 16 k;
/// nothing for others. Its line may hold two codes a byte: then `halves`, and byte j of 16 holds codes j and 16 + j of 32.
std::optional<MatrixTile> find_codes(const loop_ir::Kernel& kernel, const MatrixTile& computed, const std::vector<loop_ir::Axis>& k,
                                     const std::vector<loop_ir::Axis>& free);

/// Different factors of one row or column in so many steps of k.
int64_t count_factors(const MatrixTile& tile, const std::vector<loop_ir::Axis>& k, int64_t steps);

/// Where a warp's four matrices of a tile of codes are.
struct CodesAt {
  Expr lane;           ///< of the warp
  Expr begin;          ///< of the tile in its array
  Expr first;          ///< row or column, in the tile, of the matrices'
  int64_t step = 0;    ///< 16 k, of those in the tile
  Expr origin, depth;  ///< row or column, and k, where the tile begins
  const std::vector<loop_ir::Axis>* k = nullptr;
  const std::vector<loop_ir::Axis>* free = nullptr;
  const Substitution* batch = nullptr;
};

/// Statements that compute what threads hold of the matrices, `fragment`, as load_matrix would have loaded it.
tile_ir::Block widen_codes(const MatrixTile& tile, const CodesAt& at, const std::string& fragment, loop_ir::Names& names);
/// Loads of the factors that these need, where they do not wait for the tile; each of them once, which `seen` tells.
tile_ir::Block load_factors(const MatrixTile& tile, const CodesAt& at, std::vector<tile_ir::Load>& seen, loop_ir::Names& names);

}  // namespace deplo::loop_to_tile
