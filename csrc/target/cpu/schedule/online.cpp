#include "target/cpu/schedule/online.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "analysis/cost.h"
#include "analysis/weighted_sum.h"
#include "base/error.h"
#include "base/text.h"
#include "kernel_ir/ir.h"
#include "loop_ir/build.h"
#include "loop_ir/places.h"
#include "lower/loop_to_tile/convert.h"
#include "schedule/reader.h"
#include "target/cpu/schedule/online_scheduler.h"

namespace deplo {
namespace loop_to_tile {

using analysis::ContractionOperand;
using loop_ir::Block;
using loop_ir::Load;
using loop_ir::Store;

namespace {

constexpr int64_t kRowTiles = 5;       // register blocks of a block of rows
constexpr int64_t kKeysOfPart = 256;   // at least
constexpr double kBusy = 0.7;          // of the threads
constexpr int64_t kMatrixTiles = 2;    // for a matrix unit, whose blocks have more rows
constexpr int64_t kKeys = 256;         // of a block
constexpr int64_t kSharedRows = 512;   // rows that share packed keys and values
constexpr int64_t kFewShared = 64;     // of these, where more leave threads idle
constexpr int64_t kWantedShares = 16;  // keep a few threads busy
constexpr int64_t kMostDepth = 512;    // of one chain of sums
constexpr int64_t kMostOnlineWork = int64_t{1} << 40;

}  // namespace

std::optional<Schedule> OnlineScheduler::propose() {
  if (!choose_any()) return std::nullopt;
  return describe();
}

bool OnlineScheduler::choose_any() {
  if (!recognize()) return false;
  direct_ = is_direct();
  if (!direct_ && (rows_.empty() || hint(row_.extent) < kLeastOnlineRows)) return false;
  set_batch();
  if (direct_)
    choose_direct(hint(count(rows_)));
  else
    choose();
  return true;
}

std::optional<FewRows> OnlineScheduler::propose_few() {
  if (!choose_any() || direct_ || !reads_in_place()) return std::nullopt;
  int64_t known = 1;
  std::optional<Expr> rows;
  for (const auto& a : rows_) {
    if (a.extent.is_constant())
      known *= a.extent.value();
    else if (!rows)
      rows = a.extent;
    else
      return std::nullopt;
  }
  const int64_t most = analysis::kFewQueries / known;
  if (!rows || most < 1) return std::nullopt;
  direct_ = true;
  batch_.clear();
  set_batch();
  pair_values_ = matrix_scores_ = matrix_values_ = false;
  choose_direct(known * most);
  return FewRows{describe(), {less_equal(*rows, most)}};
}

int64_t OnlineScheduler::key_parts() {
  const int64_t threads = ctx_.target.threads;
  if (threads <= 1 || !choose_any() || part_ || sum_.extra || hint(all_rows()) > analysis::kFewQueries) return 1;
  const int64_t pieces = std::max<int64_t>(1, hint(count(batch_) * shares()));
  const int64_t most = std::min(threads, hint(sum_.key.extent) / kKeysOfPart);
  // Of the time of all threads, what they work.
  auto busy = [&](int64_t parts) {
    const double all = static_cast<double>(pieces * parts) / static_cast<double>(threads);
    return all / std::ceil(all);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= most && busy(best) < kBusy; ++parts)
    if (busy(parts) > busy(best)) best = parts;
  return best;
}

tile_ir::Kernel OnlineScheduler::apply(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!recognize()) reader.fail("the kernel's rows are no sums of values weighted by a softmax of scores");
  if (!reader.all("direct").empty())
    read_direct(reader);
  else
    read(reader);
  tile_ir::Kernel out;
  out.name = kernel_.name;
  out.params = kernel_.params;
  out.symbols = kernel_.symbols;
  out.provenance = kernel_.provenance;
  const Expr extent = count(batch_) * shares();
  if (part_ && block_keys_ != analysis::kKeyBlock)
    reader.fail(fmt::format("keys are in parts of blocks of {}: 'tile({}={})' is allowed", analysis::kKeyBlock, sum_.key.name, analysis::kKeyBlock));
  out.body = {loop("par", 0, extent, LoopKind::parallel, body())};
  out.chunks = max(1, min(extent, ceildiv(analysis::cost_of(kernel_).operations, chunk_work_)));
  out.schedule = schedule;
  return out;
}

// ---- recognition -----------------------------------------------------------------------------------------------

bool OnlineScheduler::recognize() {
  if (nest_.axes.empty() || !colliding_stores(kernel_).empty()) return false;
  auto found = analysis::find_weighted_sum(kernel_, *nest_.inner, true);
  if (!found) return false;
  if (!found->contractions) return false;
  sum_ = std::move(*found);
  pair_ = &*sum_.contractions;
  limits_ = analysis::key_limits(sum_);
  hard_limits_ = limits_.size();
  for (const auto& limit : analysis::soft_key_limits(sum_)) limits_.push_back(limit);
  const auto depth = pair_->scores.reduce->axes[0].extent.as_constant();
  const auto columns = sum_.column.extent.as_constant();
  if (!depth || *depth < 1 || *depth > kMostDepth || !columns || *columns < 1) return false;
  depth_ = *depth;
  columns_ = *columns;
  find_rows();
  if (!find_operands() || !reads_inputs_alone()) return false;
  find_part();
  return true;
}

void OnlineScheduler::find_part() {
  part_ = analysis::key_part(sum_, nest_.axes);
  if (!part_) return;
  for (auto& stmt : read_)
    if (const auto* from = std::get_if<Load>(&stmt->node); from && from->buffer == sum_.local) {
      Load load = *from;
      std::erase(load.guard, part_->cond);
      stmt = loop_ir::make_stmt(std::move(load));
    }
}

void OnlineScheduler::find_rows() {
  for (const auto& a : nest_.axes) {
    if (pair_->queries.axes.count(a.name) == 0 || pair_->keys.axes.count(a.name) > 0 || pair_->value.axes.count(a.name) > 0) continue;
    if (rows_.empty() || hint(a.extent) > hint(row_.extent)) row_ = a;
    rows_.push_back(a);
  }
}

void OnlineScheduler::set_batch() {
  auto is_row = [&](const loop_ir::Axis& a) {
    return direct_ ? std::any_of(rows_.begin(), rows_.end(), [&](const auto& r) { return r.name == a.name; }) : a.name == row_.name;
  };
  for (const auto& a : nest_.axes)
    if (!is_row(a)) batch_.push_back(a);
}

bool OnlineScheduler::find_operands() {
  Block outside = sum_.rows;
  outside.insert(outside.end(), sum_.score.begin(), sum_.score.end());
  auto prepare = [&](Operand& operand, const ContractionOperand& source, const Block& around) {
    operand.source = &source;
    Block pool = around;
    pool.insert(pool.end(), source.slice.begin(), source.slice.end());
    operand.slice = statements_for(pool, {source.value});
    return is_early(operand.slice);
  };
  if (!prepare(queries_, pair_->queries, outside) || !prepare(keys_, pair_->keys, outside)) return false;
  Block column = sum_.rows;
  for (const auto& s : sum_.column_body)
    if (!name_of(*s).empty()) column.push_back(s);
  if (!prepare(values_, pair_->value, column)) return false;
  score_ = statements_for(outside, {sum_.scored});
  Block pool = sum_.rows;
  pool.insert(pool.end(), sum_.read.begin(), sum_.read.end());
  read_ = statements_for(pool, {sum_.read_value});
  return is_early(score_) && is_early(read_);
}

bool OnlineScheduler::is_early(const Block& block) const {
  std::set<std::string> used;
  for (const auto& s : block) collect_uses(*s, used);
  return used.count(sum_.max) == 0 && used.count(sum_.sum) == 0 && used.count(pair_->values.result) == 0;
}

bool OnlineScheduler::reads_inputs_alone() const {
  std::set<std::string> inputs;
  for (const auto& p : kernel_.params)
    if (p.kind == loop_ir::ParamKind::in) inputs.insert(p.name);
  bool alone = true;
  auto check = [&](const Block& block) {
    for (const auto& s : block) {
      const auto* load = std::get_if<Load>(&s->node);
      alone = alone && (!load || load->buffer == sum_.local || inputs.count(load->buffer) > 0);
    }
  };
  for (const Block* block : {&queries_.slice, &keys_.slice, &values_.slice, &score_, &read_, &sum_.rows, &sum_.column_body}) check(*block);
  return alone;
}

// ---- the schedule as data --------------------------------------------------------------------------------------

bool OnlineScheduler::can_pair(const Operand& a, const Operand* b) const {
  auto is_bf16 = [](const Operand& o) { return o.narrow() && o.narrow()->dtype == DType::bf16; };
  return ctx_.target.features.count("avx512bf16") > 0 && is_bf16(a) && (!b || is_bf16(*b));
}

bool OnlineScheduler::stores_sum() const {
  return std::any_of(sum_.rows.begin(), sum_.rows.end(), [](const auto& s) { return std::holds_alternative<loop_ir::Store>(s->node); });
}

void OnlineScheduler::choose() {
  pair_scores_ = can_pair(queries_, &keys_) && depth_ % 2 == 0;
  pair_values_ = can_pair_values();
  matrix_scores_ = matrix_values_ = pair_scores_ && pair_values_ && has_matrix_unit();
  const int64_t lanes = ctx_.target.vector_bytes / 4;
  const int64_t rows = std::max<int64_t>(hint(row_.extent), 1);
  auto width = [&](int64_t n) { return n <= lanes ? lanes : kBlockVectors * lanes; };
  key_lanes_ = width(hint(sum_.key.extent));
  column_lanes_ = width(columns_);
  mr_ = row_.extent.is_constant() ? register_rows(rows, kBlockVectors, ctx_) : register_rows(kMostOnlineTile, kBlockVectors, ctx_);
  if (matrix_scores_) mr_ = (rows <= tile_ir::kMatrixSide ? 1 : 2) * tile_ir::kMatrixSide;
  const int64_t wanted = std::max<int64_t>(1, kWantedShares / std::max<int64_t>(1, hint(count(batch_))));
  shared_ = std::clamp((rows + wanted - 1) / wanted, kFewShared, kSharedRows);
  const int64_t pieces = (rows + shared_ - 1) / shared_;
  const int64_t tiles = ((rows + pieces - 1) / pieces + mr_ - 1) / mr_;
  const int64_t most = matrix_scores_ ? kMatrixTiles : kRowTiles;
  const int64_t blocks = (tiles + most - 1) / most;
  rows_of_block_ = (tiles + blocks - 1) / blocks * mr_;
  shared_ = rows_of_block_ * blocks;
  const int64_t step = matrix_values_ ? std::max(key_lanes_, tile_ir::kMatrixDepth) : key_lanes_;
  block_keys_ = part_ ? analysis::kKeyBlock : std::min(kKeys, round_up(std::max<int64_t>(hint(sum_.key.extent), 1), step));
}

bool OnlineScheduler::can_pair_values() const { return can_pair(values_, nullptr) && rounds_weights(); }

bool OnlineScheduler::rounds_weights() const {
  if (sum_.rounded) return true;
  return std::all_of(sum_.column_body.begin(), sum_.column_body.end(), [&](const auto& s) {
    const auto* store = std::get_if<Store>(&s->node);
    return !store || size_of(kernel_.find_param(store->buffer)->dtype) == 2;
  });
}

bool OnlineScheduler::has_matrix_unit() const { return ctx_.target.features.count("amx-bf16") > 0; }

bool OnlineScheduler::fits_matrix_unit(int64_t lanes) const {
  if (mr_ % tile_ir::kMatrixSide != 0 || lanes % tile_ir::kMatrixSide != 0) return false;
  const int64_t down = mr_ / tile_ir::kMatrixSide;
  return down * (lanes / tile_ir::kMatrixSide) + down + 1 <= kernel_ir::kMatrixRegisters;
}

Schedule OnlineScheduler::describe() const {
  Schedule s{"online", {}};
  std::vector<Argument> parallel;
  for (const auto& a : batch_) parallel.push_back({a.name, {}});
  parallel.insert(parallel.end(), {{row_.name, {}}, {"work", chunk_work_}});
  if (direct_)
    s.directives = describe_direct();
  else
    s.directives = {{"parallel", std::move(parallel)},
                    {"tile", {{row_.name, rows_of_block_}}},
                    {"tile", {{sum_.key.name, block_keys_}}},
                    {"share", {{row_.name, shared_}}},
                    {"register_block", {{row_.name, mr_}, {sum_.key.name, key_lanes_}}},
                    {"register_block", {{row_.name, mr_}, {sum_.column.name, column_lanes_}}}};
  if (pair_scores_) s.directives.push_back({"dot", {{depth_name(), matrix_scores_ ? tile_ir::kMatrixDepth : 2}}});
  if (pair_values_) s.directives.push_back({"dot", {{key_name(), matrix_values_ ? tile_ir::kMatrixDepth : 2}}});
  return s;
}

const Directive& OnlineScheduler::needed_directive(ScheduleReader& reader, const std::string& word, const std::string& name) {
  const Directive* d = reader.find(word, name);
  if (!d) reader.fail(fmt::format("it needs a '{}({})'", word, name));
  return *d;
}

/// The axes around the rows in the order of the threads; `last`: the one that is named after them, if any.
void OnlineScheduler::read_parallel(ScheduleReader& reader, const std::string& last) {
  const Directive& parallel = reader.one("parallel");
  std::vector<std::string> names = reader.names(parallel);
  std::vector<std::string> wanted;
  for (const auto& a : batch_) wanted.push_back(a.name);
  if (!last.empty()) wanted.push_back(last);
  if (names.size() != wanted.size() || (!last.empty() && names.back() != last) || !std::is_permutation(names.begin(), names.end(), wanted.begin()))
    reader.fail(parallel, fmt::format("allowed: {} and work{}", joined(wanted), last.empty() ? "" : "; the last one, the rows, stays in place"));
  std::vector<loop_ir::Axis> ordered;
  for (const std::string& name : names)
    for (const auto& a : batch_)
      if (a.name == name) ordered.push_back(a);
  batch_ = std::move(ordered);
  wanted.push_back("work");
  reader.only(parallel, {wanted.begin(), wanted.end()});
  chunk_work_ = reader.number(parallel, "work", 1, kMostOnlineWork);
}

bool OnlineScheduler::read_dot(ScheduleReader& reader, const std::string& name, bool allowed, bool& matrix, int64_t width) const {
  const Directive* d = reader.find("dot", name);
  if (!d) return false;
  reader.only(*d, {name});
  const int64_t steps = reader.number(*d, name, 2, tile_ir::kMatrixDepth);
  if (!allowed) reader.fail(*d, "only bf16 numbers, where the CPU multiplies pairs of them, are allowed");
  if (steps != 2 && steps != tile_ir::kMatrixDepth) reader.fail(*d, fmt::format("allowed: 2, and {} for a matrix unit", tile_ir::kMatrixDepth));
  matrix = steps == tile_ir::kMatrixDepth;
  if (matrix && !has_matrix_unit()) reader.fail(*d, fmt::format("{} steps at once take a CPU with amx-bf16", steps));
  if (matrix && !fits_matrix_unit(width))
    reader.fail(*d, fmt::format("{} x {} sums do not fit a matrix unit: allowed are multiples of {} up to 2 x 2, 1 x 6 or 3 x 1 of them", mr_, width,
                                tile_ir::kMatrixSide));
  return true;
}

void OnlineScheduler::read(ScheduleReader& reader) {
  if (rows_.empty()) reader.fail("there are no rows that share keys; allowed: direct(rows=1)");
  set_batch();
  read_parallel(reader, row_.name);
  auto number = [&](const std::string& word, const std::string& name) {
    const Directive& d = needed_directive(reader, word, name);
    reader.only(d, {name});
    return reader.number(d, name, 1, kMostOnlineTile);
  };
  rows_of_block_ = number("tile", row_.name);
  block_keys_ = number("tile", sum_.key.name);
  shared_ = number("share", row_.name);
  const int64_t lanes = ctx_.target.vector_bytes / 4;
  auto blocks = reader.all("register_block");
  if (blocks.size() != 2) reader.fail("it needs two register blocks, of keys and of columns");
  for (const Directive* d : blocks) {
    const bool of_keys = d->arguments.size() == 2 && d->arguments[1].name == sum_.key.name;
    const std::string& name = of_keys ? sum_.key.name : sum_.column.name;
    reader.only(*d, {row_.name, name});
    const int64_t mr = reader.number(*d, row_.name, 1, kMostOnlineTile);
    const int64_t width = reader.number(*d, name, 1, kMostOnlineTile);
    const Directive* dot = reader.find("dot", of_keys ? depth_name() : key_name());
    const bool in_vectors = !dot || dot->arguments != std::vector<Argument>{{dot->arguments[0].name, tile_ir::kMatrixDepth}};
    if (width % lanes != 0 || (in_vectors && (width / lanes) * (mr + 1) > 4 * ctx_.target.vector_registers))
      reader.fail(*d, "whole vectors, and few of them, are allowed");
    if (d != blocks[0] && mr != mr_) reader.fail(*d, "both register blocks have as many rows");
    mr_ = mr;
    (of_keys ? key_lanes_ : column_lanes_) = width;
  }
  if (key_lanes_ == 0 || column_lanes_ == 0) reader.fail("it needs two register blocks, of keys and of columns");
  if (rows_of_block_ % mr_ != 0 || shared_ % rows_of_block_ != 0 || block_keys_ % key_lanes_ != 0)
    reader.fail("tiles hold whole register blocks, and rows that share keys whole tiles");
  pair_scores_ = read_dot(reader, depth_name(), can_pair(queries_, &keys_) && depth_ % 2 == 0, matrix_scores_, key_lanes_);
  pair_values_ = read_dot(reader, key_name(), can_pair_values() && block_keys_ % 2 == 0, matrix_values_, column_lanes_);
  if (matrix_values_ && block_keys_ % tile_ir::kMatrixDepth != 0)
    reader.fail(*reader.find("dot", key_name()), fmt::format("for a matrix unit tiles hold multiples of {} keys", tile_ir::kMatrixDepth));
  reader.finish("parallel, tile, share, register_block and dot");
}

}  // namespace loop_to_tile

std::optional<FewRows> propose_cpu_online_few(const loop_ir::Kernel& kernel, const PassContext& ctx) {
  return loop_to_tile::OnlineScheduler(kernel, ctx).propose_few();
}

int64_t cpu_key_parts(const loop_ir::Kernel& kernel, const PassContext& ctx) { return loop_to_tile::OnlineScheduler(kernel, ctx).key_parts(); }

std::optional<Schedule> propose_cpu_online(const loop_ir::Kernel& kernel, const PassContext& ctx) {
  return loop_to_tile::OnlineScheduler(kernel, ctx).propose();
}

tile_ir::Kernel apply_cpu_online(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx) {
  return loop_to_tile::OnlineScheduler(kernel, ctx).apply(schedule);
}

}  // namespace deplo
