#pragma once

#include <optional>
#include <string>
#include <vector>

#include "target/cuda/schedule/matrix_tile.h"
#include "target/cuda/schedule/thread_groups.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_groups: contractions of bf16 or f16 operands, or of bytes, on the matrix units of sm_90a, of which one at least is none
/// that a tensor map describes: it is computed (a cast, an activation, a weight made from codes), or gathered through a window. All threads copy, or
/// compute, tiles of both operands to shared memory, some stages of k ahead, and groups of 128 multiply 64 rows each, straight from there
/// (`program_ir/groups.h`).
class GpuGroups : public GpuThreadGroups {
 public:
  explicit GpuGroups(const loop_ir::Kernel& kernel);

  bool fits(const SizeHints& hints, const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  struct Factors {
    MatrixTile rows, columns;
  };
  struct Shape {
    int64_t rows = 0, columns = 0, step = 0, stages = 0;
  };

  DType element() const { return factors_[0].rows.dtype; }
  DType sum_type() const { return items_[0].reduce->dtypes[0]; }
  int64_t line() const { return kGroupLines * chunk_of(element()); }  ///< elements of 128 bytes
  int64_t depth_of_step() const { return 2 * chunk_of(element()); }   ///< k that one instruction multiplies
  int64_t shared_bytes(const Shape& shape) const { return size_of(element()) * shape.stages * (shape.rows + shape.columns) * shape.step; }
  double cost(const Shape& shape, double rows, double columns, double batch, double depth, const std::string& arch) const;
  void read(const Schedule& schedule);
  int64_t wanted_lanes() const;

  tile_ir::Block stages_of(size_t product);
  TileCopy copy_of(size_t product, const MatrixTile& tile, Expr stage, Expr depth) const;
  bool is_pipelined(const MatrixTile& tile) const;
  tile_ir::Block multiply(size_t product, Expr stage, Expr steps);
  Ref<tile_ir::Stmt> multiply_part(size_t product, Expr stage, int64_t from, int64_t depth, int pending) const;
  Ref<tile_ir::Stmt> wait_for(size_t product) const { return multiply_part(product, 0, 0, 0, 0); }
  tile_ir::Block finish();

  std::vector<Factors> factors_;  ///< of items_
  bool possible_ = false;
  Shape shape_;
  int64_t threads_ = 0, lanes_ = 2;
};

}  // namespace deplo::loop_to_tile
