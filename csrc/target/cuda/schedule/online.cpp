#include "target/cuda/schedule/online.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "analysis/cost.h"
#include "base/error.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "target/cuda/devices.h"

namespace deplo::loop_to_tile {

using analysis::WeightedSum;
using loop_ir::Block;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Store;
using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr double kLeastRows = 8;     // fewer leave matrix units idle
constexpr double kLeastKeys = 128;   // that are worth it all the same: what is read matters then
constexpr double kFewKeys = 32;      // the same on matrix units, which read them in whole lines
constexpr int64_t kMostDepth = 256;  // of keys and of values
constexpr int64_t kMostSums = 192;   // of a thread: scores and sums of values
constexpr int64_t kFewBytes = 48 << 10;
// Of numbers.
constexpr double kFewRows = 16;
constexpr int64_t kBlocksOfFew = 3;  // that an SM holds if each fetches two blocks of keys ahead
// Of groups of threads.
constexpr std::string_view kGroupArch = "sm_90a";
constexpr int64_t kMostGroupKeys = 128;
constexpr int64_t kMostGroupSums = 128;  // of a thread, beside as many weights as operands
// Of parts of the keys.
constexpr double kLongKeys = 512;
constexpr double kLeastBlocks = 2;  // of keys in a part
constexpr double kMostParts = 64;
constexpr double kBlocksOfSm = 2;  // of one warp, with copies under way
constexpr double kMostGrowth = 8;  // of weights, as an exponent of 2
constexpr double kLog2E = 1.4426950408889634;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

GpuOnline::GpuOnline(const loop_ir::Kernel& kernel) : WarpRows(kernel) { possible_ = recognize(); }

// ---- recognition -----------------------------------------------------------------------------------------------------

bool GpuOnline::recognize() {
  const OuterNest nest = outer_nest(kernel_);
  if (nest.axes.empty() || !colliding_stores(kernel_).empty()) return false;
  nest_ = nest.axes;
  auto found = analysis::find_weighted_sum(kernel_, *nest.inner, true);
  if (!found || !found->contractions) return false;
  sum_ = std::move(*found);
  limits_ = analysis::key_limits(sum_);
  part_ = analysis::key_part(sum_, nest_);
  depth_axes_ = sum_.contractions->scores.reduce->axes;
  const auto depth = depth_axes_[0].extent.as_constant();
  const auto columns = sum_.column.extent.as_constant();
  if (!depth || *depth < 1 || *depth > kMostDepth || !columns || *columns < 1 || *columns > kMostDepth) return false;
  depth_ = round_up(*depth, kMatrixDepth);
  width_ = round_up(*columns, 2 * kMatrixColumns);
  if (!find_row()) return false;
  numbers_ = !find_tiles(false);
  if (numbers_ && (sum_.rounded || !find_tiles(true))) return false;
  return find_operands() && reads_inputs_alone();
}

/// Of the axes that queries alone have. Where there is none, one row.
bool GpuOnline::find_row() {
  const WeightedSum::Contractions& pair = *sum_.contractions;
  const loop_ir::Axis* best = longest([&](const loop_ir::Axis& a) {
    return pair.queries.axes.count(a.name) > 0 && pair.keys.axes.count(a.name) == 0 && pair.value.axes.count(a.name) == 0;
  });
  set_row(best ? *best : loop_ir::Axis{names_.fresh("row"), 1});
  key_axes_ = {sum_.key};
  column_axes_ = {sum_.column};
  return true;
}

/// With the statements outside of the reductions that the operands take: none may need what is known only at the end.
bool GpuOnline::find_tiles(bool numbers) {
  const WeightedSum::Contractions& pair = *sum_.contractions;
  Block outside = sum_.rows;
  outside.insert(outside.end(), sum_.score.begin(), sum_.score.end());
  auto prepare = [&](MatrixTile& tile, const analysis::ContractionOperand& source, const Block& around, const std::vector<loop_ir::Axis>& k,
                     const std::vector<loop_ir::Axis>& free, bool of_rows, const char* name) {
    Block pool = around;
    pool.insert(pool.end(), source.slice.begin(), source.slice.end());
    const Block slice = statements_for(pool, {source.value});
    auto found = find_matrix_tile(kernel_, slice, source.value, k, free, of_rows, false, DType::f32, numbers);
    if (!found || !is_early(slice)) return false;
    tile = std::move(*found);
    tile.tile = names_.fresh(std::string(name) + "_tile");
    tile.next = names_.fresh(std::string(name) + "_next");
    if (!numbers) return true;
    // Vectors of k are read of rows, vectors of columns of what does not lie along k.
    if (of_rows && !tile.along_k) {
      tile.copied = nullptr;
      tile.linear = false;
      tile.along_k = true;
    }
    if (!of_rows) tile.alike = tile.along_k ? kNumbers : 0;
    return true;
  };
  if (!prepare(queries_, pair.queries, outside, depth_axes_, row_axes_, true, "q")) return false;
  if (!prepare(keys_tile_, pair.keys, outside, depth_axes_, key_axes_, false, "k")) return false;
  Block column = sum_.rows;
  for (const auto& s : sum_.column_body)
    if (!name_of(*s).empty()) column.push_back(s);
  // Values are summed over an axis of their own, which is as long as that of the keys.
  if (!prepare(values_, pair.value, column, pair.values.reduce->axes, column_axes_, false, "v")) return false;
  if (queries_.dtype != keys_tile_.dtype) return false;
  // Weights are rounded to 16 bits, which results of more would show.
  return numbers || sum_.rounded || is_rounded(pair.values.result, sum_.column_body);
}

/// With the statements outside of the reductions that make and read scores.
bool GpuOnline::find_operands() {
  Block outside = sum_.rows;
  outside.insert(outside.end(), sum_.score.begin(), sum_.score.end());
  score_ = statements_for(outside, {sum_.scored});
  Block pool = sum_.rows;
  pool.insert(pool.end(), sum_.read.begin(), sum_.read.end());
  read_ = statements_for(pool, {sum_.read_value});
  const auto* load = read_.size() == 1 ? std::get_if<Load>(&read_[0]->node) : nullptr;
  guarded_ = load && load->buffer == sum_.local && (load->guard.empty() || (std::isinf(load->fill.f) && load->fill.f < 0));
  for (const Block* block : {&score_, &read_})
    for (const auto& s : *block) {
      const auto* from = std::get_if<Load>(&s->node);
      reads_memory_ = reads_memory_ || (from && from->buffer != sum_.local);
    }
  find_scale();
  exact_most_ = !only_shifts();
  return is_early(score_) && is_early(read_);
}

/// Where a score is the sum of products times a positive number, exponents are of the sum: one product less for each.
void GpuOnline::find_scale() {
  if (!guarded_) return;
  is_scaled_ = sum_.scored == sum_.contractions->scores.result;
  const Let* product = nullptr;
  std::map<std::string, double> constants;
  for (const auto& s : score_) {
    const auto* let = std::get_if<Let>(&s->node);
    if (!let) return;
    if (let->fn == Fn::constant)
      constants[let->name] = let->literal.f;
    else if (product || let->fn != Fn::mul || let->name != sum_.scored)
      return;
    else
      product = let;
  }
  if (!product) return;
  for (size_t i : {0, 1}) {
    auto number = constants.find(product->operands[i]);
    if (number == constants.end() || product->operands[1 - i] != sum_.contractions->scores.result) continue;
    if (!(number->second > 0) || !std::isfinite(number->second)) continue;
    scale_ = number->second;
    is_scaled_ = true;
  }
}

/// Whether what follows the sums would be the same for any other score than the greatest that weights were relative to: it is compared with -inf, or
/// added to the logarithm of the sum.
bool GpuOnline::only_shifts() const {
  std::map<std::string, const Let*> lets;
  bool shifts = sum_.normalized;
  Block all = sum_.rows;
  all.insert(all.end(), sum_.column_body.begin(), sum_.column_body.end());
  for (const auto& s : all)
    if (const auto* let = std::get_if<Let>(&s->node)) lets[let->name] = let;
  const auto is_a = [&](const std::string& name, Fn fn) { return lets.count(name) > 0 && lets.at(name)->fn == fn; };
  const auto is_log_of_sum = [&](const std::string& name) { return is_a(name, Fn::log) && lets.at(name)->operands[0] == sum_.sum; };
  const auto is_lowest = [&](const std::string& name) {
    return is_a(name, Fn::constant) && std::isinf(lets.at(name)->literal.f) && lets.at(name)->literal.f < 0;
  };
  const std::string& result = sum_.contractions->values.result;
  for (const auto& s : all) {
    const auto* let = std::get_if<Let>(&s->node);
    std::set<std::string> used;
    if (let) used = {let->operands.begin(), let->operands.end()};
    if (const auto* store = std::get_if<Store>(&s->node)) used = {store->value};
    const auto other = [&](const std::string& than) { return let->operands[0] == than ? let->operands[1] : let->operands[0]; };
    if (used.count(sum_.max) > 0)
      if (!let || sum_.extra || !((let->fn == Fn::eq && is_lowest(other(sum_.max))) || (let->fn == Fn::add && is_log_of_sum(other(sum_.max)))))
        return false;
    // A logarithm of the sum alone says how it is relative.
    if (let && is_log_of_sum(let->name)) {
      for (const auto& user : all) {
        const auto* later = std::get_if<Let>(&user->node);
        const auto* store = std::get_if<Store>(&user->node);
        if (store && store->value == let->name) return false;
        if (!later || std::count(later->operands.begin(), later->operands.end(), let->name) == 0) continue;
        const std::string& beside = later->operands[0] == let->name ? later->operands[1] : later->operands[0];
        if (later->fn != Fn::add || beside != sum_.max) return false;
      }
    } else if (used.count(sum_.sum) > 0) {
      const bool divides = let && let->fn == Fn::div && let->operands[0] == result && let->operands[1] == sum_.sum;
      if (!divides) return false;
      shifts = true;
    }
    const bool divides = let && let->fn == Fn::div && let->operands[0] == result && let->operands[1] == sum_.sum;
    if (!sum_.normalized && used.count(result) > 0 && !divides) return false;
  }
  return shifts;
}

bool GpuOnline::is_early(const Block& block) const {
  std::set<std::string> used;
  for (const auto& s : block) collect_uses(*s, used);
  return used.count(sum_.max) == 0 && used.count(sum_.sum) == 0 && used.count(sum_.contractions->values.result) == 0;
}

/// Rows run in blocks: what one of them stores, no statement may read.
bool GpuOnline::reads_inputs_alone() const {
  std::set<std::string> inputs;
  for (const auto& p : kernel_.params)
    if (p.kind == loop_ir::ParamKind::in) inputs.insert(p.name);
  for (const Block* block : {&queries_.slice, &keys_tile_.slice, &values_.slice, &score_, &read_, &sum_.rows, &sum_.column_body})
    for (const auto& s : *block) {
      const auto* load = std::get_if<Load>(&s->node);
      if (load && load->buffer != sum_.local && inputs.count(load->buffer) == 0) return false;
    }
  return true;
}

// ---- the schedule as data --------------------------------------------------------------------------------------------

int64_t GpuOnline::shared_bytes(int64_t rows, int64_t keys, int64_t stages, bool in_groups) const {
  MatrixTile q = queries_;
  MatrixTile k = keys_tile_;
  MatrixTile v = values_;
  for (MatrixTile* tile : {&q, &k, &v}) tile->in_boxes = in_groups;
  q.set_shape(rows, depth_);
  k.set_shape(keys, depth_);
  v.set_shape(width_, keys);
  MatrixTile w = weights_;
  if (numbers_) w.set_shape(rows, keys);
  return size_of(q.dtype) * (q.elements() + stages * (k.elements() + v.elements()) + (numbers_ ? w.elements() : 0));
}

bool GpuOnline::fits(const SizeHints& hints, const std::string& arch) const {
  if (!possible_ || cuda_generation(arch) < 80) return false;
  const double enough = numbers_ ? kFewRows + 1 : kLeastRows;
  return analysis::estimate(row_.extent, hints, kernel_.symbols) >= enough ||
         analysis::estimate(sum_.key.extent, hints, kernel_.symbols) >= (numbers_ ? kLeastKeys : kFewKeys);
}

/// Rows of which a block makes all, and too few blocks for the device: the cache of a batch of one that is decoded.
int64_t GpuOnline::parts(const SizeHints& hints, const std::string& arch) const {
  if (!fits(hints, arch) || part_ || !guarded_ || !row_.extent.is_constant() || row_.extent.value() > kMatrixRows) return 1;
  const double blocks = std::max(1.0, analysis::estimate(count(batch_), hints, kernel_.symbols));
  const double length = analysis::estimate(sum_.key.extent, hints, kernel_.symbols);
  const CudaModel& model = cuda_model(arch);
  if (length < kLongKeys || blocks >= model.sms) return 1;
  if (numbers_ && shared_bytes(kMatrixRows, analysis::kKeyBlock, 1, false) + kOwnBytes > static_cast<int64_t>(model.shared_kb_block) << 10) return 1;
  const double wanted =
      std::min({std::ceil(kBlocksOfSm * model.sms / blocks), std::floor(length / (kLeastBlocks * analysis::kKeyBlock)), kMostParts});
  return std::max<int64_t>(1, static_cast<int64_t>(wanted));
}

/// Two groups of threads share keys and values, or one where rows are few. Nothing where rows or keys would leave them idle.
std::optional<Schedule> GpuOnline::propose_groups(double rows, double length, double batch, const std::string& arch) const {
  if (arch != kGroupArch || part_ || rows <= kGroupRows / 2.0 || length < kGroupRows) return std::nullopt;
  const CudaModel& model = cuda_model(arch);
  const int64_t most = (static_cast<int64_t>(model.shared_kb_block) << 10) - kOwnBytes;
  int64_t groups = 2;
  if (rows <= kGroupRows || batch * std::ceil(rows / (2.0 * kGroupRows)) < model.sms) groups = 1;
  const int64_t tile = groups * kGroupRows;
  int64_t keys = (width_ + kMostGroupKeys) / 2 <= kMostGroupSums && length > kGroupRows ? kMostGroupKeys : kGroupRows;
  if (shared_bytes(tile, keys, 1, true) > most) keys = kGroupRows;
  if (shared_bytes(tile, keys, 1, true) > most) return std::nullopt;
  const int64_t stages = shared_bytes(tile, keys, 2, true) <= most ? 2 : 1;
  return Schedule{"gpu_online",
                  {{"tile", {{row_.name, tile}}}, {"tile", {{sum_.key.name, keys}}}, {"groups", {{row_.name, groups}}}, {"stages", {{"", stages}}}}};
}

/// As many rows a warp as its registers allow, since each matrix of keys and values that it loads is for all of them; fewer where blocks would be too
/// few to fill the device.
Schedule GpuOnline::propose(const SizeHints& hints, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const double rows = analysis::estimate(row_.extent, hints, kernel_.symbols);
  const double batch = std::max(1.0, analysis::estimate(count(batch_), hints, kernel_.symbols));
  int64_t keys = std::max(depth_, width_) > 128 && !part_ ? 32 : 64;
  const double length = analysis::estimate(sum_.key.extent, hints, kernel_.symbols);
  if (numbers_) return propose_numbers(rows, length, batch, arch);
  if (auto groups = propose_groups(rows, length, batch, arch)) return *groups;
  while (keys > 16 && !part_ && length <= static_cast<double>(keys) / 2) keys /= 2;
  int64_t tile = 128;
  int64_t warps = 4;
  const auto blocks = [&] { return batch * std::ceil(rows / static_cast<double>(tile)); };
  const bool fit = 2 * (width_ + keys) / 2 <= kMostSums;
  if (!fit || rows <= 64 || blocks() < model.sms) tile = 64;
  while (tile > kMatrixRows && rows <= static_cast<double>(tile) / 2) {
    tile /= 2;
    warps = std::max<int64_t>(1, warps / 2);
  }
  // Half the keys where only then two blocks fit an SM: large blocks have their registers full, and with all keys some spill.
  const auto fits_twice = [&](int64_t keys_of_block) {
    return 2 * (shared_bytes(tile, keys_of_block, 1, false) + kOwnBytes) <= static_cast<int64_t>(model.shared_kb_sm) << 10;
  };
  const bool halves = tile > 64 && !part_ && !fits_twice(keys) && fits_twice(keys / 2);
  if (halves) keys /= 2;
  const int64_t most = model.shared_kb_block << 10;
  while (keys > 16 && !part_ && shared_bytes(tile, keys, 1, false) > most) keys /= 2;
  int64_t stages = !halves && shared_bytes(tile, keys, 2, false) <= kFewBytes ? 2 : 1;
  // Where there is little to compute, memory waits for copies ahead.
  if (warps == 1)
    for (const int64_t ahead : {2, 3})
      if (shared_bytes(tile, keys, ahead, false) + kOwnBytes <= std::min(most, (static_cast<int64_t>(model.shared_kb_sm) << 10) / 2)) stages = ahead;
  return {"gpu_online",
          {{"tile", {{row_.name, tile}}}, {"tile", {{sum_.key.name, keys}}}, {"warps", {{row_.name, warps}}}, {"stages", {{"", stages}}}}};
}

void GpuOnline::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("the kernel's rows are no sums of values of bf16 or f16 weighted by a softmax of scores");
  if (numbers_)
    read_numbers(reader, sum_.key.name);
  else
    read_tiles(reader, sum_.key.name, 1, true);
  if (part_ && keys_ != analysis::kKeyBlock) reader.fail(fmt::format("its keys are in parts, by blocks of {}", analysis::kKeyBlock));
  if (numbers_) width_ = columns().groups * columns().lanes * wide_;
  const int64_t sums = numbers_ ? per_row_ * (width_ + keys_) / wide_ : units() * (width_ + keys_) / 2;
  if (sums > kMostSums)
    reader.fail(reader.one(numbers_ ? "register_block" : "warps"),
                fmt::format("each thread would have {} scores and sums in registers, allowed: {}", sums, kMostSums));
  check_shared(reader, shared_bytes(rows_, keys_, stages_, in_groups_));
  reader.finish(numbers_ ? "tile, register_block, threads and stages" : "tile, warps or groups, and stages");
  for (MatrixTile* tile : {&queries_, &keys_tile_, &values_}) tile->in_boxes = in_groups_;
  queries_.set_shape(rows_, depth_);
  keys_tile_.set_shape(keys_, depth_);
  values_.set_shape(width_, keys_);
  if (numbers_) weights_.set_shape(rows_, keys_);
}

/// Blocks of threads that hold 64 rows or more, with as many sums in registers as leave each load of shared memory enough products.
Schedule GpuOnline::propose_numbers(double rows, double length, double batch, const std::string& arch) const {
  struct Form {
    int64_t rows, keys, per_row, threads, stages;
  };
  // Of few rows whose keys stream by: a block holds all rows, and an SM several blocks, so that copies are always on their way.
  constexpr Form kFew[] = {{2, 64, 1, 32, 1}, {4, 64, 1, 64, 1}, {8, 64, 2, 64, 1}, {16, 64, 4, 64, 1}};
  constexpr Form kForms[] = {{64, 64, 8, 128, 1}, {64, 32, 4, 128, 1}, {32, 32, 4, 64, 1},
                             {32, 32, 8, 32, 1},  {16, 32, 4, 32, 1},  {16, 16, 2, 32, 1}};
  const CudaModel& model = cuda_model(arch);
  const auto bytes = [&](const Form& f) { return shared_bytes(f.rows, f.keys, f.stages, false); };
  const int64_t most = model.shared_kb_block << 10;
  Form best = kForms[std::size(kForms) - 1];
  bool few = rows <= kFewRows && (part_ || length >= kLeastKeys);
  for (const Form& f : kFew) {
    if (!few || (rows > static_cast<double>(f.rows) && f.rows < kFewRows)) continue;
    best = f;
    best.stages = 2;
    if (bytes(best) + kOwnBytes > (static_cast<int64_t>(model.shared_kb_sm) << 10) / kBlocksOfFew) best.stages = 1;
    break;
  }
  if (few && !part_ && bytes(best) + kOwnBytes > most) {  // wide heads: fewer keys at once, as many threads as hold their scores
    few = false;
    best = kForms[std::size(kForms) - 1];
  }
  for (const Form& f : kForms) {
    if (few) break;
    const bool fits = bytes(f) + kOwnBytes <= std::min(most, (static_cast<int64_t>(model.shared_kb_sm) << 10) / 2);
    const bool fills = batch * std::ceil(rows / static_cast<double>(f.rows)) >= model.sms || f.rows <= 16;
    if (!fits || !fills || rows <= static_cast<double>(f.rows) / 2) continue;
    best = f;
    break;
  }
  while (best.keys > 16 && !part_ && best.keys / 2 * best.rows / best.per_row >= best.threads * kNumbers &&
         length <= static_cast<double>(best.keys) / 2)
    best.keys /= 2;
  return {"gpu_online",
          {{"tile", {{row_.name, best.rows}}},
           {"tile", {{sum_.key.name, best.keys}}},
           {"register_block", {{row_.name, best.per_row}}},
           {"threads", {{"", best.threads}}},
           {"stages", {{"", best.stages}}}}};
}

WarpRows::Columns GpuOnline::columns() const {
  if (!numbers_) return width_ / kMatrixColumns;
  const int64_t columns = sum_.column.extent.value();
  int64_t lanes = kNumbers;
  while (lanes > 1 && 4 * round_up(columns, wide_ * lanes) > 5 * round_up(columns, wide_)) lanes /= 2;
  return {(columns + wide_ * lanes - 1) / (wide_ * lanes), lanes};
}

// ---- statements ------------------------------------------------------------------------------------------------------

Substitution GpuOnline::at(Expr row, Expr key) const {
  Substitution map = batch_map_;
  map[row_.name] = row;
  map[sum_.key.name] = key;
  map[sum_.read_axis] = key;
  return map;
}

/// Statements at a row and key; scores are read in registers.
tile_ir::Block GpuOnline::converted(const Block& block, const Substitution& map) const {
  tile_ir::Block out = placed(block, map);
  for (auto& stmt : out) {
    const auto* load = std::get_if<Load>(&stmt->node);
    if (!load || load->buffer != sum_.local) continue;
    Load copy = *load;
    copy.buffer = scores_;
    copy.index = place();
    stmt = make(std::move(copy));
  }
  return out;
}

// ---- the block -------------------------------------------------------------------------------------------------------

tile_ir::Block GpuOnline::apply(const Schedule& schedule) {
  read(schedule);
  scores_ = names_.fresh("scores");
  sums_ = names_.fresh("sums");
  base_ = names_.fresh("base");
  most_ = names_.fresh("most");
  total_ = names_.fresh("total");
  if (numbers_) weights_.tile = names_.fresh("w_tile");
  return on_rows([&] { return body(); });
}

tile_ir::Block GpuOnline::body() {
  const auto alloc = [](const std::string& name, DType dtype, std::vector<Expr> shape, Space space) {
    return make(tile_ir::Alloc{name, dtype, std::move(shape), space});
  };
  tile_ir::Block out{alloc(queries_.tile, queries_.dtype, {queries_.elements()}, Space::shared),
                     alloc(keys_tile_.tile, keys_tile_.dtype, {stages_ * keys_tile_.elements()}, Space::shared),
                     alloc(values_.tile, values_.dtype, {stages_ * values_.elements()}, Space::shared),
                     alloc(sums_, DType::f32, {units(), halves(), columns().groups, columns().lanes}, Space::reg),
                     alloc(base_, DType::f32, {units(), halves()}, Space::reg),
                     alloc(total_, DType::f32, {units(), halves()}, Space::reg)};
  if (numbers_) out.push_back(alloc(weights_.tile, DType::f32, {weights_.elements()}, Space::shared));
  if (exact_most_) out.push_back(alloc(most_, DType::f32, {units(), halves()}, Space::reg));
  append(out, start_rows());
  find_bounds(out);
  append(out, main_loop());
  append(out, finish());
  return out;
}

tile_ir::Block GpuOnline::start_rows() {
  tile_ir::Block start;
  const std::string lowest = number(start, -kInfinity);
  start.push_back(store_at(base_, {sym("u"), sym("h")}, lowest));
  if (exact_most_) start.push_back(store_at(most_, {sym("u"), sym("h")}, lowest));
  const std::string nothing = number(start, 0);
  start.push_back(store_at(total_, {sym("u"), sym("h")}, nothing));
  return {clear(sums_, columns()), per_row(std::move(start))};
}

/// Outside of these blocks of keys all of the block's rows read -inf.
void GpuOnline::find_bounds(tile_ir::Block& into) {
  bound_keys(into, sum_.rows, sum_.key.extent, [&](const Block& statements) { return is_early(statements); });
  if (part_) first_block_ = first_block_ + mod(substitute(sym(part_->axis.name), batch_map_) - first_block_, stride());
}

/// One block of keys, or the block's rows of queries.
Ref<tile_ir::Stmt> GpuOnline::fetch(const MatrixTile& tile, Expr begin, Expr key_block) {
  const bool of_queries = &tile == &queries_;
  const bool of_values = &tile == &values_;
  const Expr key = key_block * keys_;
  TileCopy copy;
  copy.thread = thread();
  copy.threads = threads();
  copy.begin = begin;
  copy.first = of_queries ? first_row_ : of_values ? Expr(0) : key;
  copy.depth = of_values ? key : Expr(0);
  copy.k = of_values ? &sum_.contractions->values.reduce->axes : &depth_axes_;
  copy.free = of_queries ? &row_axes_ : of_values ? &column_axes_ : &key_axes_;
  copy.batch = &batch_map_;
  return make(tile_ir::If{{less(key_block, last_block_)}, copy_tile(tile, copy, names_)});
}

/// With one stage, values come while scores are computed and the next keys while values are summed; with more, both come blocks of keys ahead.
tile_ir::Block GpuOnline::main_loop() {
  const auto commit = [] { return make(tile_ir::CopyGroup{}); };
  const auto wait = [](int64_t pending) { return make(tile_ir::CopyGroup{static_cast<int>(pending)}); };
  const std::string n = names_.fresh("block");
  const Expr turn = sym(n);
  const Expr block = first_block_ + turn * stride();
  tile_ir::Block out{fetch(queries_, 0, first_block_)};
  tile_ir::Block body;
  Expr keys_begin = 0;
  Expr values_begin = 0;
  if (stages_ == 1) {
    append(out, {fetch(keys_tile_, 0, first_block_), commit()});
    append(body, {wait(0), make(tile_ir::Barrier{}), fetch(values_, 0, block), commit()});
  } else {
    const std::string ahead = names_.fresh("ahead");
    const Expr past = sym(ahead);
    out.push_back(unroll(ahead, stages_ - 1,
                         {fetch(keys_tile_, past * keys_tile_.elements(), first_block_ + past * stride()),
                          fetch(values_, past * values_.elements(), first_block_ + past * stride()), commit()}));
    const Expr next = mod(turn + (stages_ - 1), stages_);
    append(body, {wait(stages_ - 2), make(tile_ir::Barrier{}), fetch(keys_tile_, next * keys_tile_.elements(), block + (stages_ - 1) * stride()),
                  fetch(values_, next * values_.elements(), block + (stages_ - 1) * stride()), commit()});
    keys_begin = mod(turn, stages_) * keys_tile_.elements();
    values_begin = mod(turn, stages_) * values_.elements();
  }
  body.push_back(make(tile_ir::Alloc{scores_, DType::f32, {units(), halves(), key_columns().groups, key_columns().lanes}, Space::reg}));
  body.push_back(clear(scores_, key_columns()));
  if (numbers_)
    append(body, multiply_by_numbers(scores_, queries_, keys_tile_, keys_begin, key_columns(), depth_));
  else
    append(body, multiply(scores_, queries_, keys_tile_, keys_begin, key_groups(), depth_));
  if (stages_ == 1 && !numbers_) append(body, {wait(0), make(tile_ir::Barrier{}), fetch(keys_tile_, 0, block + stride()), commit()});
  append(body, finish_scores(block * keys_));
  if (auto mask = mask_scores(block * keys_)) body.push_back(*mask);
  append(body, weigh());
  if (numbers_) {
    // Weights for the threads of other columns. Those before have been read: a barrier has come since.
    body.push_back(put_weights());
    if (stages_ == 1) body.push_back(wait(0));
    body.push_back(make(tile_ir::Barrier{}));
    if (stages_ == 1) append(body, {fetch(keys_tile_, 0, block + stride()), commit()});
    append(body, multiply_by_numbers(sums_, weights_, values_, values_begin, columns(), keys_));
  } else {
    append(body, multiply_numbers(sums_, scores_, values_, values_begin, columns().groups, keys_));
  }
  out.push_back(make(tile_ir::For{axis(n, 0, part_ ? ceildiv(last_block_ - first_block_, stride()) : last_block_ - first_block_), std::move(body)}));
  return out;
}

/// Sums of products become what the softmax reads; guards that leave -inf come after.
tile_ir::Block GpuOnline::finish_scores(Expr first_key) {
  const Expr key = first_key + column(key_columns().lanes);
  const Substitution map = at(row(), key);
  if (is_scaled_) return {};
  tile_ir::Block body{make(Load{sum_.contractions->scores.result, DType::f32, scores_, place(), {}, {}})};
  append(body, converted(score_, map));
  body.push_back(store_at(scores_, place(), sum_.scored));
  if (!guarded_) {
    append(body, converted(read_, map));
    body.push_back(store_at(scores_, place(), sum_.read_value));
  }
  if (reads_memory_) {
    std::vector<Cond> inside;
    if (!whole(row_.extent, rows_)) inside.push_back(less(row(), row_.extent));
    if (!whole(sum_.key.extent, keys_)) inside.push_back(less(key, sum_.key.extent));
    if (!inside.empty()) body = {make(tile_ir::If{std::move(inside), std::move(body)})};
  }
  return {per_thread(key_columns(), std::move(body))};
}

/// The least value of a condition's expression over the rows of a warp, or all, and a block of keys.
std::optional<Expr> GpuOnline::least_of(const Cond& cond, Expr first_key) const {
  const auto of_row = linear_coefficient(cond.expr, row_.name);
  const auto of_key = linear_coefficient(cond.expr, sum_.read_axis);
  if (cond.kind != Cond::Kind::ge0 || !of_row || !of_key || !of_row->is_constant() || !of_key->is_constant()) return std::nullopt;
  const Expr first = by_numbers_ ? first_row_ : first_row_ + warp() * warp_rows();
  const Expr row = of_row->value() >= 0 ? first : first + ((by_numbers_ ? rows_ : warp_rows()) - 1);
  const Expr key = of_key->value() >= 0 ? first_key : first_key + (keys_ - 1);
  return substitute(cond.expr, at(row, key));
}

/// -inf for keys that a row does not have, where a block of keys has any such.
std::optional<Ref<tile_ir::Stmt>> GpuOnline::mask_scores(Expr first_key) {
  std::vector<Cond> conds;
  if (guarded_) conds = std::get<Load>(read_[0]->node).guard;
  // The blocks that are there are of this part.
  if (part_) conds.erase(std::remove(conds.begin(), conds.end(), part_->cond), conds.end());
  if (!whole(sum_.key.extent, keys_)) conds.push_back(less(sym(sum_.read_axis), sum_.key.extent));
  if (conds.empty()) return std::nullopt;
  std::optional<Expr> least;
  bool known = true;
  for (const Cond& cond : conds) {
    const auto one = least_of(cond, first_key);
    known = known && one;
    if (one) least = least ? min(*least, *one) : *one;
  }
  const std::string masked = names_.fresh("x");
  const Substitution map = at(row(), first_key + column(key_columns().lanes));
  tile_ir::Block body{make(Load{masked, DType::f32, scores_, place(), substituted(conds, map), Scalar::of_float(DType::f32, -kInfinity)}),
                      store_at(scores_, place(), masked)};
  Ref<tile_ir::Stmt> all = per_thread(key_columns(), std::move(body));
  return known ? make(tile_ir::If{{less(*least, 0)}, {std::move(all)}}) : all;
}

/// Of a difference of scores. Weights that are rounded leave little of it.
std::string GpuOnline::exponential(tile_ir::Block& into, const std::string& past) {
  if (!numbers_) return let(into, Fn::exp2_near, {let(into, Fn::mul, {past, number(into, kLog2E * scale_)})});
  return let(into, Fn::exp, {scale_ == 1 ? past : let(into, Fn::mul, {past, number(into, scale_)})});
}

Ref<tile_ir::Stmt> GpuOnline::put_weights() {
  tile_ir::Block body;
  const std::string weight = load(body, scores_, place());
  const Expr chunk = sym("g") * wide_ + sym(thread_x_);
  body.push_back(store_at(weights_.tile, {weights_.place_of_number(0, own_row(), 0, chunk, sym("c"))}, weight));
  return per_thread(key_columns(), std::move(body));
}

/// Scores become weights, relative to a score so far. Sums so far are scaled to another one only when some score is greater than it by so much that
/// weights would grow large: few blocks of keys do that. Exponents are those of 2, within what rounding weights to 16 bits leaves of them.
tile_ir::Block GpuOnline::weigh() {
  tile_ir::Block out;
  tile_ir::Block scaling;
  tile_ir::Block weighing;
  std::string grown;
  const Columns keys = key_columns();
  for (int64_t u = 0; u < units(); ++u)
    for (int64_t h = 0; h < halves(); ++h) {
      const auto rows = [&](const tile_ir::Block& body) { return make(tile_ir::For{axis("u", u, u + 1, LoopKind::unroll), body}); };
      const auto row_of = [&](tile_ir::Block body) { return rows({make(tile_ir::For{axis("h", h, h + 1, LoopKind::unroll), std::move(body)})}); };
      const std::vector<Expr> here{u, h};
      tile_ir::Block of_most;
      const std::string score = load(of_most, scores_, {u, h, sym("g"), sym("c")});
      const std::string most = names_.fresh("here");
      out.push_back(make(tile_ir::Reduce{
          {most},
          {DType::f32},
          Combiner::max,
          {score},
          {axis(thread_x_, 0, wide_, LoopKind::thread_x), axis("g", 0, keys.groups, LoopKind::unroll), axis("c", 0, keys.lanes, LoopKind::lanes)},
          std::move(of_most)}));
      const std::string before = load(out, base_, here);
      if (exact_most_) out.push_back(store_at(most_, here, let(out, Fn::max, {load(out, most_, here), most})));
      const std::string unit = number(out, kLog2E * scale_);
      const std::string by = let(out, Fn::mul, {let(out, Fn::sub, {most, before}), unit});
      // NaN grows, as does what follows -inf.
      const std::string stays = let(out, Fn::le, {by, number(out, kMostGrowth)}, DType::boolean);
      const std::string base = let(out, Fn::where, {stays, before, most});
      out.push_back(store_at(base_, here, base));
      // Where all so far are -inf, so is the difference: the weights are 0.
      const std::string nothing = let(out, Fn::eq, {base, number(out, -kInfinity)}, DType::boolean);
      const std::string origin = let(out, Fn::where, {nothing, number(out, 0), base});
      const std::string grows = let(out, Fn::bit_not, {stays}, DType::boolean);
      grown = grown.empty() ? grows : let(out, Fn::bit_or, {grown, grows}, DType::boolean);

      const std::string factor = exponential(scaling, let(scaling, Fn::sub, {before, origin}));
      scaling.push_back(store_at(total_, here, let(scaling, Fn::mul, {load(scaling, total_, here), factor})));
      tile_ir::Block of_column;
      of_column.push_back(store_at(sums_, place(), let(of_column, Fn::mul, {load(of_column, sums_, place()), factor})));
      scaling.push_back(row_of({over_groups(columns(), std::move(of_column))}));

      tile_ir::Block of_weight;
      if (numbers_) {
        const std::string past = let(of_weight, Fn::sub, {load(of_weight, scores_, place()), origin});
        of_weight.push_back(store_at(scores_, place(), exponential(of_weight, past)));
      } else {
        const std::string less_base = let(weighing, Fn::neg, {let(weighing, Fn::mul, {origin, unit})});
        const std::string relative = let(of_weight, Fn::fma, {load(of_weight, scores_, place()), unit, less_base});
        of_weight.push_back(store_at(scores_, place(), let(of_weight, Fn::exp2_near, {relative})));
      }
      weighing.push_back(row_of({over_groups(keys, std::move(of_weight))}));
      tile_ir::Block of_sum;
      const std::string weight = load(of_sum, scores_, {u, h, sym("g"), sym("c")});
      const std::string more = names_.fresh("more");
      weighing.push_back(make(tile_ir::Reduce{{more},
                                              {DType::f32},
                                              Combiner::sum,
                                              {weight},
                                              {axis("g", 0, keys.groups, LoopKind::unroll), axis("c", 0, keys.lanes, LoopKind::lanes)},
                                              std::move(of_sum)}));
      weighing.push_back(store_at(total_, here, let(weighing, Fn::add, {load(weighing, total_, here), more})));
    }
  const std::string any = let(out, Fn::cast, {grown}, DType::i64);
  out.push_back(make(tile_ir::If{{less(0, sym(any))}, std::move(scaling)}));
  append(out, std::move(weighing));
  return out;
}

tile_ir::Block GpuOnline::finish() {
  const std::vector<Expr> here{sym("u"), sym("h")};
  Substitution map = batch_map_;
  map[row_.name] = row();
  tile_ir::Block part;
  const std::string own = load(part, total_, here);
  const std::string total = names_.fresh("all");
  tile_ir::Block body{make(tile_ir::Reduce{{total},
                                           {DType::f32},
                                           Combiner::sum,
                                           {own},
                                           {axis(thread_x_, 0, wide_, LoopKind::thread_x), axis("g", 0, 1, LoopKind::unroll)},
                                           std::move(part)})};
  tile_ir::Block rest;
  Block before{sum_.rows.begin(), sum_.rows.begin() + static_cast<std::ptrdiff_t>(sum_.before)};
  std::string all = total;
  std::string factor;  // from what weights are relative to, to the maximum
  if (sum_.extra) {
    const Block made = statements_for(before, {*sum_.extra});
    append(rest, converted(made, map));
    std::erase_if(before, [&](const auto& s) { return std::count(made.begin(), made.end(), s) > 0; });
    const std::string base = let(rest, Fn::mul, {load(rest, base_, here), number(rest, scale_)});
    // Infinite beside weights that are nothing by comparison, or of no keys.
    all = let(rest, Fn::add, {total, let(rest, Fn::exp, {let(rest, Fn::sub, {*sum_.extra, base})})});
    if (exact_most_) {
      rest.push_back(
          make(Let{sum_.max, DType::f32, Fn::max, {let(rest, Fn::mul, {load(rest, most_, here), number(rest, scale_)}), *sum_.extra}, {}, 0}));
      const std::string nothing = let(rest, Fn::eq, {base, number(rest, -kInfinity)}, DType::boolean);
      factor = let(rest, Fn::where, {nothing, number(rest, 0), let(rest, Fn::exp, {let(rest, Fn::sub, {base, sum_.max})})});
      const std::string of_extra = let(rest, Fn::exp, {let(rest, Fn::sub, {*sum_.extra, sum_.max})});
      rest.push_back(make(Let{sum_.sum, DType::f32, Fn::fma, {total, factor, of_extra}, {}, 0}));
    } else {
      const std::string one = number(rest, 1);
      rest.push_back(make(Let{sum_.sum, DType::f32, Fn::mul, {all, one}, {}, 0}));
    }
  } else if (exact_most_) {
    const std::string most = load(rest, most_, here);
    const std::string weight = exponential(rest, let(rest, Fn::sub, {load(rest, base_, here), most}));
    const std::string nothing = let(rest, Fn::eq, {most, number(rest, -kInfinity)}, DType::boolean);
    factor = let(rest, Fn::where, {nothing, number(rest, 0), weight});
    rest.push_back(make(Let{sum_.max, DType::f32, Fn::mul, {most, number(rest, scale_)}, {}, 0}));
    rest.push_back(make(Let{sum_.sum, DType::f32, Fn::mul, {total, factor}, {}, 0}));
  } else {
    const std::string base = load(rest, base_, here);
    rest.push_back(make(Let{sum_.max, DType::f32, Fn::mul, {base, number(rest, scale_)}, {}, 0}));
    const std::string one = number(rest, 1);
    rest.push_back(make(Let{sum_.sum, DType::f32, Fn::mul, {total, one}, {}, 0}));
  }
  append(rest, converted(before, map));
  tile_ir::Block of_column;
  Substitution inner = map;
  inner[sum_.column.name] = column(columns().lanes);
  const std::string& result = sum_.contractions->values.result;
  for (const auto& s : sum_.column_body) {
    if (!std::holds_alternative<loop_ir::Reduce>(s->node)) {
      append(of_column, converted({s}, inner));
      continue;
    }
    const bool as_it_is = !sum_.normalized && !exact_most_;
    const std::string raw = as_it_is ? result : names_.fresh("raw");
    of_column.push_back(make(Load{raw, DType::f32, sums_, place(), {}, {}}));
    // Both are relative to the same score.
    if (sum_.normalized) of_column.push_back(make(Let{result, DType::f32, Fn::div, {raw, all}, {}, 0}));
    if (!sum_.normalized && exact_most_) of_column.push_back(make(Let{result, DType::f32, Fn::mul, {raw, factor}, {}, 0}));
  }
  if (!whole(sum_.column.extent, width_)) of_column = {make(tile_ir::If{{less(column(columns().lanes), sum_.column.extent)}, std::move(of_column)})};
  rest.push_back(over_groups(columns(), std::move(of_column)));
  append(rest, converted({sum_.rows.begin() + static_cast<std::ptrdiff_t>(sum_.before), sum_.rows.end()}, map));
  body.push_back(make(tile_ir::If{{less(row(), row_.extent)}, std::move(rest)}));
  return {per_row(std::move(body))};
}

}  // namespace deplo::loop_to_tile
