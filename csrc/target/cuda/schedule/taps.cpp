#include "target/cuda/schedule/taps.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <set>

#include "analysis/cost.h"
#include "base/error.h"
#include "target/cuda/devices.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kMostDepth = 512;     // of k with the places beyond lines: all of a block's weights lie in shared memory
constexpr int64_t kMostGrowth = 3;      // times the taps that there are
constexpr int64_t kMostChannels = 128;  // of a block
constexpr int64_t kMostWarps = 16, kMostTile = 256, kMostPoints = 1024;
constexpr int64_t kMostSums = 128;  // of a thread
constexpr int64_t kMostPad = 32;    // elements behind a line of the image
constexpr int64_t kBanks = 32, kBankBytes = 4;
constexpr int64_t kWidestLanes = 8;
constexpr int64_t kUnrolledTurns = 8;

// Of the costs below, in clocks of an SM.
constexpr double kL2BytesPerClock = 40;
constexpr double kSharedBytesPerClock = 128;
constexpr double kCopy = 20, kFill = 4;  // instructions of a thread for a vector of the image, and for a weight
constexpr double kElement = 3;           // for two elements of a matrix of the image
constexpr double kOverlap = 0.2;         // of what runs beside the slowest part and is not hidden
constexpr double kLatency = 2500;        // of a block: its copies, a barrier, its stores
constexpr int64_t kRegisters = 64 << 10;
constexpr int64_t kOtherRegisters = 64;
constexpr int64_t kEnoughWarps = 16;

const loop_ir::Let* widened(const loop_ir::Block& slice) {
  const auto* let = slice.size() == 2 ? std::get_if<loop_ir::Let>(&slice[1]->node) : nullptr;
  return let && let->fn == Fn::cast && let->dtype == DType::f32 ? let : nullptr;
}

}  // namespace

GpuTaps::GpuTaps(const loop_ir::Kernel& kernel) : MergedKernel(kernel), GpuProducts(merged) { possible_ = fits_ && match(); }

// ---- what fits -----------------------------------------------------------------------------------------------------

bool GpuTaps::match() {
  if (items_.size() != 1 || items_[0].reduce->dtypes[0] != DType::f32) return false;
  const Item& item = items_[0];
  for (bool rows : {true, false}) {
    image_is_rows_ = rows;
    if (match_image(rows ? item.rows : item.columns) && match_weights(rows ? item.columns : item.rows)) return true;
  }
  return false;
}

std::vector<loop_ir::Axis> GpuTaps::all_points() const {
  std::vector<loop_ir::Axis> all = batch_;
  all.insert(all.end(), points().begin(), points().end());
  return all;
}

/// A window with lines of taps, whose elements threads would have to gather: vectors along k are copied where they lie.
bool GpuTaps::match_image(const Operand& operand) {
  const Item& item = items_[0];
  const auto* load = widened(operand.slice) ? std::get_if<loop_ir::Load>(&operand.slice[0]->node) : nullptr;
  if (!load || widened(operand.slice)->operands[0] != load->name || size_of(load->dtype) != 2 || !is_float(load->dtype)) return false;
  const auto tile = find_matrix_tile(kernel_, operand.slice, operand.value, item.k, points(), image_is_rows_, true);
  if (!tile || tile->copied) return false;
  const std::vector<loop_ir::Axis> all = all_points();
  const std::vector<Reach> windows = find_windows(kernel_, *inner_, all);
  const auto found = std::find_if(windows.begin(), windows.end(), [&](const Reach& w) { return w.loads.size() == 1 && w.loads[0] == load; });
  if (found == windows.end() || !found->run() || !(found->fill == loop_ir::zero_of(load->dtype))) return false;
  window_ = *found;
  run_ = *window_.run();
  line_axes_.clear();
  run_axes_.clear();
  lines_ = length_ = 1;
  for (const loop_ir::Axis& axis : item.k) {
    if (!axis.extent.is_constant() || axis.extent.value() < 1) return false;
    const bool runs = uses(load->index[run_], axis.name);
    for (size_t d = 0; runs && d < load->index.size(); ++d)
      if (d != run_ && uses(load->index[d], axis.name)) return false;
    (runs ? run_axes_ : line_axes_).push_back(axis);
    (runs ? length_ : lines_) *= axis.extent.value();
  }
  const auto step_of = [&](const loop_ir::Axis& axis) { return linear_coefficient(load->index[run_], axis.name)->value(); };
  std::stable_sort(run_axes_.begin(), run_axes_.end(), [&](const auto& a, const auto& b) { return step_of(a) > step_of(b); });
  int64_t side_by_side = 1;
  for (size_t a = run_axes_.size(); a-- > 0; side_by_side *= run_axes_[a].extent.value())
    if (step_of(run_axes_[a]) != side_by_side) return false;
  // Points side by side are one axis of the tile, those of the next line another one.
  if (window_.steps[run_].size() != 1) return false;
  across_ = window_.steps[run_].begin()->first;
  if (std::none_of(points().begin(), points().end(), [&](const auto& a) { return a.name == across_; })) return false;
  down_.clear();
  for (const loop_ir::Axis& axis : points()) {
    if (axis.name == across_) continue;
    bool overlaps = down_.empty();
    for (size_t d : window_.overlaps()) overlaps = overlaps || window_.step(d, axis.name) != 0;
    if (overlaps) down_ = axis.name;
  }
  lead_ = 0;
  const auto base = window_.base[run_].as_constant();
  if (base && window_.step(run_, across_) > 0 && floor_mod(*base, 2) == 1) lead_ = 1;
  window_.least[run_] -= lead_;
  window_.most[run_] += units_of_line() * kUnit - lead_ - length_;
  window_.beyond = units_of_line() * kUnit > length_;
  return steps() * kMatrixDepth <= kMostDepth && units() * kUnit <= kMostGrowth * lines_ * length_ && window_.step(run_, across_) > 0;
}

bool GpuTaps::match_weights(const Operand& operand) {
  weights_load_ = widened(operand.slice) ? std::get_if<loop_ir::Load>(&operand.slice[0]->node) : nullptr;
  if (!weights_load_ || widened(operand.slice)->operands[0] != weights_load_->name || !weights_load_->guard.empty() ||
      weights_load_->dtype != window_.param->dtype || !kernel_.find_param(weights_load_->buffer))
    return false;
  for (const GlobalAccess& access : global_accesses(kernel_, {operand.slice[0]}))
    if (const auto step = linear_coefficient(access.offset, channels().back().name)) weights_across_ = step->is(1);
  return true;
}

bool GpuTaps::fits(const SizeHints& hints, const std::string& arch) const {
  return possible_ && cuda_generation(arch) >= 80 && choose(hints, arch).has_value();
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

std::optional<GpuTaps::Unit> GpuTaps::unit(int64_t number) const {
  if (number >= units()) return std::nullopt;
  return Unit{number / units_of_line(), number % units_of_line() * kUnit - lead_};
}

int64_t GpuTaps::points_along(const Shape& shape, const std::string& axis) const {
  return axis == across_ ? shape.across : axis == down_ ? shape.down : 1;
}

PointTile GpuTaps::tile_of(const Shape& shape) const {
  PointTile tile;
  for (const loop_ir::Axis& a : all_points()) tile[a.name] = points_along(shape, a.name);
  return tile;
}

/// The part of the image that a block needs, with as many elements behind each line as keep a warp's threads out of each other's banks, and lines at
/// pairs of elements.
Region GpuTaps::region_of(const Shape& shape) const {
  std::optional<Region> best;
  double least = 0;
  for (int64_t pad = 0; pad <= kMostPad; ++pad) {
    Region region = make_region(window_, tile_of(shape), across_, 2, all_points(), pad);
    bool pairs = true;
    for (size_t d = 0; d < region.extents.size(); ++d) pairs = pairs && (d == run_ || region.extents[d] == 1 || region.pitch[d] % 2 == 0);
    if (!pairs || pad % region.lanes != 0) continue;
    const double ways = bank_ways(region, shape);
    if (best && ways >= least) continue;
    best = std::move(region);
    least = ways;
  }
  return *best;
}

/// Turns of the banks when a warp takes a matrix from the image, on average over the ways in which units lie beside each other.
double GpuTaps::bank_ways(const Region& region, const Shape& shape) const {
  const MatrixTile image = image_of(shape);
  std::set<int64_t> apart;
  for (int64_t half = 0; 2 * half + 1 < units(); ++half) apart.insert(place_of(region, *unit(2 * half + 1)) - place_of(region, *unit(2 * half)));
  if (apart.empty()) apart.insert(kUnit);
  double ways = 0;
  for (int64_t next : apart) {
    std::set<int64_t> words;
    for (int64_t t = 0; t < kWarp; ++t) {
      const int64_t point = image.line_of(t / 4, 0, 0).value();
      int64_t place = t % 4 / 2 * next + t % 2 * 2;
      for (size_t d = 0; d < region.extents.size(); ++d)
        if (region.extents[d] > 1)
          place += region.pitch[d] * (window_.step(d, across_) * (point % shape.across) + std::abs(window_.step(d, down_)) * (point / shape.across));
      words.insert(floor_divide(place * 2, kBankBytes));
    }
    int64_t most = 1;
    std::array<int64_t, kBanks> turns{};
    for (int64_t word : words) most = std::max(most, ++turns[static_cast<size_t>(floor_mod(word, kBanks))]);
    ways += static_cast<double>(most);
  }
  return ways / static_cast<double>(apart.size());
}

/// Sums side by side in a thread that make an access of 16 bytes of the narrowest result.
int64_t GpuTaps::lanes_of(const Shape& shape) const {
  int64_t lanes = 2;
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_))
    if (access.stores) lanes = std::max(lanes, std::min(kWidestLanes, kAccessBytes / access.bytes));
  const int64_t columns = image_is_rows_ ? shape.channels : shape.of_warp();
  while (lanes > 2 && (columns % (lanes / 2 * kMatrixColumns) != 0 || (!image_is_rows_ && shape.across % lanes != 0))) lanes /= 2;
  return lanes;
}

MatrixTile GpuTaps::weights_of(const Shape& shape) const {
  MatrixTile tile;
  tile.dtype = window_.param->dtype;
  tile.of_rows = !image_is_rows_;
  tile.lanes = lanes_of(shape);
  tile.gathered = weights_across_;
  tile.set_shape(shape.channels, steps() * kMatrixDepth);
  return tile;
}

MatrixTile GpuTaps::image_of(const Shape& shape) const {
  MatrixTile tile;
  tile.dtype = window_.param->dtype;
  tile.of_rows = image_is_rows_;
  tile.lanes = lanes_of(shape);
  return tile;
}

int64_t GpuTaps::shared_bytes(const Shape& shape) const {
  const int64_t image = (region_of(shape).bytes() + kAccessBytes - 1) / kAccessBytes * kAccessBytes;
  return image + weights_of(shape).elements() * 2;
}

/// Clocks of a device for all blocks: rounds of as many as an SM holds, each bound by its matrix units, shared memory, memory or instructions.
double GpuTaps::cost(const Shape& shape, const SizeHints& hints, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const auto expected = [&](Expr e) { return std::max(1.0, analysis::estimate(e, hints, kernel_.symbols)); };
  const auto whole = static_cast<double>(steps() * kMatrixDepth);
  const auto points = static_cast<double>(shape.points());
  const auto channels = static_cast<double>(shape.channels);
  const auto warps = static_cast<double>(shape.warps);
  const Region region = region_of(shape);
  const auto image = static_cast<double>(region.elements);
  const double multiply = 2 * points * channels * whole * model.sms * model.boost_ghz / (model.bf16_tflops * 1e3);
  const double taken = points * whole / 2 / kWarp;       // pairs of the image, by warp
  const double loaded = warps * channels * whole / 256;  // matrices of weights
  const double issue =
      (points * channels * whole / (kMatrixRows * kMatrixColumns * kMatrixDepth) + taken * kElement + loaded +
       image / static_cast<double>(region.lanes) / kWarp * kCopy + channels * whole / kWarp * kFill + points * channels / kWarp * 2) /
      4;
  const double shared = (taken * 128 + loaded * 512 + 2 * image + 2 * channels * whole) / kSharedBytesPerClock;
  double stored = 0;
  for (const GlobalAccess& access : global_accesses(kernel_, *inner_))
    if (access.stores) stored += points * channels * static_cast<double>(access.bytes);
  const double memory =
      (2 * image + 2 * channels * static_cast<double>(lines_ * length_)) / kL2BytesPerClock + stored * model.sms * model.boost_ghz / model.dram_gb_s;
  const int64_t registers = shape.of_warp() * shape.channels / kWarp + kOtherRegisters;
  const auto held = static_cast<double>(shape.warps * kWarp * registers);
  const double resident =
      std::max(1.0, std::floor(std::min({static_cast<double>(model.warps_sm) / warps, static_cast<double>(kRegisters) / held,
                                         static_cast<double>(model.shared_kb_sm << 10) / static_cast<double>(shared_bytes(shape) + 1024)})));
  double blocks = std::ceil(expected(count(this->channels())) / channels);
  for (const loop_ir::Axis& a : all_points()) blocks *= std::ceil(expected(a.extent) / static_cast<double>(points_along(shape, a.name)));
  const double work = std::max({multiply, shared, memory, issue}) + kOverlap * (multiply + shared + memory + issue);
  const double each = std::ceil(blocks / model.sms);
  const double thin = std::max(1.0, kEnoughWarps / (resident * warps));
  return each * work + std::ceil(each / resident) * kLatency * std::sqrt(thin);
}

std::optional<GpuTaps::Shape> GpuTaps::choose(const SizeHints& hints, const std::string& arch) const {
  const double all = std::max(1.0, analysis::estimate(count(channels()), hints, kernel_.symbols));
  const int64_t most = (static_cast<int64_t>(cuda_model(arch).shared_kb_block) << 10) - (1 << 10);
  std::optional<Shape> best;
  double least = 0;
  const auto parts = static_cast<int64_t>(std::ceil(all / static_cast<double>(kMostChannels)));
  std::set<int64_t> widths;
  for (int64_t n : {parts, 2 * parts}) {
    const auto width = static_cast<int64_t>(std::ceil(all / static_cast<double>(n)));
    widths.insert(std::min(kMostChannels, (width + kMatrixRows - 1) / kMatrixRows * kMatrixRows));
  }
  for (int64_t width : widths)
    for (int64_t across : {8, 16, 32, 64})
      for (int64_t down : {1, 2, 4, 8, 16, 32})
        for (int64_t of_warp : {64, 32, 16}) {
          const Shape shape{across, down, width, across * down / of_warp};
          if ((down > 1 && down_.empty()) || shape.points() < 64 || shape.points() > 512 || shape.warps < 2 || shape.warps > kMostWarps) continue;
          if (of_warp * width / kWarp > kMostSums || shared_bytes(shape) > most) continue;
          const double clocks = cost(shape, hints, arch);
          if (best && clocks >= least) continue;
          best = shape;
          least = clocks;
        }
  return best;
}

Schedule GpuTaps::propose(const SizeHints& hints, const std::string& arch) const {
  const std::optional<Shape> best = choose(hints, arch);
  DEPLO_CHECK(best.has_value(), "{}: gpu_taps is proposed for a window that does not fit", kernel_.name);
  Schedule s{"gpu_taps", {{"tile", {{across_, best->across}}}}};
  if (best->down > 1) s.directives.push_back({"tile", {{down_, best->down}}});
  s.directives.push_back({"tile", {{group_of(channels()), best->channels}}});
  s.directives.push_back({"warps", {{"", best->warps}}});
  return s;
}

void GpuTaps::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("the kernel is no contraction of a window of bf16 or f16 whose taps are few and lie side by side");
  const auto tile = [&](const std::string& axis, int64_t of, int64_t most, std::optional<int64_t> otherwise) {
    const Directive* d = reader.find("tile", axis);
    if (!d && otherwise) return *otherwise;
    if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", axis));
    reader.only(*d, {axis});
    const int64_t n = reader.number(*d, axis, of, most);
    if (n % of != 0) reader.fail(*d, fmt::format("allowed: multiples of {}", of));
    return n;
  };
  shape_.across = tile(across_, 2, kMostTile, std::nullopt);
  shape_.down = down_.empty() ? 1 : tile(down_, 1, kMostTile, 1);
  shape_.channels = tile(group_of(channels()), kMatrixRows, kMostChannels, std::nullopt);
  const Directive& warps = reader.one("warps");
  reader.only(warps, {""});
  shape_.warps = reader.number(warps, "", 1, kMostWarps);
  if (shape_.points() > kMostPoints || shape_.points() % (shape_.warps * kMatrixRows) != 0)
    reader.fail(warps,
                fmt::format("allowed: what leaves each warp a multiple of {} of the tile's points, which are up to {}", kMatrixRows, kMostPoints));
  const int64_t sums = shape_.of_warp() * shape_.channels / kWarp;
  if (sums > kMostSums) reader.fail(warps, fmt::format("each thread would have {} sums in registers, allowed: {}", sums, kMostSums));
  if (shared_bytes(shape_) > kMostSharedBytes)
    reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has at most {}", shared_bytes(shape_), kMostSharedBytes));
  reader.finish("tile and warps");
  lanes_ = lanes_of(shape_);
  region_ = region_of(shape_);
  weights_ = weights_of(shape_);
  image_ = image_of(shape_);
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuTaps::apply(const Schedule& schedule) {
  read(schedule);
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
  row_ = names_.fresh("u");
  half_ = names_.fresh("h");
  group_ = names_.fresh("g");
  column_ = names_.fresh("w");
  const std::string channel = names_.fresh("c");
  std::vector<loop_ir::Axis> blocks{{channel, ceildiv(count(channels()), shape_.channels)}};
  for (const loop_ir::Axis& a : all_points()) blocks.push_back({a.name, ceildiv(a.extent, points_along(shape_, a.name))});
  first_ = unflatten(blocks, sym(block_));
  first_channel_ = first_.at(channel) * shape_.channels;
  first_.erase(channel);
  for (auto& [axis, at] : first_) at = at * points_along(shape_, axis);
  region_.array = names_.fresh("window");
  region_.origin = origin_of(region_, tile_of(shape_), first_);
  weights_.tile = names_.fresh("weights");
  const std::string& sums = items_[0].sums;
  const int64_t rows = image_is_rows_ ? shape_.of_warp() : shape_.channels;
  const int64_t columns = image_is_rows_ ? shape_.channels : shape_.of_warp();
  tile_ir::Block body{make(tile_ir::Alloc{region_.array, window_.param->dtype, {region_.elements}, Space::shared}),
                      make(tile_ir::Alloc{weights_.tile, weights_.dtype, {weights_.elements()}, Space::shared}),
                      make(tile_ir::Alloc{sums, DType::f32, {rows / kMatrixRows, 2, columns / (4 * lanes_), lanes_}, Space::reg})};
  const auto append = [&](tile_ir::Block block) { body.insert(body.end(), block.begin(), block.end()); };
  append(copy_region(region_, sym(thread_), shape_.warps * kWarp, names_));
  if (region_.is_async) body.push_back(make(tile_ir::CopyGroup{}));
  append(fill_weights());
  if (region_.is_async) body.push_back(make(tile_ir::CopyGroup{0}));
  body.push_back(make(tile_ir::Barrier{}));
  const std::string zero = names_.fresh("zero");
  body.push_back(per_thread({make(tile_ir::Let{zero, DType::f32, Fn::constant, {}, loop_ir::zero_of(DType::f32), 0}),
                             make(tile_ir::Store{sums, {sym(row_), sym(half_), sym(group_), sym(column_)}, zero, {}, Combiner::set})}));
  append(multiply());
  append(finish());
  Expr grid = 1;
  for (const loop_ir::Axis& a : blocks) grid = grid * a.extent;
  return gpu_grid(block_, grid, thread_, shape_.warps * kWarp, apart(body));
}

/// All weights of the block's channels, in the order of units, with zeros beyond lines: threads side by side fill what lies side by side in memory.
tile_ir::Block GpuTaps::fill_weights() {
  const int64_t by = units_of_line() % 2 == 0 ? 2 * kUnit : kUnit;
  const int64_t in_channel = steps() * kMatrixDepth / by;
  const int64_t in_line = units_of_line() * kUnit / by;
  const int64_t threads = shape_.warps * kWarp;
  const int64_t all = shape_.channels * in_channel;
  const std::string q = names_.fresh("q");
  const std::string v = names_.fresh("v");
  const std::string value = names_.fresh("n");
  const std::string next = names_.fresh("next");
  const Expr number = sym(thread_) + sym(q) * threads;
  const Expr line_at = weights_.gathered ? mod(number, shape_.channels) : floordiv(number, in_channel);
  const Expr piece = weights_.gathered ? floordiv(number, shape_.channels) : mod(number, in_channel);
  const Expr line = floordiv(piece, in_line);
  const Expr tap = mod(piece, in_line) * by + sym(v) - lead_;
  const Expr channel = first_channel_ + line_at;
  Substitution map = first_;
  map.merge(unflatten(channels(), channel));
  map.merge(unflatten(line_axes_, line));
  map.merge(unflatten(run_axes_, tap));
  loop_ir::Load load = substituted(*weights_load_, map);
  load.name = value;
  load.fill = loop_ir::zero_of(load.dtype);
  if (lead_ > 0) load.guard.push_back({Cond::Kind::ge0, tap});
  if (units_of_line() * kUnit > length_ + lead_) load.guard.push_back(less(tap, length_));
  if (in_channel > lines_ * in_line) load.guard.push_back(less(line, lines_));
  const Expr most = count(channels());
  if (!most.is_constant() || most.value() % shape_.channels != 0) load.guard.push_back(less(channel, most));
  if (load.guard.empty()) load.fill = {};
  const std::string w = names_.fresh("v");
  const std::string stored = names_.fresh("n");
  const Expr at = weights_.place_of(0, line_at, floordiv(piece * by, kChunk)) + (by < kChunk ? mod(piece, kChunk / by) * by : Expr(0)) + sym(w);
  tile_ir::Block body{
      make(tile_ir::Alloc{next, weights_.dtype, {by}, Space::reg}),
      make(tile_ir::For{axis(v, 0, by, LoopKind::unroll), {make(std::move(load)), make(tile_ir::Store{next, {sym(v)}, value, {}, Combiner::set})}}),
      make(tile_ir::For{axis(w, 0, by, LoopKind::lanes),
                        {make(tile_ir::Load{stored, weights_.dtype, next, {sym(w)}, {}, {}}),
                         make(tile_ir::Store{weights_.tile, {at}, stored, {}, Combiner::set})}})};
  if (all % threads != 0) body = {make(tile_ir::If{{less(number, all)}, std::move(body)})};
  const int64_t turns = (all + threads - 1) / threads;
  return {
      make(tile_ir::For{turns <= kUnrolledTurns ? axis(q, 0, turns, LoopKind::unroll) : axis(q, 0, turns, LoopKind::serial, 1, 2), std::move(body)})};
}

/// Where a point's first tap lies in the region, from the tile's first one on.
Expr GpuTaps::place_of(Expr point) const {
  Expr place = 0;
  for (size_t d = 0; d < region_.extents.size(); ++d) {
    if (region_.extents[d] == 1) continue;
    for (const auto& [axis, step] : window_.steps[d]) {
      const int64_t n = points_along(shape_, axis);
      if (n == 1) continue;
      const Expr at = axis == across_ ? mod(point, shape_.across) : floordiv(point, shape_.across);
      place = place + (at * step + (step < 0 ? -step * (n - 1) : 0)) * region_.pitch[d];
    }
  }
  return place;
}

/// Where a unit begins, from a point's place on.
int64_t GpuTaps::place_of(const Region& region, const Unit& unit) const {
  Substitution taps = unflatten(line_axes_, unit.line);
  int64_t place = 0;
  for (size_t d = 0; d < region.extents.size(); ++d) {
    if (region.extents[d] == 1) continue;
    int64_t at = -window_.least[d] + (d == region.order.back() ? region.shift : 0);
    if (d == run_) at += unit.first;
    for (const loop_ir::Axis& axis : line_axes_)
      if (const auto step = linear_coefficient(window_.loads[0]->index[d], axis.name)) at += step->value() * taps.at(axis.name).value();
    place += at * region.pitch[d];
  }
  return place;
}

/// A thread's two numbers of one of four matrices: 8 of k are a unit and the next one, of which two threads have the first. What lies beyond lines
/// is 0, whatever neighbours of theirs are.
tile_ir::Block GpuTaps::load_units(const std::string& array, int64_t matrix, Expr point, int64_t half) {
  const DType dtype = window_.param->dtype;
  const std::string v = names_.fresh("v");
  const std::string value = names_.fresh("x");
  const Expr t = mod(lane(), 4);
  const auto first = unit(2 * half);
  if (!first) {
    return {make(tile_ir::For{axis(v, 0, 2, LoopKind::lanes),
                              {make(tile_ir::Let{value, dtype, Fn::constant, {}, loop_ir::zero_of(dtype), 0}),
                               make(tile_ir::Store{array, {matrix, sym(v)}, value, {}, Combiner::set})}})};
  }
  const auto second = unit(2 * half + 1);
  const int64_t begin = place_of(region_, *first);
  const int64_t next = second ? place_of(region_, *second) - begin : 0;
  const Expr within = next == kUnit ? t * 2 : floordiv(t, 2) * next + mod(t, 2) * 2;
  tile_ir::Block body{make(tile_ir::Load{value, dtype, region_.array, {place_of(point) + begin + within + sym(v)}, {}, {}})};
  // Of 8 numbers, where those that count begin or end: a product changes its sign there.
  const auto counts = [&](int64_t e) {
    const auto& of = e < kUnit ? first : second;
    const int64_t tap = of ? of->first + e % kUnit : -1;
    return tap >= 0 && tap < length_;
  };
  Expr sign = counts(2 * kUnit - 1) ? 1 : -1;
  const Expr element = t * 2 + sym(v);
  bool all = true;
  for (int64_t e = 0; e < 2 * kUnit; ++e) {
    all = all && counts(e);
    if (e > 0 && counts(e) != counts(e - 1)) sign = sign * (element * 2 - (2 * e - 1));
  }
  std::string stored = value;
  if (!all) {
    const std::string place = names_.fresh("e");
    const std::string none = names_.fresh("none");
    const std::string is = names_.fresh("is");
    const std::string zero = names_.fresh("zero");
    stored = names_.fresh("x");
    body.push_back(make(tile_ir::Let{place, DType::i64, Fn::index, {}, {}, sign}));
    body.push_back(make(tile_ir::Let{none, DType::i64, Fn::constant, {}, Scalar::of_int(DType::i64, 0), 0}));
    body.push_back(make(tile_ir::Let{is, DType::boolean, Fn::ge, {place, none}, {}, 0}));
    body.push_back(make(tile_ir::Let{zero, dtype, Fn::constant, {}, loop_ir::zero_of(dtype), 0}));
    body.push_back(make(tile_ir::Let{stored, dtype, Fn::where, {is, value, zero}, {}, 0}));
  }
  body.push_back(make(tile_ir::Store{array, {matrix, sym(v)}, stored, {}, Combiner::set}));
  return {make(tile_ir::For{axis(v, 0, 2, LoopKind::lanes), std::move(body)})};
}

/// Four matrices of the image: 16 points, from `first` of the tile on, at 16 of k.
tile_ir::Block GpuTaps::image_matrix(const std::string& name, Expr first, int64_t step) {
  const std::string array = names_.fresh("taps");
  tile_ir::Block out{make(tile_ir::Alloc{array, window_.param->dtype, {4, 2}, Space::reg})};
  tile_ir::JoinMatrix join{name, window_.param->dtype, array, {}};
  for (int64_t m = 0; m < 4; ++m) {
    const int64_t next = image_is_rows_ ? m % 2 : m / 2;
    const int64_t deeper = image_is_rows_ ? m / 2 : m % 2;
    for (auto& s : load_units(array, m, image_.line_of(floordiv(lane(), 4), first, next), 2 * step + deeper)) out.push_back(s);
    join.places.push_back({m, 0});
  }
  out.push_back(make(std::move(join)));
  return out;
}

/// All products: a warp has its points, and all channels of the block.
tile_ir::Block GpuTaps::multiply() {
  tile_ir::Block out;
  const std::string& sums = items_[0].sums;
  const int64_t rows = image_is_rows_ ? shape_.of_warp() : shape_.channels;
  const int64_t columns = image_is_rows_ ? shape_.channels : shape_.of_warp();
  const Expr begin = warp() * shape_.of_warp();
  for (int64_t step = 0; step < steps(); ++step) {
    const auto load = [&](const std::string& name, bool of_rows, int64_t first) -> tile_ir::Block {
      if (of_rows == image_is_rows_) return image_matrix(name, begin + first, step);
      return {
          make(tile_ir::LoadMatrix{name, weights_.dtype, weights_.tile, {weights_.row_of_matrix(lane(), 0, first, step * kMatrixDepth)}, 4, false})};
    };
    std::vector<std::string> loaded;
    for (int64_t first = 0; first < columns; first += 2 * kMatrixColumns) {
      loaded.push_back(names_.fresh("bm"));
      for (auto& s : load(loaded.back(), false, first)) out.push_back(s);
    }
    const int64_t units = lanes_ / 2;  // of 8 columns that make a group of sums
    for (int64_t row = 0; row < rows / kMatrixRows; ++row) {
      const std::string a = names_.fresh("am");
      for (auto& s : load(a, true, row * kMatrixRows)) out.push_back(s);
      for (int64_t at = 0; at < columns / kMatrixColumns; ++at)
        out.push_back(make(tile_ir::Mma{sums,
                                        {row, 0, at / units, at % units * 2},
                                        {row, 1, at / units, at % units * 2},
                                        a,
                                        loaded[static_cast<size_t>(at / 2)],
                                        static_cast<int>(at % 2)}));
    }
  }
  return out;
}

/// for row, half, group, lane: body, over the thread's own outputs.
Ref<tile_ir::Stmt> GpuTaps::per_thread(tile_ir::Block body) const {
  const int64_t rows = image_is_rows_ ? shape_.of_warp() : shape_.channels;
  const int64_t columns = image_is_rows_ ? shape_.channels : shape_.of_warp();
  tile_ir::Block inner{make(tile_ir::For{axis(column_, 0, lanes_, LoopKind::lanes), std::move(body)})};
  inner = {make(tile_ir::For{axis(group_, 0, columns / (4 * lanes_), LoopKind::unroll), std::move(inner)})};
  inner = {make(tile_ir::For{axis(half_, 0, 2, LoopKind::unroll), std::move(inner)})};
  return make(tile_ir::For{axis(row_, 0, rows / kMatrixRows, LoopKind::unroll), std::move(inner)});
}

/// What the kernel computes from the sums, for each output of the thread.
tile_ir::Block GpuTaps::finish() {
  const Expr row = sym(row_) * kMatrixRows + sym(half_) * 8 + floordiv(lane(), 4);
  const Expr column = sym(group_) * (4 * lanes_) + mod(lane(), 4) * lanes_ + sym(column_);
  const Expr point = warp() * shape_.of_warp() + (image_is_rows_ ? row : column);
  const Expr channel = first_channel_ + (image_is_rows_ ? column : row);
  Substitution map = first_;
  map.merge(unflatten(channels(), channel));
  std::vector<Cond> exists;
  const auto within = [&](Expr at, Expr extent, int64_t tile) {
    if (!extent.is_constant() || extent.value() % tile != 0) exists.push_back(less(at, extent));
  };
  within(channel, count(channels()), shape_.channels);
  for (const loop_ir::Axis& a : points()) {
    if (a.name == across_) map[a.name] = map.at(a.name) + mod(point, shape_.across);
    if (a.name == down_) map[a.name] = map.at(a.name) + floordiv(point, shape_.across);
    within(map.at(a.name), a.extent, points_along(shape_, a.name));
  }
  tile_ir::Block body = convert(*inner_, map, {sym(row_), sym(half_), sym(group_), sym(column_)});
  if (!exists.empty()) body = {make(tile_ir::If{exists, std::move(body)})};
  return {per_thread(std::move(body))};
}

}  // namespace deplo::loop_to_tile
