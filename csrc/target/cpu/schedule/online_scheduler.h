#pragma once

#include <optional>
#include <string>
#include <vector>

#include "analysis/cost.h"
#include "analysis/weighted_sum.h"
#include "base/context.h"
#include "loop_ir/ir.h"
#include "schedule/reader.h"
#include "target/cpu/schedule/contraction_scheduler.h"
#include "target/cpu/schedule/online.h"
#include "tile_ir/ir.h"

namespace deplo::loop_to_tile {

constexpr int64_t kMostOnlineTile = 4096;  ///< that a schedule may ask for
constexpr int64_t kLeastOnlineRows = 8;    ///< fewer do not pay for packing

/// Schedules of kind `online` (`online.h`).
class OnlineScheduler {
 public:
  OnlineScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), ctx_(ctx), nest_(outer_nest(kernel)) {}

  std::optional<Schedule> propose();
  /// Of a number of rows that calls differ in, where many of them pay for packing: a schedule for few.
  std::optional<FewRows> propose_few();
  /// Into how many parts keys are worth cutting, so that threads have enough to do.
  int64_t key_parts();
  tile_ir::Kernel apply(const Schedule& schedule);

 private:
  bool recognize();
  /// Chooses a schedule, where one pays.
  bool choose_any();
  /// The part of the keys that the nest has, if any: of blocks that are in it nothing is left to be guarded.
  void find_part();
  /// The axes that queries alone have, and of these the longest one.
  void find_rows();
  /// What lies around the rows of a block: all other axes of the nest.
  void set_batch();
  /// Whether keys and values are worth reading where they lie, for all of few rows at a time.
  bool is_direct() const;
  /// Whether memory runs along what scores sum over, and along the columns of values.
  bool reads_in_place() const;
  /// With the statements outside of the reductions that the operands take: none may need what is known only at the end.
  bool find_operands();
  bool is_early(const loop_ir::Block& block) const;
  /// Rows run in blocks: what one of them stores, no statement may read.
  bool reads_inputs_alone() const;
  int64_t hint(Expr e) const { return static_cast<int64_t>(analysis::estimate(e, ctx_.hints, kernel_.symbols)); }

  bool can_pair(const Operand& a, const Operand* b) const;
  bool can_pair_values() const;
  /// Whether the program rounds weights to 16 bits, or what is made of them: of other results each rounded weight would show.
  bool rounds_weights() const;
  bool has_matrix_unit() const;
  /// Whether a register block so wide does.
  bool fits_matrix_unit(int64_t lanes) const;
  /// Whether the sum of weights is a result itself, which rounded weights would show in. Else what both sums round alike is divided away.
  bool stores_sum() const;
  void choose();
  void choose_direct(int64_t rows);
  std::vector<Directive> describe_direct() const;
  std::string depth_name() const { return pair_->scores.result + "." + pair_->scores.reduce->axes[0].name; }
  std::string key_name() const { return pair_->values.result + "." + pair_->values.reduce->axes[0].name; }

  Schedule describe() const;
  static const Directive& needed_directive(ScheduleReader& reader, const std::string& word, const std::string& name);
  void read(ScheduleReader& reader);
  void read_direct(ScheduleReader& reader);
  void read_parallel(ScheduleReader& reader, const std::string& last);
  bool read_dot(ScheduleReader& reader, const std::string& name, bool allowed, bool& matrix, int64_t width) const;

  static Ref<tile_ir::Stmt> loop(const std::string& name, Expr lo, Expr hi, LoopKind kind, tile_ir::Block body, int64_t by = 1);
  static Ref<tile_ir::Stmt> load(const std::string& name, DType dtype, const std::string& buffer, std::vector<Expr> index);
  static Ref<tile_ir::Stmt> store(const std::string& buffer, std::vector<Expr> index, const std::string& value);
  static Ref<tile_ir::Stmt> let(const std::string& name, Fn fn, std::vector<std::string> operands, DType dtype = DType::f32);
  static Ref<tile_ir::Stmt> number(const std::string& name, double value, DType dtype = DType::f32);
  static void append(tile_ir::Block& to, tile_ir::Block more) { to.insert(to.end(), more.begin(), more.end()); }
  static void join(Substitution& into, const Substitution& more);

  Expr all_rows() const { return direct_ ? count(rows_) : row_.extent; }
  /// Sets the axes of the rows to those of one of them.
  void set_row(Substitution& map, Expr row) const {
    if (!direct_)
      map[row_.name] = row;
    else
      join(map, unflatten(rows_, row));
  }
  Expr shares() const { return ceildiv(all_rows(), shared_); }
  Expr first_shared() const { return mod(sym("par"), shares()) * shared_; }
  Expr shared_rows() const { return min(shared_, all_rows() - first_shared()); }
  Expr first_key() const { return (part_ ? sym("kb") * part_->axis.extent + outer().at(part_->axis.name) : sym("kb")) * block_keys_; }
  Expr block_keys() const { return min(block_keys_, sum_.key.extent - first_key()); }
  Expr place() const { return direct_ ? Expr(0) : sym("rb") * rows_of_block_; }
  Expr block_rows() const { return min(rows_of_block_, shared_rows() - place()); }
  Expr row_at(Expr of_block) const { return first_shared() + place() + of_block; }
  Substitution outer() const { return unflatten(batch_, floordiv(sym("par"), shares())); }

  /// Keys [lo, hi) outside of which all of some rows read -inf.
  struct Bounds {
    std::optional<Expr> lo, hi;
  };
  /// Limits of masks by least numbers hold for rows that have any key: all is done once more, without them, where one has none.
  tile_ir::Block with_soft_limits(tile_ir::Block once) const;
  /// For `rows` rows from `first` on. What limits that are values take goes before.
  Bounds bounds_of(Expr first, Expr rows, const std::string& tag, tile_ir::Block& into) const;

  tile_ir::Block body() const;
  /// Keys [lo, hi) that count for some row that shares them, and how many of these the block in hand has.
  struct KeyRange {
    Expr lo, hi, of_block;
  };
  /// What limits that are values take goes before.
  KeyRange keys_of_rows(tile_ir::Block& into) const;
  /// Over the blocks of these keys.
  tile_ir::Block over_blocks(const KeyRange& keys, tile_ir::Block body) const;
  tile_ir::Block direct_body() const;
  /// Elements of a query: whole vectors.
  int64_t direct_depth() const;
  /// The row of an operand that a key has, read along an axis from `first` on, `count` elements; as `length` ones it would lie beside the next.
  struct RowOfKey {
    std::string key;
    Expr at;
    std::string along;
    Expr first;
    int64_t count = 0, length = 0;
  };
  /// Fetches that of a key further on, if rows of keys lie apart: hardware expects those next to each other alone.
  tile_ir::Block fetch_ahead(const Operand& operand, const std::string& value, const RowOfKey& row, const std::string& tag) const;
  tile_ir::Block direct_scores(Expr keys) const;
  tile_ir::Block direct_values(Expr keys) const;
  tile_ir::Block start() const;
  std::vector<Expr> paired(Expr panel, Expr k, Expr lane, bool pairs) const;
  /// The operand's value at a point, as float32 or as it was before it was widened, stored at buffer[to].
  static tile_ir::Block copy_operand(const Operand& operand, const Substitution& map, const std::string& suffix, bool narrow,
                                     const std::string& buffer, std::vector<Expr> to);
  /// Whether memory runs along an axis of the operand: all of its accesses step by one element there, or by none.
  bool unit_along(const Operand& operand, const std::string& axis) const;
  /// A panel's lanes [0, valid) x steps [0, depth) of k, in squares that are transposed in registers if memory runs along k; zeros up to its width.
  tile_ir::Block pack_panel(const Operand& operand, const std::string& k_axis, Expr depth, Expr whole, const std::string& lane_axis, Expr first_k,
                            Expr first_lane, Expr valid, int64_t width, const std::string& buffer, Expr panel, bool pairs,
                            const std::string& tag) const;
  /// The first `keys` of a block: what others hold may be anything.
  tile_ir::Block pack_keys(Expr keys) const;
  tile_ir::Block pack_values(Expr keys) const;
  tile_ir::Block pack_queries() const;
  /// One block of rows and of keys.
  tile_ir::Block row_block() const;
  struct Product {
    std::string rows, lanes, panel, tag;
    int64_t width = 0;
    Expr panels, depth;
    bool pairs = false;
  };

  /// For each panel and each block of rows: sums in registers, and what is done with them at [ro, xo].
  tile_ir::Block multiply(const Product& p, tile_ir::Block of_row, tile_ir::Block of_sum) const;
  /// The same sums of a matrix unit, stored from `to` on, and what follows that.
  tile_ir::Block multiply_in_matrices(const Product& p, const std::string& to, std::vector<Expr> at, tile_ir::Block then) const;
  tile_ir::Block over_register_blocks(const Product& p, tile_ir::Block block) const;
  /// Steps of sums that are packed: whole ones of a matrix unit.
  int64_t packed_depth() const { return matrix_scores_ ? round_up(depth_, tile_ir::kMatrixDepth) : depth_; }
  int64_t query_elements() const { return matrix_scores_ ? packed_depth() + tile_ir::kMatrixDepth : round_up(depth_, kCacheLine) + kRowPadding; }
  Expr packed_keys(Expr keys) const { return round_up(keys, matrix_values_ ? tile_ir::kMatrixDepth : 2); }
  /// Whether what follows the sum of products of scores is arithmetic on it and constants.
  bool simple_scores() const;
  /// Whether memory holds the sums, and what follows is computed where it is read: it costs less than to store and load it.
  bool recomputes_scores() const;
  tile_ir::Block compute_scores(Expr keys) const;
  tile_ir::Block score_tail(Expr row, Expr key, const std::string& sum, const std::string& suffix, const std::vector<Expr>& to) const;
  std::string score_of(Expr row, Expr key, const std::string& sum, const std::string& suffix, tile_ir::Block& into) const;
  /// The score that the softmax is of, at a row and key of the block.
  std::string read_score(Expr row, Expr key, const std::string& suffix, tile_ir::Block& into) const;
  /// Scores become weights, relative to the maximum so far.
  tile_ir::Block weigh(Expr keys) const;
  /// By the largest of a row's scores in `base`: the maximum so far, what weights are relative to (in `base`), and the factor of what was summed.
  tile_ir::Block move_maximum(Expr row) const;
  tile_ir::Block add_values(Expr keys) const;
  tile_ir::Block finish() const;
  const loop_ir::Kernel& kernel_;
  const PassContext& ctx_;
  OuterNest nest_;
  analysis::WeightedSum sum_;
  const analysis::WeightedSum::Contractions* pair_ = nullptr;
  std::vector<analysis::KeyLimit> limits_;
  size_t hard_limits_ = 0;           ///< of these; the others are soft
  std::vector<loop_ir::Axis> rows_;  ///< the axes that queries alone have
  loop_ir::Axis row_;
  std::vector<loop_ir::Axis> batch_;
  Operand queries_, keys_, values_;
  loop_ir::Block score_;  ///< what makes a score of a sum of products
  loop_ir::Block read_;   ///< what the softmax reads of it
  int64_t depth_ = 0, columns_ = 0;
  int64_t chunk_work_ = kChunkWork;
  int64_t mr_ = 0, key_lanes_ = 0, column_lanes_ = 0;
  int64_t rows_of_block_ = 0, block_keys_ = 0;
  int64_t shared_ = 0;   ///< rows that share packed keys and values
  bool direct_ = false;  ///< nothing is packed
  std::optional<analysis::KeyPart> part_;
  bool pair_scores_ = false, pair_values_ = false;
  bool matrix_scores_ = false, matrix_values_ = false;  ///< such pairs are multiplied in a matrix unit
};

}  // namespace deplo::loop_to_tile
