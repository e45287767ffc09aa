#include "target/cuda/schedule/warp_rows.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "base/error.h"
#include "loop_ir/places.h"
#include "loop_ir/rewrite.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;

namespace {

// What a schedule may ask for.
constexpr int64_t kMostTile = 256, kMostWarps = 16, kMostStages = 4;
constexpr int64_t kMostThreads = 512, kMostOwnRows = 16;
constexpr int64_t kChainedSums = 16;  // of a thread: those of parts of their chains fit beside them
constexpr int64_t kTurn = 8;          // chunks of k, by which lines are rotated: as many steps have addresses of their own
constexpr int64_t kGroupWarps = kGroupThreads / kWarp;

}  // namespace

void append(tile_ir::Block& to, tile_ir::Block from) { std::move(from.begin(), from.end(), std::back_inserter(to)); }

Ref<tile_ir::Stmt> unroll(const std::string& name, int64_t trips, tile_ir::Block body) {
  return make(tile_ir::For{axis(name, 0, trips, LoopKind::unroll), std::move(body)});
}

Ref<tile_ir::Stmt> store_at(const std::string& array, std::vector<Expr> index, const std::string& value) {
  return make(tile_ir::Store{array, std::move(index), value, {}, Combiner::set});
}

WarpRows::WarpRows(const loop_ir::Kernel& kernel) : kernel_(kernel) {
  names_.reserve(kernel);
  for (const char* name : {"u", "h", "g", "c"}) names_.reserve(name);
}

// ---- recognition -----------------------------------------------------------------------------------------------------

const loop_ir::Axis* WarpRows::longest(const std::function<bool(const loop_ir::Axis&)>& may) const {
  const loop_ir::Axis* best = nullptr;
  for (const auto& a : nest_) {
    const bool longer = !best || !a.extent.is_constant() || (best->extent.is_constant() && a.extent.value() > best->extent.value());
    if (longer && may(a)) best = &a;
  }
  return best;
}

void WarpRows::set_row(loop_ir::Axis row) {
  row_ = std::move(row);
  row_axes_ = {row_};
  for (const auto& a : nest_)
    if (a.name != row_.name) batch_.push_back(a);
}

bool WarpRows::is_rounded(const std::string& sum, const loop_ir::Block& body) const {
  std::set<std::string> exact{sum};
  for (const auto& s : body) {
    const auto* store = std::get_if<loop_ir::Store>(&s->node);
    if (store && exact.count(store->value) > 0 && size_of(kernel_.find_param(store->buffer)->dtype) > 2) return false;
    const auto* let = std::get_if<loop_ir::Let>(&s->node);
    const bool follows = let && std::any_of(let->operands.begin(), let->operands.end(), [&](const auto& name) { return exact.count(name) > 0; });
    if (follows && size_of(let->dtype) > 2) exact.insert(let->name);
  }
  return true;
}

// ---- the schedule as data --------------------------------------------------------------------------------------------

void WarpRows::read_tiles(ScheduleReader& reader, const std::string& key, int64_t least_stages, bool in_groups) {
  auto tile = [&](const std::string& name) {
    const Directive* d = reader.find("tile", name);
    if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", name));
    reader.only(*d, {name});
    const int64_t n = reader.number(*d, name, kMatrixRows, kMostTile);
    if (n % kMatrixRows != 0) reader.fail(*d, fmt::format("allowed: multiples of {}", kMatrixRows));
    return n;
  };
  rows_ = tile(row_.name);
  keys_ = tile(key);
  const Directive* groups = in_groups ? reader.find("groups", row_.name) : nullptr;
  const Directive& warps = groups ? *groups : reader.one("warps");
  reader.only(warps, {row_.name});
  in_groups_ = groups != nullptr;
  warps_ = in_groups_ ? kGroupWarps * reader.number(warps, row_.name, 1, kMostWarps / kGroupWarps) : reader.number(warps, row_.name, 1, kMostWarps);
  if (in_groups_ && rows_ != warps_ * kMatrixRows) reader.fail(warps, fmt::format("allowed: what leaves each group {} rows", kGroupRows));
  if (rows_ % (warps_ * kMatrixRows) != 0) reader.fail(warps, fmt::format("allowed: what leaves each warp a multiple of {} rows", kMatrixRows));
  const Directive& stages = reader.one("stages");
  reader.only(stages, {""});
  stages_ = reader.number(stages, "", least_stages, kMostStages);
}

void WarpRows::read_numbers(ScheduleReader& reader, const std::string& key) {
  by_numbers_ = true;
  auto tile = [&](const std::string& name) {
    const Directive* d = reader.find("tile", name);
    if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", name));
    reader.only(*d, {name});
    return reader.number(*d, name, 1, kMostTile);
  };
  rows_ = tile(row_.name);
  keys_ = tile(key);
  const Directive& block = reader.one("register_block");
  reader.only(block, {row_.name});
  per_row_ = reader.number(block, row_.name, 1, kMostOwnRows);
  if (rows_ % per_row_ != 0) reader.fail(block, fmt::format("allowed: what divides {} rows", rows_));
  const Directive& threads = reader.one("threads");
  reader.only(threads, {""});
  const int64_t count = reader.number(threads, "", kWarp, kMostThreads);
  wide_ = count / (rows_ / per_row_);
  const bool whole = count % (rows_ / per_row_) == 0 && count % kWarp == 0 && wide_ <= kWarp && (wide_ & (wide_ - 1)) == 0;
  if (!whole) reader.fail(threads, "allowed: whole warps, and a power of two of threads, up to 32, for each row");
  if (keys_ % (wide_ * kNumbers) != 0)
    reader.fail(threads, fmt::format("{} threads for each row leave them {} keys, allowed: multiples of {}", wide_, keys_ / wide_, kNumbers));
  const Directive& stages = reader.one("stages");
  reader.only(stages, {""});
  stages_ = reader.number(stages, "", 1, kMostStages);
}

void WarpRows::check_shared(const ScheduleReader& reader, int64_t bytes) {
  if (bytes > kMostSharedBytes) reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has at most {}", bytes, kMostSharedBytes));
}

// ---- the block -------------------------------------------------------------------------------------------------------

tile_ir::Block WarpRows::on_rows(const std::function<tile_ir::Block()>& body) {
  block_ = names_.fresh("b");
  thread_x_ = names_.fresh("tx");
  thread_y_ = names_.fresh("ty");
  const Expr tiles = ceildiv(row_.extent, rows_);
  const bool later_longer = std::any_of(limits_.begin(), limits_.end(), [&](const analysis::KeyLimit& limit) {
    const auto step = linear_coefficient(limit.limit, row_.name);
    return limit.above && step && step->is_constant() && step->value() > 0;
  });
  const Expr tile = mod(sym(block_), tiles);
  first_row_ = (later_longer ? tiles - 1 - tile : tile) * rows_;
  batch_map_ = unflatten(batch_, floordiv(sym(block_), tiles));
  return {on_grid(block_, count(batch_) * tiles, body())};
}

void WarpRows::bound_keys(tile_ir::Block& into, const loop_ir::Block& rows, Expr extent,
                          const std::function<bool(const loop_ir::Block&)>& may_come_first) {
  Expr lo = 0;
  Expr hi = extent;
  const Expr last_row = min(first_row_ + rows_, row_.extent) - 1;
  loop_ir::Block of_all;
  for (const auto& [above, limit] : limits_) {
    const auto step = linear_coefficient(limit, row_.name);
    const loop_ir::Block statements = statements_for(rows, symbols_of(limit));
    std::set<std::string> used;
    for (const auto& s : statements) collect_uses(*s, used);
    if (!step || !step->is_constant() || used.count(row_.name) > 0 || !may_come_first(statements)) continue;
    for (const auto& s : statements)
      if (std::find(of_all.begin(), of_all.end(), s) == of_all.end()) of_all.push_back(s);
    Substitution map = batch_map_;
    map[row_.name] = (step->value() >= 0) == above ? last_row : first_row_;
    const Expr bound = substitute(limit, map);
    // A loaded position may be the largest integer.
    if (above)
      hi = min(hi, min(bound, extent - 1) + 1);
    else
      lo = max(lo, min(bound, extent));
  }
  // Later statements make values of the same names.
  loop_ir::Renaming renaming;
  for (const auto& s : of_all) renaming.value(loop_ir::name_of(*s), names_.fresh(loop_ir::name_of(*s)));
  append(into, placed(loop_ir::copy_block(of_all, renaming, nullptr), batch_map_));
  first_block_ = floordiv(substitute(lo, renaming.exprs), keys_);
  last_block_ = ceildiv(max(substitute(hi, renaming.exprs), 0), keys_);
}

tile_ir::Block WarpRows::placed(const loop_ir::Block& block, const Substitution& map) {
  tile_ir::Block out;
  for (const auto& stmt : block) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node)) out.push_back(make(substituted(*let, map)));
    if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) out.push_back(make(substituted(*store, map)));
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt->node)) out.push_back(make(substituted(*load, map)));
  }
  return out;
}

// ---- statements ------------------------------------------------------------------------------------------------------

std::string WarpRows::let(tile_ir::Block& into, Fn fn, std::vector<std::string> operands, DType dtype) {
  const std::string name = names_.fresh("w");
  into.push_back(make(tile_ir::Let{name, dtype, fn, std::move(operands), {}, 0}));
  return name;
}

std::string WarpRows::number(tile_ir::Block& into, double value) {
  const std::string name = names_.fresh("n");
  into.push_back(make(tile_ir::Let{name, DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, value), 0}));
  return name;
}

std::string WarpRows::load(tile_ir::Block& into, const std::string& array, std::vector<Expr> index) {
  const std::string name = names_.fresh("x");
  into.push_back(make(tile_ir::Load{name, DType::f32, array, std::move(index), {}, {}}));
  return name;
}

Ref<tile_ir::Stmt> WarpRows::over_groups(const Columns& columns, tile_ir::Block body) const {
  return unroll("g", columns.groups, {make(tile_ir::For{axis("c", 0, columns.lanes, LoopKind::lanes), std::move(body)})});
}

Ref<tile_ir::Stmt> WarpRows::per_row(tile_ir::Block body) const { return unroll("u", units(), {unroll("h", halves(), std::move(body))}); }

Ref<tile_ir::Stmt> WarpRows::per_thread(const Columns& columns, tile_ir::Block body) const {
  return per_row({over_groups(columns, std::move(body))});
}

Ref<tile_ir::Stmt> WarpRows::clear(const std::string& array, const Columns& columns) {
  tile_ir::Block zero;
  const std::string none = number(zero, 0);
  zero.push_back(store_at(array, place(), none));
  return per_thread(columns, std::move(zero));
}

Ref<tile_ir::Stmt> WarpRows::on_grid(const std::string& block, Expr blocks, tile_ir::Block body) const {
  tile_ir::Block inner{make(tile_ir::For{axis(thread_x_, 0, wide_, LoopKind::thread_x), std::move(body)})};
  inner = {make(tile_ir::For{axis(thread_y_, 0, threads() / wide_, LoopKind::thread_y), std::move(inner)})};
  return make(tile_ir::For{axis(block, 0, blocks, LoopKind::block_x), std::move(inner)});
}

std::vector<std::string> WarpRows::load_rows(tile_ir::Block& into, const MatrixTile& rows, Expr depth) {
  std::vector<std::string> matrices;
  for (int64_t unit = 0; unit < units(); ++unit) {
    matrices.push_back(names_.fresh("qm"));
    const Expr row = rows.row_of_matrix(lane(), 0, warp() * warp_rows() + unit * kMatrixRows, depth);
    into.push_back(make(tile_ir::LoadMatrix{matrices.back(), rows.dtype, rows.tile, {row}, 4, !rows.along_k}));
  }
  return matrices;
}

tile_ir::Block WarpRows::multiply(const std::string& sums, const MatrixTile& rows, const MatrixTile& columns, Expr begin, int64_t groups,
                                  int64_t depth, const std::vector<std::vector<std::string>>& loaded) {
  if (in_groups_) return multiply_in_groups(sums, rows, "", columns, begin, groups, depth);
  tile_ir::Block body;
  if (!loaded.empty()) {
    for (size_t step = 0; step < loaded.size(); ++step)
      append(body, multiply_step(sums, loaded[step], columns, begin, groups, static_cast<int64_t>(step) * kMatrixDepth));
    return body;
  }
  const std::string k = names_.fresh("kk");
  const Expr at = sym(k) * kMatrixDepth;
  const std::vector<std::string> matrices = load_rows(body, rows, at);
  append(body, multiply_step(sums, matrices, columns, begin, groups, at));
  return {unroll(k, depth / kMatrixDepth, std::move(body))};
}

tile_ir::Block WarpRows::multiply_numbers(const std::string& sums, const std::string& numbers, const MatrixTile& columns, Expr begin, int64_t groups,
                                          int64_t depth) {
  if (in_groups_) return multiply_in_groups(sums, columns, numbers, columns, begin, groups, depth);
  const std::string k = names_.fresh("kv");
  tile_ir::Block body;
  std::vector<std::string> rows;
  for (int64_t unit = 0; unit < units(); ++unit) {
    rows.push_back(names_.fresh("wm"));
    tile_ir::JoinMatrix join{rows.back(), columns.dtype, numbers, {}};
    for (int64_t deeper : {0, 1})
      for (int64_t half : {0, 1}) join.places.push_back({unit, half, sym(k) * 2 + deeper, 0});
    body.push_back(make(std::move(join)));
  }
  append(body, multiply_step(sums, rows, columns, begin, groups, sym(k) * kMatrixDepth));
  return {unroll(k, depth / kMatrixDepth, std::move(body))};
}

tile_ir::Block WarpRows::multiply_in_groups(const std::string& sums, const MatrixTile& rows, const std::string& numbers, const MatrixTile& columns,
                                            Expr begin, int64_t groups, int64_t depth) {
  tile_ir::Block body;
  GroupProducts products;
  products.columns = groups * kMatrixColumns;
  products.depth = depth;
  products.b = {columns.tile, begin, columns.lines, !columns.along_k};
  if (numbers.empty()) {
    // From one group's rows to the next one's: lines, or boxes.
    const int64_t apart = (rows.along_k ? kGroupRows : rows.lines) * kGroupLine;
    products.a = {rows.tile, floordiv(warp(), kGroupWarps) * apart, rows.lines, !rows.along_k};
  }
  for (int64_t k = 0; !numbers.empty() && k < depth / kMatrixDepth; ++k) {
    products.matrices.push_back(names_.fresh("wm"));
    tile_ir::JoinMatrix join{products.matrices.back(), columns.dtype, numbers, {}};
    for (int64_t deeper : {0, 1})
      for (int64_t half : {0, 1}) join.places.push_back({0, half, k * 2 + deeper, 0});
    body.push_back(make(std::move(join)));
  }
  body.push_back(make(tile_ir::MultiplyGroup{sums, 0, std::move(products)}));
  return body;
}

/// Four of k at once, of which a vector of a row is loaded, and vectors of columns, whichever way those lie.
tile_ir::Block WarpRows::multiply_by_numbers(const std::string& sums, const MatrixTile& rows, const MatrixTile& columns, Expr begin,
                                             const Columns& own, int64_t depth) {
  const std::string outer = names_.fresh("ko");
  const std::string step = names_.fresh("ks");
  const std::string k = names_.fresh("kn");
  const std::string v = names_.fresh("kl");
  const std::string of_rows = names_.fresh("qn");
  const int64_t chunks = depth / kNumbers;
  int64_t turn = std::min(chunks, kTurn);
  while (chunks % turn != 0) --turn;
  const Expr chunk = sym(outer) * turn + sym(step);
  tile_ir::Block body{make(tile_ir::Alloc{of_rows, DType::f32, {units(), kNumbers}, tile_ir::Space::reg})};
  tile_ir::Block vector;
  const std::string number = names_.fresh("x");
  vector.push_back(make(tile_ir::Load{number, DType::f32, rows.tile, {rows.place_of_number(0, own_row(), 0, chunk, sym(v))}, {}, {}}));
  vector.push_back(store_at(of_rows, {sym("u"), sym(v)}, number));
  body.push_back(unroll("u", units(), {unroll("h", 1, {make(tile_ir::For{axis(v, 0, kNumbers, LoopKind::lanes), std::move(vector)})})}));
  tile_ir::Block product;
  const std::string a = load(product, of_rows, {sym("u"), sym(k)});
  const std::string b = names_.fresh("x");
  const Expr first = (sym("g") * wide_ + sym(thread_x_)) * own.lanes;
  product.push_back(make(tile_ir::Load{b, DType::f32, columns.tile, {columns.place_of_number(begin, first, sym("c"), chunk, sym(k))}, {}, {}}));
  // Of few sums each turn is a chain of its own, as short as those of the dot products that eager mode takes for few rows.
  const bool chains = chunks > turn && units() * own.groups * own.lanes <= kChainedSums;
  const std::string into = chains ? names_.fresh("chain") : sums;
  const std::string c = load(product, into, place());
  product.push_back(store_at(into, place(), let(product, Fn::fma, {a, b, c})));
  tile_ir::Block columnwise{make(tile_ir::For{axis("c", 0, own.lanes, LoopKind::lanes), std::move(product)})};
  columnwise = {unroll(k, kNumbers, std::move(columnwise))};
  columnwise = {unroll("u", units(), {unroll("h", 1, std::move(columnwise))})};
  body.push_back(unroll("g", own.groups, std::move(columnwise)));
  body = {make(tile_ir::For{axis(step, 0, turn, LoopKind::serial, 1, turn), std::move(body)})};
  if (chains) {
    auto over_sums = [&](tile_ir::Block block) {
      block = {make(tile_ir::For{axis("c", 0, own.lanes, LoopKind::lanes), std::move(block)})};
      return unroll("u", units(), {unroll("h", 1, {unroll("g", own.groups, std::move(block))})});
    };
    tile_ir::Block none;
    none.push_back(store_at(into, place(), this->number(none, 0)));
    body.insert(body.begin(), over_sums(std::move(none)));
    body.insert(body.begin(), make(tile_ir::Alloc{into, DType::f32, {units(), 1, own.groups, own.lanes}, tile_ir::Space::reg}));
    tile_ir::Block add;
    const std::string earlier = load(add, sums, place());
    const std::string part = load(add, into, place());
    add.push_back(store_at(sums, place(), let(add, Fn::add, {earlier, part})));
    body.push_back(over_sums(std::move(add)));
  }
  return {make(tile_ir::For{axis(outer, 0, chunks / turn), std::move(body)})};
}

/// 16 of k.
tile_ir::Block WarpRows::multiply_step(const std::string& sums, const std::vector<std::string>& rows, const MatrixTile& columns, Expr begin,
                                       int64_t groups, Expr depth) {
  tile_ir::Block body;
  for (int64_t pair = 0; pair < groups / 2; ++pair) {
    const std::string loaded = names_.fresh(columns.along_k ? "km" : "vm");
    const Expr row = columns.row_of_matrix(lane(), begin, pair * 2 * kMatrixColumns, depth);
    body.push_back(make(tile_ir::LoadMatrix{loaded, columns.dtype, columns.tile, {row}, 4, !columns.along_k}));
    for (int64_t unit = 0; unit < units(); ++unit)
      for (int64_t half : {0, 1})
        body.push_back(make(tile_ir::Mma{
            sums, {unit, 0, pair * 2 + half, 0}, {unit, 1, pair * 2 + half, 0}, rows[static_cast<size_t>(unit)], loaded, static_cast<int>(half)}));
  }
  return body;
}

}  // namespace deplo::loop_to_tile
