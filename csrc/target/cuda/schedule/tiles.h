#pragma once

#include <optional>
#include <string>
#include <vector>

#include "target/cuda/schedule/thread_groups.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_tiles: contractions of bf16 or f16 operands on the matrix units of sm_90a, by products of tiles (`program_ir/tiles.h`).
/// Groups of 128 threads multiply what a warp of its own has copied to shared memory, several tiles of k ahead. Operands are what lies in memory,
/// with strides of multiples of 16 bytes.
class GpuTiles : public GpuThreadGroups {
 public:
  explicit GpuTiles(const loop_ir::Kernel& kernel);

  bool fits(const SizeHints& hints, const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  struct Factors {
    TileFactor rows, columns;
    DType dtype = DType::bf16;
  };
  struct Shape {
    int64_t rows = 0, columns = 0, stages = 0;
  };

  std::optional<TileFactor> find_factor(const Operand& operand, const std::vector<loop_ir::Axis>& k, const std::vector<loop_ir::Axis>& free,
                                        DType* dtype) const;
  int64_t shared_bytes(const Shape& shape) const;
  double cost(const Shape& shape, double rows, double columns, double batch, double depth, const std::string& arch) const;
  void read(const Schedule& schedule);
  tile_ir::Block multiply();
  tile_ir::Block finish();

  std::vector<Factors> factors_;  ///< of items_
  bool possible_ = false;
  Shape shape_;
};

}  // namespace deplo::loop_to_tile
