#include "target/cuda/schedule/chain.h"

#include <algorithm>
#include <cmath>

#include "analysis/cost.h"
#include "base/error.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"
#include "target/cuda/devices.h"

namespace deplo::loop_to_tile {

using analysis::ProductChain;
using loop_ir::Block;
using loop_ir::Let;
using loop_ir::Load;
using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr double kLeastRows = 16;    // fewer leave matrix units idle
constexpr int64_t kMostDepth = 256;  // of a product, and columns of all results
constexpr int64_t kMostSums = 160;   // of a thread
constexpr int64_t kMostKept = 168;   // of these, and registers with what stays
// Of numbers.
constexpr int64_t kMostNumbers = 128;  // sums of a thread that are proposed
constexpr int64_t kBusyThreads = 256;  // of an SM
constexpr double kLog2E = 1.4426950408889634;

bool is_constant(const loop_ir::Stmt& stmt) {
  const auto* let = std::get_if<Let>(&stmt.node);
  return let && let->fn == Fn::constant;
}

DType dtype_of(const loop_ir::Stmt& stmt) {
  if (const auto* load = std::get_if<Load>(&stmt.node)) return load->dtype;
  return std::get<Let>(stmt.node).dtype;
}

}  // namespace

GpuChain::GpuChain(const loop_ir::Kernel& kernel) : WarpRows(kernel) { possible_ = recognize(); }

// ---- recognition -----------------------------------------------------------------------------------------------------

bool GpuChain::recognize() {
  const OuterNest nest = outer_nest(kernel_);
  if (nest.axes.empty() || !colliding_stores(kernel_).empty()) return false;
  nest_ = nest.axes;
  auto found = analysis::find_product_chain(kernel_, *nest.inner);
  if (!found) return false;
  chain_ = std::move(*found);
  limits_ = analysis::key_limits(chain_);
  if (!find_row()) return false;
  key_axes_ = {chain_.keys.back()};
  return (find_products(false) || find_products(true)) && find_points() && reads_inputs_alone();
}

bool GpuChain::find_products(bool numbers) {
  numbers_ = numbers;
  inner_.clear();
  outer_.clear();
  int64_t columns = 0;
  for (const auto& inner : chain_.inner)
    if (!find_inner(inner)) return false;
  for (const auto& outer : chain_.outer) {
    if (!find_outer(outer)) return false;
    columns += outer_.back().width;
  }
  for (const Inner& inner : inner_)
    if (inner.rows.dtype != inner_[0].rows.dtype) return false;
  return columns <= kMostDepth;
}

/// Of the axes that what stays has and what moves has not.
bool GpuChain::find_row() {
  const loop_ir::Axis* best = longest([&](const loop_ir::Axis& a) {
    const auto has = [&](const analysis::ContractionOperand& operand) { return operand.axes.count(a.name) > 0; };
    return std::all_of(chain_.inner.begin(), chain_.inner.end(), [&](const auto& i) { return has(i.rows) && !has(i.moving); }) &&
           std::none_of(chain_.outer.begin(), chain_.outer.end(), [&](const auto& o) { return has(o.other); });
  });
  if (best) set_row(*best);
  return best != nullptr;
}

bool GpuChain::find_inner(const ProductChain::Inner& source) {
  Inner inner;
  inner.depth_axes = source.contraction.reduce->axes;
  const auto depth = inner.depth_axes[0].extent.as_constant();
  if (!depth || *depth < 1 || *depth > kMostDepth) return false;
  inner.depth = round_up(*depth, kMatrixDepth);
  const auto prepare = [&](MatrixTile& tile, const analysis::ContractionOperand& operand, const std::vector<loop_ir::Axis>& free, bool of_rows) {
    Block pool = chain_.rows;
    pool.insert(pool.end(), operand.slice.begin(), operand.slice.end());
    // Tiles are filled before anything of the points is known.
    std::set<std::string> used;
    for (const auto& stmt : operand.slice) loop_ir::collect_uses(*stmt, used);
    if (std::any_of(chain_.points.begin(), chain_.points.end(), [&](const auto& s) { return used.count(loop_ir::name_of(*s)) > 0; })) return false;
    auto found =
        find_matrix_tile(kernel_, statements_for(pool, {operand.value}), operand.value, inner.depth_axes, free, of_rows, false, DType::f32, numbers_);
    if (!found) return false;
    tile = std::move(*found);
    // Vectors of k are read of rows, vectors of columns of what does not lie along k.
    if (numbers_ && of_rows && !tile.along_k) {
      tile.copied = nullptr;
      tile.linear = false;
      tile.along_k = true;
    }
    if (numbers_ && !of_rows) tile.alike = tile.along_k ? kNumbers : 0;
    tile.tile = names_.fresh(of_rows ? "row_tile" : "key_tile");
    tile.next = names_.fresh(of_rows ? "row_next" : "key_next");
    return true;
  };
  if (!prepare(inner.rows, source.rows, row_axes_, true) || !prepare(inner.moving, source.moving, key_axes_, false)) return false;
  if (inner.rows.dtype != inner.moving.dtype) return false;
  inner.sums = names_.fresh("products");
  inner_.push_back(std::move(inner));
  return true;
}

bool GpuChain::find_outer(const ProductChain::Outer& source) {
  Outer outer;
  const auto columns = source.column.extent.as_constant();
  if (!columns || *columns < 1 || *columns > kMostDepth) return false;
  outer.width = round_up(*columns, 2 * kMatrixColumns);
  outer.key_axes = {source.contraction.reduce->axes.back()};
  outer.column_axes = {source.column};
  Block pool = chain_.rows;
  for (const auto& s : source.body)
    if (!loop_ir::name_of(*s).empty()) pool.push_back(s);
  pool.insert(pool.end(), source.other.slice.begin(), source.other.slice.end());
  const Block slice = statements_for(pool, {source.other.value});
  auto found = find_matrix_tile(kernel_, slice, source.other.value, outer.key_axes, outer.column_axes, false, false, DType::f32, numbers_);
  std::set<std::string> used;
  for (const auto& s : slice) collect_uses(*s, used);
  if (!found || found->dtype != inner_[0].rows.dtype || used.count(source.contraction.result) > 0 || !is_exact_enough(source)) return false;
  outer.tile = std::move(*found);
  if (numbers_) outer.tile.alike = outer.tile.along_k ? kNumbers : 0;
  if (numbers_) outer.shared_weights.tile = names_.fresh("weight_tile");
  // Numbers of columns lie otherwise than those of k.
  if (!numbers_) outer.shares = find_shared(source, outer.tile, outer.width);
  if (outer.shares) {
    outer.tile.tile = inner_[*outer.shares].moving.tile;
  } else {
    outer.tile.tile = names_.fresh("value_tile");
    outer.tile.next = names_.fresh("value_next");
  }
  outer.weights = names_.fresh("weights");
  outer.sums = names_.fresh("sums");
  outer_.push_back(std::move(outer));
  return true;
}

/// An inner product whose moving operand is the same matrix, column for depth.
std::optional<size_t> GpuChain::find_shared(const ProductChain::Outer& outer, const MatrixTile& tile, int64_t width) const {
  if (!tile.copied || tile.along_k) return std::nullopt;
  for (size_t i = 0; i < inner_.size(); ++i) {
    const MatrixTile& moving = inner_[i].moving;
    if (!moving.copied || !moving.along_k || inner_[i].depth != width || moving.copied->buffer != tile.copied->buffer ||
        inner_[i].depth_axes[0].extent != outer.column.extent)
      continue;
    Substitution map{{inner_[i].depth_axes[0].name, sym(outer.column.name)}};
    for (size_t k = 0; k < chain_.keys.size(); ++k) map[chain_.keys[k].name] = sym(outer.contraction.reduce->axes[k].name);
    const Load load = substituted(*moving.copied, map);
    if (load.index == tile.copied->index && load.guard == tile.copied->guard) return i;
  }
  return std::nullopt;
}

/// Weights are rounded to 16 bits, and those that were not so by the program must be exponentials times something, in results of 16 bits.
bool GpuChain::is_exact_enough(const ProductChain::Outer& outer) const {
  if (outer.rounded || numbers_) return true;
  if (!analysis::ValueConditions(chain_.rows, {&chain_.points}).is_weight(outer.weight)) return false;
  return is_rounded(outer.contraction.result, outer.body);
}

/// Values that differ from key to key.
std::set<std::string> GpuChain::varying() const {
  std::set<std::string> names;
  for (const auto& a : chain_.keys) names.insert(a.name);
  for (const auto& i : chain_.inner) names.insert(i.contraction.result);
  for (const auto& s : chain_.points) {
    std::set<std::string> used;
    collect_uses(*s, used);
    if (std::any_of(used.begin(), used.end(), [&](const auto& name) { return names.count(name) > 0; })) names.insert(loop_ir::name_of(*s));
  }
  return names;
}

/// What weights need of the points; float32 values of the row alone are kept in registers.
bool GpuChain::find_points() {
  const std::set<std::string> varies = varying();
  Block pool = chain_.rows;
  pool.insert(pool.end(), chain_.points.begin(), chain_.points.end());
  std::set<std::string> needed;
  for (const auto& outer : chain_.outer) needed.insert(outer.weight);
  for (const auto& outer : chain_.outer) {
    auto at = std::find_if(pool.begin(), pool.end(), [&](const auto& s) { return loop_ir::name_of(*s) == outer.weight; });
    if (at == pool.end() || dtype_of(**at) != DType::f32 || varies.count(outer.weight) == 0) return false;
  }
  for (size_t i = pool.size(); i-- > 0;) {
    const std::string name = loop_ir::name_of(*pool[i]);
    if (needed.count(name) == 0) continue;
    if (varies.count(name) == 0 && !is_constant(*pool[i]) && dtype_of(*pool[i]) == DType::f32) {
      row_values_[name] = names_.fresh("of_row");
      continue;
    }
    collect_uses(*pool[i], needed);
    points_.insert(points_.begin(), pool[i]);
    reads_memory_ = reads_memory_ || std::holds_alternative<Load>(pool[i]->node);
  }
  return true;
}

/// Rows run in blocks: what one of them stores, no statement may read.
bool GpuChain::reads_inputs_alone() const {
  std::vector<const Block*> blocks{&chain_.rows, &chain_.points};
  for (const Inner& inner : inner_)
    for (const MatrixTile* tile : {&inner.rows, &inner.moving}) blocks.push_back(&tile->slice);
  for (const Outer& outer : outer_) blocks.push_back(&outer.tile.slice);
  for (const auto& outer : chain_.outer) blocks.push_back(&outer.body);
  for (const Block* block : blocks)
    for (const auto& s : *block) {
      const auto* load = std::get_if<Load>(&s->node);
      const auto* param = load ? kernel_.find_param(load->buffer) : nullptr;
      if (load && (!param || param->kind != loop_ir::ParamKind::in)) return false;
    }
  return true;
}

// ---- the schedule as data --------------------------------------------------------------------------------------------

int64_t GpuChain::sums_of(int64_t units, int64_t keys) const {
  int64_t sums = static_cast<int64_t>(inner_.size()) * keys / 2;
  for (const Outer& outer : outer_) sums += outer.width / 2;
  return units * sums;
}

int64_t GpuChain::sums_of_numbers(int64_t per_row, int64_t keys, int64_t wide) const {
  int64_t sums = static_cast<int64_t>(inner_.size() + outer_.size()) * keys / wide;
  for (const Outer& outer : outer_) sums += width_of_numbers(outer, wide) / wide;
  return per_row * sums;
}

WarpRows::Columns GpuChain::columns(const Outer& outer) const {
  return numbers_ ? columns_of_numbers(outer, wide_) : Columns(outer.width / kMatrixColumns);
}

/// As many side by side as waste few columns.
WarpRows::Columns GpuChain::columns_of_numbers(const Outer& outer, int64_t wide) const {
  const int64_t width = outer.column_axes[0].extent.value();
  int64_t lanes = kNumbers;
  while (lanes > 1 && 4 * round_up(width, wide * lanes) > 5 * round_up(width, wide)) lanes /= 2;
  return {(width + wide * lanes - 1) / (wide * lanes), lanes};
}

int64_t GpuChain::width_of_numbers(const Outer& outer, int64_t wide) const {
  const Columns columns = columns_of_numbers(outer, wide);
  return columns.groups * columns.lanes * wide;
}

/// Registers of a thread that what stays of its rows takes.
int64_t GpuChain::kept_of(int64_t units) const {
  int64_t registers = 0;
  for (const Inner& inner : inner_) registers += units * inner.depth / 4;
  return registers;
}

void GpuChain::set_shapes(int64_t rows, int64_t keys) {
  for (Inner& inner : inner_) {
    inner.rows.set_shape(rows, inner.depth);
    inner.moving.set_shape(keys, inner.depth);
  }
  for (Outer& outer : outer_) outer.tile.set_shape(outer.width, keys);
  for (Outer& outer : outer_)
    if (numbers_) outer.shared_weights.set_shape(rows, keys);
}

int64_t GpuChain::shared_bytes(int64_t rows, int64_t keys, int64_t stages, int64_t wide) const {
  int64_t elements = 0;
  const auto add = [&](MatrixTile tile, int64_t width, int64_t depth, int64_t times) {
    tile.set_shape(width, depth);
    elements += times * tile.elements();
  };
  for (const Inner& inner : inner_) {
    add(inner.rows, rows, inner.depth, 1);
    add(inner.moving, keys, inner.depth, stages);
  }
  for (const Outer& outer : outer_)
    if (!outer.shares) add(outer.tile, numbers_ ? width_of_numbers(outer, wide) : outer.width, keys, stages);
  for (const Outer& outer : outer_)
    if (numbers_) add(outer.shared_weights, rows, keys, 1);
  return size_of(inner_[0].rows.dtype) * elements;
}

bool GpuChain::fits(const SizeHints& hints, const std::string& arch) const {
  if (!possible_ || cuda_generation(arch) < 80) return false;
  if (!numbers_ && sums_of(1, kMatrixDepth) > kMostSums) return false;
  // Lengths that only a call knows are left to other schedules.
  const auto is_known = [](const loop_ir::Axis& a) { return a.extent.is_constant(); };
  if (!is_known(row_) || !std::all_of(chain_.keys.begin(), chain_.keys.end(), is_known)) return false;
  if (shared_bytes(kMatrixRows, kMatrixDepth, 2) + kOwnBytes > (static_cast<int64_t>(cuda_model(arch).shared_kb_block) << 10)) return false;
  return analysis::estimate(row_.extent, hints, kernel_.symbols) >= kLeastRows;
}

/// As many rows a warp, and then as many keys, as its registers allow, since each matrix of what moves is for all rows of a warp; less where an SM
/// would hold one block only, and fewer rows where blocks would be too few to fill the device.
Schedule GpuChain::propose(const SizeHints& hints, const std::string& arch) const {
  const CudaModel& model = cuda_model(arch);
  const double rows = analysis::estimate(row_.extent, hints, kernel_.symbols);
  const double batch = std::max(1.0, analysis::estimate(count(batch_), hints, kernel_.symbols));
  if (numbers_) return propose_numbers(rows, batch, arch);
  const auto of_block = static_cast<int64_t>(model.shared_kb_block) << 10;
  const auto of_sm = static_cast<int64_t>(model.shared_kb_sm) << 10;
  int64_t warps = 4;
  while (warps > 1 && rows <= static_cast<double>(warps * kMatrixRows) / 2) warps /= 2;
  int64_t units = 1;
  int64_t keys = kMatrixDepth;
  bool found = false;
  for (const int64_t blocks : {2, 1})
    for (const auto& [u, k] : std::initializer_list<std::pair<int64_t, int64_t>>{{2, 64}, {2, 32}, {1, 64}, {1, 32}, {1, 16}}) {
      const int64_t tile = warps * u * kMatrixRows;
      const bool fills = u == 1 || batch * std::ceil(rows / static_cast<double>(tile)) >= model.sms;
      const int64_t most = std::min(of_block, of_sm / blocks) - kOwnBytes;
      if (found || !fills || sums_of(u, k) > kMostSums || shared_bytes(tile, k, 2) > most) continue;
      found = true;
      units = u;
      keys = k;
    }
  while (!found && warps > 1 && shared_bytes(warps * kMatrixRows, keys, 2) + kOwnBytes > of_block) warps /= 2;
  Schedule s{"gpu_chain", {{"tile", {{row_.name, warps * units * kMatrixRows}}}, {"tile", {{chain_.keys.back().name, keys}}}}};
  s.directives.push_back({"warps", {{row_.name, warps}}});
  s.directives.push_back({"stages", {{"", 2}}});
  if (sums_of(units, keys) + kept_of(units) <= kMostKept) s.directives.push_back({"keep", {{"registers", {}}}});
  return s;
}

/// The most rows of a thread, each load of shared memory being for all of them, that leave an SM enough warps.
Schedule GpuChain::propose_numbers(double rows, double batch, const std::string& arch) const {
  struct Form {
    int64_t rows, keys, per_row, threads;
    int64_t wide() const { return threads / (rows / per_row); }
  };
  constexpr Form kForms[] = {{64, 32, 4, 128}, {64, 32, 2, 256}, {32, 32, 4, 64}, {32, 32, 2, 128},
                             {32, 32, 1, 256}, {16, 32, 1, 128}, {16, 16, 1, 64}};
  const CudaModel& model = cuda_model(arch);
  const auto of_block = static_cast<int64_t>(model.shared_kb_block) << 10;
  const auto of_sm = static_cast<int64_t>(model.shared_kb_sm) << 10;
  Form best = kForms[std::size(kForms) - 1];
  bool found = false;
  for (const int64_t threads : {kBusyThreads, kBusyThreads / 2, kWarp})
    for (const Form& f : kForms) {
      const int64_t bytes = shared_bytes(f.rows, f.keys, 2, f.wide()) + kOwnBytes;
      const bool fits = bytes <= of_block && sums_of_numbers(f.per_row, f.keys, f.wide()) <= kMostNumbers;
      const bool fills = f.rows <= kMatrixRows || batch * std::ceil(rows / static_cast<double>(f.rows)) >= model.sms;
      if (found || !fits || !fills || of_sm / bytes * f.threads < threads || rows <= static_cast<double>(f.rows) / 2) continue;
      found = true;
      best = f;
    }
  return {"gpu_chain",
          {{"tile", {{row_.name, best.rows}}},
           {"tile", {{chain_.keys.back().name, best.keys}}},
           {"register_block", {{row_.name, best.per_row}}},
           {"threads", {{"", best.threads}}},
           {"stages", {{"", 2}}}}};
}

void GpuChain::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!possible_) reader.fail("the kernel's rows are no sums of bf16, f16 or float32 operands times what follows from such sums");
  if (numbers_) {
    read_numbers(reader, chain_.keys.back().name);
    if (stages_ < 2) reader.fail(reader.one("stages"), "allowed: 2 and more");
    for (Outer& outer : outer_) outer.width = width_of_numbers(outer, wide_);
    const int64_t sums = sums_of_numbers(per_row_, keys_, wide_);
    if (sums > kMostSums)
      reader.fail(reader.one("register_block"), fmt::format("each thread would have {} sums in registers, allowed: {}", sums, kMostSums));
    check_shared(reader, shared_bytes(rows_, keys_, stages_, wide_));
    reader.finish("tile, register_block, threads and stages");
    set_shapes(rows_, keys_);
    return;
  }
  read_tiles(reader, chain_.keys.back().name, 2);
  const int64_t sums = sums_of(units(), keys_);
  if (sums > kMostSums) reader.fail(reader.one("warps"), fmt::format("each thread would have {} sums in registers, allowed: {}", sums, kMostSums));
  check_shared(reader, shared_bytes(rows_, keys_, stages_));
  const auto keep = reader.all("keep");
  keeps_ = !keep.empty();
  for (const Directive* d : keep) reader.only(*d, {"registers"});
  if (keeps_ && sums + kept_of(units()) > kMostKept)
    reader.fail(*keep[0], fmt::format("each thread would need {} registers for sums and rows, allowed: {}", sums + kept_of(units()), kMostKept));
  reader.finish("tile, warps, stages and keep");
  set_shapes(rows_, keys_);
}

// ---- statements ------------------------------------------------------------------------------------------------------

/// At a turn of the main loop: its point of the outer axes of keys.
Substitution GpuChain::at_turn(Expr turn) const {
  Substitution map = batch_map_;
  if (!has_outer_keys()) return map;
  const std::vector<loop_ir::Axis> outer(chain_.keys.begin(), chain_.keys.end() - 1);
  const Substitution at = unflatten(outer, floordiv(turn, span_));
  for (size_t k = 0; k < outer.size(); ++k) {
    map[outer[k].name] = at.at(outer[k].name);
    for (const auto& o : chain_.outer) map[o.contraction.reduce->axes[k].name] = at.at(outer[k].name);
  }
  return map;
}

// ---- the block -------------------------------------------------------------------------------------------------------

tile_ir::Block GpuChain::apply(const Schedule& schedule) {
  read(schedule);
  return on_rows([&] { return body(); });
}

tile_ir::Block GpuChain::body() {
  tile_ir::Block out;
  const auto alloc = [&](const std::string& name, DType dtype, std::vector<Expr> shape, Space space) {
    out.push_back(make(tile_ir::Alloc{name, dtype, std::move(shape), space}));
  };
  for (const Inner& inner : inner_) {
    alloc(inner.rows.tile, inner.rows.dtype, {inner.rows.elements()}, Space::shared);
    alloc(inner.moving.tile, inner.moving.dtype, {stages_ * inner.moving.elements()}, Space::shared);
  }
  for (const Outer& outer : outer_) {
    if (!outer.shares) alloc(outer.tile.tile, outer.tile.dtype, {stages_ * outer.tile.elements()}, Space::shared);
    alloc(outer.sums, DType::f32, {units(), halves(), columns(outer).groups, columns(outer).lanes}, Space::reg);
    if (numbers_) alloc(outer.shared_weights.tile, DType::f32, {outer.shared_weights.elements()}, Space::shared);
  }
  for (const auto& [name, array] : row_values_) alloc(array, DType::f32, {units(), halves()}, Space::reg);
  for (const Outer& outer : outer_) out.push_back(clear(outer.sums, columns(outer)));
  append(out, load_row_values());
  find_bounds(out);
  append(out, main_loop());
  append(out, finish());
  return out;
}

/// What the points take of the rows.
tile_ir::Block GpuChain::load_row_values() {
  if (row_values_.empty()) return {};
  Block pool = chain_.rows;
  pool.insert(pool.end(), chain_.points.begin(), chain_.points.end());
  std::set<std::string> needed;
  for (const auto& [name, array] : row_values_) needed.insert(name);
  Substitution map = batch_map_;
  map[row_.name] = row();
  tile_ir::Block body;
  const std::vector<Expr> here{sym("u"), sym("h")};
  if (!whole(row_.extent, rows_)) {
    const std::string none = number(body, 0);
    for (const auto& [name, array] : row_values_) body.push_back(store_at(array, here, none));
  }
  // Values that the end takes have the same names.
  loop_ir::Renaming renaming;
  const Block statements = statements_for(pool, needed);
  for (const auto& s : statements) renaming.value(loop_ir::name_of(*s), names_.fresh(loop_ir::name_of(*s)));
  tile_ir::Block inside = placed(loop_ir::copy_block(statements, renaming, nullptr), map);
  for (const auto& [name, array] : row_values_) inside.push_back(store_at(array, here, renaming.values.at(name)));
  if (whole(row_.extent, rows_))
    append(body, std::move(inside));
  else
    body.push_back(make(tile_ir::If{{less(row(), row_.extent)}, std::move(inside)}));
  return {per_row(std::move(body))};
}

/// Outside of these blocks of keys all weights of the block's rows are 0.
void GpuChain::find_bounds(tile_ir::Block& into) {
  bound_keys(into, chain_.rows, chain_.keys.back().extent, [](const Block&) { return true; });
  turns_ = last_block_ - first_block_;
  if (!has_outer_keys()) return;
  span_ = max(turns_, 1);
  const std::vector<loop_ir::Axis> outer(chain_.keys.begin(), chain_.keys.end() - 1);
  turns_ = max(turns_, 0) * count(outer);
}

/// The block's rows of what stays.
tile_ir::Block GpuChain::fetch_rows() {
  tile_ir::Block copies;
  for (const Inner& inner : inner_) {
    TileCopy copy;
    copy.thread = thread();
    copy.threads = threads();
    copy.begin = 0;
    copy.first = first_row_;
    copy.depth = 0;
    copy.k = &inner.depth_axes;
    copy.free = &row_axes_;
    copy.batch = &batch_map_;
    append(copies, copy_tile(inner.rows, copy, names_));
  }
  if (keeps_) return copies;
  return {make(tile_ir::If{{less(0, turns_)}, std::move(copies)})};
}

/// One block of keys.
tile_ir::Block GpuChain::fetch(Expr turn, Expr stage) {
  const Substitution map = at_turn(turn);
  const Expr key = block_of(turn) * keys_;
  tile_ir::Block copies;
  const auto add = [&](const MatrixTile& tile, const std::vector<loop_ir::Axis>& k, const std::vector<loop_ir::Axis>& free, bool keys_are_k) {
    TileCopy copy;
    copy.thread = thread();
    copy.threads = threads();
    copy.begin = stage * tile.elements();
    copy.first = keys_are_k ? Expr(0) : key;
    copy.depth = keys_are_k ? key : Expr(0);
    copy.k = &k;
    copy.free = &free;
    copy.batch = &map;
    append(copies, copy_tile(tile, copy, names_));
  };
  for (const Inner& inner : inner_) add(inner.moving, inner.depth_axes, key_axes_, false);
  for (const Outer& outer : outer_)
    if (!outer.shares) add(outer.tile, outer.key_axes, outer.column_axes, true);
  return {make(tile_ir::If{{less(turn, turns_)}, std::move(copies)})};
}

/// Copies run stages_ - 1 blocks of keys ahead. One barrier a block says that its copies are there, and that the block before has been read.
tile_ir::Block GpuChain::main_loop() {
  tile_ir::Block out = fetch_rows();
  const std::string ahead = names_.fresh("ahead");
  tile_ir::Block first = fetch(sym(ahead), sym(ahead));
  first.push_back(make(tile_ir::CopyGroup{}));
  if (keeps_) out.push_back(make(tile_ir::CopyGroup{}));
  out.push_back(unroll(ahead, stages_ - 1, std::move(first)));
  if (keeps_) {
    append(out, {make(tile_ir::CopyGroup{static_cast<int>(stages_ - 1)}), make(tile_ir::Barrier{})});
    for (Inner& inner : inner_)
      for (int64_t k = 0; k < inner.depth; k += kMatrixDepth) inner.kept.push_back(load_rows(out, inner.rows, k));
  }
  const std::string n = names_.fresh("block");
  const Expr turn = sym(n);
  tile_ir::Block body{make(tile_ir::CopyGroup{static_cast<int>(stages_ - 2)}), make(tile_ir::Barrier{})};
  append(body, fetch(turn + (stages_ - 1), mod(turn + (stages_ - 1), stages_)));
  body.push_back(make(tile_ir::CopyGroup{}));
  const Expr stage = mod(turn, stages_);
  for (const Inner& inner : inner_) {
    body.push_back(make(tile_ir::Alloc{inner.sums, DType::f32, {units(), halves(), key_columns().groups, key_columns().lanes}, Space::reg}));
    body.push_back(clear(inner.sums, key_columns()));
    if (numbers_)
      append(body, multiply_by_numbers(inner.sums, inner.rows, inner.moving, stage * inner.moving.elements(), key_columns(), inner.depth));
    else
      append(body, multiply(inner.sums, inner.rows, inner.moving, stage * inner.moving.elements(), key_groups(), inner.depth, inner.kept));
  }
  for (const Outer& outer : outer_)
    body.push_back(make(tile_ir::Alloc{outer.weights, DType::f32, {units(), halves(), key_columns().groups, key_columns().lanes}, Space::reg}));
  append(body, weigh(turn));
  if (numbers_) append(body, put_weights());
  for (const Outer& outer : outer_) {
    const Expr begin = stage * outer.tile.elements();
    if (numbers_)
      append(body, multiply_by_numbers(outer.sums, outer.shared_weights, outer.tile, begin, columns(outer), keys_));
    else
      append(body, multiply_numbers(outer.sums, outer.weights, outer.tile, begin, outer.width / kMatrixColumns, keys_));
  }
  out.push_back(make(tile_ir::For{axis(n, 0, turns_), std::move(body)}));
  return out;
}

/// For the threads of other columns. Those before have been read: a barrier has come since.
tile_ir::Block GpuChain::put_weights() {
  tile_ir::Block out;
  const Expr chunk = sym("g") * wide_ + sym(thread_x_);
  for (const Outer& outer : outer_) {
    tile_ir::Block body;
    const std::string weight = load(body, outer.weights, place());
    body.push_back(store_at(outer.shared_weights.tile, {outer.shared_weights.place_of_number(0, own_row(), 0, chunk, sym("c"))}, weight));
    out.push_back(per_thread(key_columns(), std::move(body)));
  }
  out.push_back(make(tile_ir::Barrier{}));
  return out;
}

/// Sums of products become weights; those of keys and rows that there are not are 0.
tile_ir::Block GpuChain::weigh(Expr turn) {
  const Expr key = block_of(turn) * keys_ + column(key_columns().lanes);
  Substitution map = at_turn(turn);
  map[row_.name] = row();
  map[chain_.keys.back().name] = key;
  tile_ir::Block inside;
  for (size_t i = 0; i < inner_.size(); ++i)
    inside.push_back(make(Load{chain_.inner[i].contraction.result, DType::f32, inner_[i].sums, place(), {}, {}}));
  for (const auto& [name, array] : row_values_) inside.push_back(make(Load{name, DType::f32, array, {sym("u"), sym("h")}, {}, {}}));
  for (const auto& stmt : placed(points_, map)) {
    const auto* exp = std::get_if<Let>(&stmt->node);
    if (numbers_ || !exp || exp->fn != Fn::exp || exp->dtype != DType::f32) {
      inside.push_back(stmt);
      continue;
    }
    const std::string by = let(inside, Fn::mul, {exp->operands[0], number(inside, kLog2E)});
    inside.push_back(make(Let{exp->name, DType::f32, Fn::exp2_near, {by}, {}, 0}));
  }
  for (size_t o = 0; o < outer_.size(); ++o) inside.push_back(store_at(outer_[o].weights, place(), chain_.outer[o].weight));
  std::vector<Cond> there;
  if (!whole(row_.extent, rows_) && reads_memory_) there.push_back(less(row(), row_.extent));
  if (!whole(chain_.keys.back().extent, keys_)) there.push_back(less(key, chain_.keys.back().extent));
  if (there.empty()) return {per_thread(key_columns(), std::move(inside))};
  tile_ir::Block body;
  const std::string none = number(body, 0);
  for (const Outer& outer : outer_) body.push_back(store_at(outer.weights, place(), none));
  body.push_back(make(tile_ir::If{std::move(there), std::move(inside)}));
  return {per_thread(key_columns(), std::move(body))};
}

tile_ir::Block GpuChain::finish() {
  Substitution map = batch_map_;
  map[row_.name] = row();
  tile_ir::Block rest;
  for (size_t o = 0; o < outer_.size(); ++o) {
    const ProductChain::Outer& source = chain_.outer[o];
    Substitution inner = map;
    const Columns own = columns(outer_[o]);
    inner[source.column.name] = column(own.lanes);
    std::set<std::string> needed;
    for (const auto& s : source.body)
      if (!std::holds_alternative<loop_ir::Reduce>(s->node)) collect_uses(*s, needed);
    tile_ir::Block of_column = placed(statements_for(chain_.rows, needed), inner);
    for (const auto& s : source.body) {
      if (std::holds_alternative<loop_ir::Reduce>(s->node))
        of_column.push_back(make(Load{source.contraction.result, DType::f32, outer_[o].sums, place(), {}, {}}));
      else
        append(of_column, placed({s}, inner));
    }
    if (!whole(source.column.extent, outer_[o].width))
      of_column = {make(tile_ir::If{{less(column(own.lanes), source.column.extent)}, std::move(of_column)})};
    rest.push_back(over_groups(own, std::move(of_column)));
  }
  return {per_row({make(tile_ir::If{{less(row(), row_.extent)}, std::move(rest)})})};
}

}  // namespace deplo::loop_to_tile
