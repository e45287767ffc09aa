#include "target/cuda/schedule/groups.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "analysis/cost.h"
#include "base/error.h"
#include "target/cuda/devices.h"
#include "target/cuda/schedule/access.h"
#include "target/cuda/schedule/codes.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr std::string_view kArch = "sm_90a";
constexpr int64_t kRaster = 8;  // rows of tiles that blocks make one after the other: their columns' tiles stay in the L2
constexpr double kLeastRows = 64, kLeastColumns = 32, kLeastDepth = 64;

// What a schedule may ask for.
constexpr int64_t kColumnStep = 64;
constexpr int64_t kMostGroups = 4, kMostStages = 8, kMostRaster = 64, kMostLines = 2;
constexpr int64_t kMostSums = 128;  // of a thread
constexpr int64_t kWidestLanes = 8;

// Of the costs below, in clocks of an SM.
constexpr double kL2BytesPerClock = 40;
constexpr double kSharedBytesPerClock = 128;
constexpr double kLatency = 700;
constexpr double kBetween = 120;  // products of a stage and the next one's
constexpr double kComputed = 20;  // instructions of a thread for 16 bytes that it computes
constexpr double kCopied = 6;
constexpr int64_t kRegisters = 64 << 10;
constexpr int64_t kOtherRegisters = 72;

}  // namespace

GpuGroups::GpuGroups(const loop_ir::Kernel& kernel) : GpuThreadGroups(kernel) {
  possible_ = fits_;
  for (const Item& item : items_) {
    const auto find = [&](const Operand& operand, bool of_rows) {
      auto tile = find_matrix_tile(kernel_, operand.slice, operand.value, item.k, of_rows ? rows_ : columns_, of_rows, true, item.reduce->dtypes[0]);
      if (!tile) return tile;
      // Warps make numbers of codes that lie two a byte by themselves.
      if (const auto codes = find_codes(kernel_, *tile, item.k, of_rows ? rows_ : columns_); codes && codes->halves) tile.reset();
      if (!tile) return tile;
      tile->in_boxes = true;
      tile->tile = operand.tile;
      tile->next = operand.next;
      return tile;
    };
    auto rows = find(item.rows, true);
    auto columns = find(item.columns, false);
    const DType sum = item.reduce->dtypes[0];
    // Bytes may have signs or not, each of them.
    possible_ = possible_ && (sum == DType::f32 || sum == DType::i32) && sum == sum_type() && rows && columns;
    if (!possible_) return;
    factors_.push_back({*rows, *columns});
    // They share their memory.
    possible_ =
        (rows->dtype == columns->dtype || sum == DType::i32) && factors_[0].rows.dtype == rows->dtype && factors_[0].columns.dtype == columns->dtype;
  }
}

bool GpuGroups::fits(const SizeHints& hints, const std::string& arch) const {
  if (!possible_ || arch != kArch || static_cast<int64_t>(items_.size()) * kColumnStep / 2 > kMostSums) return false;
  const auto expected = [&](const std::vector<loop_ir::Axis>& axes) { return analysis::estimate(count(axes), hints, kernel_.symbols); };
  return expected(rows_) >= kLeastRows && expected(columns_) >= kLeastColumns && expected(items_[0].k) >= kLeastDepth;
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

/// Columns side by side that make an access of 16 bytes of the narrowest result.
int64_t GpuGroups::wanted_lanes() const {
  for (const Factors& factors : factors_)
    if (!factors.columns.along_k) return 2;
  int64_t lanes = 2;
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_))
    if (access.stores) lanes = std::max(lanes, std::min(kWidestLanes, kAccessBytes / access.bytes));
  return lanes;
}

/// Clocks for all blocks: rounds of as many as the device holds, each bound by its matrix units, shared memory, the L2, or what its threads do to
/// fill tiles.
double GpuGroups::cost(const Shape& shape, double rows, double columns, double batch, double depth, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const auto tile_rows = static_cast<double>(shape.rows);
  const auto tile_columns = static_cast<double>(shape.columns);
  const auto items = static_cast<double>(items_.size());
  const int64_t threads = shape.rows / kGroupRows * kGroupThreads;
  const int64_t registers = shape.columns / 2 * static_cast<int64_t>(items_.size()) + kOtherRegisters;
  const auto resident = static_cast<double>(std::max<int64_t>(
      1, std::min((static_cast<int64_t>(model.shared_kb_sm) << 10) / (shared_bytes(shape) + 1024), kRegisters / (registers * threads))));
  // Bytes are multiplied as half as many elements of 16 bits.
  const double step = static_cast<double>(shape.step * size_of(element())) / 2;
  const double multiply = 2 * tile_rows * tile_columns * step * model.sms * model.boost_ghz / (model.bf16_tflops * 1e3);
  const double bytes = (tile_rows + tile_columns) * step * 2;
  const double read = (tile_rows + tile_columns * tile_rows / kGroupRows) * step * 2;
  const auto fill = [&](const MatrixTile& tile, double lines) { return lines * step * 2 / kAccessBytes * (tile.copied ? kCopied : kComputed); };
  const double issue = (fill(factors_[0].rows, tile_rows) + fill(factors_[0].columns, tile_columns)) / kWarp / 4;
  const double work = std::max({multiply, (read + bytes) / kSharedBytesPerClock, bytes / kL2BytesPerClock, issue});
  const double blocks = std::ceil(rows / tile_rows) * std::ceil(columns / tile_columns) * batch;
  const double each = std::ceil(blocks / model.sms);
  const double steps = (std::ceil(depth / static_cast<double>(shape.step)) + static_cast<double>(shape.stages)) * items;
  const double held = std::min(each, resident);
  // Blocks of one SM fill each other's gaps.
  const double round = std::max(held * work + kBetween / held, kLatency / static_cast<double>(shape.stages - 1)) * steps;
  return std::ceil(each / resident) * round;
}

Schedule GpuGroups::propose(const SizeHints& hints, const std::string& arch) const {
  const auto expected = [&](const std::vector<loop_ir::Axis>& axes) {
    return std::max(1.0, analysis::estimate(count(axes), hints, kernel_.symbols));
  };
  const int64_t most = (static_cast<int64_t>(cuda_model(arch).shared_kb_block) << 10) - (1 << 10);
  std::optional<Shape> best;
  double least = 0;
  for (int64_t rows : {128, 64})
    for (int64_t columns : {256, 192, 128, 64})
      for (int64_t step : {line(), 2 * line()})
        for (int64_t stages : {3, 4}) {
          const Shape shape{rows, columns, step, stages};
          if (columns / 2 * static_cast<int64_t>(items_.size()) > kMostSums || shared_bytes(shape) > most) continue;
          const double clocks = cost(shape, expected(rows_), expected(columns_), expected(batch_), expected(items_[0].k), arch);
          if (best && clocks >= least) continue;
          best = shape;
          least = clocks;
        }
  Schedule s{"gpu_groups", {{"tile", {{group_of(rows_), best->rows}}}, {"tile", {{group_of(columns_), best->columns}}}}};
  for (const Item& item : items_) s.directives.push_back({"tile", {{item.depth_name, best->step}}});
  s.directives.push_back({"stages", {{"", best->stages}}});
  s.directives.push_back({"raster", {{"", kRaster}}});
  return s;
}

void GpuGroups::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("the kernel is no contraction of bf16 or f16 operands, or of bytes in int32");
  shape_.rows = tile_of(reader, group_of(rows_), kGroupRows, kMostGroups * kGroupRows);
  shape_.columns = tile_of(reader, group_of(columns_), kColumnStep, kMostGroupColumns);
  for (const Item& item : items_) {
    const int64_t step = tile_of(reader, item.depth_name, line(), kMostLines * line());
    if (shape_.step != 0 && step != shape_.step) reader.fail("its products need tiles of k of one size");
    shape_.step = step;
  }
  const int64_t sums = shape_.columns / 2 * static_cast<int64_t>(items_.size());
  if (sums > kMostSums) reader.fail(fmt::format("each thread would have {} sums in registers, allowed: {}", sums, kMostSums));
  shape_.stages = number_of(reader, "stages", 2, kMostStages);
  raster_ = number_of(reader, "raster", 1, kMostRaster);
  if (shared_bytes(shape_) > kMostSharedBytes)
    reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has at most {}", shared_bytes(shape_), kMostSharedBytes));
  threads_ = shape_.rows / kGroupRows * kGroupThreads;
  lanes_ = wanted_lanes();
  for (Factors& factors : factors_)
    for (MatrixTile* tile : {&factors.rows, &factors.columns}) {
      tile->lanes = lanes_;
      tile->set_shape(tile->of_rows ? shape_.rows : shape_.columns, shape_.step);
    }
  reader.finish("tile, stages and raster");
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuGroups::apply(const Schedule& schedule) {
  read(schedule);
  const Expr tiles = begin_block(shape_.rows, shape_.columns);
  tile_ir::Block body;
  for (size_t p = 0; p < factors_.size(); ++p)
    for (auto& s : stages_of(p)) body.push_back(s);
  for (auto& s : finish()) body.push_back(s);
  return gpu_grid(block_, count(batch_) * tiles, thread_, threads_, std::move(body));
}

/// One product: copies run stages - 1 stages of k ahead. A stage's products run while the threads fill a later stage's tiles: that of the stage
/// before, whose products all groups have waited for at the barrier.
tile_ir::Block GpuGroups::stages_of(size_t product) {
  const Item& item = items_[product];
  Factors& factors = factors_[product];
  const Expr steps = ceildiv(count(item.k), shape_.step);
  tile_ir::Block out;
  for (MatrixTile* source : {&factors.rows, &factors.columns}) {
    // Later products use the same memory.
    source->tile = source->of_rows ? factors_[0].rows.tile : factors_[0].columns.tile;
    if (product == 0) out.push_back(make(tile_ir::Alloc{source->tile, source->dtype, {shape_.stages * source->elements()}, Space::shared}));
  }
  out.push_back(make(tile_ir::Alloc{item.sums, sum_type(), {1, 2, shape_.columns / (4 * lanes_), lanes_}, Space::reg}));
  const std::string zero = names_.fresh("zero");
  out.push_back(over_outputs(shape_.columns, lanes_,
                             {make(tile_ir::Let{zero, sum_type(), Fn::constant, {}, loop_ir::zero_of(sum_type()), 0}),
                              make(tile_ir::Store{item.sums, {0, sym(half_), sym(group_), sym(column_)}, zero, {}, Combiner::set})}));
  if (product > 0) out.push_back(make(tile_ir::Barrier{}));
  const auto fetch_all = [&](Expr stage, bool pipelined) {
    tile_ir::Block copies;
    for (const MatrixTile* source : {&factors.rows, &factors.columns})
      if (pipelined || !is_pipelined(*source))
        for (auto& s : copy_tile(*source, copy_of(product, *source, stage, stage * shape_.step), names_)) copies.push_back(s);
    return copies.empty() ? tile_ir::Block{} : tile_ir::Block{make(tile_ir::If{{less(stage, steps)}, std::move(copies)})};
  };
  const std::string ahead = names_.fresh("ahead");
  tile_ir::Block first = fetch_all(sym(ahead), true);
  first.push_back(make(tile_ir::CopyGroup{}));
  out.push_back(make(tile_ir::For{axis(ahead, 0, shape_.stages - 1, steps.is_constant() ? LoopKind::unroll : LoopKind::serial), std::move(first)}));
  const std::string s = names_.fresh("stage");
  tile_ir::Block body{make(tile_ir::CopyGroup{static_cast<int>(shape_.stages - 2)}), wait_for(product), make(tile_ir::Barrier{})};
  for (auto& stmt : fetch_all(sym(s) + (shape_.stages - 1), false)) body.push_back(stmt);
  body.push_back(make(tile_ir::CopyGroup{}));
  for (auto& stmt : multiply(product, sym(s), steps)) body.push_back(stmt);
  out.push_back(make(tile_ir::For{axis(s, 0, steps), std::move(body)}));
  out.push_back(wait_for(product));
  return out;
}

/// A stage of one operand's tile, from `depth` of k on, into shared memory.
TileCopy GpuGroups::copy_of(size_t product, const MatrixTile& tile, Expr stage, Expr depth) const {
  TileCopy copy;
  copy.thread = sym(thread_);
  copy.threads = threads_;
  copy.begin = mod(stage, shape_.stages) * tile.elements();
  copy.first = tile.of_rows ? first_row_ : first_column_;
  copy.depth = depth;
  copy.k = &items_[product].k;
  copy.free = tile.of_rows ? &rows_ : &columns_;
  copy.batch = &batch_map_;
  return copy;
}

/// Whether what is computed of an operand waits in registers for its loads while matrices are multiplied.
bool GpuGroups::is_pipelined(const MatrixTile& tile) const {
  return !tile.copied && turns_of(tile, threads_) * threads_ == tile.lines * (tile.filled / tile.chunk()) &&
         turns_of(tile, threads_) >= shape_.step / depth_of_step();
}

/// `depth` of a stage's k, from `from` on.
Ref<tile_ir::Stmt> GpuGroups::multiply_part(size_t product, Expr stage, int64_t from, int64_t depth, int pending) const {
  const auto factor = [&](const MatrixTile& tile, Expr first) {
    const int64_t along = tile.along_k ? from / line() * tile.lines * line() + from % line() : from * line();
    return GroupFactor{tile.tile, mod(stage, shape_.stages) * tile.elements() + first + along, tile.lines, !tile.along_k};
  };
  const MatrixTile& rows = factors_[product].rows;
  GroupProducts products;
  products.a = factor(rows, floordiv(sym(thread_), kGroupThreads) * ((rows.along_k ? kGroupRows : rows.lines) * line()));
  products.b = factor(factors_[product].columns, 0);
  products.columns = shape_.columns;
  products.depth = depth;
  products.lanes = lanes_;
  products.pending = pending;
  return make(tile_ir::MultiplyGroup{items_[product].sums, 0, std::move(products)});
}

/// The products of one stage, which end behind it. Where operands are computed, a part of a later stage is loaded before each step of k and stored
/// behind it. Behind the last stage that one is loaded again, to where nobody reads it, rather than to ask whether there is another one.
tile_ir::Block GpuGroups::multiply(size_t product, Expr stage, Expr steps) {
  std::vector<const MatrixTile*> computed;
  for (const MatrixTile* source : {&factors_[product].rows, &factors_[product].columns})
    if (is_pipelined(*source)) computed.push_back(source);
  if (computed.empty()) return {multiply_part(product, stage, 0, shape_.step, 1)};
  const Expr later = stage + (shape_.stages - 1);
  const int64_t turns = shape_.step / depth_of_step();
  tile_ir::Block out;
  for (int64_t turn = 0; turn < turns; ++turn) {
    tile_ir::Block puts;
    for (const MatrixTile* source : computed) {
      MatrixTile tile = *source;
      tile.next = names_.fresh(source->next + "_");
      TileCopy copy = copy_of(product, tile, later, min(later, steps - 1) * shape_.step);
      const int64_t all = turns_of(tile, threads_);
      copy.from = all * turn / turns;
      copy.to = all * (turn + 1) / turns;
      out.push_back(make(tile_ir::Alloc{tile.next, tile.dtype, {*copy.to - copy.from, tile.chunk()}, Space::reg}));
      copy.part = TileCopy::Part::load;
      for (auto& s : copy_tile(tile, copy, names_)) out.push_back(s);
      copy.part = TileCopy::Part::put;
      for (auto& s : copy_tile(tile, copy, names_)) puts.push_back(s);
    }
    out.push_back(multiply_part(product, stage, turn * depth_of_step(), depth_of_step(), static_cast<int>(turns)));
    for (auto& s : puts) out.push_back(s);
  }
  return out;
}

/// What the kernel computes from the sums, for each output of the thread.
tile_ir::Block GpuGroups::finish() {
  const Expr lane = mod(sym(thread_), kWarp);
  const Expr row = first_row_ + floordiv(sym(thread_), kWarp) * kMatrixRows + floordiv(lane, 4) + sym(half_) * 8;
  const Expr column = first_column_ + sym(group_) * (4 * lanes_) + mod(lane, 4) * lanes_ + sym(column_);
  Substitution map = batch_map_;
  map.merge(unflatten(rows_, row));
  map.merge(unflatten(columns_, column));
  tile_ir::Block body = convert(*inner_, map, {0, sym(half_), sym(group_), sym(column_)});
  tile_ir::If inside{{less(row, count(rows_)), less(column, count(columns_))}, std::move(body)};
  return {over_outputs(shape_.columns, lanes_, {make(std::move(inside))})};
}

}  // namespace deplo::loop_to_tile
