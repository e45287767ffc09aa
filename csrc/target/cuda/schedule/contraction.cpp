#include "target/cuda/schedule/contraction.h"

#include <algorithm>

#include "analysis/cost.h"
#include "base/error.h"
#include "target/cuda/schedule/access.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

/// Outputs of a block, and of a thread.
struct Tile {
  int64_t rows, columns, per_row, per_column;
};
constexpr Tile kSmallest{64, 64, 4, 4};
constexpr Tile kSmall{64, 64, 8, 4};                                             // more products for each load of shared memory
constexpr Tile kLarge[] = {{256, 64, 8, 8}, {64, 256, 8, 8}, {128, 128, 8, 8}};  // where that gives enough blocks, the last one if several do
constexpr Tile kFew[] = {{32, 128, 8, 4}, {128, 32, 8, 4}, {16, 128, 4, 4}, {128, 16, 4, 4}};  // rows or columns, the fewest last
constexpr double kEnoughBlocks = 96;                                                           // to fill a GPU
constexpr int64_t kStep = 16;                                                                  // of k per stage
constexpr int64_t kBuffers = 2;                                                                // one is filled while the other one is read
constexpr int64_t kPad = 4;     // elements behind a row of a tile whose operand lies along k
constexpr int64_t kVector = 4;  // sums side by side

// What a schedule may ask for.
constexpr int64_t kMostTile = 1024;
constexpr int64_t kMostPerThread = 16;

}  // namespace

// ---- the schedule as data ------------------------------------------------------------------------------------------

bool GpuContraction::fits() const {
  return fits_ && std::all_of(items_.begin(), items_.end(), [](const Item& item) { return is_float(item.reduce->dtypes[0]); });
}

Schedule GpuContraction::propose(const SizeHints& hints) const {
  bool large = true;
  for (const Item& item : items_) large = large && item.reduce->dtypes[0] == DType::f32;
  const bool wide = large && items_.size() == 1;
  const auto expected = [&](Expr e) { return analysis::estimate(e, hints, kernel_.symbols); };
  const auto blocks = [&](const Tile& t) { return expected(count(batch_) * ceildiv(count(rows_), t.rows) * ceildiv(count(columns_), t.columns)); };
  const double rows = expected(count(rows_));
  const double columns = expected(count(columns_));
  Tile tile = large ? kSmall : kSmallest;
  for (const Tile& t : kLarge) {
    // A tile that reaches beyond all rows or columns multiplies for nothing.
    const bool fills = 2 * rows > static_cast<double>(t.rows) && 2 * columns > static_cast<double>(t.columns);
    if (wide && fills && blocks(t) >= kEnoughBlocks) tile = t;
  }
  for (const Tile& t : kFew)
    if (wide && (t.rows < t.columns ? rows <= static_cast<double>(t.rows) : columns <= static_cast<double>(t.columns))) tile = t;
  Schedule s{"gpu_contraction", {{"tile", {{group_of(rows_), tile.rows}}}, {"tile", {{group_of(columns_), tile.columns}}}}};
  for (const Item& item : items_) s.directives.push_back({"tile", {{item.depth_name, kStep}}});
  s.directives.push_back({"register_block", {{group_of(rows_), tile.per_row}, {group_of(columns_), tile.per_column}}});
  s.directives.push_back({"threads", {{"", tile.rows / tile.per_row * (tile.columns / tile.per_column)}}});
  return s;
}

void GpuContraction::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!fits()) reader.fail("the kernel is no contraction of floats");
  const Directive& threads = reader.one("threads");
  threads_ = read_threads(reader);
  auto tile = [&](const std::string& axis) {
    const Directive* d = reader.find("tile", axis);
    if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", axis));
    reader.only(*d, {axis});
    return reader.number(*d, axis, 1, kMostTile);
  };
  std::string rows = group_of(rows_);
  std::string columns = group_of(columns_);
  tile_rows_ = tile(rows);
  tile_columns_ = tile(columns);
  const Directive& block = reader.one("register_block");
  reader.only(block, {rows, columns});
  per_row_ = reader.number(block, rows, 1, kMostPerThread);
  per_column_ = reader.number(block, columns, 1, kMostPerThread);
  if (tile_rows_ % per_row_ != 0 || tile_columns_ % per_column_ != 0)
    reader.fail(block, fmt::format("allowed: what divides the tiles, {} x {}", tile_rows_, tile_columns_));
  int64_t wanted = tile_rows_ / per_row_ * (tile_columns_ / per_column_);
  if (threads_ != wanted) reader.fail(threads, fmt::format("allowed: {}, one for each register block of the tile", wanted));
  int64_t bytes = 0;
  for (Item& item : items_) {
    item.step = tile(item.depth_name);
    if (item.step * tile_rows_ % threads_ != 0 || item.step * tile_columns_ % threads_ != 0)
      reader.fail(threads,
                  fmt::format("allowed: what divides the operands' tiles, {} x {} and {} x {}", item.step, tile_rows_, item.step, tile_columns_));
    for (Operand* operand : {&item.rows, &item.columns}) {
      const int64_t width = operand == &item.rows ? tile_rows_ : tile_columns_;
      while (operand->lanes > 1 &&
             (item.step * width % (operand->lanes * threads_) != 0 || (operand->along_k ? item.step : width) % operand->lanes != 0))
        operand->lanes /= 2;
      operand->row_length = width + (operand->along_k ? kPad : 0);
      bytes += kBuffers * item.step * operand->row_length * size_of(item.reduce->dtypes[0]);
    }
  }
  if (bytes > kSharedBytes) reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has {}", bytes, kSharedBytes));
  reader.finish("tile, register_block and threads");
}

// ---- the block -----------------------------------------------------------------------------------------------------

tile_ir::Block GpuContraction::apply(const Schedule& schedule) {
  read(schedule);
  block_ = names_.fresh("b");
  thread_ = names_.fresh("t");
  row_ = names_.fresh("u");
  column_ = names_.fresh("w");
  row_group_ = names_.fresh("ug");
  column_group_ = names_.fresh("wg");
  const Expr tiles_down = ceildiv(count(rows_), tile_rows_);
  const Expr tiles_across = ceildiv(count(columns_), tile_columns_);
  first_row_ = mod(floordiv(sym(block_), tiles_across), tiles_down) * tile_rows_;
  first_column_ = mod(sym(block_), tiles_across) * tile_columns_;
  batch_map_ = unflatten(batch_, floordiv(sym(block_), tiles_across * tiles_down));
  tile_ir::Block body;
  for (const Item& item : items_)
    for (auto& s : stage(item)) body.push_back(s);
  for (auto& s : finish()) body.push_back(s);
  return gpu_grid(block_, count(batch_) * tiles_down * tiles_across, thread_, threads_, std::move(body));
}

// A thread's sums lie in groups side by side, as wide as an access, and the groups as far apart as those of all threads together: threads of a warp
// so read the columns' tile without conflicts.
Expr GpuContraction::thread_row() const {
  const int64_t group = group_size(per_row_);
  const Expr thread = floordiv(sym(thread_), tile_columns_ / per_column_);
  return sym(row_group_) * (tile_rows_ / per_row_ * group) + thread * group + sym(row_);
}

Expr GpuContraction::thread_column() const {
  const int64_t group = group_size(per_column_);
  const Expr thread = mod(sym(thread_), tile_columns_ / per_column_);
  return sym(column_group_) * (tile_columns_ / per_column_ * group) + thread * group + sym(column_);
}

int64_t GpuContraction::group_size(int64_t per_thread) { return per_thread % kVector == 0 ? kVector : 1; }

std::vector<Expr> GpuContraction::sum_index() const { return {sym(row_group_) * group_size(per_row_) + sym(row_), sym(column_group_), sym(column_)}; }

/// Both operands, a stage of k at a time, from global memory into registers while the stage before is multiplied, then into shared memory, of which
/// one buffer is filled while the other one may still be read: one barrier a stage.
tile_ir::Block GpuContraction::stage(const Item& item) {
  DType dtype = item.reduce->dtypes[0];
  tile_ir::Block out;
  for (const Operand* operand : {&item.rows, &item.columns}) {
    const int64_t width = operand == &item.rows ? tile_rows_ : tile_columns_;
    out.push_back(make(tile_ir::Alloc{operand->tile, dtype, {kBuffers, item.step, operand->row_length}, Space::shared}));
    out.push_back(make(tile_ir::Alloc{operand->next, dtype, {item.step * width / (operand->lanes * threads_), operand->lanes}, Space::reg}));
  }
  const int64_t group = group_size(per_column_);
  out.push_back(make(tile_ir::Alloc{item.sums, dtype, {per_row_, per_column_ / group, group}, Space::reg}));
  out.push_back(clear(item.sums, dtype));
  std::string s = names_.fresh("stage");
  std::string k = names_.fresh("kk");
  const Expr stages = ceildiv(count(item.k), item.step);
  const Expr buffer = mod(sym(s), kBuffers);
  for (bool rows : {true, false}) out.push_back(fetch(item, rows, 0));
  tile_ir::Block body{put(item, true, buffer), put(item, false, buffer), make(tile_ir::Barrier{})};
  // The last stage fetches itself once more rather than to ask whether there is another one.
  for (bool rows : {true, false}) body.push_back(fetch(item, rows, min(sym(s) + 1, stages - 1)));
  body.push_back(make(tile_ir::For{axis(k, 0, item.step, LoopKind::serial, 1, item.step), {per_thread(multiply(item, buffer, k))}}));
  out.push_back(make(tile_ir::For{axis(s, 0, stages), std::move(body)}));
  if (items_.size() > 1) out.push_back(make(tile_ir::Barrier{}));
  return out;
}

/// Where a thread's vector `q` of an operand's tile lies: its step of k, and its position along rows or columns.
std::pair<Expr, Expr> GpuContraction::place(const Item& item, const Operand& operand, const std::string& q, const std::string& v) const {
  const int64_t width = &operand == &item.rows ? tile_rows_ : tile_columns_;
  const Expr vector = sym(thread_) + sym(q) * threads_;
  const int64_t in_line = (operand.along_k ? item.step : width) / operand.lanes;
  const Expr along = mod(vector, in_line) * operand.lanes + sym(v);
  const Expr across = floordiv(vector, in_line);
  return operand.along_k ? std::pair{along, across} : std::pair{across, along};
}

/// for q, v: body, over a thread's vectors of an operand's tile.
Ref<tile_ir::Stmt> GpuContraction::over_vectors(const Item& item, const Operand& operand, const std::string& q, const std::string& v,
                                                tile_ir::Block body) const {
  const int64_t width = &operand == &item.rows ? tile_rows_ : tile_columns_;
  tile_ir::Block inner{make(tile_ir::For{axis(v, 0, operand.lanes, LoopKind::lanes), std::move(body)})};
  return make(tile_ir::For{axis(q, 0, item.step * width / (operand.lanes * threads_), LoopKind::unroll), std::move(inner)});
}

/// All threads compute one operand's tile for a stage, each its vectors, zero beyond the edges.
Ref<tile_ir::Stmt> GpuContraction::fetch(const Item& item, bool of_rows, Expr stage) {
  DType dtype = item.reduce->dtypes[0];
  const Operand& operand = of_rows ? item.rows : item.columns;
  const auto& axes = of_rows ? rows_ : columns_;
  std::string q = names_.fresh("q");
  std::string v = names_.fresh("v");
  const auto [k, position] = place(item, operand, q, v);
  const Expr linear = (of_rows ? first_row_ : first_column_) + position;
  const Expr depth = stage * item.step + k;
  Substitution map = batch_map_;
  map.merge(unflatten(axes, linear));
  map.merge(unflatten(item.k, depth));
  // Statements of a slice occur once for each place it is computed in.
  tile_ir::Block inside = convert(operand.slice, map, {});
  inside.push_back(make(tile_ir::Store{operand.next, {sym(q), sym(v)}, operand.value, {}, Combiner::set}));
  std::string none = names_.fresh("zero");
  return over_vectors(item, operand, q, v,
                      {make(tile_ir::Let{none, dtype, Fn::constant, {}, Scalar::of_float(dtype, 0), 0}),
                       make(tile_ir::Store{operand.next, {sym(q), sym(v)}, none, {}, Combiner::set}),
                       make(tile_ir::If{{less(linear, count(axes)), less(depth, count(item.k))}, std::move(inside)})});
}

/// What was fetched, into shared memory.
Ref<tile_ir::Stmt> GpuContraction::put(const Item& item, bool of_rows, Expr buffer) {
  const Operand& operand = of_rows ? item.rows : item.columns;
  std::string q = names_.fresh("q");
  std::string v = names_.fresh("v");
  std::string value = names_.fresh("n");
  const auto [k, position] = place(item, operand, q, v);
  return over_vectors(item, operand, q, v,
                      {make(tile_ir::Load{value, item.reduce->dtypes[0], operand.next, {sym(q), sym(v)}, {}, {}}),
                       make(tile_ir::Store{operand.tile, {buffer, k, position}, value, {}, Combiner::set})});
}

/// What the kernel computes from the sums, for each output of the thread.
tile_ir::Block GpuContraction::finish() {
  const Expr row = first_row_ + thread_row();
  const Expr column = first_column_ + thread_column();
  Substitution map = batch_map_;
  map.merge(unflatten(rows_, row));
  map.merge(unflatten(columns_, column));
  tile_ir::Block body = convert(*inner_, map, sum_index());
  tile_ir::If inside{{less(row, count(rows_)), less(column, count(columns_))}, std::move(body)};
  return {per_thread({make(std::move(inside))})};
}

/// for row, column: body, over the thread's own outputs, columns side by side as lanes.
Ref<tile_ir::Stmt> GpuContraction::per_thread(tile_ir::Block body) const {
  const int64_t rows = group_size(per_row_);
  const int64_t columns = group_size(per_column_);
  tile_ir::Block inner{make(tile_ir::For{axis(column_, 0, columns, LoopKind::lanes), std::move(body)})};
  inner = {make(tile_ir::For{axis(column_group_, 0, per_column_ / columns, LoopKind::unroll), std::move(inner)})};
  inner = {make(tile_ir::For{axis(row_, 0, rows, LoopKind::unroll), std::move(inner)})};
  return make(tile_ir::For{axis(row_group_, 0, per_row_ / rows, LoopKind::unroll), std::move(inner)});
}

Ref<tile_ir::Stmt> GpuContraction::clear(const std::string& array, DType dtype) {
  std::string name = names_.fresh("zero");
  return per_thread({make(tile_ir::Let{name, dtype, Fn::constant, {}, Scalar::of_float(dtype, 0), 0}),
                     make(tile_ir::Store{array, sum_index(), name, {}, Combiner::set})});
}

tile_ir::Block GpuContraction::multiply(const Item& item, Expr buffer, const std::string& k) {
  DType dtype = item.reduce->dtypes[0];
  std::string a = names_.fresh("av");
  std::string b = names_.fresh("bv");
  std::string c = names_.fresh("cv");
  std::string d = names_.fresh("dv");
  return {make(tile_ir::Load{a, dtype, item.rows.tile, {buffer, sym(k), thread_row()}, {}, {}}),
          make(tile_ir::Load{b, dtype, item.columns.tile, {buffer, sym(k), thread_column()}, {}, {}}),
          make(tile_ir::Load{c, dtype, item.sums, sum_index(), {}, {}}), make(tile_ir::Let{d, dtype, Fn::fma, {a, b, c}, {}, 0}),
          make(tile_ir::Store{item.sums, sum_index(), d, {}, Combiner::set})};
}

}  // namespace deplo::loop_to_tile
