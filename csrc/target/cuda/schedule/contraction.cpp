#include "target/cuda/schedule/contraction.h"

#include <algorithm>

#include "base/error.h"

namespace deplo::loop_to_tile {

using analysis::AxisClass;
using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kTile = 64;      // outputs of a block along rows and columns
constexpr int64_t kPerThread = 4;  // of a thread
constexpr int64_t kStep = 16;      // of k per stage
constexpr size_t kMostItems = 3;   // sums of all stay in registers

// What a schedule may ask for.
constexpr int64_t kMostTile = 1024;
constexpr int64_t kMostPerThread = 16;

std::string name_of(const loop_ir::Stmt& stmt) {
  return std::visit(Overloaded{[](const loop_ir::Let& s) { return s.name; }, [](const loop_ir::Load& s) { return s.name; },
                               [](const auto&) { return std::string(); }},
                    stmt.node);
}

void collect_uses(const loop_ir::Stmt& stmt, std::set<std::string>& out) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) {
    out.insert(let->operands.begin(), let->operands.end());
    if (let->fn == Fn::index) collect_symbols(let->index, out);
  }
  if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) {
    for (Expr e : load->index) collect_symbols(e, out);
    for (const Cond& c : load->guard) collect_symbols(c.expr, out);
  }
}

std::string group_of(const std::vector<loop_ir::Axis>& axes) {
  std::vector<std::string> names;
  for (const auto& a : axes) names.push_back(a.name);
  return group_name(names);
}

bool uses_any(const std::set<std::string>& names, const std::vector<loop_ir::Axis>& axes) {
  return std::any_of(axes.begin(), axes.end(), [&](const auto& a) { return names.count(a.name) > 0; });
}

}  // namespace

GpuContraction::GpuContraction(const loop_ir::Kernel& kernel) : kernel_(kernel) {
  names_.reserve(kernel);
  fits_ = match();
}

// ---- recognition ---------------------------------------------------------------------------------------------------

bool GpuContraction::match() {
  std::vector<analysis::Contraction> found = analysis::find_contractions(kernel_);
  OuterNest nest = outer_nest(kernel_);
  inner_ = nest.inner;
  if (found.empty() || found.size() > kMostItems || !colliding_stores(kernel_).empty()) return false;
  for (const auto& a : nest.axes) batch_.push_back(a);
  loop_ir::Block before;
  for (const auto& stmt : *inner_) {
    const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt->node);
    if (!reduce) {
      if (std::holds_alternative<loop_ir::Let>(stmt->node) || std::holds_alternative<loop_ir::Load>(stmt->node)) before.push_back(stmt);
      if (std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Scan>(stmt->node) ||
          std::holds_alternative<loop_ir::Local>(stmt->node))
        return false;
      continue;
    }
    auto at = std::find_if(found.begin(), found.end(), [&](const auto& c) { return c.reduce == reduce; });
    if (at == found.end() || !classify(*at) || !add_item(*at, before)) return false;
  }
  return items_.size() == found.size();
}

/// The first contraction says which axes are rows and which are columns, where the last axis of the output always runs; the others must agree.
bool GpuContraction::classify(const analysis::Contraction& contraction) {
  std::vector<loop_ir::Axis> batch;
  std::vector<loop_ir::Axis> m;
  std::vector<loop_ir::Axis> n;
  std::string last;
  for (const auto& a : contraction.axes) {
    if (a.kind == AxisClass::k) continue;
    if (!a.shared) return false;
    last = a.name;
    (a.kind == AxisClass::m ? m : a.kind == AxisClass::n ? n : batch).push_back({a.name, a.extent});
  }
  if (std::any_of(m.begin(), m.end(), [&](const auto& a) { return a.name == last; })) std::swap(m, n);
  if (!items_.empty()) return (m == rows_ && n == columns_) || (n == rows_ && m == columns_);
  rows_ = m;
  columns_ = n;
  batch_ = batch;
  return !rows_.empty() && !columns_.empty();
}

bool GpuContraction::add_item(const analysis::Contraction& contraction, const loop_ir::Block& before) {
  const loop_ir::Reduce& reduce = *contraction.reduce;
  if (reduce.dtypes[0] != DType::f32 && reduce.dtypes[0] != DType::f64) return false;
  loop_ir::Block whole = before;
  for (const auto& s : reduce.body) {
    if (name_of(*s).empty()) return false;  // a check, or a loop
    whole.push_back(s);
  }
  Item item;
  item.reduce = &reduce;
  for (const auto* side : {&contraction.a, &contraction.b}) {
    std::set<std::string> needed{side->value};
    Operand operand{{}, side->value};
    for (size_t i = whole.size(); i-- > 0;) {
      if (!needed.count(name_of(*whole[i]))) continue;
      collect_uses(*whole[i], needed);
      operand.slice.insert(operand.slice.begin(), whole[i]);
    }
    for (const Item& other : items_)
      if (needed.count(other.reduce->results[0])) return false;
    bool of_rows = uses_any(needed, rows_);
    if (of_rows == uses_any(needed, columns_)) return false;
    (of_rows ? item.rows : item.columns) = std::move(operand);
  }
  if (item.rows.value.empty() || item.columns.value.empty()) return false;
  item.depth_name = reduce.results[0] + "." + group_of(reduce.axes);
  item.rows_tile = names_.fresh("a_tile");
  item.columns_tile = names_.fresh("b_tile");
  item.sums = names_.fresh("acc");
  item.stage_sums = names_.fresh("part");
  items_.push_back(std::move(item));
  return true;
}

// ---- the schedule as data ------------------------------------------------------------------------------------------

Schedule GpuContraction::propose() const {
  Schedule s{"gpu_contraction", {{"tile", {{group_of(rows_), kTile}}}, {"tile", {{group_of(columns_), kTile}}}}};
  for (const Item& item : items_) s.directives.push_back({"tile", {{item.depth_name, kStep}}});
  s.directives.push_back({"register_block", {{group_of(rows_), kPerThread}, {group_of(columns_), kPerThread}}});
  s.directives.push_back({"threads", {{"", kGpuThreads}}});
  return s;
}

void GpuContraction::read(const Schedule& schedule) {
  ScheduleReader reader(kernel_.name, schedule);
  if (!fits_) reader.fail("the kernel is no contraction");
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
    bytes += item.step * (tile_rows_ + tile_columns_) * size_of(item.reduce->dtypes[0]);
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

Expr GpuContraction::thread_row() const { return floordiv(sym(thread_), tile_columns_ / per_column_) * per_row_ + sym(row_); }
Expr GpuContraction::thread_column() const { return mod(sym(thread_), tile_columns_ / per_column_) * per_column_ + sym(column_); }

/// Both operands, a stage of k at a time, into shared memory and from there into the thread's sums.
tile_ir::Block GpuContraction::stage(const Item& item) {
  DType dtype = item.reduce->dtypes[0];
  tile_ir::Block out{make(tile_ir::Alloc{item.rows_tile, dtype, {item.step, tile_rows_}, Space::shared}),
                     make(tile_ir::Alloc{item.columns_tile, dtype, {item.step, tile_columns_}, Space::shared}),
                     make(tile_ir::Alloc{item.sums, dtype, {per_row_, per_column_}, Space::reg}),
                     make(tile_ir::Alloc{item.stage_sums, dtype, {per_row_, per_column_}, Space::reg}), clear(item.sums, dtype)};
  std::string first = names_.fresh("kb");
  std::string k = names_.fresh("kk");
  const Expr depth = count(item.reduce->axes);
  tile_ir::Block body{load_tile(item, true, first), load_tile(item, false, first), make(tile_ir::Barrier{})};
  // Sums of a stage are formed by themselves and then added: shorter chains than one over all of k.
  body.push_back(clear(item.stage_sums, dtype));
  body.push_back(make(tile_ir::For{axis(k, 0, item.step), {per_thread(multiply(item, k))}}));
  body.push_back(per_thread(accumulate(item)));
  body.push_back(make(tile_ir::Barrier{}));
  out.push_back(make(tile_ir::For{axis(first, 0, depth, LoopKind::serial, item.step), std::move(body)}));
  return out;
}

/// All threads fill tile[step][width] with one operand, from k = first on, zero beyond the edges.
Ref<tile_ir::Stmt> GpuContraction::load_tile(const Item& item, bool of_rows, const std::string& first) {
  DType dtype = item.reduce->dtypes[0];
  const Operand& operand = of_rows ? item.rows : item.columns;
  const std::string& tile = of_rows ? item.rows_tile : item.columns_tile;
  const auto& axes = of_rows ? rows_ : columns_;
  const int64_t width = of_rows ? tile_rows_ : tile_columns_;
  std::string q = names_.fresh("q");
  Expr element = sym(thread_) + sym(q) * threads_;
  Expr k = floordiv(element, width);
  Expr position = mod(element, width);
  Expr linear = (of_rows ? first_row_ : first_column_) + position;
  Substitution map = batch_map_;
  map.merge(unflatten(axes, linear));
  map.merge(unflatten(item.reduce->axes, sym(first) + k));
  tile_ir::Block inside = convert(operand.slice, map);
  inside.push_back(make(tile_ir::Store{tile, {k, position}, operand.value, {}, Combiner::set}));
  std::string none = names_.fresh("zero");
  tile_ir::Block body{make(tile_ir::Let{none, dtype, Fn::constant, {}, Scalar::of_float(dtype, 0), 0}),
                      make(tile_ir::Store{tile, {k, position}, none, {}, Combiner::set}),
                      make(tile_ir::If{{less(linear, count(axes)), less(sym(first) + k, count(item.reduce->axes))}, std::move(inside)})};
  return make(tile_ir::For{axis(q, 0, item.step * width / threads_), std::move(body)});
}

/// What the kernel computes from the sums, for each output of the thread.
tile_ir::Block GpuContraction::finish() {
  const Expr row = first_row_ + thread_row();
  const Expr column = first_column_ + thread_column();
  Substitution map = batch_map_;
  map.merge(unflatten(rows_, row));
  map.merge(unflatten(columns_, column));
  tile_ir::Block body = convert(*inner_, map);
  tile_ir::If inside{{less(row, count(rows_)), less(column, count(columns_))}, std::move(body)};
  return {per_thread({make(std::move(inside))})};
}

tile_ir::Block GpuContraction::convert(const loop_ir::Block& block, const Substitution& map) const {
  tile_ir::Block out;
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::Let& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Load& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Store& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Check& s) { out.push_back(make(substituted(s, map))); },
                          [&](const loop_ir::Reduce& s) {
                            auto item = std::find_if(items_.begin(), items_.end(), [&](const Item& i) { return i.reduce == &s; });
                            out.push_back(make(tile_ir::Load{s.results[0], s.dtypes[0], item->sums, {sym(row_), sym(column_)}, {}, {}}));
                          },
                          [](const auto&) {}},
               stmt->node);
  return out;
}

/// for row, column: body, over the thread's own outputs.
Ref<tile_ir::Stmt> GpuContraction::per_thread(tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(column_, 0, per_column_, LoopKind::unroll), std::move(body)})};
  return make(tile_ir::For{axis(row_, 0, per_row_, LoopKind::unroll), std::move(inner)});
}

Ref<tile_ir::Stmt> GpuContraction::clear(const std::string& array, DType dtype) {
  std::string name = names_.fresh("zero");
  return per_thread({make(tile_ir::Let{name, dtype, Fn::constant, {}, Scalar::of_float(dtype, 0), 0}),
                     make(tile_ir::Store{array, {sym(row_), sym(column_)}, name, {}, Combiner::set})});
}

tile_ir::Block GpuContraction::multiply(const Item& item, const std::string& k) {
  DType dtype = item.reduce->dtypes[0];
  std::string a = names_.fresh("av");
  std::string b = names_.fresh("bv");
  std::string c = names_.fresh("cv");
  std::string d = names_.fresh("dv");
  return {make(tile_ir::Load{a, dtype, item.rows_tile, {sym(k), thread_row()}, {}, {}}),
          make(tile_ir::Load{b, dtype, item.columns_tile, {sym(k), thread_column()}, {}, {}}),
          make(tile_ir::Load{c, dtype, item.stage_sums, {sym(row_), sym(column_)}, {}, {}}), make(tile_ir::Let{d, dtype, Fn::fma, {a, b, c}, {}, 0}),
          make(tile_ir::Store{item.stage_sums, {sym(row_), sym(column_)}, d, {}, Combiner::set})};
}

tile_ir::Block GpuContraction::accumulate(const Item& item) {
  DType dtype = item.reduce->dtypes[0];
  std::string a = names_.fresh("pv");
  std::string b = names_.fresh("sv");
  std::string c = names_.fresh("tv");
  return {make(tile_ir::Load{a, dtype, item.stage_sums, {sym(row_), sym(column_)}, {}, {}}),
          make(tile_ir::Load{b, dtype, item.sums, {sym(row_), sym(column_)}, {}, {}}), make(tile_ir::Let{c, dtype, Fn::add, {b, a}, {}, 0}),
          make(tile_ir::Store{item.sums, {sym(row_), sym(column_)}, c, {}, Combiner::set})};
}

}  // namespace deplo::loop_to_tile
