#pragma once

#include <optional>
#include <string>
#include <vector>

#include "loop_ir/build.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/block.h"

namespace deplo::loop_to_tile {

constexpr int64_t kWarp = 32;
constexpr int64_t kMatrixRows = 16, kMatrixColumns = 8, kMatrixDepth = 16;  ///< of one instruction of a matrix unit
constexpr int64_t kChunk = 8;                                               ///< elements of 16 bits in 16 bytes

/// Elements in 16 bytes.
inline int64_t chunk_of(DType dtype) { return kAccessBytes / size_of(dtype); }

/// An operand of a matrix product in shared memory, as a block copies it there and as its warps load matrices from it.
///
/// A line of a tile is the tile's extent along k, or, of an operand along whose rows or columns memory runs, along these. Its chunks of 16 bytes are
/// rotated by the line, so that eight lines at one chunk, which are what a matrix is loaded from, lie in different banks. Columns that lie along k
/// may be given to the matrix unit in an order that puts `lanes` of them side by side in a thread's sums.
struct MatrixTile {
  DType dtype = DType::f32;               ///< of its elements before they were widened for the product
  std::string value;                      ///< the name of such an element
  loop_ir::Block slice;                   ///< statements that compute it
  const loop_ir::Load* copied = nullptr;  ///< the only statement, if it can be copied 16 bytes at a time
  size_t dimension = 0;                   ///< of its buffer along which memory runs
  bool along_k = true;
  bool linear = false;  ///< all axes of k are one index of that dimension, and no other's
  /// Of a tile of bytes (codes.h): what threads make of them for the matrix unit, and whether a byte holds two codes, 16 k apart.
  DType wide = DType::f32;
  bool halves = false;
  bool gathered = false;  ///< by threads side by side on lines of k, for elements that lie side by side along rows or columns
  bool of_rows = true;
  int64_t alike = 1;                        ///< of numbers that are read one by one: lines side by side that are rotated alike, 0: none is
  bool in_boxes = false;                    ///< of lines of 128 bytes, as groups of threads multiply them (`program_ir/groups.h`)
  std::string tile, next;                   ///< in shared memory, and in registers
  int64_t line = 0, lines = 0, filled = 0;  ///< elements of a line of the tile, lines, and elements of a line that are filled
  int64_t lanes = 2;
  int64_t apart = 0;  ///< elements that are left out behind each line

  /// `width` rows or columns by `depth` of k. Lines become long enough for their chunks to be rotated.
  void set_shape(int64_t width, int64_t depth);
  int64_t elements() const { return in_boxes ? (filled + line - 1) / line * line * lines : line * lines; }
  int64_t chunk() const { return chunk_of(dtype); }
  bool has_codes() const { return wide != DType::f32; }
  /// Of what the matrix unit multiplies.
  DType element() const { return has_codes() ? wide : dtype; }
  /// k in the bytes of a chunk.
  int64_t depth_of_chunk() const { return halves ? 2 * chunk() : chunk(); }
  /// The row or column of line `line` of a tile along k: in boxes, columns are in the order that puts `lanes` of them side by side in a thread's
  /// sums.
  Expr column_of(Expr line_at) const;
  /// The line of row or column `row` of eight, from `first` on; `next`: of the eight behind them.
  Expr line_of(Expr row, Expr first, Expr next) const;
  /// The beginning of the row of a matrix that lane `lane` of a warp names: `first` and `depth` are the matrices' first row or column and first k in
  /// the tile that begins at `begin`. Four of 8 x 16 bytes make 16 rows at 32 bytes of k, in the order of columns, or 16 columns, in the order of
  /// rows.
  Expr row_of_matrix(Expr lane, Expr begin, Expr first, Expr depth) const;
  /// Where chunk `chunk` of a line lies in it, in chunks.
  Expr rotated(Expr line_at, Expr chunk) const;
  /// Where element `k` of chunk `chunk` of k lies, of a row or column whose first one of those that are rotated alike is `first`.
  Expr place_of_number(Expr begin, Expr first, Expr past, Expr chunk, Expr k) const;
  /// Where it lies in the array of a tile that begins at `begin`.
  Expr place_of(Expr begin, Expr line_at, Expr chunk) const;
};

/// The elements of which a factor of a product is the widened value, exactly: floats of 16 bits, or bytes of a product of int32 (`sum`); else
/// nothing. Of numbers, all factors of float32 are elements as they are. `gathers`: windows that move along rows or columns, and bytes that do not
/// lie along k, may become lines of k. `tf32`: numbers that the program rounds to tf32, too.
std::optional<MatrixTile> find_matrix_tile(const loop_ir::Kernel& kernel, const loop_ir::Block& slice, const std::string& value,
                                           const std::vector<loop_ir::Axis>& k, const std::vector<loop_ir::Axis>& free, bool of_rows,
                                           bool gathers = false, DType sum = DType::f32, bool numbers = false, bool tf32 = false);

/// Which part of an operand becomes a tile, and who copies it.
struct TileCopy {
  Expr thread;
  int64_t threads = 0;
  Expr begin;         ///< of the tile in its array
  Expr first, depth;  ///< row or column, and k, of its first element
  const std::vector<loop_ir::Axis>* k = nullptr;
  const std::vector<loop_ir::Axis>* free = nullptr;
  const Substitution* batch = nullptr;

  /// Of a tile that is computed: into registers, [to - from][8] in `next`, which the caller declares, or from there to shared memory.
  enum class Part : uint8_t { all, load, put };
  Part part = Part::all;
  int64_t from = 0;           ///< the first of a thread's chunks
  std::optional<int64_t> to;  ///< behind the last one; none: all
};

/// Chunks of a tile that each of `threads` copies, at most.
int64_t turns_of(const MatrixTile& tile, int64_t threads);

/// Copies 16 bytes at a time, zeros beyond the edges: asynchronously where the operand lies in memory as it is.
tile_ir::Block copy_tile(const MatrixTile& tile, const TileCopy& copy, loop_ir::Names& names);

}  // namespace deplo::loop_to_tile
