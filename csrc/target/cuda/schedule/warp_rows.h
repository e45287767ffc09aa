#pragma once

#include <functional>
#include <string>
#include <vector>

#include "analysis/conditions.h"
#include "schedule/reader.h"
#include "target/cuda/schedule/matrix_tile.h"

namespace deplo::loop_to_tile {

/// What schedules share whose warps each make some rows of a block: a block of four threads holds a row of 8 columns of each matrix. Sums lie in
/// arrays [unit of 16 rows][half][group of 8 columns][2].
///
/// Without matrix units (`by_numbers_`) up to 32 threads side by side hold a row, each as many columns side by side as an access has, and the same of
/// further rows; sums lie in arrays [row][1][group of columns][columns side by side].
class WarpRows {
 protected:
  /// A thread's columns: groups of `lanes` side by side.
  struct Columns {
    Columns(int64_t n, int64_t side_by_side = 2) : groups(n), lanes(side_by_side) {}  // NOLINT(google-explicit-constructor)
    int64_t groups, lanes;
  };
  static constexpr int64_t kNumbers = 4;  ///< of float32 in an access

  explicit WarpRows(const loop_ir::Kernel& kernel);

  // ---- recognition
  /// Of the axes of the nest that may be rows, the longest one, or the last one of those whose lengths are not known.
  const loop_ir::Axis* longest(const std::function<bool(const loop_ir::Axis&)>& may) const;
  /// All other axes of the nest are batches.
  void set_row(loop_ir::Axis row);
  /// Whether what is stored of the sum has 16 bits, which do not show that its factors were rounded to as many.
  bool is_rounded(const std::string& sum, const loop_ir::Block& body) const;

  // ---- the schedule as data
  /// Rows and keys of a block, warps, or groups of four of them, and stages.
  void read_tiles(ScheduleReader& reader, const std::string& key, int64_t least_stages, bool in_groups = false);
  /// The same of a block without matrix units: rows and keys, the rows of a thread, threads and stages.
  void read_numbers(ScheduleReader& reader, const std::string& key);
  static void check_shared(const ScheduleReader& reader, int64_t bytes);

  // ---- the block
  /// A grid of blocks of rows. Where later rows have more keys they go first, so that no long block runs alone at the end.
  tile_ir::Block on_rows(const std::function<tile_ir::Block()>& body);
  /// Sets first_block_ and last_block_, outside of which the limits of all rows of the block leave every key out; `into` gets what they take of
  /// `rows`. Limits that loaded values of single rows decide, or what may not come first, are left to the guards.
  void bound_keys(tile_ir::Block& into, const loop_ir::Block& rows, Expr extent, const std::function<bool(const loop_ir::Block&)>& may_come_first);
  /// Statements at a place.
  static tile_ir::Block placed(const loop_ir::Block& block, const Substitution& map);

  /// for unit, half, group, lane: body, over the thread's own places.
  Ref<tile_ir::Stmt> per_thread(const Columns& columns, tile_ir::Block body) const;
  Ref<tile_ir::Stmt> per_row(tile_ir::Block body) const;
  Ref<tile_ir::Stmt> over_groups(const Columns& columns, tile_ir::Block body) const;
  std::vector<Expr> place() const { return {sym("u"), sym("h"), sym("g"), sym("c")}; }
  std::string let(tile_ir::Block& into, Fn fn, std::vector<std::string> operands, DType dtype = DType::f32);
  std::string number(tile_ir::Block& into, double value);
  std::string load(tile_ir::Block& into, const std::string& array, std::vector<Expr> index);
  Ref<tile_ir::Stmt> clear(const std::string& array, const Columns& columns);
  /// Matrices of the warp's rows of a tile that begins at 0, each unit of one 16 of k; their names.
  std::vector<std::string> load_rows(tile_ir::Block& into, const MatrixTile& rows, Expr depth);
  /// Adds to `sums` the products of the warp's rows of `rows`, which begin at 0, with all columns of `columns`, over `depth` of k. `loaded`: such
  /// matrices of all k, where they are there already.
  tile_ir::Block multiply(const std::string& sums, const MatrixTile& rows, const MatrixTile& columns, Expr begin, int64_t groups, int64_t depth,
                          const std::vector<std::vector<std::string>>& loaded = {});
  /// The same of rows that a thread holds as numbers: those of 16 columns are what it holds of a matrix.
  tile_ir::Block multiply_numbers(const std::string& sums, const std::string& numbers, const MatrixTile& columns, Expr begin, int64_t groups,
                                  int64_t depth);
  tile_ir::Block multiply_step(const std::string& sums, const std::vector<std::string>& rows, const MatrixTile& columns, Expr begin, int64_t groups,
                               Expr depth);
  /// Adds the products of a thread's own rows of `rows` and columns of `columns`, one by one.
  tile_ir::Block multiply_by_numbers(const std::string& sums, const MatrixTile& rows, const MatrixTile& columns, Expr begin, const Columns& own,
                                     int64_t depth);
  /// The products of groups of warps, 64 rows each, with tiles in boxes. `numbers`: rows are those, in registers, rather than a tile.
  tile_ir::Block multiply_in_groups(const std::string& sums, const MatrixTile& rows, const std::string& numbers, const MatrixTile& columns,
                                    Expr begin, int64_t groups, int64_t depth);
  Ref<tile_ir::Stmt> on_grid(const std::string& block, Expr blocks, tile_ir::Block body) const;

  Expr lane() const { return mod(sym(thread_y_), 8) * 4 + sym(thread_x_); }
  Expr warp() const { return floordiv(sym(thread_y_), 8); }
  Expr thread() const { return sym(thread_y_) * wide_ + sym(thread_x_); }
  int64_t threads() const { return by_numbers_ ? rows_ / per_row_ * wide_ : warps_ * kWarp; }
  int64_t warp_rows() const { return rows_ / warps_; }
  int64_t units() const { return by_numbers_ ? per_row_ : warp_rows() / kMatrixRows; }
  int64_t halves() const { return by_numbers_ ? 1 : 2; }
  /// Of the block. Threads side by side have rows side by side, which lie in different banks.
  Expr own_row() const {
    if (by_numbers_) return sym("u") * (rows_ / per_row_) + sym(thread_y_);
    return warp() * warp_rows() + sym("u") * kMatrixRows + sym("h") * 8 + mod(sym(thread_y_), 8);
  }
  Expr row() const { return first_row_ + own_row(); }
  Expr column(int64_t lanes = 2) const { return (sym("g") * wide_ + sym(thread_x_)) * lanes + sym("c"); }
  static bool whole(Expr extent, int64_t tile) { return extent.is_constant() && extent.value() % tile == 0; }

  int64_t key_groups() const { return keys_ / kMatrixColumns; }
  Columns key_columns() const { return by_numbers_ ? Columns{keys_ / (wide_ * kNumbers), kNumbers} : Columns{keys_ / kMatrixColumns, 2}; }

  static constexpr int64_t kOwnBytes = 1 << 10;  ///< of shared memory, that a block has besides its tiles
  static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

  const loop_ir::Kernel& kernel_;
  loop_ir::Names names_;
  std::vector<analysis::KeyLimit> limits_;
  loop_ir::Axis row_;
  std::vector<loop_ir::Axis> nest_, batch_, row_axes_, key_axes_;
  int64_t rows_ = 0, keys_ = 0, warps_ = 0, stages_ = 0;  ///< of a block
  bool by_numbers_ = false;                               ///< without matrix units
  int64_t wide_ = 4;                                      ///< threads that hold a row
  int64_t per_row_ = 0;                                   ///< by numbers: rows of a thread
  bool in_groups_ = false;                                ///< four warps multiply together, straight from shared memory
  std::string block_, thread_x_, thread_y_;
  Expr first_row_;
  Expr first_block_, last_block_;  ///< of keys
  Substitution batch_map_;
};

void append(tile_ir::Block& to, tile_ir::Block from);
Ref<tile_ir::Stmt> unroll(const std::string& name, int64_t trips, tile_ir::Block body);
Ref<tile_ir::Stmt> store_at(const std::string& array, std::vector<Expr> index, const std::string& value);

}  // namespace deplo::loop_to_tile
