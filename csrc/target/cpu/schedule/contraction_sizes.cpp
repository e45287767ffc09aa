#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "kernel_ir/ir.h"
#include "target/cpu/features.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo::loop_to_tile {
namespace {

constexpr int64_t kWholeDepth = 192;        // k is one chain of additions up to here
constexpr int64_t kChain = 128;             // beyond: chains are short
constexpr int64_t kShortChain = 32;         // of few rows, which wait for memory, and which eager mode sums by dot products of vectors: as exactly
constexpr int64_t kShortChainRows = 8;      // so few
constexpr double kWindowShare = 0.25;       // of it, that those of windows may take: far less than copies of all windows
constexpr double kCacheShare = 0.7;         // of the second cache, that the packed operands of a block of k may take
constexpr int64_t kStaticLanes = 256;       // lanes of a block whose lane operand was packed before
constexpr int64_t kCallRows = 112;          // rows of a block beside such lanes
constexpr double kCallShare = 0.11;         // of the second cache, that these may take: what comes next is fetched beside them
constexpr int64_t kCallLanes = 1024;        // lanes of a block whose lane operand a step of the call packs: they go by in panels
constexpr int64_t kStaticRows = 96;         // its rows
constexpr int64_t kWideLanes = 512;         // lanes of a block of register blocks of three vectors
constexpr int64_t kWideUnroll = 2;          // steps of k of such a register block
constexpr int64_t kMatrixDepthBlock = 512;  // KC of a matrix unit
constexpr int64_t kSplitDepthBlock = 128;   // of operands in parts: a panel's stay in L1
constexpr int64_t kLeastSplitRows = 48;     // fewer wait for memory, of which parts take more
constexpr int64_t kLeastSplitDepth = 64;    // shorter sums do not pay for making parts
constexpr int64_t kMatrixRows = 256;        // rows of a block for it: it takes panels faster than memory brings them
constexpr int64_t kMostMatrixRows = 512;    // likewise, beside lanes that the block packs
constexpr int64_t kLeastMatrixRows = 8;     // fewer leave most of it idle, and wait for memory anyway
constexpr int64_t kByteChain = 512;         // steps of k of bytes, of which a panel stays in the first cache
constexpr double kByteShare = 0.5;          // of the second cache, that their rows may take
constexpr int64_t kMatrixPadding = 32;      // bf16 elements, a line: keeps rows whole lines off each other's cache sets
constexpr int64_t kDynamicLanes = 256;      // lanes of a block that packs its lane operand
constexpr int64_t kNarrowLanes = 96;        // its lanes at least
constexpr int64_t kLeastRows = 128;         // its rows at least where few blocks would leave threads idle
constexpr int64_t kTileElements = 1 << 17;  // of the tile of sums: it shares L2 with the packed operands
constexpr int64_t kWidenedTiles = 3;        // register blocks of a tile that pay for widening a panel beforehand
constexpr int64_t kWideRows = 4;            // up to here, loads of the rows cost more than what is multiplied, unless many lanes share them
constexpr int64_t kFewRows = 32;            // up to which a program of few rows, of any number, has blocks of its own
constexpr int64_t kTailRows = 4;            // of the register blocks that end a tile of any size: fewer hide less of the latency
constexpr int64_t kFewBlocks = 4;           // fewer parallel iterations leave one of a few threads idle for long
constexpr int64_t kWantedBlocks = 8;        // parallel iterations that keep a few threads busy
constexpr int64_t kManyBlocks = 512;        // parallel iterations that any number of threads shares well
constexpr double kBetterShare = 0.97;       // gain that pays for lanes of another width than the usual

/// a cut into equal parts of at most `most`: the size of a part.
int64_t balanced(int64_t a, int64_t most) {
  int64_t parts = (a + most - 1) / most;
  return (a + parts - 1) / parts;
}

int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// How much longer all threads are busy than if blocks were shared out evenly, on average over 2, 4 and 8 of them: `outer` times `panels` in groups
/// of p, each times `tiles` in groups of q, in this order.
double idle_share(int64_t outer, int64_t panels, int64_t p, int64_t tiles, int64_t q) {
  const int64_t groups = (panels + p - 1) / p;
  const int64_t blocks = (tiles + q - 1) / q;
  const int64_t trips = outer * groups * blocks;
  if (trips > kManyBlocks) return 1;
  auto work = [&](int64_t i) { return std::min(p, panels - i / blocks % groups * p) * std::min(q, tiles - i % blocks * q); };
  double sum = 0;
  for (int64_t threads : {2, 4, 8}) {
    int64_t longest = 0;
    for (int64_t t = 0; t < threads; ++t) {
      int64_t mine = 0;
      for (int64_t i = trips * t / threads; i < trips * (t + 1) / threads; ++i) mine += work(i);
      longest = std::max(longest, mine);
    }
    sum += static_cast<double>(threads * longest) / static_cast<double>(outer * panels * tiles);
  }
  return sum / 3;
}

/// A block of k that holds whole runs of its inner axes, so that its elements lie in lines: m times the extents of some innermost axes, where m
/// divides the next one's. Nothing if none is near the size that is wanted.
std::optional<int64_t> whole_lines(const std::vector<Axis>& axes, int64_t wanted) {
  std::optional<int64_t> best;
  int64_t inner = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    if (!axes[i].extent.is_constant()) break;
    const int64_t extent = axes[i].extent.value();
    for (int64_t m = 1; m <= extent && m * inner <= wanted; ++m)
      if (extent % m == 0 && (!best || m * inner > *best)) best = m * inner;
    inner *= extent;
  }
  return best && *best >= wanted / 2 ? best : std::nullopt;
}

/// Rows of a register block at most, of `vectors` each, beside the registers that hold operands.
int64_t most_register_rows(int64_t vectors, const PassContext& ctx) {
  return (ctx.target.vector_registers - 1 - std::max<int64_t>(vectors, 2)) / vectors;
}

/// The same beside numbers that take words apart, which code generation keeps in registers where there are many.
int64_t most_widened_rows(int64_t vectors, const PassContext& ctx) {
  constexpr int64_t kNumbers = 4;
  const int64_t most = most_register_rows(vectors, ctx);
  return ctx.target.vector_registers < 32 ? most : std::max<int64_t>(1, most - (kNumbers + vectors - 1) / vectors);
}

/// The same beside bytes that are taken apart into halves of words: those of the lanes, and of one row.
int64_t most_split_rows(int64_t vectors, const PassContext& ctx) {
  constexpr int64_t kOfRow = 3;
  return std::max<int64_t>(1, (ctx.target.vector_registers - kOfRow - 2 * vectors) / vectors);
}

}  // namespace

/// What `rows` rows cost in register blocks of mr: little where little is padding, each row of lanes that is read serves many, and enough
/// sums are independent of one another to hide the latency of multiply-adds. The constants fit what blocks of 4 to 14 rows took on Zen 4,
/// with AVX2 and AVX-512, and kChains what convolutions over lines of 7 points took in blocks of 4 and 3.
double block_overhead(int64_t mr, int64_t vectors, double load_cost) {
  constexpr double kReload = 1.2;  // cost of reading the lanes, in rows
  constexpr double kChains = 8;    // vectors of sums that hide the latency
  const auto m = static_cast<double>(mr);
  const auto v = static_cast<double>(vectors);
  return (1 + kReload / m) * std::max(1.0, kChains / (m * v)) * (1 + load_cost / v);
}
double block_cost(int64_t rows, int64_t mr, int64_t vectors, double load_cost) {
  return static_cast<double>(round_up(rows, mr)) * block_overhead(mr, vectors, load_cost);
}

namespace {

/// Rows of a register block, of at most `most`, that suit `rows` rows.
int64_t balanced_rows(int64_t rows, int64_t most, int64_t vectors) {
  if (rows <= most) return std::max<int64_t>(rows, 1);
  int64_t best = most;
  for (int64_t mr = most; mr >= std::min<int64_t>(most, 4); --mr)
    if (block_cost(rows, mr, vectors, 0) < block_cost(rows, best, vectors, 0)) best = mr;
  return best;
}

}  // namespace

int64_t register_rows(int64_t rows, int64_t vectors, const PassContext& ctx) {
  return balanced_rows(rows, most_register_rows(vectors, ctx), vectors);
}

void ContractionScheduler::choose_sizes() {
  choose_blocks(kBlockVectors);
  // Lanes that are a call's own rows, or the channels of a group, may be few.
  if ((window_ || (per_call_ && across_)) && lanes_extent_.is_constant()) {
    // One vector of lanes is read for each row, which takes longer unless it saves padding: measured for 16 and for 32 registers.
    const double narrow = items_[0].pairs ? 1.5 : ctx_.target.vector_registers < 32 ? 1.4 : 1.15;
    int64_t best = kBlockVectors;
    auto share = [&] { return window_ ? block_share(lane_block_) : 1; };
    double least = padded_work() * share();
    for (int64_t vectors : {kBlockVectors - 1, kBlockVectors + 1}) {
      choose_blocks(vectors);
      const double work = padded_work() * share() * (vectors < kBlockVectors ? narrow : 1);
      if (work >= least) continue;
      best = vectors;
      least = work;
    }
    choose_blocks(best);
  }
  // Three vectors of fewer rows load less for each multiply-add, where their lanes are not many more. Panels of words are as wide whatever the rows.
  const bool words = std::any_of(items_.begin(), items_.end(), [&](const Item& i) { return can_fold(i, 8) || can_widen_words(i); });
  if (ctx_.target.load_cost > 0 && lanes_static() && !per_call_ && !in_rows_ && !window_ && items_[0].group() == 1 && !words) {
    const double narrow = padded_work() * block_share(lane_block_);
    choose_blocks(kBlockVectors + 1);
    const bool wide = rows_extent_.is_constant() ? padded_work() * block_share(lane_block_) < narrow : three_vectors_suit_any_rows();
    if (!wide) choose_blocks(kBlockVectors);
  }
  if (folds_wide() && rows_extent_.is_constant() && rows_extent_.value() <= kWideRows) choose_blocks(word_vectors());
  for (Item& item : items_) {
    choose_words(item);
    item.widened = !item.folded && can_widen(item) && (item.bits > 0 || item.needs_widening() || hint(tile_rows()) / mr_ >= kWidenedTiles);
  }
  for (Item& item : items_) shorten_chains(item);
  choose_in_place();
  for (Item& item : items_) {
    item.rows.in_lines = !item.rows.in_place && wants_lines(item);
    if (item.rows.in_lines) item.rows.padding = spread(row_tiles_ * mr_ + kRowPadding) - row_tiles_ * mr_;
  }
  in_registers_ = wants_registers();
  rows_outside_ = wants_rows_outside();
  outer_inside_ = wants_outer_inside();
}

/// Programs for few and for many rows read one pack, so that the lanes alone decide; those of pairs are as wide as a matrix unit's.
bool ContractionScheduler::three_vectors_suit_any_rows() const {
  if (std::any_of(items_.begin(), items_.end(), [](const Item& i) { return i.pairs || i.matrix; })) return false;
  const auto cost = [&](int64_t vectors) {
    const int64_t width = vectors * (ctx_.target.vector_bytes / 4);
    return static_cast<double>(round_up(hint(lanes_extent_), width)) *
           block_overhead(most_register_rows(vectors, ctx_), vectors, ctx_.target.load_cost);
  };
  return cost(kBlockVectors + 1) < cost(kBlockVectors);
}

void ContractionScheduler::shorten_chains(Item& item) const {
  const bool few = rows_extent_.is_constant() && rows_extent_.value() > 1 && rows_extent_.value() <= kShortChainRows;
  if (!few || window_ || item.dtype() != DType::f32 || item.pairs || item.matrix || item.parts > 1 || item.bytes) return;
  if (item.folded && sums_rows(item)) return;  // each chain then ends with a difference
  const int64_t unit = std::max(kDepthUnroll, item.word());
  const int64_t chain = item.chain;
  if (!item.folded && !item.widened) {
    item.chain = std::min(chain, round_up(balanced(item.depth_block, kShortChain), unit));
    return;
  }
  // Words and groups of quantised weights end where chains do. Many short ones would be no more exact than one.
  for (item.chain = std::min(chain, kShortChain) / unit * unit; item.chain >= kShortChain / 2; item.chain -= unit)
    if (chain % item.chain == 0) return;
  item.chain = chain;
}

bool ContractionScheduler::wants_rows_outside() const {
  if (in_rows_ || !lanes_static() || two_lane_axes()) return false;
  if (per_call_ || !rows_extent_.is_constant()) return false;
  // Each thread reads all of what the lanes are made of, and kernels that follow one another have the same points in a thread's cache: rows that it
  // would read of what others wrote, or write for others to read, outweigh that.
  constexpr double kWeights = 2;  // cost of reading an element of weights twice, beside that of moving one from thread to thread
  const auto points = static_cast<double>(hint(rows_extent_));
  const auto lanes = static_cast<double>(hint(lanes_extent_));
  const auto depth = static_cast<double>(hint(items_[0].depth));
  return points * (lanes + (window_ ? depth / static_cast<double>(window_->taps()) : depth)) > kWeights * lanes * depth;
}

int64_t ContractionScheduler::call_blocks() const { return hint(lanes_extent_) > kDynamicLanes ? 2 : 1; }

double ContractionScheduler::block_share(int64_t lane_block) const {
  // Cost of packing an element of the rows, in multiply-adds: of one in parts, when a matrix unit makes these.
  constexpr double kRowCopy = 8;
  constexpr double kRowSplit = 48;
  if (!lanes_static() || two_lane_axes() || !lanes_extent_.is_constant() || !rows_extent_.is_constant()) return 1;
  const int64_t panels = (lanes_extent_.value() + nr_ - 1) / nr_;
  const int64_t tiles = window_ ? (rows_[0].extent.value() + block_lines_ - 1) / block_lines_ : (rows_extent_.value() + mr_ - 1) / mr_;
  const double idle =
      idle_share(std::max<int64_t>(1, hint(count(outer_))), panels, lane_block / nr_, tiles, window_ ? lines_ / block_lines_ : row_tiles_);
  return idle * (1 + (items_[0].parts > 1 ? kRowSplit : kRowCopy) / static_cast<double>(lane_block));
}

void ContractionScheduler::share_rows() {
  // Cost of another block beside that of its multiply-adds: each starts with rows that nothing fetched for it.
  constexpr double kBlock = 0.01;
  const int64_t all = (rows_extent_.value() + mr_ - 1) / mr_;
  const int64_t others = std::max<int64_t>(1, hint(count(outer_) * lane_groups()));
  const int64_t usual = row_tiles_;
  auto share = [&](int64_t tiles) {
    return idle_share(others, 1, 1, all, tiles) * (1 + kBlock * static_cast<double>(usual) / static_cast<double>(tiles));
  };
  for (int64_t tiles = std::max<int64_t>(1, usual / 3); tiles <= usual; ++tiles)
    if (share(tiles) < share(row_tiles_)) row_tiles_ = tiles;
}

void ContractionScheduler::share_tiles() {
  constexpr double kBlock = 3;  // cost of another block in rows: it brings the lanes from the second cache again
  if (hint(count(outer_) * rows_extent_ * lanes_extent_ * items_[0].depth) < kWantedBlocks * kChunkWork) return;
  const int64_t most_tiles = row_tiles_;
  const int64_t most_lanes = lane_block_;
  int64_t best_tiles = most_tiles;
  double best = kBetterShare * block_share(most_lanes);
  for (int64_t lanes = most_lanes; lanes >= nr_; lanes -= nr_)
    for (row_tiles_ = most_tiles; row_tiles_ >= 1; --row_tiles_) {
      const double share = block_share(lanes) * (1 + kBlock / static_cast<double>(row_tiles_ * mr_));
      if (share >= best) continue;
      best = share;
      best_tiles = row_tiles_;
      lane_block_ = lanes;
    }
  row_tiles_ = best_tiles;
}

void ContractionScheduler::share_lanes() {
  if (hint(count(outer_) * rows_extent_ * lanes_extent_ * items_[0].depth) < kWantedBlocks * kChunkWork) return;
  const int64_t usual = lane_block_;
  double best = kBetterShare * block_share(usual);
  for (int64_t lanes = round_up(usual / 2, nr_); lanes <= 2 * usual; lanes += nr_) {
    if (const double share = block_share(lanes); share < best) {
      best = share;
      lane_block_ = lanes;
    }
  }
}

void ContractionScheduler::choose_blocks(int64_t vectors) {
  nr_ = vectors * (ctx_.target.vector_bytes / 4);
  tail_ = 0;
  // One version serves all sizes beyond a few rows.
  int64_t rows = rows_extent_.is_constant() ? rows_extent_.value() : std::max(hint(rows_extent_), kDynamicRows);
  mr_ = rows_extent_.is_constant() ? register_rows(rows, vectors, ctx_) : most_register_rows(vectors, ctx_);
  // Of few rows, half of such a block would be padding.
  if (const auto few = bounds(rows_extent_, ranges_).hi; few && *few <= kFewRows && !rows_extent_.is_constant())
    mr_ = std::min({mr_, std::max<int64_t>(*few, 1), 2 * kTailRows});
  for (Item& item : items_) {
    item.bytes = can_multiply_codes(item);
    item.pairs = !item.bytes && ctx_.target.features.count("avx512bf16") > 0 && can_pair(item);
    item.words = item.dtype() == DType::i32;
    // One addition brings a pair of products.
    const int64_t additions = item.pairs ? 2 : 1;
    const int64_t whole = additions * kWholeDepth;
    const int64_t most = std::max(whole, longest_block(item, rows));
    int64_t depth = hint(item.depth);
    item.chain = additions * kChain;
    if (item.words) {  // exact in any order
      const int64_t unit = depth % tile_ir::kMatrixBytes == 0 ? tile_ir::kMatrixBytes : 4;
      item.depth_block = round_up(balanced(depth, most / unit * unit), unit);
      const auto& axes = item.contraction->reduce->axes;
      if (const auto lines = whole_lines(axes, most); axes.size() > 1 && lines && *lines % 4 == 0) item.depth_block = *lines;
      item.chain = item.depth_block;
      continue;
    }
    item.depth_block = item.depth.is_constant() && depth <= whole ? round_up(std::max<int64_t>(depth, 1), additions) : most / item.chain * item.chain;
    if (item.depth.is_constant() && depth <= whole) item.chain = item.depth_block;
    if (!item.depth.is_constant() || depth <= whole) continue;
    item.depth_block = round_up(balanced(depth, most), kDepthUnroll);
    item.chain = round_up(balanced(item.depth_block, item.chain), kDepthUnroll);
    const auto& axes = item.summed;
    // Rows that are packed per block are packed with vectors along k.
    if (axes.size() > 1 && !item.rows.is_static && !rows_lie_across())
      if (const auto lines = whole_lines(axes, most); lines && *lines % additions == 0) item.depth_block = *lines;
    item.chain = std::min(item.chain, item.depth_block);
  }
  const bool split_bytes = !has_byte_products(ctx_.target.features);
  if (split_bytes && std::any_of(items_.begin(), items_.end(), [](const Item& i) { return i.words || i.bytes; }))
    mr_ = std::min(mr_, balanced_rows(rows, most_split_rows(vectors, ctx_), vectors));
  if (std::any_of(items_.begin(), items_.end(), [&](const Item& i) { return wants_widened_words(i); }))
    mr_ = std::min(mr_, most_widened_rows(vectors, ctx_));
  // Unrolled steps of bytes that are taken apart keep more sums in flight than there are registers: LLVM adds them up by themselves.
  for (Item& item : items_) item.unroll = split_bytes && (item.words || item.bytes) ? 1 : vectors > kBlockVectors ? kWideUnroll : kDepthUnroll;
  // Of a unit's steps of k, half and more are no padding.
  const bool matrix = std::all_of(items_.begin(), items_.end(), [&](const Item& i) {
    if (i.words) return can_use_matrix(i);
    return i.pairs && can_use_matrix(i) && 2 * hint(i.depth) >= tile_ir::kMatrixDepth && !is_stored_below(i, DType::bf16);
  });
  for (Item& item : items_) item.matrix = matrix && rows >= kLeastMatrixRows;
  // In training, whose weights change, making their parts in each step takes longer than these save. Where calls of few rows are served as well,
  // these read numbers that are packed whole: parts would be a second copy.
  const bool split = !ctx_.training && rows_extent_.is_constant() && hint(rows_extent_) >= kLeastSplitRows &&
                     std::all_of(items_.begin(), items_.end(), [&](const Item& i) { return can_split(i) && i.depth.value() >= kLeastSplitDepth; });
  for (Item& item : items_) {
    item.parts = split ? kParts : 1;
    if (split) item.pairs = item.matrix = true;
  }
  if (items_[0].matrix) choose_matrix_blocks(rows);
  choose_lane_block();
  if (window_) {
    choose_window_sizes();
    return;
  }
  if (in_rows_) {
    mr_ = register_rows(in_rows_->count, vectors, ctx_);
    row_tiles_ = (in_rows_->count + mr_ - 1) / mr_;
    return;
  }
  if (rows_lie_across()) {
    row_tiles_ = (rows + mr_ - 1) / mr_;
    if (lanes_static() && !per_call_ && rows_.size() == 1) share_tiles();
    for (Item& item : items_) item.rows.padding = spread(row_tiles_ * mr_ + kRowPadding) - row_tiles_ * mr_;
    return;
  }
  int64_t most = items_[0].matrix       ? most_matrix_rows()
                 : per_call_ && across_ ? call_blocks() * kCallRows
                 : lanes_static()       ? kStaticRows
                                        : kDynamicRows;
  bool rows_static = std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.rows.is_static; });
  if (rows_static && !lanes_static()) {
    // Every block of rows packs the lanes anew: one block takes all rows, unless that leaves too few blocks.
    int64_t others = std::max<int64_t>(1, hint(count(outer_) * lane_groups()));
    int64_t blocks = (kWantedBlocks + others - 1) / others;
    most = std::min(std::max(kLeastRows, (rows + blocks - 1) / blocks), std::max(kDynamicRows, kTileElements / lane_block_));
  }
  if (items_[0].matrix && !lanes_static()) {
    // More rows share the lanes that a block packs, where enough blocks are left.
    const int64_t others = std::max<int64_t>(1, hint(count(outer_) * lane_groups()));
    most = std::clamp(rows * others / kWantedBlocks, kMatrixRows, kMostMatrixRows);
  }
  int64_t tiles = std::max<int64_t>(1, most / mr_);
  if (rows_extent_.is_constant()) tiles = balanced((rows + mr_ - 1) / mr_, tiles);
  row_tiles_ = tiles;
  if (per_call_ && rows_extent_.is_constant() && (across_ || !rows_static)) share_rows();
  if (lanes_static() && !across_ && !per_call_) share_lanes();
  const bool any_size = !rows_extent_.is_constant() && std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.rows.is_static; });
  if (any_size && items_[0].matrix)
    tail_ = tile_ir::kMatrixSide;
  else if (any_size && mr_ >= 2 * kTailRows)
    tail_ = kTailRows;
}

int64_t ContractionScheduler::longest_block(const Item& item, int64_t rows) const {
  // Of each step: the rows of a tile, the panel in hand and the next one, and lanes that are packed for the block.
  const int64_t size = 4 / item.group();
  if (per_call_ && across_ && !item.rows.is_static)
    return static_cast<int64_t>(kCallShare * static_cast<double>(ctx_.target.l2_bytes) / static_cast<double>(size * kCallRows));
  // Words lie alike whatever the rows.
  const int64_t wanted = item.words ? kStaticRows : in_rows_ ? in_rows_->count : rows;
  const int64_t packed_rows = std::min(wanted, lanes_static() ? kStaticRows : kDynamicRows);
  const int64_t lanes = lanes_static() ? 2 * nr_ : std::min(kDynamicLanes, std::max(hint(lanes_extent_), nr_));
  const double bytes = static_cast<double>(size * (packed_rows + lanes));
  return static_cast<int64_t>(kCacheShare * static_cast<double>(ctx_.target.l2_bytes) / bytes);
}

bool ContractionScheduler::can_widen(const Item& item) {
  const bool fits = item.lanes.is_static && item.dtype() == DType::f32 && item.packed_lanes() && !item.matrix;
  return fits && (item.group() == 1 || item.needs_widening());
}

bool ContractionScheduler::lies_for_pairs(const Item& item) const {
  const bool packed = item.lanes.is_static && !item.rows.is_static;
  return packed && !in_rows_ && !rows_lie_across() && !window_ && item.depth.is_constant();
}

bool ContractionScheduler::can_word(const Item& item) const {
  if (!lies_for_pairs(item) || item.dtype() != DType::i32 || item.depth.value() % 4 != 0) return false;
  const auto rows = item.rows.narrow();
  const auto lanes = item.lanes.narrow();
  return rows && lanes && (rows->dtype == DType::i8 || lanes->dtype == DType::i8);
}

bool ContractionScheduler::can_pair(const Item& item) const {
  if (in_rows_ || (rows_lie_across() && !window_)) return false;
  auto is_bf16 = [](const Operand& operand) {
    auto narrow = operand.narrow();
    return narrow && narrow->dtype == DType::bf16;
  };
  if (!is_bf16(item.rows) || !is_bf16(item.lanes)) return false;
  if (window_) {
    const bool plain = item.lanes.is_static && item.lanes.stored()->dtype == DType::bf16 && !item.lanes.prologue(item.contraction->reduce->axes);
    return plain && !window_->channels.empty() && count(window_->channels).is_constant();
  }
  if (!item.lanes.is_static) return true;
  // A group's factors are those of both steps of a pair, and what is widened to pairs are whole ones.
  if (const auto scaled = item.lanes.prologue(item.contraction->reduce->axes)) return scaled->group % 2 == 0;
  return (item.depth.is_constant() && item.depth.value() % 2 == 0) || item.lanes.stored()->dtype == DType::bf16;
}

bool ContractionScheduler::can_pack_in_lines(const Item& item) const {
  const bool plain = item.group() == 1 && item.parts == 1 && !item.matrix && !item.folded && item.dtype() == DType::f32;
  return plain && !item.rows.is_static && !across_ && !window_ && !in_rows_ && rows_.size() == 1;
}

bool ContractionScheduler::lies_in_rows(const Item& item) const {
  const bool plain = item.group() == 1 && item.parts == 1 && !item.matrix && item.dtype() == DType::f32 && !item.folded;
  if (!plain || in_rows_ || window_ || per_call_ || item.rows.is_static || !item.lanes.is_static || rows_lie_across()) return false;
  const loop_ir::Load* load = main_load(item.rows);
  const bool alone = load && item.rows.statements_of(item.rows.source->value).size() == 1;
  return alone && load->dtype == DType::f32 && load->guard.empty() && knows_place(item.rows) && lies_along(item.rows, item.contraction->reduce->axes);
}

bool ContractionScheduler::can_read_in_place(const Item& item) const {
  return lies_in_rows(item) && rows_extent_.is_constant() && rows_extent_.value() % mr_ == 0 && tail_ == 0;
}

void ContractionScheduler::choose_in_place() {
  constexpr int64_t kSets = 2048;    // bytes from row to row of which multiples share too few sets of the first cache
  constexpr double kPadding = 1.06;  // cost of other register blocks that pays
  constexpr int64_t kLeastBlock = 4;
  constexpr int64_t kFewLanes = 256;  // that share what is packed
  if (!rows_extent_.is_constant() || rows_.size() != 1 || across_) return;
  const bool in_cache = hint(tile_rows() * items_[0].depth) * 4 <= ctx_.target.l1_bytes;
  if (!wants_rows_outside() && (in_cache || hint(lanes_extent_) > kFewLanes)) return;
  for (const Item& item : items_) {
    if (!lies_in_rows(item)) return;
    const auto step = step_along(item.rows, rows_[0].name);
    if (!step || !step->is_constant() || step->value() * 4 % kSets == 0) return;
  }
  const int64_t rows = rows_extent_.value();
  const int64_t tile = row_tiles_ * mr_;
  int64_t best = 0;
  for (int64_t mr = mr_; mr >= kLeastBlock && best == 0; --mr)
    if (rows % mr == 0 && block_cost(rows, mr, block_vectors(), 0) <= kPadding * block_cost(rows, mr_, block_vectors(), 0)) best = mr;
  if (best == 0) return;
  mr_ = best;
  const int64_t all = rows / mr_;
  const int64_t usual = balanced(all, std::max<int64_t>(1, tile / mr_));
  row_tiles_ = usual;
  // Nothing is packed for a block, so that small ones are no loss: threads share them evenly, as they share the lines of the kernels around.
  constexpr double kBlock = 0.03;  // of the time that a register block takes: what a block costs more
  const bool outside = wants_rows_outside();
  const int64_t others = std::max<int64_t>(1, hint(count(outer_)));
  const int64_t panels = ceil_of(hint(lanes_extent_), nr_);
  if (outside && lanes_extent_.is_constant()) lane_block_ = round_up(lanes_extent_.value(), nr_);
  auto share = [&](int64_t lanes, int64_t tiles) {
    const double idle = outside ? idle_share(others, 1, 1, all, tiles) : idle_share(others, panels, lanes / nr_, all, tiles);
    return idle * (1 + kBlock / static_cast<double>(tiles)) * (1 + kBlock * static_cast<double>(nr_) / static_cast<double>(lanes));
  };
  double least = share(lane_block_, row_tiles_);
  const int64_t widest = lane_block_;
  for (int64_t lanes = widest; lanes >= (outside ? widest : nr_); lanes -= nr_)
    for (int64_t tiles = usual; tiles >= 1; --tiles) {
      if (share(lanes, tiles) >= least) continue;
      least = share(lanes, tiles);
      lane_block_ = lanes;
      row_tiles_ = tiles;
    }
  for (Item& item : items_) item.rows.in_place = true;
}

bool ContractionScheduler::can_use_matrix(const Item& item) const {
  if (item.words) {
    const bool whole = can_word(item) && item.depth.value() % tile_ir::kMatrixBytes == 0 && item.depth_block % tile_ir::kMatrixBytes == 0;
    return whole && ctx_.target.features.count("amx-int8") > 0;
  }
  return ctx_.target.features.count("amx-bf16") > 0 && !window_ && can_pair(item);
}

bool ContractionScheduler::is_stored_below(const Item& item, DType dtype) {
  const loop_ir::Block& lanes = item.lanes.slice;
  return std::any_of(lanes.begin(), lanes.end(), [&](const auto& s) {
    const auto* load = std::get_if<loop_ir::Load>(&s->node);
    return load && size_of(load->dtype) < size_of(dtype);
  });
}

bool ContractionScheduler::can_split(const Item& item) const {
  const auto& features = ctx_.target.features;
  return !is_stored_below(item, DType::f32) && features.count("amx-bf16") > 0 && features.count("avx512bf16") > 0 && lies_for_pairs(item) &&
         !item.rows.narrow() && !item.lanes.narrow() && item.contraction->reduce->axes.size() == 1 && item.depth.value() % tile_ir::kMatrixDepth == 0;
}

void ContractionScheduler::choose_matrix_blocks(int64_t rows) {
  constexpr int64_t side = tile_ir::kMatrixSide;
  nr_ = 2 * side;
  // Two registers of rows use each register of lanes twice.
  mr_ = rows <= side || (rows <= 3 * side && rows > 2 * side) ? side : 2 * side;
  for (Item& item : items_) {
    item.unroll = 1;
    if (item.words) {  // in blocks of k as without it: programs of few rows read the same panels
      item.chain = item.depth_block > kByteChain ? round_up(balanced(item.depth_block, kByteChain), tile_ir::kMatrixBytes) : item.depth_block;
      continue;
    }
    const int64_t most = item.parts > 1 ? kSplitDepthBlock : kMatrixDepthBlock;
    int64_t block = item.lanes.is_static ? std::min(hint(item.depth), most) : balanced(hint(item.depth), most);
    // Whole lines of memory, if these are whole steps of the unit.
    const Axis& inner = item.summed.back();
    if (item.summed.size() > 1 && inner.extent.is_constant() && inner.extent.value() % tile_ir::kMatrixDepth == 0 && inner.extent.value() <= most)
      block =
          balanced(item.depth.is_constant() ? item.depth.value() / inner.extent.value() : most / inner.extent.value(), most / inner.extent.value()) *
          inner.extent.value();
    item.depth_block = item.depth.is_constant() ? round_up(block, tile_ir::kMatrixDepth) : most;
    item.chain = item.depth_block;
    item.rows.padding = kMatrixPadding;
  }
}

int64_t ContractionScheduler::most_matrix_rows() const {
  if (!items_[0].words) return kMatrixRows;
  int64_t bytes = 0;
  for (const Item& item : items_) bytes = std::max(bytes, item.depth_block);
  const auto fit = static_cast<int64_t>(kByteShare * static_cast<double>(ctx_.target.l2_bytes)) / bytes;
  return std::clamp(fit / mr_ * mr_, mr_, kMatrixRows);
}

void ContractionScheduler::choose_window_sizes() {
  const int64_t most = most_register_rows(block_vectors(), ctx_);
  const int64_t lines = std::max<int64_t>(1, hint(window_->line.axis.extent));
  const int64_t points = std::max<int64_t>(1, hint(window_->point.axis.extent));
  double best = 0;
  for (int64_t dx = 1; dx <= std::min(most, points); ++dx)
    for (int64_t dy = 1; dy * dx <= most && dy <= lines && (dy == 1 || (dx == points && !any_points())); ++dy) {
      double cost = window_cost(dy, dx);
      if (best != 0 && cost >= best) continue;
      best = cost;
      block_lines_ = dy;
      block_points_ = dx;
    }
  mr_ = block_lines_ * block_points_;
  lines_ = round_up(balanced(lines, std::max<int64_t>(1, kDynamicRows / points)), block_lines_);
  Item& item = items_[0];
  pair_channels(item);
  const int64_t steps = window_steps(item);
  const int64_t channels = std::max<int64_t>(1, kChain / window_->taps());
  // Of each channel, or pair of them: the points under the block of lines, the panel in hand and the next one.
  const int64_t bytes = 4 * (hint(window_->line.span(lines_) * window_->point.span(points)) + 2 * nr_ * window_->taps());
  const int64_t longest = std::max(channels, static_cast<int64_t>(kWindowShare * static_cast<double>(ctx_.target.l2_bytes)) / bytes);
  const Expr all = ceildiv(count(window_->channels), item.group());
  const bool whole = all.is_constant() && all.value() * window_->taps() <= kWholeDepth;
  const int64_t block = !all.is_constant() ? longest : balanced(all.value(), whole ? all.value() : longest);
  item.depth_block = steps * block;
  item.chain = whole ? item.depth_block : steps * balanced(block, channels);
  item.unroll = window_->point.taps > 1 ? std::min(window_->point.taps, kMostUnroll) : kDepthUnroll;
  // Packing for fewer lanes costs little, idle threads much.
  while (lane_block_ > nr_ && hint(count(outer_) * lane_groups()) * ((lines + lines_ - 1) / lines_) < kWantedBlocks)
    lane_block_ = round_up(lane_block_ / 2, nr_);
}

std::vector<ContractionScheduler::LineBlocks> ContractionScheduler::line_blocks(int64_t most) const {
  if (any_points()) {
    const Expr points = rows_[1].extent;
    if (most <= kTailRows) return {{0, ceildiv(points, most), most}};
    const Expr whole = floordiv(points, most) * most;
    return {{0, floordiv(points, most), most}, {whole, ceildiv(points - whole, kTailRows), kTailRows}};
  }
  const int64_t points = window_->point.axis.extent.value();
  const int64_t count = (points + most - 1) / most;
  const int64_t larger = points % count;
  std::vector<LineBlocks> out;
  if (larger > 0) out.push_back({0, larger, points / count + 1});
  out.push_back({larger * (points / count + 1), count - larger, points / count});
  return out;
}

Expr ContractionScheduler::tile_points() const {
  if (!any_points()) return rows_[1].extent;
  const LineBlocks last = line_blocks(block_points_).back();
  return last.first + last.count * last.points;
}

double ContractionScheduler::window_cost(int64_t lines, int64_t points) const {
  double cost = 0;
  for (const LineBlocks& b : line_blocks(points))
    cost += static_cast<double>(hint(b.count) * b.points) *
            block_overhead(lines * b.points, block_vectors(), items_[0].pairs ? 0 : ctx_.target.load_cost);
  return cost * static_cast<double>(round_up(hint(window_->line.axis.extent), lines));
}

void ContractionScheduler::choose_lane_block() {
  if (two_lane_axes()) {
    int64_t inner = lanes_.back().extent.value();
    lane_lines_ = lines_of_block(inner);
    lane_block_ = round_up(lane_lines_ * inner, nr_);
  } else {
    int64_t widest = per_call_ ? kCallLanes : across_ ? kLeastRows : lanes_static() ? kStaticLanes : kDynamicLanes;
    if (!across_ && lanes_static() && block_vectors() > kBlockVectors) widest = kWideLanes;
    lane_block_ = lanes_extent_.is_constant() ? round_up(balanced(lanes_extent_.value(), widest), nr_) : widest;
    if (across_ || lanes_static() || in_rows_) return;
    // Narrow blocks pack the rows more often, too few leave threads idle.
    int64_t others = std::max<int64_t>(1, hint(count(outer_) * ceildiv(rows_extent_, kDynamicRows / mr_ * mr_)));
    int64_t groups = (kFewBlocks + others - 1) / others;
    int64_t narrow = std::max(kNarrowLanes, balanced(hint(lanes_extent_), std::max<int64_t>(1, hint(lanes_extent_) / groups)));
    if (lanes_extent_.is_constant()) lane_block_ = std::min(lane_block_, round_up(balanced(lanes_extent_.value(), narrow), nr_));
  }
}

int64_t ContractionScheduler::lines_of_block(int64_t inner) const {
  int64_t widest = std::max<int64_t>(1, kDynamicLanes / inner);
  if (!lanes_[0].extent.is_constant()) return widest;
  int64_t all = lanes_[0].extent.value();
  auto padded = [&](int64_t lines) { return all / lines * round_up(lines * inner, nr_) + round_up(all % lines * inner, nr_); };
  int64_t best = balanced(all, widest);
  for (int64_t lines = best + 1; lines <= std::min(all, widest); ++lines)
    if (padded(lines) < padded(best)) best = lines;
  return best;
}

}  // namespace deplo::loop_to_tile
