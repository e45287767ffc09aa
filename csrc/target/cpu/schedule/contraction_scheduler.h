#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "analysis/contraction.h"
#include "lower/loop_to_tile/convert.h"
#include "lower/loop_to_tile/layers.h"
#include "schedule/reader.h"
#include "target/cpu/schedule/contraction.h"

namespace deplo::loop_to_tile {

using analysis::Contraction;
using loop_ir::Axis;
using tile_ir::LoopKind;
using tile_ir::Space;

constexpr int64_t kDepthUnroll = 4;
constexpr int64_t kDynamicRows = 256;  // its rows: they pay for that pack
constexpr int64_t kCacheLine = 16;     // float32 elements
constexpr int64_t kRowPadding = 16;    // keeps packed rows off each other's cache sets
/// The width of a line of at least `elements` float32, or pairs of 16 bits, that keeps what lies below one another in all sets of a cache: an odd
/// number of cache lines.
constexpr int64_t spread(int64_t elements) { return ((elements + kCacheLine - 1) / kCacheLine | 1) * kCacheLine; }
constexpr int64_t kPrefetchLines = 8;  // steps of k ahead of a pack of lines in runs
constexpr int64_t kPrefetchSteps = 4;  // of the outermost reduce axis, ahead of the pack
constexpr int64_t kChunkWork = 65536;

inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
inline Expr round_up(Expr a, int64_t b) { return ceildiv(a, b) * b; }

constexpr int64_t kBlockVectors = 2;    // of a register block's rows
constexpr int64_t kParts = 3;           // bf16 numbers of 8 bits that hold the 24 bits of float32
constexpr int64_t kWordVectors = 4;     // of a panel of words, where registers are 32: so many lanes share what is loaded of the rows
constexpr int64_t kLongestFold = 128;   // steps of k that are summed before they are added to a total, where no factors ask for less
constexpr int64_t kTotals = 16;         // chains of such steps that are added up by themselves, where there are many
constexpr int64_t kDifferenceRows = 4;  // up to here, making exact numbers of bytes costs more than a second product
constexpr int64_t kMostUnroll = 16;     // steps of k: beyond, code grows out of proportion
constexpr int64_t kMatrixChain = 1024;  // of k, that a matrix unit sums in one chain

/// What a row costs in register blocks of mr rows of `vectors` vectors, beside its multiply-adds.
double block_overhead(int64_t mr, int64_t vectors, double load_cost);
/// What `rows` rows cost in such register blocks.
double block_cost(int64_t rows, int64_t mr, int64_t vectors, double load_cost);
/// Rows of the register block for `rows` rows.
int64_t register_rows(int64_t rows, int64_t vectors, const PassContext& ctx);

struct Operand {
  const analysis::ContractionOperand* source = nullptr;
  loop_ir::Block slice;    ///< with the statements outside of the reduction that it needs
  bool fixed = false;      ///< made of static buffers and constant sizes alone: it may be packed once
  bool is_static = false;  ///< packed beforehand, in panels
  bool per_call = false;   ///< by a step of each call
  bool in_place = false;   ///< not packed: read where it lies
  bool in_lines = false;   ///< rows that are packed [k][row], for memory runs along them
  int64_t padding = kRowPadding;
  std::string param;  ///< of the packed buffer when static

  /// The value as it was before a cast that loses nothing: of 16-bit floats to float32, of bytes to int32; none if there is no such cast.
  struct Narrow {
    std::string value;
    DType dtype = DType::f32;
  };
  std::optional<Narrow> narrow() const;
  /// The first value of a chain of such casts: bytes behind bfloat16 numbers, say.
  std::optional<Narrow> stored() const;

  /// A value that is computed from an element of the largest buffer and from factors that are the same for `group` steps of k next to each
  /// other: what it was quantised to, and scales and zero points.
  struct Prologue {
    Narrow main;
    std::vector<const loop_ir::Load*> factors;
    int64_t group = 1;
  };
  std::optional<Prologue> prologue(const std::vector<Axis>& summed) const;

  /// A value that is scale * (code + offset) + shift of a byte in memory, where these are made of factors that are the same for `group` steps of k.
  struct Linear {
    Narrow code;
    std::vector<const loop_ir::Load*> factors;
    int64_t group = 0;                          ///< 0: no factors
    loop_ir::Block statements;                  ///< that make them, in float32
    std::string scale, shift, offset;           ///< empty: 1, 0 and 0
    std::vector<const loop_ir::Load*> centers;  ///< of integers that are added to codes before they are scaled: zero points
  };
  /// Roundings to 16 bits between code and value are left out: in a sum of products the factors could as well leave the sum. Without `inner`, an
  /// offset is part of the shift. With `centered`, zero points are taken to be 0.
  std::optional<Linear> linear(const std::vector<Axis>& summed, bool inner = false, bool centered = false) const;

  /// The statements of the slice that this value takes.
  loop_ir::Block statements_of(const std::string& value) const;
};

/// One direction of the windows that the reduction slides over the rows' operand: its coordinate is axis * stride + tap * dilation. A buffer
/// that holds the points under a block of rows has them at axis * step + tap * tap_step.
struct WindowSide {
  Axis axis;
  std::string tap;  ///< the reduce axis; none where windows are one point wide
  int64_t taps = 1;
  int64_t step = 1;
  int64_t tap_step = 0;

  /// Points under `rows` rows next to each other.
  Expr span(Expr rows) const { return (rows - 1) * step + (taps - 1) * tap_step + 1; }
  /// What the axes are at a point of the buffer whose first row is `first`.
  Substitution at(Expr first, Expr point) const {
    Substitution map;
    bool by_tap = tap_step == 1 && step != 1;  // the finer of both reaches every point
    map[axis.name] = by_tap ? first : first + point;
    if (!tap.empty()) map[tap] = by_tap ? point : Expr(0);
    return map;
  }
};

/// Rows that are the points of lines of an image. Under overlapping windows the image is packed once, not once a tap.
struct Window {
  WindowSide line, point;
  std::vector<Axis> channels;  ///< the reduce axes that are no taps: outside of them

  int64_t taps() const { return line.taps * point.taps; }
};

struct Item {
  const Contraction* contraction = nullptr;
  Operand rows;
  Operand lanes;
  std::vector<Axis> summed;  ///< the reduce axes, in the order in which k counts their points
  size_t channels = 0;  ///< the first of these, if k counts their points in twos outside of the others, which are a window's taps; 0: it does not
  Expr depth;
  int64_t depth_block = 0;  ///< KC
  int64_t chain = 0;        ///< steps of k that are summed in registers before they are added to the tile
  int64_t unroll = kDepthUnroll;
  bool pairs = false;     ///< steps of k side by side in twos, as bf16
  bool words = false;     ///< steps of k side by side in fours, bytes of an int32
  bool matrix = false;    ///< pairs or words that a matrix unit multiplies
  int64_t parts = 1;      ///< bf16 numbers that make up an element: float32 is the sum of three
  bool widened = false;   ///< a panel of narrow lanes is widened once for all register blocks of a tile
  int64_t bits = 0;       ///< of codes of lanes that are packed in words, each of which holds several steps of k; 0: they are not
  int64_t width = 0;      ///< lanes of such a panel: those of a register block or more
  bool folded = false;    ///< these are taken apart in registers, as they are multiplied, and their factors multiply the sums of groups; else widened
  bool centered = false;  ///< their zero points are taken to be 0
  bool bytes = false;     ///< and they are multiplied as bytes by the codes of the rows, four steps of k at a time
  Expr depth_blocks;
  std::string tag;

  DType dtype() const { return contraction->dtype; }
  /// Steps of k that one multiplication takes.
  int64_t group() const { return words || bytes ? 4 : pairs ? 2 : 1; }
  /// Of which what is packed holds whole multiples: a matrix unit takes many at a time.
  int64_t step() const { return matrix ? matrix_depth() : group(); }
  /// Whether zeros behind the last step of k complete these.
  bool pads_depth() const { return pairs && parts == 1 && bits == 0 && !(depth.is_constant() && depth.value() % step() == 0); }
  /// Steps of k in a word.
  int64_t word() const { return bits > 0 ? 32 / bits : 0; }
  bool may_be_odd() const { return !(depth.is_constant() && depth.value() % 2 == 0); }
  /// Whether the last pair of channels is half one of zeros.
  bool has_odd_channels() const;
  /// Whether two steps of k lie side by side in the panels of lanes.
  bool paired_lanes() const { return pairs && bits == 0; }
  /// The lanes as codes and their factors, if these may be packed in words.
  std::optional<Operand::Linear> linear(bool inner = false) const;
  /// Whether words of 4-bit codes are turned, so that a shift brings a code of each half to where bf16 numbers have the upper bits of their fraction.
  bool turns_words() const { return bits == 4 && pairs && !bytes; }
  /// Whether 4-bit codes are multiplied where they lie in their word, and powers of 2 that make up for it are part of the rows' numbers: exact ones,
  /// for numbers of 16 bits leave room for them.
  bool scales_steps() const;
  /// Whether the codes become numbers with their zero points before they are multiplied.
  bool adds_offsets() const { return widened || (folded && !pairs && !bytes && !scales_steps()); }
  /// The rows as codes and factors that are the same for all k.
  std::optional<Operand::Linear> row_codes() const;
  /// Whether the uppermost bit of the rows' bytes is turned over as they are packed: beside signed bytes they are unsigned, beside 4 bits signed.
  bool turns_rows() const;
  /// Whether words are multiplied as the difference of two bf16 numbers, which are made faster than one that is exact.
  bool differs(int64_t rows) const { return folded && pairs && bits == 8 && rows <= kDifferenceRows; }
  /// Of what the rows' bytes are packed: a matrix unit alone multiplies signed ones.
  DType row_bytes() const { return words && matrix ? rows.narrow()->dtype : DType::u8; }
  /// Steps of k of one instruction of a matrix unit.
  int64_t matrix_depth() const { return words ? tile_ir::kMatrixBytes : tile_ir::kMatrixDepth; }
  /// Whether the lanes' sums over k take part: the rows' codes have an offset.
  bool needs_lane_sums() const;
  /// As what the lanes are packed once, if not as they are multiplied.
  std::optional<Operand::Narrow> packed_lanes() const;
  /// How lanes that are packed as they were quantised become what is multiplied.
  std::optional<Operand::Prologue> prologue() const;
  /// Whether only a panel that was widened beforehand can be multiplied.
  bool needs_widening() const;
  /// Whether the rows' bytes are signed, too: they are packed with 128 added, and the panels of lanes end in what that adds to the sums. A matrix
  /// unit reads the same panels, but not their ends.
  bool shifted() const { return words && rows.narrow()->dtype == DType::i8 && lanes.narrow()->dtype == DType::i8; }
};

/// One kernel's contractions: what they are, a schedule for them, and the Tile IR that a schedule stands for. An object proposes one
/// schedule or applies one.
class ContractionScheduler {
 public:
  /// `bits`: of lanes that are packed in words, if they can be; `centered`: their zero points are taken to be 0.
  ContractionScheduler(const loop_ir::Kernel& kernel, const std::set<std::string>& statics, const PassContext& ctx, int64_t bits = 8,
                       bool centered = false);
  std::optional<Schedule> propose();

  /// With the lanes along the other operand's axes, where that pads less; `best` is the cost to beat.
  std::optional<Schedule> propose_across(double best);

  /// With the lanes along another axis of their operand than the stores' contiguous one, where that pads less.
  std::optional<Schedule> propose_apart(double best);

  /// With lanes that change packed once a call, along the stores' contiguous axis or the other operand's.
  std::optional<Schedule> propose_per_call(bool across, double best);

  /// With the points of an image as rows, packed as they lie, beside lanes that are packed once, or once a call.
  std::optional<Schedule> propose_window(bool across, bool per_call, double best);

  /// Whether all lanes are packed beforehand.
  bool lanes_static() const;
  /// Whether none are.
  bool lanes_change() const;

  /// Of the sizes chosen: multiply-adds with the padding, weighed by how well their register blocks run, and the elements packed, for one k of all
  /// outer points.
  double padded_work() const;
  ScheduledContraction apply(const Schedule& schedule);

  /// Conditions on the sizes of which any makes it better to stream the operands as they lie; nothing if it always is. Asked after a proposal.
  std::optional<std::vector<Cond>> streamed() const;

  /// Whether operands are packed once that are nothing but weights, for nothing but plain multiply-adds or pairs. Asked after a proposal.
  bool keeps_plain_weights() const;
  /// Whether lanes off the stores' contiguous axis are packed once a call, beside rows of a block each.
  bool reads_rows() const {
    return per_call_ && across_ && !window_ && std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.rows.is_static; });
  }

  /// Multiply-adds that it costs to copy such rows from memory, where packed ones are read ahead: beside many lanes little.
  double reading_rows() const;

  /// What codes of 4 bits take for granted of the params that hold them, after a proposal; none where all are bytes.
  std::vector<AssumedRange> few_bits() const;

  /// For a block of `rows` rows of one axis.
  std::optional<std::vector<Directive>> propose_rows(const ContractionRows& tile);
  tile_ir::Block apply_rows(const ContractionRows& tile, const Schedule& schedule);

 private:
  // ---- recognition -----------------------------------------------------------------------------------------------

  bool recognize() { return !contractions_.empty() && fits() && classify(); }

  /// Of a phase: its rows are the block's, and all else but the lanes is known outside.
  bool bound() const;

  /// Inside the outer nest: the contractions' reductions and straight-line statements only.
  bool fits();
  std::vector<const loop_ir::Store*> stores() const;
  Expr offset(const std::string& buffer, const std::vector<Expr>& index) const;

  /// The axis along which most stores are contiguous.
  std::optional<Axis> contiguous_axis() const;

  /// Whether the axis steps on in every store where `span` points of the contiguous one end.
  bool continues(const std::string& axis, Expr span) const;

  /// Whether no vector of lanes crosses from one `span` of the contiguous axis into the next: these may lie apart (heads of a layer).
  bool whole_vectors(Expr span) const;

  /// Sorts the outer axes into rows, lanes and the rest, and each contraction's operands likewise.
  bool classify();

  /// The windows of the only contraction over lines of a known length, if it has any.
  std::optional<Window> find_window() const;

  /// One direction: every index and condition of the operand has axis and tap in the same proportion, so that their sum is one coordinate.
  std::optional<WindowSide> find_side(const Axis& axis) const;

  /// Whether a schedule packs the rows' operand as it lies under windows.
  static bool is_windowed(const Schedule& schedule);
  static std::set<std::string> parallel_names(const Schedule& schedule);
  /// Whether images, along whose points rows lie, fill blocks each: their points are then copied as lines.
  bool are_lines_enough() const;

  /// Whether a schedule gives the lanes to another axis than the stores' contiguous one.
  bool is_across(const Schedule& schedule) const;

  /// The lanes are the contiguous axis, and with it the axes that continue it in every store, or step from one row of whole vectors to the
  /// next; other axes of its class run outside.
  void group_lanes();
  /// Whether a schedule packs the lanes once a call.
  static bool is_per_call(const Schedule& schedule);
  /// Of bf16 operands k counts points as memory of the rows runs: along the channels of an image whose pixels are lines of them.
  void order_steps(Item& item) const;
  /// Whether an operand of static buffers is packed once, rather than left where it lies.
  bool is_kept(const analysis::ContractionOperand& source, const std::vector<loop_ir::Axis>& summed) const;
  bool prepare(Operand& operand, const analysis::ContractionOperand& source, const std::vector<loop_ir::Axis>& summed);
  int64_t hint(Expr e) const;

  /// With lanes off the stores' contiguous axis: whether memory runs along the rows, which are packed [k][row] then.
  bool rows_lie_across() const;
  /// Whether a tile of rows is packed [k][row]: so, or because of memory that runs along them.
  bool packs_rows_in_lines(const Item& item) const { return item.rows.in_lines || rows_lie_across(); }
  static const loop_ir::Load* main_load(const Operand& operand);
  /// Whether the place of that load is known ahead: an index that is computed or loaded (a gather) is known only where the value is.
  static bool knows_place(const Operand& operand);

  /// Step of the operand's main load along an axis; nothing if it is not affine there.
  std::optional<Expr> step_along(const Operand& operand, const std::string& axis) const;
  bool unit_along(const Operand& operand, const std::string& axis) const;
  /// Whether memory runs along all of these axes, as along one.
  bool lies_along(const Operand& operand, const std::vector<loop_ir::Axis>& axes) const;

  // ---- sizes -----------------------------------------------------------------------------------------------------

  void choose_sizes();
  void choose_blocks(int64_t vectors);
  int64_t block_vectors() const { return nr_ / (ctx_.target.vector_bytes / 4); }

  /// Whether the operands are bf16 that are packed so that two steps of k are neighbours.
  bool can_pair(const Item& item) const;
  /// Whether the operands are bytes, of which one may count as unsigned and the other one is signed, and sums are int32.
  bool can_word(const Item& item) const;
  /// Whether the rows may be read where they lie, in register blocks without padding.
  bool can_read_in_place(const Item& item) const;
  /// Whether rows may be packed [k][row]: as numbers of float32, one step of k at a time. Copies are lines then, not transposed squares.
  bool can_pack_in_lines(const Item& item) const;
  /// Whether that is as memory runs, and pays: steps of k read lines more slowly than rows of k (measured where vectors are 32 bytes), and beside
  /// lanes that a step of the call packs, rows are copied once for all of them.
  bool wants_lines(const Item& item) const {
    return can_pack_in_lines(item) && unit_along(item.rows, rows_[0].name) && !(per_call_ && ctx_.target.vector_bytes <= 32 && !item.pairs);
  }
  /// Whether the operand is a plain float32 load whose memory runs along k.
  bool lies_in_rows(const Item& item) const;
  /// Reads rows where they lie if that pays, in register blocks that divide them.
  void choose_in_place();
  /// Whether a matrix unit may multiply these pairs or words.
  bool can_use_matrix(const Item& item) const;
  /// Whether the lanes' numbers take less memory than those of `dtype`, as what they would be copied for a matrix unit: nothing expands them.
  static bool is_stored_below(const Item& item, DType dtype);
  /// Whether it may multiply float32 operands as sums of bf16 numbers: of layers, convolutions pack less as they lie.
  bool can_split(const Item& item) const;
  /// What products of words, codes and parts have in common: packed lanes, rows packed per block, k of a known length.
  bool lies_for_pairs(const Item& item) const;
  /// Register blocks of the matrix unit's sides, where all products are for it.
  void choose_matrix_blocks(int64_t rows);
  /// Rows of a block for it.
  int64_t most_matrix_rows() const;
  void check_matrix_sides(ScheduleReader& reader, const Directive& block) const;

  /// Whether the lanes are packed once and narrower than float32.
  static bool can_widen(const Item& item);

  /// Lines of a block and the rows of its register blocks: points of one line, or several whole lines.
  void choose_window_sizes();

  /// Register blocks that share the points of a line: all of one size, or some with a point more.
  struct LineBlocks {
    Expr first = 0;  ///< point
    Expr count = 0;
    int64_t points = 0;
  };
  std::vector<LineBlocks> line_blocks(int64_t most) const;

  /// Of the whole image, in rows.
  double window_cost(int64_t lines, int64_t points) const;
  Expr lines_padded(Expr lines) const { return ceildiv(lines, block_lines_) * block_lines_; }
  /// Whether lines of an image are of any length: their last register block is partly padding.
  bool any_points() const { return window_ && !rows_[1].extent.is_constant(); }
  /// Rows of the tile that a line takes.
  Expr tile_points() const;
  Expr tile_rows() const { return window_ ? lines_ * tile_points() : Expr(row_tiles_ * mr_); }
  std::string row_tile_name() const { return window_ ? rows_[0].name : name_of(rows_); }
  void choose_lane_block();
  /// Blocks of rows in one, beside lanes that are packed once a call: more lanes leave more time to fetch them.
  int64_t call_blocks() const;
  /// How much of the time threads lose with blocks of so many lanes, waiting for one another and packing rows for each block: 1 and more.
  double block_share(int64_t lane_block) const;
  /// Another height of the rows' blocks where threads share them better.
  void share_rows();
  /// Another width of the lanes' blocks where threads share them better.
  void share_lanes();
  /// Whether threads share the rows out, not the lanes: of both operands each one reads the whole of the other, which should be the smaller one.
  bool wants_rows_outside() const;
  /// Smaller blocks of both where the points of an image are rows of one block, unless that keeps threads busy.
  void share_tiles();

  /// Lines of `inner` lanes that a block packs side by side: many enough to share the rows, and little padding up to whole vectors.
  int64_t lines_of_block(int64_t inner) const;

  /// Lanes of two axes that are packed per block: whole lines of the inner axis side by side.
  bool two_lane_axes() const { return !across_ && lanes_.size() == 2 && !lanes_static(); }

  // ---- the schedule as data --------------------------------------------------------------------------------------

  static std::string name_of(const std::vector<Axis>& axes);
  /// The reduce axes of one contraction: those of another may have the same names.
  static std::string depth_name(const Item& item) { return item.contraction->result + "." + name_of(item.summed); }
  std::string lane_tile_name() const { return two_lane_axes() ? lanes_[0].name : name_of(lanes_); }
  Schedule describe() const;
  void read(ScheduleReader& reader);
  static const Directive& needed(ScheduleReader& reader, const std::string& word, const std::string& name);
  static int64_t read_number(ScheduleReader& reader, const std::string& word, const std::string& name, int64_t most);
  void read_depth(ScheduleReader& reader, Item& item) const;
  void read_dot(ScheduleReader& reader, Item& item) const;
  void read_window(ScheduleReader& reader, Item& item) const;
  void read_widen(ScheduleReader& reader, Item& item) const;
  void read_pack(ScheduleReader& reader, const Item& item, Operand& operand, const std::string& side) const;
  void read_lanes(ScheduleReader& reader);

  /// The outer axes in the order given, then the tiles of lanes, then those of rows.
  void read_parallel(ScheduleReader& reader);
  void read_register_block(ScheduleReader& reader);
  void read_tail(ScheduleReader& reader);
  void read_tiles(ScheduleReader& reader);
  void read_epilogue(ScheduleReader& reader);

  // ---- statements ------------------------------------------------------------------------------------------------

  static Ref<tile_ir::Stmt> loop(const std::string& name, Expr lo, Expr hi, LoopKind kind, tile_ir::Block body, int64_t by = 1);
  static tile_ir::Block store_zero(const std::string& buffer, std::vector<Expr> index, const std::string& name, DType dtype = DType::f32);

  /// The operand at the point that `map` gives, stored at buffer[index] as float32, or as it was before it was widened. Names get a suffix: a body
  /// holds several copies.
  static tile_ir::Block store_operand(const Operand& operand, const Substitution& map, const std::string& buffer, std::vector<Expr> index,
                                      const std::string& suffix, const std::optional<Operand::Narrow>& before = std::nullopt);

  /// Its statements at that point, some loads by others, and the name of the value.
  static std::string operand_value(const Operand& operand, const Substitution& map, const std::string& suffix,
                                   const std::optional<Operand::Narrow>& before, tile_ir::Block& into,
                                   const std::map<std::string, loop_ir::Load>& instead = {});
  /// Statements at a place, their values with a suffix, in order; the new names. `instead`: loads of other places, by value.
  static std::map<std::string, std::string> copy_statements(const loop_ir::Block& statements, const Substitution& map, const std::string& suffix,
                                                            tile_ir::Block& into, const std::map<std::string, loop_ir::Load>& instead = {});

  /// Four steps of k as one int32 at buffer[index]: `maps` are the points of each.
  static tile_ir::Block store_word(const Operand& operand, const std::vector<Substitution>& maps, const std::string& buffer, std::vector<Expr> index,
                                   const std::string& suffix);

  /// The codes of a word's steps at buffer[index]: `maps` are the points of each.
  static tile_ir::Block store_codes(const Item& item, const std::vector<Substitution>& maps, const std::string& buffer, std::vector<Expr> index,
                                    const std::string& suffix);

  /// The operand as the sum of three bf16 numbers h + m + l, at buffer[index] with their numbers 0, 1 and 2 at `part` of the index.
  static tile_ir::Block store_parts(const Operand& operand, const Substitution& map, const std::string& buffer, const std::vector<Expr>& index,
                                    size_t part, const std::string& suffix);

  /// The extent of the innermost reduce axis where each of its steps is a line of its own, and blocks of k hold whole runs of it.
  std::optional<int64_t> run_of_lines(const Item& item, const Operand& operand) const;
  /// A hint to fetch what the pack will read kPrefetchSteps steps of the outermost reduce axis later: rows of one k lie far apart, so that
  /// no hardware prefetcher sees them coming.
  void prefetch_operand(const Item& item, const Operand& operand, const Substitution& map, Expr k, tile_ir::Block& into) const;
  static void prefetch_at(const Operand& operand, const Substitution& map, tile_ir::Block& into, int level = 1);
  static void join(Substitution& into, const Substitution& more);
  static Substitution depth_map(const Item& item, Expr k);
  static Expr depth_of_block(const Item& item);
  /// Multiplications of a block of k, the last one of zeros in part if need be.
  static Expr steps_of_block(const Item& item);

  /// Whether the packed lanes of one contraction are those of another.
  static bool packs_alike(const Item& a, const Item& b);
  static std::string lanes_text(const Item& item);

  // ---- packing once ----------------------------------------------------------------------------------------------

  PackedOperand pack_once(Item& item, Operand& operand, bool lanes);
  /// The factors of lanes that are packed as they were quantised.
  std::vector<PackedOperand> pack_factors(Item& item);
  /// The pack kernel around `inside`, whose sources are `reads`.
  void finish_pack(PackedOperand& packed, const std::set<std::string>& reads, tile_ir::Block inside, const std::vector<Axis>& batch,
                   const std::vector<Axis>& axes, int64_t width) const;
  /// One panel of an operand that is packed once: panel `par` of those of all places of the axes `batch`.
  tile_ir::Block pack_panel(const Item& item, const Operand& operand, bool lanes, const PackedOperand& packed, const std::vector<Axis>& batch) const;

  // ---- the kernel ------------------------------------------------------------------------------------------------

  tile_ir::Block body();
  /// What an iteration of the parallel loop computes.
  struct Turn {
    Substitution outer;
    Expr row_block, lane_group;
  };
  Turn turn(Expr par) const;
  Expr lane_groups() const { return two_lane_axes() ? ceildiv(lanes_[0].extent, lane_lines_) : ceildiv(lanes_extent_, lane_block_); }
  void choose_lanes(Expr group);
  tile_ir::Block allocations() const;
  tile_ir::Block tile_body() const;
  tile_ir::Block contraction(const Item& item) const;

  /// Whether the largest parts are summed in several chains.
  static bool is_chained(const Item& item) { return item.parts > 1 && item.depth.value() > kMatrixChain; }
  /// Whether each panel of lanes is finished, epilogue included, while its sums are in the first cache. A matrix unit's sums of pairs go on from
  /// block to block of k instead.
  bool in_panels() const;
  /// Whether a panel's sums of all contractions are made one after another: all of k is one block.
  bool joint() const;
  /// The panel of lanes in hand.
  Expr panel(const Item& item) const { return sym("pt" + (joint() ? items_[0].tag : item.tag)); }
  /// Where the tile of sums has a lane of the panel in hand.
  Expr tile_lane(const Item& item, Expr lane) const { return joint() ? lane : panel(item) * nr_ + lane; }
  tile_ir::Block packs(const Item& item) const;
  /// Statements for each place of item's tile of sums, padding included, and that place.
  Ref<tile_ir::Stmt> over_tile(const Item& item, const std::string& prefix, tile_ir::Block body) const;
  static std::vector<Expr> place_of(const Item& item, const std::string& prefix);

  /// Points under the block: [channels of a block of k][lines][points of a line].
  std::vector<Expr> window_shape() const;
  /// Points of a window times the channels that one multiplication takes.
  int64_t window_steps(const Item& item) const { return window_->taps() * item.group(); }
  /// Has k count pairs of channels, the last one with zeros if they are odd.
  void pair_channels(Item& item) const;

  /// Copies the points under a block of lines as they lie, with the border; what only padding reads is zero.
  tile_ir::Block pack_window(const Item& item) const;

  /// A tile along one axis or a group, or along two of which whole lines of the inner one lie side by side.
  struct Lines {
    std::vector<Axis> axes;
    bool two = false;
    Expr first, valid;             ///< of the group
    Expr first_line, valid_lines;  ///< of the outer axis, if there are two
  };
  Lines lane_lines() const { return {lanes_, two_lane_axes(), first_lane_, valid_lanes_, first_line_, valid_lines_}; }
  Lines row_lines() const;

  /// Copies a tile of an operand to buffer[k][place], with vectors along its axes; zeros up to `padded`.
  tile_ir::Block pack_lines(const Item& item, const Operand& operand, const std::string& side, const std::string& prefix, const Lines& lines,
                            Expr padded) const;
  tile_ir::Block pack_rows(const Item& item) const;
  /// Rows of bytes [row][k] for dot products of words; signed ones beside signed lanes get 128 added.
  tile_ir::Block pack_bytes(const Item& item) const;
  std::vector<Expr> outer_index(const Operand& operand) const;

  /// The lanes of one panel as they are multiplied, for all register blocks of the tile.
  Ref<tile_ir::Stmt> widen_panel(const Item& item) const;
  /// The same of words of 4-bit codes; pairs of bf16 numbers are words again.
  Ref<tile_ir::Stmt> widen_words(const Item& item) const;

  // ---- lanes in words, taken apart in registers ------------------------------------------------------------------

  /// Whether the lanes may be packed in words of such codes.
  bool can_fold(const Item& item, int64_t bits) const;
  /// Whether words of 4-bit codes may be widened a panel at a time.
  bool can_widen_words(const Item& item) const;
  bool wants_widened_words(const Item& item) const;
  /// Whether there are so few rows that words are taken apart in registers, for each of them.
  bool folds_rows(const Item& item) const;
  /// Whether such words may be multiplied as bytes.
  bool can_multiply_codes(const Item& item) const;
  /// Of `vectors` vectors.
  int64_t lanes_of(int64_t vectors) const { return vectors * (ctx_.target.vector_bytes / 4); }
  /// Lanes of an operand's panel as it is packed once.
  int64_t packed_width(const Item& item, bool lanes) const { return !lanes ? mr_ : item.bits > 0 ? item.width : nr_; }
  /// Vectors of a panel of words: sums, words in hand and what takes them apart share the registers.
  int64_t word_vectors() const { return ctx_.target.vector_registers >= 32 ? kWordVectors : kBlockVectors; }
  /// Whether all lanes may be packed in words, in panels of word_vectors() without much padding.
  bool folds_wide() const;
  /// Packs lanes in words where they may be, in blocks of k that these and their factors fit.
  void choose_words(Item& item) const;
  /// Of two and more rows that are few: chains of a part of their length, which cost nothing beside memory.
  bool three_vectors_suit_any_rows() const;
  void shorten_chains(Item& item) const;
  void choose_widened_words(Item& item) const;
  /// What makes a code of the number that a word gives: added to the sums of pairs, to each number of float32.
  static int64_t code_offset(const Item& item);
  static bool sums_rows(const Item& item);
  /// The sums of the rows over each chain, and the rows with the other sign.
  tile_ir::Block prepare_rows(const Item& item) const;
  /// Steps of k that such a loop makes with the same factors: whole words.
  static int64_t share_of_factors(const Item& item);
  /// Statements that make the lanes' scale and shift at a step of k, for the panel in hand, and their names; empty ones are 1 and 0.
  struct Factors {
    std::string scale, shift, offset;
  };
  Factors factors_of(const Item& item, Expr step, Expr lane, const std::string& suffix, tile_ir::Block& into) const;
  /// Loads of the factors at a step of k, for the panel in hand.
  std::map<std::string, loop_ir::Load> factors_at(const Item& item, const std::vector<const loop_ir::Load*>& factors, int64_t group, Expr step,
                                                  Expr lane) const;

  /// The statements that make scale and shift at a point, and their names; empty ones are 1 and 0.
  static std::pair<std::string, std::string> linear_at(const Operand::Linear& linear, const Substitution& map, const std::string& suffix,
                                                       tile_ir::Block& into);
  /// The sums of the lanes over each block of k.
  PackedOperand pack_lane_sums(const Item& item);

  /// Register blocks of rows that every block of rows has, where that is known.
  int64_t fewest_tiles() const;
  /// Brings the panel after this one nearer while line k of this one is read: the share of the register block of rows `rt`, before which there are
  /// `before` others.
  tile_ir::Block prefetch_panel(const Item& item, Expr k, Expr before = 0) const;

  /// Where the packed lanes of a panel lie; of pairs, the first or second half.
  std::vector<Expr> packed_lanes(const Item& item, Expr k, Expr lane, Expr half, int64_t part = 0) const;

  /// All register blocks of the panel in hand over one block of k.
  tile_ir::Block multiply(const Item& item, bool several) const;
  Ref<tile_ir::Stmt> over_panels(const Item& item, tile_ir::Block body) const;

  /// Blocks of mr rows next to each other, from row `first` of the tile on; of lines, the points that they share.
  struct RowBlocks {
    int64_t mr = 0;
    Expr first = 0;
    LineBlocks points = {};
    std::string suffix = {};  ///< registers need names of their own
  };

  // ---- lanes that are left out ----------------------------------------------------------------------------------

  /// Lanes of which the stores ask for no sum: those where `condition` does not hold, from `value` on, a number that is the same for a block.
  struct LaneLimit {
    std::string condition;
    std::string value;
    loop_ir::Block statements;  ///< that make the value
  };
  std::optional<LaneLimit> find_lane_limit() const;
  std::optional<LaneLimit> limit_of(const std::string& condition) const;
  /// Whether a value needs a sum where the condition `left_out` does not hold; `known`: what was found out of others.
  bool depends_on_sums(const std::string& value, const std::string& left_out, std::map<std::string, bool>& known) const;
  /// Finds out how many lanes of the block count, if some may be left out.
  tile_ir::Block limit_lanes();
  /// What a block does where only `counted_lanes_` count.
  tile_ir::Block within_limit(tile_ir::Block tile) const;
  /// Likewise one panel of lanes, as it is packed; adds what it reads to `reads`.
  tile_ir::Block pack_within_limit(tile_ir::Block panel, const std::vector<Axis>& batch, Expr panels, std::set<std::string>& reads) const;

  // ---- rows that are fetched ahead ------------------------------------------------------------------------------

  /// The statements that make the values in the place of an operand's elements: of a matrix that a tensor chooses.
  loop_ir::Block choice(const Operand& operand) const;
  /// Whether there are such values, the same for all that one iteration of the parallel loop reads.
  bool is_chosen(const Item& item, const Operand& operand) const;
  /// Iterations of the outer axes may choose the same rows: next to each other they find these in a cache.
  bool wants_outer_inside() const;
  /// Of a block of k, that of the block after it.
  Turn turn_ahead(const Item& item) const;
  static std::string ahead_suffix(const Item& item) { return ".n" + item.tag; }
  /// The values in the place of the rows of the next block.
  tile_ir::Block places_ahead(const Item& item) const;
  /// Whether the steps of k of one block fetch the rows of the next one.
  bool prefetches_rows(const Item& item) const;
  tile_ir::Block prefetch_rows(const Item& item, const RowBlocks& rows, Expr at) const;
  /// The loop over k: rows are fetched once for the steps of a line.
  Ref<tile_ir::Stmt> over_lines(const Item& item, const RowBlocks& rows, Expr first, Expr end, tile_ir::Block body) const;

  /// A step of k; of windows, it is made of a channel and two taps.
  struct Depth {
    Expr k, channel, line_tap, point_tap;
  };
  Depth depth_at(const Item& item) const;
  /// Row `row` of a register block: of windows as a line and a point of it, else in the tile.
  Expr line_of(const Item& item, const RowBlocks& rows, Expr row) const;
  static Expr point_of(const Item& item, const RowBlocks& rows, Expr row);
  static Expr row_of(const Item& item, const RowBlocks& rows, Expr row);
  /// Where that row's operand is packed; of pairs, the first or second half.
  std::vector<Expr> packed_row(const Item& item, const RowBlocks& rows, Expr row, int64_t half) const;
  /// Where a step of the block of k of a register block's row lies, of rows that are packed once.
  std::vector<Expr> static_row(const Item& item, const RowBlocks& rows, Expr step, Expr row) const;

  /// Statements for each row of a register block, then for each of its lanes.
  Ref<tile_ir::Stmt> over_registers(const Item& item, const RowBlocks& rows, const std::string& suffix, tile_ir::Block of_row,
                                    tile_ir::Block of_lane) const;
  /// One step of k for all products of a register block.
  Ref<tile_ir::Stmt> multiply_add(const Item& item, const RowBlocks& rows, const std::string& acc) const;
  /// All steps of a block of k, or of a chain of it.
  Ref<tile_ir::Stmt> over_depth(const Item& item, const RowBlocks& rows, tile_ir::Block body) const;
  static bool has_chains(const Item& item) { return item.chain < item.depth_block && !item.folded; }
  /// Whether all register blocks of a panel take one chain before the next: what they read of the panel stays in the first cache.
  static bool chains_outside(const Item& item) { return in_chunks(item) || (item.matrix && has_chains(item)); }
  Ref<tile_ir::Stmt> over_chains(const Item& item, tile_ir::Block body) const;
  /// Whether a panel is widened as much as one chain takes at a time, which stays in the first cache.
  static bool in_chunks(const Item& item) { return item.widened && has_chains(item); }
  static int64_t chunk(const Item& item) { return in_chunks(item) ? item.chain : item.depth_block; }
  /// The first step of a chunk in the block of k.
  static Expr chunk_start(const Item& item) { return in_chunks(item) ? sym("kg" + item.tag) * (item.chain / item.group()) : Expr(0); }
  tile_ir::Block add_to_tile(const Item& item, bool several, const RowBlocks& rows, const std::string& acc) const;
  tile_ir::Block register_block(const Item& item, bool several, const RowBlocks& rows) const;
  tile_ir::Block matrix_block(const Item& item, bool several, const RowBlocks& rows) const;
  tile_ir::Block folded_block(const Item& item, bool several, const RowBlocks& rows) const;
  /// Sums that a row's products with a lane are shared out to: so many chains hide the latency of multiply-adds.
  int64_t shares(const Item& item, const RowBlocks& rows) const;
  /// Adds the sums of a chain, times its factors, to the totals.
  tile_ir::Block add_chain(const Item& item, const RowBlocks& rows, const std::string& acc, const std::string& total) const;
  /// The sums of products of codes, as those of the numbers that they stand for.
  Ref<tile_ir::Stmt> scale_rows(const Item& item, const RowBlocks& rows, const std::string& total) const;
  /// One word of each lane, as bytes, times the rows' bytes.
  Ref<tile_ir::Stmt> multiply_codes(const Item& item, const RowBlocks& rows, const std::string& acc) const;
  Ref<tile_ir::Stmt> multiply_words(const Item& item, const RowBlocks& rows, const std::string& acc) const;

  /// Products of these parts of the rows and lanes, in pairs, added to buffer `c` of the tile.
  struct PartProducts {
    std::string name;  ///< of the sums
    std::string c;
    std::vector<std::pair<int64_t, int64_t>> parts;
    bool prefetch = true;
  };
  tile_ir::Block matrix_products(const Item& item, bool several, const RowBlocks& rows, const PartProducts& products) const;
  tile_ir::Block prefetch_pairs(const Item& item, Expr k) const;

  /// The sum of item's products at a place of the tile, under the name `result`.
  static void load_sum(const Item& item, const std::string& result, Expr row, Expr lane, tile_ir::Block& into);
  /// The most that the packed operands of a block of k may take, in steps of it.
  int64_t longest_block(const Item& item, int64_t rows) const;

  /// Sets how many register blocks the tile's valid rows take.
  void count_tiles();
  /// So many rows at most are left to blocks of tail_; more take one of mr_.
  int64_t tail_rows() const { return (mr_ - tail_) / tail_ * tail_; }
  Expr padded_rows() const { return tiles_ * mr_ + tails_ * tail_; }

  // ---- what remains when the sums are known -----------------------------------------------------------------------

  /// Whether the statements outside of the reductions are few and simple enough to run on register blocks: the last chain of k then ends in them.
  bool can_finish_in_registers() const;
  /// Whether that pays.
  bool wants_registers() const;
  /// Blocks of k and chains of this one that come after the one in hand.
  static Expr sums_left(const Item& item, bool several);
  /// What the epilogue will read of a register block's places, fetched while its last sums are made: rows lie far apart, so that no hardware
  /// prefetcher sees them coming.
  tile_ir::Block prefetch_finish(const Item& item, bool several, const RowBlocks& rows) const;
  /// The last sums of a register block, as they are (plus, if `more`, what the tile has), and what follows from them. `store` puts them into the
  /// tile, from where blocks that are partly padding are finished.
  tile_ir::Block finish_registers(const Item& item, const RowBlocks& rows, const std::string& acc, tile_ir::Block store, bool more) const;
  /// The row of the tile where row `row` of a register block lies.
  Expr tile_row(const Item& item, const RowBlocks& rows, Expr row) const;
  /// What the rows' axes are at a row of the tile.
  Substitution at_row(Expr row) const;

  /// Everything but the sums, over rows of the finished tile or panel, with vectors along the stores' contiguous axis.
  tile_ir::Block epilogue(Expr from, Expr to) const;
  /// Of these rows; `lanes` of the lanes, from `first` on, which the sums have at `place` on. `whole`: they are vectors.
  struct Finished {
    Expr from, to, first, lanes, place;
    bool whole = false;
  };
  tile_ir::Block epilogue(const Finished& part) const;
  /// Of one loop over rows, where their axes are `here` and the sums of row `row` in `tile_row`.
  tile_ir::Block epilogue(const Finished& part, const Substitution& here, Expr tile_row) const;

  /// The statements outside of the reductions, at one point of the tile; `sums` adds a statement for an item's sum, under a name.
  using Sums = std::function<void(const Item&, const std::string&, tile_ir::Block&)>;
  tile_ir::Block finish(const Substitution& point, const Sums& sums) const;

  const loop_ir::Kernel kernel_;
  const std::set<std::string>& statics_;
  const PassContext& ctx_;
  OuterNest nest_;
  std::vector<Contraction> contractions_;
  std::vector<Item> items_;
  std::vector<Axis> rows_, lanes_, outer_;
  std::vector<Axis> lane_class_;                   ///< the axes that only the lane operands vary along
  Axis unit_;                                      ///< the one along which most stores are contiguous
  std::optional<Window> window_;                   ///< when the rows' operand is packed as it lies under windows
  bool windowed_ = false;                          ///< asked for
  std::optional<std::set<std::string>> parallel_;  ///< asked for
  bool per_call_ = false;                          ///< lanes that change are packed once a call
  int64_t lines_ = 0, block_lines_ = 0, block_points_ = 0;
  Expr first_row_line_, valid_row_lines_;
  bool across_ = false;                       ///< lanes are off that axis: the sums are transposed at the end
  bool apart_ = false;                        ///< lanes are of that axis' class but off it: the sums are scattered at the end
  const ContractionRows* in_rows_ = nullptr;  ///< when this is a phase of a block of rows
  int64_t chunk_work_ = kChunkWork;
  bool rows_outside_ = false;  ///< blocks of rows are outside of those of lanes in the parallel loop
  bool outer_inside_ = false;  ///< the outer axes are inside of both
  bool in_registers_ = false;  ///< the epilogue runs on register blocks, not on the tile of sums
  int64_t tail_ = 0;           ///< rows of the register blocks at the end of a tile; 0: they are all alike
  int64_t mr_ = 0, nr_ = 0, row_tiles_ = 0, lane_block_ = 0, lane_lines_ = 0;
  Expr rows_extent_, lanes_extent_, row_blocks_, parallel_extent_;
  Expr first_row_, first_lane_, first_line_, valid_rows_, valid_lanes_, valid_lines_;
  std::optional<LaneLimit> limit_;
  Expr counted_lanes_;  ///< of the valid ones
  Expr tiles_, tails_;  ///< register blocks of mr_ rows, then of tail_ rows
  Substitution outer_map_;
  Ranges ranges_;
  std::string tag_;
  int64_t bits_ = 8;
  bool centered_ = false;
};

}  // namespace deplo::loop_to_tile
