#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "target/cuda/schedule/matrix_tile.h"
#include "target/cuda/schedule/merged.h"
#include "target/cuda/schedule/products.h"
#include "target/cuda/schedule/window.h"

namespace deplo::loop_to_tile {

/// Schedules of kind gpu_taps: contractions of bf16 or f16 on matrix units, one operand of which is a window over an image whose taps are not many
/// (first layers of convolutional nets). A block copies what its tile of points reaches to shared memory once, with its border, and all weights of
/// its channels; threads take their part of each matrix from there, where it lies at distances that do not depend on the point.
///
/// Taps side by side in memory are a line, cut into units of four; a line's last unit, and its first one where lines do not begin at pairs, have
/// places beyond the line, whose weights and elements count as 0. A unit and the next one make 8 of k.
class GpuTaps : private MergedKernel, public GpuProducts {
 public:
  explicit GpuTaps(const loop_ir::Kernel& kernel);

  bool fits(const SizeHints& hints, const std::string& arch) const;
  Schedule propose(const SizeHints& hints, const std::string& arch) const;
  /// The kernel's body as a grid of blocks.
  tile_ir::Block apply(const Schedule& schedule);

 private:
  struct Shape {
    int64_t across = 0, down = 0;  ///< points of a block along the axis that windows run along, and along another one
    int64_t channels = 0, warps = 0;
    int64_t points() const { return across * down; }
    int64_t of_warp() const { return points() / warps; }
  };
  /// A unit of four places of a line, from `first` on, before the line's beginning if that is negative; nothing behind the last one.
  struct Unit {
    int64_t line = 0, first = 0;
  };

  bool match();
  bool match_image(const Operand& operand);
  bool match_weights(const Operand& operand);
  const std::vector<loop_ir::Axis>& points() const { return image_is_rows_ ? rows_ : columns_; }
  const std::vector<loop_ir::Axis>& channels() const { return image_is_rows_ ? columns_ : rows_; }
  std::vector<loop_ir::Axis> all_points() const;
  int64_t units_of_line() const { return (length_ + lead_ + kUnit - 1) / kUnit; }
  int64_t units() const { return lines_ * units_of_line(); }
  int64_t steps() const { return (units() * kUnit + kMatrixDepth - 1) / kMatrixDepth; }
  std::optional<Unit> unit(int64_t number) const;
  PointTile tile_of(const Shape& shape) const;
  int64_t points_along(const Shape& shape, const std::string& axis) const;
  Region region_of(const Shape& shape) const;
  double bank_ways(const Region& region, const Shape& shape) const;
  MatrixTile weights_of(const Shape& shape) const;
  MatrixTile image_of(const Shape& shape) const;
  int64_t lanes_of(const Shape& shape) const;
  int64_t shared_bytes(const Shape& shape) const;
  double cost(const Shape& shape, const SizeHints& hints, const std::string& arch) const;
  /// The cheapest shape; nothing where even the smallest tile reaches more of the image than shared memory holds.
  std::optional<Shape> choose(const SizeHints& hints, const std::string& arch) const;
  void read(const Schedule& schedule);

  Expr place_of(Expr point) const;
  int64_t place_of(const Region& region, const Unit& unit) const;
  tile_ir::Block fill_weights();
  tile_ir::Block multiply();
  tile_ir::Block image_matrix(const std::string& name, Expr first, int64_t step);
  tile_ir::Block load_units(const std::string& array, int64_t matrix, Expr point, int64_t half);
  tile_ir::Block finish();
  Ref<tile_ir::Stmt> per_thread(tile_ir::Block body) const;
  Expr lane() const { return mod(sym(thread_), kWarp); }
  Expr warp() const { return floordiv(sym(thread_), kWarp); }

  static constexpr int64_t kUnit = 4;

  bool possible_ = false, image_is_rows_ = true;
  Reach window_;                                     ///< with the places beyond its lines
  size_t run_ = 0;                                   ///< the dimension of the image that lines lie along
  std::string across_, down_;                        ///< axes of the points; the second one may be none
  std::vector<loop_ir::Axis> line_axes_, run_axes_;  ///< of k, outer first
  int64_t lines_ = 1, length_ = 1, lead_ = 0;
  const loop_ir::Load* weights_load_ = nullptr;
  bool weights_across_ = false;  ///< their memory runs along channels

  Shape shape_;
  Region region_;
  MatrixTile weights_, image_;
  int64_t lanes_ = 2;
  std::string block_, thread_, row_, half_, group_, column_;
  Substitution first_;  ///< axes at the tile's first point
  Expr first_channel_;
};

}  // namespace deplo::loop_to_tile
