#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_rows with `vectorize`: the threads of a warp, or of the block, share a row in vectors of 16 bytes, combine what they reduce
/// or scan by exchanging it, and keep what they computed of a row of constant size in registers, so that it is read once; of longer rows each loop
/// computes again what it needs. A block has one or more rows.
class GpuRowVectors {
 public:
  explicit GpuRowVectors(const loop_ir::Kernel& kernel);

  bool fits() const { return fits_; }
  Schedule propose() const;
  tile_ir::Block apply(const Schedule& schedule);

 private:
  void look();
  bool match();
  bool match_loop(const std::vector<loop_ir::Axis>& axes, const loop_ir::Block& body);
  int64_t registers_of_element() const;
  bool is_shifted() const;
  bool is_updated_alone(const std::string& buffer) const;
  void read(const Schedule& schedule);

  /// The pieces of a row's loop: its axes in terms of what runs, and the Tile IR axes of that.
  struct Pieces {
    Substitution map;
    std::vector<tile_ir::Axis> axes;
  };
  /// `in_order`: a piece is what all threads have side by side.
  Pieces pieces(const std::vector<loop_ir::Axis>& axes, bool in_order);
  tile_ir::Block convert(const loop_ir::Block& block, const Substitution& map, bool in_loop) const;
  void lower(const loop_ir::Stmt& stmt, tile_ir::Block& out);
  void lower(const loop_ir::Scan& s, tile_ir::Block& out);
  int64_t steps() const;

  loop_ir::Kernel kernel_;
  loop_ir::Names names_;
  std::vector<loop_ir::Axis> outer_;
  const loop_ir::Block* inner_ = nullptr;
  Expr extent_;  ///< elements of a row, the same for all loops
  std::map<std::string, const loop_ir::Local*> locals_;
  int64_t least_lanes_ = 0;    ///< that every loop allows
  int64_t whole_lanes_ = 0;    ///< that every loop would, if rows began at multiples of them
  std::vector<Expr> starts_;   ///< where accesses along the row begin
  bool shifts_ = false;        ///< those are no multiples of vectors, but all begin alike
  std::optional<Expr> shift_;  ///< elements that a row's first vector begins before the row, so that places come to multiples of vectors
  Expr before_ = 0;            ///< the same, so that it has bounds
  bool fits_ = false;

  int64_t threads_ = 32;  ///< of a row
  int64_t rows_ = 1;      ///< of a block
  int64_t lanes_ = 1;
  bool keeps_ = false;  ///< rows in registers

  std::string thread_, row_;
  std::string piece_, lane_;  ///< of the loop being lowered
  Substitution row_map_;
  std::vector<Cond> in_range_;  ///< that the row exists; empty: it does
};

}  // namespace deplo::loop_to_tile
