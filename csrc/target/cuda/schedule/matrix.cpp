#include "target/cuda/schedule/matrix.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "analysis/cost.h"
#include "base/error.h"
#include "target/cuda/devices.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/raster.h"
#include "target/cuda/schedule/tf32.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kStages[] = {3, 4, 6, 8};
constexpr int64_t kSteps[] = {32, 64, 128};  // of k per stage
// More of either is for few rows, whose columns' operand streams by: what matters is how much of it is on its way.
constexpr int64_t kMostStagesOfTiles = 4, kMostStepOfTiles = 64;
constexpr int64_t kSplits[] = {1, 2, 4, 8};  // of k, between warps
constexpr int64_t kRaster = 8;               // rows of tiles that blocks make one after the other: their columns' tiles stay in the L2

// What a schedule may ask for.
constexpr int64_t kMostTile = 256, kMostWarps = 16, kMostStages = 8, kMostRaster = 64, kMostSplit = 16;
constexpr int64_t kMostSplitWarps = 8, kMostSplitRows = 64;  // of what is proposed
constexpr int64_t kMostSums = 128;                           // of a thread
constexpr int64_t kFactors = 32;                             // registers of factors that are left beside so many sums
constexpr int64_t kWidestLanes = 8;

// Of the costs below.
constexpr double kLatency = 700;         // clocks until a copy is there
constexpr double kL2BytesPerClock = 40;  // for each SM
constexpr double kSharedBytesPerClock = 128;
constexpr double kTie = 0.02;
constexpr double kOverlap = 0.15;          // of what runs beside the slowest part and is not hidden
constexpr int64_t kRegisters = 64 << 10;   // of an SM
constexpr int64_t kOtherRegisters = 72;    // of a thread besides its sums
constexpr double kOtherInstructions = 70;  // of a warp and stage, besides those that load and multiply matrices
constexpr double kDivision = 15;           // more where stages are no power of two
constexpr double kSpill = 1e15;            // clocks for each register too many
constexpr double kWiden = 18;              // of a warp for 8 columns of 16 k that it makes from codes
constexpr double kStart = 96;              // steps of k until a block is at work
constexpr int64_t kEnoughWarps = 8;        // that hide each other's waits
constexpr double kThin = 1.15;             // where there are fewer
constexpr double kCombine = 150;           // that parts of k take to meet, besides what travels

}  // namespace

GpuMatrix::GpuMatrix(const loop_ir::Kernel& kernel) : GpuProducts(kernel) {
  possible_ = fits_;
  for (const Item& item : items_) {
    auto find = [&](const Operand& operand, bool of_rows) -> std::optional<MatrixTile> {
      auto tile = find_matrix_tile(kernel_, operand.slice, operand.value, item.k, of_rows ? rows_ : columns_, of_rows, true, item.reduce->dtypes[0],
                                   false, true);
      if (!tile) return tile;
      if (tile->dtype == DType::f32) return with_numbers(*tile, operand.tile, operand.next);
      if (auto codes = find_codes(kernel_, *tile, item.k, of_rows ? rows_ : columns_)) tile = codes;
      tile->tile = operand.tile;
      tile->next = operand.next;
      return tile;
    };
    auto rows = find(item.rows, true);
    auto columns = find(item.columns, false);
    // Bytes may have signs or not, each of them.
    possible_ =
        possible_ && item.reduce->dtypes[0] == sum_type() && rows && columns && (rows->element() == columns->element() || sum_type() == DType::i32);
    if (!possible_) return;
    products_.push_back({*rows, *columns});
    // They share their memory.
    const Product& one = products_[0];
    const auto alike = [](const MatrixTile& a, const MatrixTile& b) { return a.dtype == b.dtype && a.halves == b.halves && a.apart == b.apart; };
    possible_ = alike(one.rows, *rows) && alike(one.columns, *columns);
  }
}

bool GpuMatrix::fits(const std::string& arch) const { return possible_ && cuda_generation(arch) >= 80; }

bool GpuMatrix::has_codes() const {
  return std::any_of(products_.begin(), products_.end(), [](const Product& p) { return p.rows.has_codes() || p.columns.has_codes(); });
}

bool GpuMatrix::has_halves() const {
  return std::any_of(products_.begin(), products_.end(), [](const Product& p) { return p.rows.halves || p.columns.halves; });
}

bool GpuMatrix::takes_step(int64_t step) const {
  if (!has_codes()) return true;
  return std::all_of(items_.begin(), items_.end(), [&](const Item& item) {
    const int64_t depth = count(item.k).value();
    // Lines of two chunks are not apart in all banks.
    const int64_t least = has_halves() && depth % (2 * kLeastStepOfCodes) == 0 ? 2 * kLeastStepOfCodes : kLeastStepOfCodes;
    return step >= least && depth % step == 0;
  });
}

bool GpuMatrix::takes_split(int64_t split, int64_t step) const {
  return split == 1 || std::all_of(items_.begin(), items_.end(), [&](const Item& item) {
           const Expr depth = count(item.k);
           return depth.is_constant() && depth.value() % (split * step) == 0;
         });
}

int64_t GpuMatrix::registers_of_factors(int64_t warp_columns, int64_t step) const {
  int64_t most = 0;
  for (size_t p = 0; p < products_.size(); ++p)
    if (const MatrixTile& columns = products_[p].columns; columns.has_codes())
      most = std::max(most, count_factors(columns, items_[p].k, step) * warp_columns / kMatrixColumns);
  return most;
}

std::vector<Codes> GpuMatrix::codes() const {
  std::vector<Codes> out;
  for (size_t p = 0; possible_ && p < products_.size(); ++p)
    if (const MatrixTile& columns = products_[p].columns; columns.has_codes() && !columns.halves) out.push_back({columns.copied, items_[p].k});
  return out;
}

/// Of what parts of k but the first one put into shared memory, with what keeps them in different banks.
int64_t GpuMatrix::bytes_of_parts(int64_t split, int64_t rows, int64_t columns) const {
  return (split - 1) * rows * columns * 4 * 9 / 8 * static_cast<int64_t>(items_.size());
}

int64_t GpuMatrix::bytes_of(int64_t rows, int64_t columns, int64_t step) const {
  const auto bytes = [&](const MatrixTile& tile, int64_t width) {
    return (width * kAccessBytes / tile.depth_of_chunk() + tile.apart * size_of(tile.dtype)) * step;
  };
  return bytes(products_[0].rows, rows) + bytes(products_[0].columns, columns);
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

/// Columns side by side that make an access of 16 bytes of the narrowest result.
int64_t GpuMatrix::wanted_lanes() const {
  for (const Product& product : products_)
    if (!product.columns.along_k) return 2;
  int64_t lanes = 2;
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_))
    if (access.stores) lanes = std::max(lanes, std::min(kWidestLanes, kAccessBytes / access.bytes));
  return lanes;
}

int64_t GpuMatrix::lanes_for(int64_t wanted, int64_t columns_of_warp) {
  int64_t lanes = wanted;
  while (lanes > 2 && columns_of_warp % (lanes / 2 * kMatrixColumns) != 0) lanes /= 2;
  return lanes;
}

/// Clocks of a device for all blocks: rounds of as many as it holds, each bound by its matrix units, shared memory or what the L2 gives, or by how
/// long copies take.
double GpuMatrix::cost(const Tiles& tiles, double rows, double columns, double batch, double depth, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const auto items = static_cast<double>(items_.size());
  const int64_t warps = tiles.warp_rows * tiles.warp_columns * tiles.split;
  const int64_t warp_rows = tiles.rows / tiles.warp_rows;
  const int64_t warp_columns = tiles.columns / tiles.warp_columns;
  const int64_t sums = warp_rows * warp_columns / kWarp * static_cast<int64_t>(items_.size());
  const int64_t bytes = tiles.split * bytes_of(tiles.rows, tiles.columns, depth_of(tiles.step));
  const int64_t resident = std::max<int64_t>(1, std::min({model.warps_sm / warps, kRegisters / ((sums + kOtherRegisters) * warps * kWarp),
                                                          (model.shared_kb_sm << 10) / (bytes * tiles.stages + 1024)}));
  const double flops_per_clock = model.bf16_tflops * 1e3 / (model.sms * model.boost_ghz);
  const auto volume = static_cast<double>(tiles.rows * tiles.columns * tiles.step * tiles.split);
  const double multiply = 2.0 * volume / flops_per_clock;
  const auto read = static_cast<double>(warps * (warp_rows + warp_columns) * tiles.step * 2);
  const double shared = (static_cast<double>(bytes) + read) / kSharedBytesPerClock;
  const double global = static_cast<double>(bytes) / kL2BytesPerClock;
  const double products = volume / (kMatrixRows * kMatrixColumns * kMatrixDepth);
  const double others = kOtherInstructions + ((tiles.stages & (tiles.stages - 1)) == 0 ? 0 : kDivision);
  const double widened = has_codes() ? kWiden * static_cast<double>(warp_columns * tiles.step) / (kMatrixColumns * kMatrixDepth) : 0;
  const double issue = (products + read / 512 + (others + widened) * static_cast<double>(warps)) / 4;
  const double thin = resident * warps < kEnoughWarps ? kThin : 1;
  const double work = thin * (std::max({multiply, shared, global, issue}) + kOverlap * (multiply + shared + global + issue));
  const double blocks = std::ceil(rows / static_cast<double>(tiles.rows)) * std::ceil(columns / static_cast<double>(tiles.columns)) * batch;
  const double each = std::ceil(blocks / model.sms);
  const auto most = static_cast<double>(resident);
  auto round = [&](double held) { return std::max(held * work, kLatency / static_cast<double>(tiles.stages - 1)); };
  const double left = std::fmod(each, most);
  const double steps = std::ceil(depth / static_cast<double>(tiles.step * tiles.split)) + kStart / static_cast<double>(tiles.step);
  const double combine =
      tiles.split == 1 ? 0 : kCombine + static_cast<double>(2 * (tiles.split - 1) * tiles.rows * tiles.columns * 4) / kSharedBytesPerClock;
  // Of tiles that wait for copies alike, those that compute least beyond the edges.
  return items *
         (steps * (std::floor(each / most) * round(most) + (left > 0 ? round(left) : 0) + kTie * each * work) + combine * std::ceil(each / most));
}

Schedule GpuMatrix::propose(const SizeHints& hints, const std::string& arch) const {
  static constexpr Tiles kChoices[] = {{128, 128, 2, 2}, {128, 256, 2, 4}, {256, 128, 4, 2}, {128, 64, 2, 2}, {64, 128, 2, 2},
                                       {64, 64, 2, 2},   {128, 32, 4, 1},  {32, 128, 1, 4},  {32, 64, 1, 2},  {64, 32, 2, 1},
                                       {16, 128, 1, 4},  {16, 64, 1, 2},   {16, 32, 1, 1},   {16, 16, 1, 1}};
  auto expected = [&](const std::vector<loop_ir::Axis>& axes) { return std::max(1.0, analysis::estimate(count(axes), hints, kernel_.symbols)); };
  std::optional<Tiles> best;
  double least = 0;
  const int64_t most = cuda_model(arch).shared_kb_block << 10;
  const auto consider = [&](Tiles tiles) {
    for (int64_t step : kSteps)
      for (int64_t stages : kStages) {
        if (tiles.rows > kMatrixRows && (stages > kMostStagesOfTiles || step > (has_halves() ? 2 : 1) * kMostStepOfTiles)) continue;
        tiles.step = step;
        tiles.stages = stages;
        const int64_t sums = tiles.rows / tiles.warp_rows * (tiles.columns / tiles.warp_columns) / kWarp;
        const int64_t parts = bytes_of_parts(tiles.split, tiles.rows, tiles.columns);
        if (sums * static_cast<int64_t>(items_.size()) > kMostSums ||
            parts + tiles.split * stages * bytes_of(tiles.rows, tiles.columns, depth_of(step)) > most)
          continue;
        if (!takes_step(depth_of(step)) || !takes_split(tiles.split, depth_of(step))) continue;
        const int64_t factors = registers_of_factors(tiles.columns / tiles.warp_columns, depth_of(step));
        double clocks = cost(tiles, expected(rows_), expected(columns_), expected(batch_),
                             expected(items_[0].k) * kMatrixDepth / static_cast<double>(depth_of_step()), arch);
        // What spills is chosen where everything does.
        if (const int64_t over = sums * static_cast<int64_t>(items_.size()) + factors - kMostSums - kFactors; over > 0)
          clocks += kSpill * static_cast<double>(over);
        if (best && clocks >= least) continue;
        best = tiles;
        best->step = depth_of(step);
        least = clocks;
      }
  };
  for (Tiles tiles : kChoices)
    for (int64_t split : kSplits) {
      if (split > 1 && (tiles.rows > kMostSplitRows || tiles.warp_rows * tiles.warp_columns * split > kMostSplitWarps)) continue;
      tiles.split = split;
      consider(tiles);
    }
  const std::string rows = group_of(rows_);
  const std::string columns = group_of(columns_);
  Schedule s{"gpu_matrix", {{"tile", {{rows, best->rows}}}, {"tile", {{columns, best->columns}}}}};
  for (const Item& item : items_) s.directives.push_back({"tile", {{item.depth_name, best->step}}});
  s.directives.push_back({"warps", {{rows, best->warp_rows}, {columns, best->warp_columns}}});
  if (best->split > 1) s.directives.push_back({"split", {{"", best->split}}});
  s.directives.push_back({"stages", {{"", best->stages}}});
  s.directives.push_back({"raster", {{"", kRaster}}});
  return s;
}

void GpuMatrix::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("the kernel is no contraction of bf16 or f16 operands, of float32 rounded to tf32, or of bytes in int32");
  auto tile = [&](const std::string& axis, int64_t of) {
    const Directive* d = reader.find("tile", axis);
    if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", axis));
    reader.only(*d, {axis});
    const int64_t n = reader.number(*d, axis, of, kMostTile);
    if (n % of != 0 || (n & (n - 1)) != 0) reader.fail(*d, fmt::format("allowed: powers of two from {} on", of));
    return n;
  };
  auto only_number = [&](const std::string& word, int64_t least, int64_t most) {
    const Directive& d = reader.one(word);
    reader.only(d, {""});
    return reader.number(d, "", least, most);
  };
  const std::string rows = group_of(rows_);
  const std::string columns = group_of(columns_);
  tile_rows_ = tile(rows, kMatrixRows);
  tile_columns_ = tile(columns, 2 * kMatrixColumns);
  // Fewer than four chunks of k are not apart in eight lines.
  for (const Item& item : items_) {
    const int64_t step = tile(item.depth_name, 2 * depth_of_step());
    if (step_ != 0 && step != step_) reader.fail("its products need tiles of k of one size");
    if (!takes_step(step)) reader.fail(fmt::format("tiles of codes need steps from {} on that divide {}", kLeastStepOfCodes, print(count(item.k))));
    step_ = step;
  }
  const Directive& warps = reader.one("warps");
  reader.only(warps, {rows, columns});
  warps_down_ = reader.number(warps, rows, 1, kMostWarps);
  warps_across_ = reader.number(warps, columns, 1, kMostWarps);
  if (tile_rows_ % (warps_down_ * kMatrixRows) != 0 || tile_columns_ % (warps_across_ * 2 * kMatrixColumns) != 0)
    reader.fail(warps, fmt::format("allowed: what leaves each warp a multiple of {} x {} of the tile, {} x {}", kMatrixRows, 2 * kMatrixColumns,
                                   tile_rows_, tile_columns_));
  for (const Directive* split : reader.all("split")) {
    reader.only(*split, {""});
    split_ = reader.number(*split, "", 1, kMostSplit);
    if (!takes_split(split_, step_)) reader.fail(*split, fmt::format("allowed: what leaves equal parts of whole tiles of k of {}", step_));
  }
  threads_ = warps_down_ * warps_across_ * kWarp;
  if (threads_ * split_ > kMostGpuThreads) reader.fail(warps, fmt::format("allowed: up to {} threads", kMostGpuThreads));
  const int64_t chunk = products_[0].rows.chunk();
  if (threads_ > tile_rows_ * step_ / chunk || threads_ > tile_columns_ * step_ / chunk)
    if ((tile_rows_ * step_ / chunk) % threads_ != 0 && threads_ % (tile_rows_ * step_ / chunk) != 0) reader.fail(warps, "allowed: powers of two");
  const int64_t sums = tile_rows_ * tile_columns_ / threads_ * static_cast<int64_t>(items_.size());
  if (sums > kMostSums) reader.fail(warps, fmt::format("each thread would have {} sums in registers, allowed: {}", sums, kMostSums));
  const int64_t parts = bytes_of_parts(split_, tile_rows_, tile_columns_);
  threads_ *= split_;
  stages_ = only_number("stages", 2, kMostStages);
  raster_ = only_number("raster", 1, kMostRaster);
  const int64_t bytes = split_ * stages_ * bytes_of(tile_rows_, tile_columns_, step_) + parts;
  if (bytes > kMostSharedBytes) reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has at most {}", bytes, kMostSharedBytes));
  lanes_ = lanes_for(wanted_lanes(), tile_columns_ / warps_across_);
  for (Product& product : products_)
    for (MatrixTile* tile : {&product.rows, &product.columns}) {
      tile->lanes = lanes_;
      tile->set_shape(tile->of_rows ? tile_rows_ : tile_columns_, step_);
    }
  reader.finish("tile, warps, split, stages and raster");
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuMatrix::apply(const Schedule& schedule) {
  read(schedule);
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
  row_ = names_.fresh("u");
  half_ = names_.fresh("h");
  group_ = names_.fresh("g");
  column_ = names_.fresh("w");
  const Expr tiles = ceildiv(count(rows_), tile_rows_) * ceildiv(count(columns_), tile_columns_);
  std::tie(first_row_, first_column_) = raster_place(mod(sym(block_), tiles), count(rows_), count(columns_), tile_rows_, tile_columns_, raster_);
  batch_map_ = unflatten(batch_, floordiv(sym(block_), tiles));
  tile_ir::Block body;
  for (size_t p = 0; p < products_.size(); ++p)
    for (auto& s : stage(p)) body.push_back(s);
  for (auto& s : split_ > 1 ? combine() : finish()) body.push_back(s);
  return gpu_grid(block_, count(batch_) * tiles, thread_, threads_, std::move(body));
}

Expr GpuMatrix::thread_row() const {
  return warp_row() * (tile_rows_ / warps_down_) + sym(row_) * kMatrixRows + sym(half_) * 8 + floordiv(lane(), 4);
}

Expr GpuMatrix::thread_column() const {
  return warp_column() * (tile_columns_ / warps_across_) + sym(group_) * (4 * lanes_) + mod(lane(), 4) * lanes_ + sym(column_);
}

/// for row, half, group, lane: body, over the thread's own outputs.
Ref<tile_ir::Stmt> GpuMatrix::per_thread(tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(column_, 0, lanes_, LoopKind::lanes), std::move(body)})};
  inner = {make(tile_ir::For{axis(group_, 0, tile_columns_ / warps_across_ / (4 * lanes_), LoopKind::unroll), std::move(inner)})};
  inner = {make(tile_ir::For{axis(half_, 0, 2, LoopKind::unroll), std::move(inner)})};
  return make(tile_ir::For{axis(row_, 0, tile_rows_ / warps_down_ / kMatrixRows, LoopKind::unroll), std::move(inner)});
}

Ref<tile_ir::Stmt> GpuMatrix::clear(const std::string& array) {
  const std::string name = names_.fresh("zero");
  return per_thread({make(tile_ir::Let{name, sum_type(), Fn::constant, {}, loop_ir::zero_of(sum_type()), 0}),
                     make(tile_ir::Store{array, {sym(row_), sym(half_), sym(group_), sym(column_)}, name, {}, Combiner::set})});
}

/// One product: copies run stages_ - 1 stages of k ahead. A stage is multiplied when its copies have been waited for by all threads, which says as
/// well that the stage before has been read, so that the copies after it may overwrite that one: one barrier a stage.
tile_ir::Block GpuMatrix::stage(size_t product) {
  const Item& item = items_[product];
  Product& operands = products_[product];
  const Expr steps = steps_of(product);
  tile_ir::Block out;
  for (MatrixTile* source : {&operands.rows, &operands.columns}) {
    // Later products use the same memory.
    source->tile = source->of_rows ? products_[0].rows.tile : products_[0].columns.tile;
    if (product == 0) out.push_back(make(tile_ir::Alloc{source->tile, source->dtype, {split_ * stages_ * source->elements()}, Space::shared}));
  }
  out.push_back(make(tile_ir::Alloc{
      item.sums, sum_type(), {tile_rows_ / warps_down_ / kMatrixRows, 2, tile_columns_ / warps_across_ / (4 * lanes_), lanes_}, Space::reg}));
  out.push_back(clear(item.sums));
  if (product > 0) out.push_back(make(tile_ir::Barrier{}));
  const auto fetch_all = [&](Expr stage, bool pipelined) {
    tile_ir::Block copies;
    for (const MatrixTile* source : {&operands.rows, &operands.columns})
      if (pipelined || !is_pipelined(*source))
        for (auto& s : copy_tile(*source, copy_of(product, *source, stage), names_)) copies.push_back(s);
    return copies.empty() ? tile_ir::Block{} : tile_ir::Block{make(tile_ir::If{{less(stage, steps)}, std::move(copies)})};
  };
  const std::string ahead = names_.fresh("ahead");
  tile_ir::Block first = fetch_all(sym(ahead), true);
  first.push_back(make(tile_ir::CopyGroup{}));
  out.push_back(make(tile_ir::For{axis(ahead, 0, stages_ - 1, steps.is_constant() ? LoopKind::unroll : LoopKind::serial), std::move(first)}));
  const std::string s = names_.fresh("stage");
  tile_ir::Block body = load_factors_of(product, sym(s));
  body.push_back(make(tile_ir::CopyGroup{static_cast<int>(stages_ - 2)}));
  body.push_back(make(tile_ir::Barrier{}));
  for (auto& stmt : fetch_all(sym(s) + (stages_ - 1), false)) body.push_back(stmt);
  body.push_back(make(tile_ir::CopyGroup{}));
  for (auto& stmt : multiply(product, sym(s), steps)) body.push_back(stmt);
  out.push_back(make(tile_ir::For{axis(s, 0, steps), std::move(body)}));
  return out;
}

/// A stage of one operand's tile into shared memory.
TileCopy GpuMatrix::copy_of(size_t product, const MatrixTile& tile, Expr stage) const {
  TileCopy copy;
  copy.thread = thread_of_part();
  copy.threads = threads_ / split_;
  copy.begin = begin_of(tile, stage);
  copy.first = tile.of_rows ? first_row_ : first_column_;
  copy.depth = depth_of(product, stage);
  copy.k = &items_[product].k;
  copy.free = tile.of_rows ? &rows_ : &columns_;
  copy.batch = &batch_map_;
  return copy;
}

/// Whether what is computed of an operand waits in registers for its loads while matrices are multiplied.
bool GpuMatrix::is_pipelined(const MatrixTile& tile) const {
  const int64_t threads = threads_ / split_;
  return !tile.copied && turns_of(tile, threads) * threads == tile.lines * (tile.filled / tile.chunk()) &&
         turns_of(tile, threads) >= step_ / depth_of_step();
}

/// The products of one stage. Where operands are computed, a part of a later stage is loaded before each step of k and stored behind it. Behind the
/// last stage that one is loaded again, to where nobody reads it, rather than to ask whether there is another one.
tile_ir::Block GpuMatrix::multiply(size_t product, Expr stage, Expr steps) {
  const Expr later = stage + (stages_ - 1);
  const int64_t turns = step_ / depth_of_step();
  std::vector<const MatrixTile*> computed;
  for (const MatrixTile* source : {&products_[product].rows, &products_[product].columns})
    if (is_pipelined(*source)) computed.push_back(source);
  if (computed.empty()) {
    if (has_codes()) {
      tile_ir::Block out;
      for (int64_t turn = 0; turn < turns; ++turn)
        for (auto& s : multiply_step(product, stage, turn)) out.push_back(s);
      return out;
    }
    const std::string k = names_.fresh("kk");
    return {make(tile_ir::For{axis(k, 0, turns, LoopKind::unroll), multiply_step(product, stage, sym(k))})};
  }
  tile_ir::Block out;
  for (int64_t turn = 0; turn < turns; ++turn) {
    tile_ir::Block loads;
    tile_ir::Block puts;
    for (const MatrixTile* source : computed) {
      MatrixTile tile = *source;
      tile.next = names_.fresh(source->next + "_");
      TileCopy copy = copy_of(product, tile, later);
      copy.depth = depth_of(product, min(later, steps - 1));
      const int64_t all = turns_of(tile, threads_ / split_);
      copy.from = all * turn / turns;
      copy.to = all * (turn + 1) / turns;
      out.push_back(make(tile_ir::Alloc{tile.next, tile.dtype, {*copy.to - copy.from, tile.chunk()}, Space::reg}));
      copy.part = TileCopy::Part::load;
      for (auto& s : copy_tile(tile, copy, names_)) loads.push_back(s);
      copy.part = TileCopy::Part::put;
      for (auto& s : copy_tile(tile, copy, names_)) puts.push_back(s);
    }
    for (auto& s : loads) out.push_back(s);
    for (auto& s : multiply_step(product, stage, turn)) out.push_back(s);
    for (auto& s : puts) out.push_back(s);
  }
  return out;
}

/// The products of 16 k of a stage: a warp holds all its columns of them, and goes through its rows.
tile_ir::Block GpuMatrix::multiply_step(size_t product, Expr stage, Expr step) {
  const Item& item = items_[product];
  const Product& operands = products_[product];
  const int64_t warp_rows = tile_rows_ / warps_down_;
  const int64_t warp_columns = tile_columns_ / warps_across_;
  const Expr depth = step * depth_of_step();
  const auto load = [&](const std::string& name, const MatrixTile& tile, Expr first) -> tile_ir::Block {
    if (tile.apart > 0) return load_numbers(tile, {lane(), begin_of(tile, stage), first, depth}, name, names_);
    if (tile.has_codes()) return widen_codes(tile, codes_at(product, tile, stage, first, step.value()), name, names_);
    return {
        make(tile_ir::LoadMatrix{name, tile.dtype, tile.tile, {tile.row_of_matrix(lane(), begin_of(tile, stage), first, depth)}, 4, !tile.along_k})};
  };
  tile_ir::Block body;
  std::vector<std::string> columns;
  for (int64_t pair = 0; pair < warp_columns / (2 * kMatrixColumns); ++pair) {
    columns.push_back(names_.fresh("bm"));
    for (auto& s : load(columns.back(), operands.columns, warp_column() * warp_columns + pair * 2 * kMatrixColumns)) body.push_back(s);
  }
  const std::string row = names_.fresh("u");
  const std::string a = names_.fresh("am");
  tile_ir::Block products = load(a, operands.rows, warp_row() * warp_rows + sym(row) * kMatrixRows);
  const int64_t units = lanes_ / 2;  // of 8 columns that make a group of sums
  for (int64_t unit = 0; unit < warp_columns / kMatrixColumns; ++unit) {
    const Expr group = unit / units;
    const Expr lane = unit % units * 2;
    products.push_back(make(tile_ir::Mma{
        item.sums, {sym(row), 0, group, lane}, {sym(row), 1, group, lane}, a, columns[static_cast<size_t>(unit / 2)], static_cast<int>(unit % 2)}));
  }
  body.push_back(make(tile_ir::For{axis(row, 0, warp_rows / kMatrixRows, LoopKind::unroll), std::move(products)}));
  return body;
}

CodesAt GpuMatrix::codes_at(size_t product, const MatrixTile& tile, Expr stage, Expr first, int64_t step) const {
  CodesAt at;
  at.lane = lane();
  at.begin = begin_of(tile, stage);
  at.first = first;
  at.step = step;
  at.origin = tile.of_rows ? first_row_ : first_column_;
  at.depth = depth_of(product, stage);
  at.k = &items_[product].k;
  at.free = tile.of_rows ? &rows_ : &columns_;
  at.batch = &batch_map_;
  return at;
}

/// Factors of a stage's codes, which are on their way while copies are waited for.
tile_ir::Block GpuMatrix::load_factors_of(size_t product, Expr stage) {
  tile_ir::Block out;
  std::vector<tile_ir::Load> seen;
  const MatrixTile& columns = products_[product].columns;
  const int64_t warp_columns = tile_columns_ / warps_across_;
  for (int64_t step = 0; columns.has_codes() && step < step_ / kMatrixDepth; ++step)
    for (int64_t pair = 0; pair < warp_columns / (2 * kMatrixColumns); ++pair)
      for (auto& s :
           load_factors(columns, codes_at(product, columns, stage, warp_column() * warp_columns + pair * 2 * kMatrixColumns, step), seen, names_))
        out.push_back(s);
  return out;
}

/// The first part's threads add up what those of the others put into shared memory, in their order, and finish.
tile_ir::Block GpuMatrix::combine() {
  const int64_t groups = tile_columns_ / warps_across_ / (4 * lanes_);
  const int64_t vectors = tile_rows_ / warps_down_ / kMatrixRows * 2 * groups;  // of a thread
  const int64_t threads = threads_ / split_;
  const Expr vector = (sym(row_) * 2 + sym(half_)) * groups + sym(group_);
  // Accesses of 16 bytes that are 32 apart lie in different banks if four threads' are apart by 16 more.
  const int64_t apart = lanes_ > 4 ? 4 : 0;
  const int64_t length = threads * lanes_ + threads / 4 * apart;
  const auto place = [&](Expr part) {
    return (part * vectors + vector) * length + thread_of_part() * lanes_ + floordiv(thread_of_part(), 4) * apart + sym(column_);
  };
  const std::vector<Expr> own{sym(row_), sym(half_), sym(group_), sym(column_)};
  tile_ir::Block out;
  tile_ir::Block put;
  tile_ir::Block add;
  for (const Item& item : items_) {
    const std::string parts = names_.fresh("parts");
    out.push_back(make(tile_ir::Alloc{parts, sum_type(), {(split_ - 1) * vectors * length}, Space::shared}));
    const std::string given = names_.fresh("given");
    put.push_back(per_thread({make(tile_ir::Load{given, sum_type(), item.sums, own, {}, {}}),
                              make(tile_ir::Store{parts, {place(part() - 1)}, given, {}, Combiner::set})}));
    tile_ir::Block body;
    std::string sum = names_.fresh("sum");
    body.push_back(make(tile_ir::Load{sum, sum_type(), item.sums, own, {}, {}}));
    for (int64_t p = 0; p + 1 < split_; ++p) {
      const std::string more = names_.fresh("more");
      const std::string next = names_.fresh("sum");
      body.push_back(make(tile_ir::Load{more, sum_type(), parts, {place(p)}, {}, {}}));
      body.push_back(make(tile_ir::Let{next, sum_type(), Fn::add, {sum, more}, {}, 0}));
      sum = next;
    }
    body.push_back(make(tile_ir::Store{item.sums, own, sum, {}, Combiner::set}));
    add.push_back(per_thread(std::move(body)));
  }
  out.push_back(make(tile_ir::If{{less(0, part())}, std::move(put)}));
  out.push_back(make(tile_ir::Barrier{}));
  for (auto& s : finish()) add.push_back(s);
  out.push_back(make(tile_ir::If{{less(part(), 1)}, std::move(add)}));
  return out;
}

/// What the kernel computes from the sums, for each output of the thread.
tile_ir::Block GpuMatrix::finish() {
  const Expr row = first_row_ + thread_row();
  const Expr column = first_column_ + thread_column();
  Substitution map = batch_map_;
  map.merge(unflatten(rows_, row));
  map.merge(unflatten(columns_, column));
  tile_ir::Block body = convert(*inner_, map, {sym(row_), sym(half_), sym(group_), sym(column_)});
  tile_ir::If inside{{less(row, count(rows_)), less(column, count(columns_))}, std::move(body)};
  return {per_thread({make(std::move(inside))})};
}

}  // namespace deplo::loop_to_tile
