#include "target/cuda/schedule/tiles.h"

#include <algorithm>
#include <cmath>

#include "analysis/cost.h"
#include "base/error.h"
#include "expr/node.h"
#include "target/cuda/devices.h"
#include "target/cuda/schedule/matrix_tile.h"

namespace deplo::loop_to_tile {

using tile_ir::Space;

namespace {

constexpr int64_t kRaster = 8;  // rows of tiles that blocks make one after the other: their columns' tiles stay in the L2
constexpr int64_t kMostStages = 8, kMostRaster = 64, kMostGroups = 2;
constexpr int64_t kMostSums = 128;  // of a thread
constexpr int64_t kOwnBytes = 1 << 10;
constexpr double kLeastRows = 64;

// Of the costs below, in clocks of an SM.
constexpr double kL2BytesPerClock = 40;
constexpr double kSharedBytesPerClock = 128;
constexpr double kStart = 1200;  // until the first products, and from the last ones to the end
constexpr double kLatency = 800;

/// The step from one element to the next along axes taken as one index, if there is one.
std::optional<Expr> stride_along(Expr offset, const std::vector<loop_ir::Axis>& axes) {
  const auto last = linear_coefficient(offset, axes.back().name);
  auto inner = last;
  for (size_t a = axes.size() - 1; inner && a-- > 0;) {
    const auto own = linear_coefficient(offset, axes[a].name);
    if (!own || *own != *inner * axes[a + 1].extent) return std::nullopt;
    inner = own;
  }
  return last;
}

bool is_multiple(Expr e, int64_t of) {
  const auto terms = terms_of(e);
  return std::all_of(terms.begin(), terms.end(), [&](const Term& t) { return t.coefficient % of == 0; });
}

}  // namespace

GpuTiles::GpuTiles(const loop_ir::Kernel& kernel) : GpuThreadGroups(kernel) {
  possible_ = fits_;
  for (const Item& item : items_) {
    Factors found;
    DType other = DType::f32;
    auto rows = find_factor(item.rows, item.k, rows_, &found.dtype);
    auto columns = find_factor(item.columns, item.k, columns_, &other);
    possible_ = possible_ && item.reduce->dtypes[0] == DType::f32 && rows && columns && found.dtype == other;
    if (possible_ && !factors_.empty()) possible_ = found.dtype == factors_[0].dtype;
    if (!possible_) return;
    found.rows = *rows;
    found.columns = *columns;
    factors_.push_back(std::move(found));
  }
}

/// What a tensor map can say of an operand: an input's elements along k, along rows or columns, and along the batch's axes.
std::optional<TileFactor> GpuTiles::find_factor(const Operand& operand, const std::vector<loop_ir::Axis>& k, const std::vector<loop_ir::Axis>& free,
                                                DType* dtype) const {
  const auto tile = find_matrix_tile(kernel_, operand.slice, operand.value, k, free, &free == &rows_);
  if (!tile || !tile->copied || !tile->copied->guard.empty()) return std::nullopt;
  const loop_ir::Param& param = *kernel_.find_param(tile->copied->buffer);
  *dtype = tile->dtype;
  Expr place = 0;
  for (size_t d = 0; d < param.strides.size(); ++d) place = place + tile->copied->index[d] * param.strides[d];
  const auto along_k = stride_along(place, k);
  const auto along_rows = stride_along(place, free);
  if (!along_k || !along_rows || !(along_k->is(1) || along_rows->is(1))) return std::nullopt;
  TileFactor f;
  f.buffer = param.name;
  f.turned = !along_k->is(1);
  f.extents = {count(k), count(free)};
  f.strides = {1, f.turned ? *along_k : *along_rows};
  if (f.turned) std::swap(f.extents[0], f.extents[1]);
  f.at = {0};
  Substitution zero;
  for (const auto& a : k) zero[a.name] = 0;
  for (const auto& a : free) zero[a.name] = 0;
  for (const auto& a : batch_) {
    zero[a.name] = 0;
    const auto step = linear_coefficient(place, a.name);
    if (!step) return std::nullopt;
    if (step->is(0)) continue;
    f.extents.push_back(a.extent);
    f.strides.push_back(*step);
    f.at.push_back(sym(a.name));
  }
  f.offset = substitute(place, zero);
  if (f.extents.size() > static_cast<size_t>(kMostTileDimensions)) return std::nullopt;
  const auto is_size = [&](Expr e) {
    const auto names = symbols_of(e);
    return std::all_of(names.begin(), names.end(), [&](const std::string& name) { return kernel_.symbols.count(name) > 0; });
  };
  bool whole = is_multiple(f.offset, kChunk) && is_size(f.offset);
  for (size_t d = 0; d < f.extents.size(); ++d)
    whole = whole && is_size(f.extents[d]) && is_size(f.strides[d]) && (d == 0 || is_multiple(f.strides[d], kChunk));
  if (!whole) return std::nullopt;
  return f;
}

bool GpuTiles::fits(const SizeHints& hints, const std::string& arch) const {
  return possible_ && arch == "sm_90a" && static_cast<int64_t>(items_.size()) * kTileColumnStep / 2 <= kMostSums &&
         analysis::estimate(count(rows_), hints, kernel_.symbols) >= kLeastRows;
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

int64_t GpuTiles::shared_bytes(const Shape& shape) const { return shape.stages * ((shape.rows + shape.columns) * kTileDepth * 2 + 16) + kOwnBytes; }

/// Clocks for all blocks: rounds of as many as the device holds, each bound by its matrix units, shared memory or the L2.
double GpuTiles::cost(const Shape& shape, double rows, double columns, double batch, double depth, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const auto tile_rows = static_cast<double>(shape.rows);
  const auto tile_columns = static_cast<double>(shape.columns);
  const int64_t threads = shape.rows / kTileGroupRows * kTileGroup + kWarp;
  const int64_t registers = threads * (shape.columns / 2 * static_cast<int64_t>(items_.size()) + 64);
  const auto resident = static_cast<double>(
      std::max<int64_t>(1, std::min<int64_t>((static_cast<int64_t>(model.shared_kb_sm) << 10) / shared_bytes(shape), (64 << 10) / registers)));
  const double multiply = 2 * tile_rows * tile_columns * kTileDepth * model.sms * model.boost_ghz / (model.bf16_tflops * 1e3);
  const double bytes = (tile_rows + tile_columns) * kTileDepth * 2;
  const double read = (tile_rows + tile_columns * tile_rows / kTileGroupRows) * kTileDepth * 2;
  const double step = std::max({multiply, (read + bytes) / kSharedBytesPerClock, bytes / kL2BytesPerClock});
  const double blocks = std::ceil(rows / tile_rows) * std::ceil(columns / tile_columns) * batch;
  const double each = std::ceil(blocks / model.sms);
  const double steps = std::ceil(depth / kTileDepth) * static_cast<double>(items_.size());
  const double round = std::max(std::min(each, resident) * step, kLatency / static_cast<double>(shape.stages - 1)) * steps;
  return std::ceil(each / resident) * (round + kStart);
}

Schedule GpuTiles::propose(const SizeHints& hints, const std::string& arch) const {
  auto expected = [&](const std::vector<loop_ir::Axis>& axes) { return std::max(1.0, analysis::estimate(count(axes), hints, kernel_.symbols)); };
  const int64_t most = static_cast<int64_t>(cuda_model(arch).shared_kb_block) << 10;
  std::optional<Shape> best;
  double least = 0;
  for (int64_t rows : {128, 64})
    for (int64_t columns = kMostTileColumns; columns >= kTileColumnStep; columns -= kTileColumnStep) {
      Shape shape{rows, columns, 4};
      while (shape.stages < 6 && shared_bytes({rows, columns, shape.stages + 1}) <= most / 2) ++shape.stages;
      if (columns / 2 * static_cast<int64_t>(items_.size()) > kMostSums || shared_bytes(shape) > most) continue;
      const double clocks = cost(shape, expected(rows_), expected(columns_), expected(batch_), expected(items_[0].k), arch);
      if (best && clocks >= least) continue;
      best = shape;
      least = clocks;
    }
  return {"gpu_tiles",
          {{"tile", {{group_of(rows_), best->rows}}},
           {"tile", {{group_of(columns_), best->columns}}},
           {"stages", {{"", best->stages}}},
           {"raster", {{"", kRaster}}}}};
}

void GpuTiles::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("the kernel is no contraction of bf16 or f16 inputs that tensor maps describe");
  shape_.rows = tile_of(reader, group_of(rows_), kTileGroupRows, kMostGroups * kTileGroupRows);
  shape_.columns = tile_of(reader, group_of(columns_), kTileColumnStep, kMostTileColumns);
  const int64_t sums = shape_.columns / 2 * static_cast<int64_t>(items_.size());
  if (sums > kMostSums) reader.fail(fmt::format("each thread would have {} sums in registers, allowed: {}", sums, kMostSums));
  shape_.stages = number_of(reader, "stages", 2, kMostStages);
  raster_ = number_of(reader, "raster", 1, kMostRaster);
  if (shared_bytes(shape_) > kMostSharedBytes)
    reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has at most {}", shared_bytes(shape_), kMostSharedBytes));
  reader.finish("tile, stages and raster");
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuTiles::apply(const Schedule& schedule) {
  read(schedule);
  const Expr tiles = begin_block(shape_.rows, shape_.columns);
  tile_ir::Block body = multiply();
  for (auto& s : finish()) body.push_back(s);
  return gpu_grid(block_, count(batch_) * tiles, thread_, shape_.rows / kTileGroupRows * kTileGroup + kWarp, std::move(body));
}

tile_ir::Block GpuTiles::multiply() {
  tile_ir::Block out;
  const std::string flags = names_.fresh("flags");
  const DType dtype = factors_[0].dtype;
  out.push_back(make(tile_ir::Alloc{items_[0].rows.tile, dtype, {shape_.stages * shape_.rows * kTileDepth}, Space::shared}));
  out.push_back(make(tile_ir::Alloc{items_[0].columns.tile, dtype, {shape_.stages * shape_.columns * kTileDepth}, Space::shared}));
  out.push_back(make(tile_ir::Alloc{flags, DType::i64, {2 * shape_.stages}, Space::shared}));
  Expr after = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const std::string& sums = items_[i].sums;
    const std::string zero = names_.fresh("zero");
    out.push_back(make(tile_ir::Alloc{sums, DType::f32, {2, shape_.columns / kMatrixColumns, 2}, Space::reg}));
    out.push_back(over_outputs(shape_.columns, 2,
                               {make(tile_ir::Let{zero, DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, 0), 0}),
                                make(tile_ir::Store{sums, {sym(half_), sym(group_), sym(column_)}, zero, {}, Combiner::set})}));
    tile_ir::MultiplyTiles node{sums,
                                {factors_[i].rows, factors_[i].columns, sym(thread_), shape_.rows / kTileGroupRows, shape_.stages, flags, after}};
    for (auto [factor, tile, rows, first] : {std::tuple{&node.products.a, &items_[0].rows.tile, shape_.rows, first_row_},
                                             std::tuple{&node.products.b, &items_[0].columns.tile, shape_.columns, first_column_}}) {
      factor->tiles = *tile;
      factor->rows = rows;
      for (Expr& e : factor->at) e = substitute(e, batch_map_);
      factor->at[0] = first;
    }
    after = after + node.products.tiles_of_k();
    out.push_back(make(std::move(node)));
  }
  return out;
}

/// What the kernel computes from the sums, for each output of the thread.
tile_ir::Block GpuTiles::finish() {
  const Expr lane = mod(sym(thread_), kWarp);
  const Expr row = first_row_ + floordiv(sym(thread_), kWarp) * kMatrixRows + floordiv(lane, 4) + sym(half_) * 8;
  const Expr column = first_column_ + sym(group_) * kMatrixColumns + mod(lane, 4) * 2 + sym(column_);
  Substitution map = batch_map_;
  map.merge(unflatten(rows_, row));
  map.merge(unflatten(columns_, column));
  tile_ir::Block body = convert(*inner_, map, {sym(half_), sym(group_), sym(column_)});
  tile_ir::If inside{{less(row, count(rows_)), less(column, count(columns_))}, std::move(body)};
  return {make(
      tile_ir::If{{less(sym(thread_), shape_.rows / kTileGroupRows * kTileGroup)}, {over_outputs(shape_.columns, 2, {make(std::move(inside))})}})};
}

}  // namespace deplo::loop_to_tile
