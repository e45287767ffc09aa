#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "target/cpu/schedule/contraction_scheduler.h"
#include "target/cpu/schedule/statements.h"

namespace deplo::loop_to_tile {
namespace {

constexpr int64_t kStepsAhead = 2;  // of a matrix unit: enough to bring a line from the second cache

bool rounds_to_bf16(const tile_ir::Block& block, const loop_ir::Let& cast) {
  return cast.dtype == DType::bf16 && std::any_of(block.begin(), block.end(), [&](const auto& stmt) {
           const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
           return let && let->name == cast.operands[0] && let->dtype == DType::f32;
         });
}

}  // namespace

tile_ir::Block ContractionScheduler::body() {
  const int64_t rows_block = row_tiles_ * mr_;
  row_blocks_ = window_ ? ceildiv(rows_[0].extent, lines_) : ceildiv(rows_extent_, rows_block);
  parallel_extent_ = count(outer_) * lane_groups() * row_blocks_;
  const Turn now = turn(sym("par"));
  outer_map_ = now.outer;
  if (window_) {
    first_row_line_ = now.row_block * lines_;
    valid_row_lines_ = min(lines_, rows_[0].extent - first_row_line_);
    valid_rows_ = valid_row_lines_ * rows_[1].extent;
  } else {
    first_row_ = now.row_block * rows_block;
    valid_rows_ = min(rows_block, rows_extent_ - first_row_);
    count_tiles();
  }
  choose_lanes(now.lane_group);
  tile_ir::Block out = limit_lanes();
  for (auto& stmt : allocations()) out.push_back(stmt);
  for (auto& stmt : limit_ ? within_limit(tile_body()) : tile_body()) out.push_back(stmt);
  return {loop("par", 0, parallel_extent_, LoopKind::parallel, std::move(out))};
}

ContractionScheduler::Turn ContractionScheduler::turn(Expr par) const {
  if (outer_inside_) {
    const Expr points = count(outer_);
    const Expr tile = floordiv(par, points);
    return {unflatten(outer_, mod(par, points)), mod(tile, row_blocks_), floordiv(tile, row_blocks_)};
  }
  return {unflatten(outer_, floordiv(par, row_blocks_ * lane_groups())), mod(rows_outside_ ? floordiv(par, lane_groups()) : par, row_blocks_),
          mod(rows_outside_ ? par : floordiv(par, row_blocks_), lane_groups())};
}

void ContractionScheduler::count_tiles() {
  if (tail_ == 0) {
    tiles_ = ceildiv(valid_rows_, mr_);
    tails_ = 0;
    return;
  }
  const int64_t most = tail_rows();
  tiles_ = floordiv(valid_rows_ + (mr_ - most - 1), mr_);
  tails_ = ceildiv(max(valid_rows_ - tiles_ * mr_, 0), tail_);
}

void ContractionScheduler::choose_lanes(Expr group) {
  if (two_lane_axes()) {
    first_line_ = group * lane_lines_;
    valid_lines_ = min(lane_lines_, lanes_[0].extent - first_line_);
    first_lane_ = first_line_ * lanes_[1].extent;
    valid_lanes_ = valid_lines_ * lanes_[1].extent;
  } else {
    first_lane_ = group * lane_block_;
    valid_lanes_ = min(lane_block_, lanes_extent_ - first_lane_);
  }
}

tile_ir::Block ContractionScheduler::allocations() const {
  tile_ir::Block out;
  for (const Item& item : items_) {
    auto scratch = [&](const char* name, std::vector<Expr> shape, DType dtype = DType::f32) {
      out.push_back(make(tile_ir::Alloc{name + item.tag, dtype, std::move(shape), Space::scratch}));
    };
    scratch("c", {tile_rows(), joint() ? nr_ : lane_block_}, item.dtype());
    if (item.parts > 1) scratch("cr", {tile_rows(), lane_block_});
    if (is_chained(item)) scratch("cg", {tile_rows(), lane_block_});
    if (item.widened && item.pairs && item.bits > 0)
      scratch("pw", {chunk(item) / 2, nr_}, DType::i32);
    else if (item.widened && item.pairs)
      scratch("pw", {chunk(item) / 2, nr_, 2}, DType::bf16);
    else if (item.widened)
      scratch("pw", {chunk(item), nr_});
    if (window_) {
      scratch("pa", window_shape(), item.pairs ? DType::bf16 : item.dtype());
      continue;
    }
    if (!item.rows.is_static && packs_rows_in_lines(item)) scratch("pa", {item.depth_block, row_tiles_ * mr_ + item.rows.padding});
    if (!item.rows.is_static && !item.rows.in_place && !packs_rows_in_lines(item)) {
      std::vector<Expr> shape{row_tiles_ * mr_, item.depth_block + item.rows.padding * (item.words || item.bytes ? 4 : 1)};
      if (item.parts > 1) shape.insert(shape.begin(), item.parts);
      scratch("pa", std::move(shape), item.pairs ? DType::bf16 : item.words || item.bytes ? item.row_bytes() : item.dtype());
    }
    if (!item.lanes.is_static && item.pairs)
      scratch("pb", {item.depth_block / 2, spread(lane_block_), 2}, DType::bf16);
    else if (!item.lanes.is_static)
      scratch("pb", {item.depth_block, spread(lane_block_)});
    if (sums_rows(item)) scratch("ps", {row_tiles_ * mr_, item.depth_block / item.chain});
    if (item.differs(mr_) || item.scales_steps())
      scratch("pn", {row_tiles_ * mr_, item.depth_block + item.rows.padding}, item.pairs ? DType::bf16 : DType::f32);
  }
  return out;
}

bool ContractionScheduler::in_panels() const {
  return std::none_of(items_.begin(), items_.end(), [](const Item& i) { return i.matrix && !i.words; });
}

bool ContractionScheduler::joint() const {
  return in_panels() && std::all_of(items_.begin(), items_.end(), [](const Item& i) { return i.depth_blocks.is(1); });
}

tile_ir::Block ContractionScheduler::tile_body() const {
  tile_ir::Block out;
  auto append = [&](tile_ir::Block block) { out.insert(out.end(), block.begin(), block.end()); };
  if (joint()) {
    tile_ir::Block panels;
    for (const Item& item : items_) {
      append(packs(item));
      for (auto& stmt : multiply(item, false)) panels.push_back(stmt);
    }
    if (!in_registers_)
      for (auto& stmt : epilogue(0, valid_rows_)) panels.push_back(stmt);
    append({over_panels(items_[0], std::move(panels))});
    for (const Item& item : items_) out = {loop("kb" + item.tag, 0, 1, LoopKind::serial, std::move(out))};
    return out;
  }
  for (const Item& item : items_) append(contraction(item));
  if (!in_panels()) append(epilogue(0, valid_rows_));
  return out;
}

std::vector<Expr> ContractionScheduler::place_of(const Item& item, const std::string& prefix) {
  return {sym(prefix + "r" + item.tag), sym(prefix + "l" + item.tag)};
}

Ref<tile_ir::Stmt> ContractionScheduler::over_tile(const Item& item, const std::string& prefix, tile_ir::Block body) const {
  body = {loop(prefix + "l" + item.tag, 0, round_up(valid_lanes_, nr_), LoopKind::lanes, std::move(body))};
  Expr rows = window_ ? lines_padded(valid_row_lines_) * tile_points() : padded_rows();
  return loop(prefix + "r" + item.tag, 0, rows, LoopKind::serial, std::move(body));
}

tile_ir::Block ContractionScheduler::contraction(const Item& item) const {
  tile_ir::Block out;
  bool several = !item.depth_blocks.is(1);
  std::string t = item.tag;
  if (in_panels()) {
    tile_ir::Block panel = multiply(item, several);
    if (&item == &items_.back() && !in_registers_) {
      // The last block of k ends the panel's sums.
      const Cond last{Cond::Kind::ge0, sym("kb" + t) + 1 - item.depth_blocks};
      panel.push_back(make(tile_ir::If{{last}, epilogue(0, valid_rows_)}));
    }
    tile_ir::Block block = packs(item);
    block.push_back(over_panels(item, std::move(panel)));
    return {loop("kb" + t, 0, item.depth_blocks, LoopKind::serial, std::move(block))};
  }
  if (several) {
    tile_ir::Block clear = store_zero("c" + t, place_of(item, "z"), "zero" + t);
    if (item.parts > 1) clear.push_back(make(loop_ir::Store{"cr" + t, place_of(item, "z"), "zero" + t, {}, Combiner::set}));
    out.push_back(over_tile(item, "z", std::move(clear)));
  }
  tile_ir::Block block = packs(item);
  block.push_back(over_panels(item, multiply(item, several)));
  if (!is_chained(item)) {
    out.push_back(loop("kb" + t, 0, item.depth_blocks, LoopKind::serial, std::move(block)));
    return out;
  }
  // A matrix unit adds each block to the sums so far: chains of some blocks are added up by themselves.
  const int64_t blocks = std::max<int64_t>(1, kMatrixChain / item.depth_block);
  const Expr first = sym("kg" + t) * blocks;
  tile_ir::Block add;
  for (const char* buffer : {"c", "cg"})
    add.push_back(make(loop_ir::Load{std::string("v") + buffer + t, DType::f32, buffer + t, place_of(item, "g"), {}, {}}));
  add.push_back(make(loop_ir::Let{"sum" + t, DType::f32, Fn::add, {"vc" + t, "vcg" + t}, {}, 0}));
  add.push_back(make(loop_ir::Store{"c" + t, place_of(item, "g"), "sum" + t, {}, Combiner::set}));
  out.push_back(loop(
      "kg" + t, 0, ceildiv(item.depth_blocks, blocks), LoopKind::serial,
      {over_tile(item, "y", store_zero("cg" + t, place_of(item, "y"), "none" + t)),
       loop("kb" + t, first, min(first + blocks, item.depth_blocks), LoopKind::serial, std::move(block)), over_tile(item, "g", std::move(add))}));
  return out;
}

tile_ir::Block ContractionScheduler::packs(const Item& item) const {
  tile_ir::Block block = places_ahead(item);
  if (!item.lanes.is_static)
    for (auto& s : pack_lines(item, item.lanes, "l", "pb", lane_lines(), round_up(valid_lanes_, nr_))) block.push_back(s);
  if (window_)
    for (auto& s : pack_window(item)) block.push_back(s);
  else if (!item.rows.is_static && !item.rows.in_place)
    for (auto& s : packs_rows_in_lines(item) ? pack_lines(item, item.rows, "r", "pa", row_lines(), padded_rows()) : pack_rows(item))
      block.push_back(s);
  if (item.folded)
    for (auto& s : prepare_rows(item)) block.push_back(s);
  return block;
}

Ref<tile_ir::Stmt> ContractionScheduler::over_panels(const Item& item, tile_ir::Block body) const {
  return loop(panel(item).name(), 0, ceildiv(limit_ ? counted_lanes_ : valid_lanes_, nr_), LoopKind::serial, std::move(body));
}

tile_ir::Block ContractionScheduler::multiply(const Item& item, bool several) const {
  const std::string& t = item.tag;
  tile_ir::Block tiles;
  if (window_) {
    for (const LineBlocks& b : line_blocks(block_points_))
      tiles.push_back(
          loop("rx" + t, 0, b.count, LoopKind::serial, register_block(item, several, {block_lines_ * b.points, 0, b, tiles.empty() ? "" : "s"})));
    tiles = {loop("rt" + t, 0, ceildiv(valid_row_lines_, block_lines_), LoopKind::serial, std::move(tiles))};
  } else {
    tiles = {loop("rt" + t, 0, tiles_, LoopKind::serial, register_block(item, several, {mr_}))};
    if (tail_ > 0) tiles.push_back(loop("rt" + t, 0, tails_, LoopKind::serial, register_block(item, several, {tail_, tiles_ * mr_, {}, "e"})));
  }
  if (item.widened) tiles.insert(tiles.begin(), widen_panel(item));
  return chains_outside(item) ? tile_ir::Block{over_chains(item, std::move(tiles))} : tiles;
}

std::vector<Expr> ContractionScheduler::packed_lanes(const Item& item, Expr k, Expr lane, Expr half, int64_t part) const {
  std::vector<Expr> index = outer_index(item.lanes);
  if (item.bits > 0) {
    const Expr place = first_lane_ + panel(item) * nr_;
    const Expr word = sym("kb" + item.tag) * (item.depth_block / item.word()) + k;
    index.insert(index.end(), {floordiv(place, item.width), word, mod(place, item.width) + lane});
    return index;
  }
  index.insert(index.end(), {sym("kb" + item.tag), floordiv(first_lane_, nr_) + panel(item)});
  if (item.parts > 1) index.emplace_back(part);
  index.insert(index.end(), {k, lane});
  if (item.paired_lanes()) index.push_back(half);
  return index;
}

int64_t ContractionScheduler::fewest_tiles() const {
  if (!rows_extent_.is_constant()) return 1;
  const int64_t block = row_tiles_ * mr_;
  const int64_t last = rows_extent_.value() % block;
  return last == 0 ? row_tiles_ : std::max<int64_t>(1, std::min(row_tiles_, (last + mr_ - 1) / mr_));
}

tile_ir::Block ContractionScheduler::prefetch_panel(const Item& item, Expr k, Expr before) const {
  tile_ir::Block out;
  if (in_rows_) return out;
  const auto narrow = item.packed_lanes();
  const bool words = item.words || item.bits > 0;
  const int64_t lanes_of_line = words ? kCacheLine : kCacheLine * 4 / (narrow ? size_of(narrow->dtype) : 4) / (item.pairs ? 2 : 1);
  // Every tile of rows reads the panel, and each fetches its share of the lines of the next one: if one fetched all, it would wait for memory, and
  // memory would rest while the others multiply.
  const int64_t lines = (nr_ + lanes_of_line - 1) / lanes_of_line;
  const int64_t tiles = item.widened || item.folded ? 1 : window_ ? lines_ / block_lines_ : fewest_tiles();
  const int64_t turns = std::min(lines, tiles);
  const int64_t each = (lines + turns - 1) / turns;
  for (int64_t line = 0; line < each; ++line) {
    const Expr at_line = turns == 1 ? Expr(line) : min(mod(sym("rt" + item.tag) + before, turns) * each + line, lines - 1);
    std::vector<Expr> at = packed_lanes(item, k, at_line * lanes_of_line, 0);
    Expr& next = at[at.size() - (item.paired_lanes() ? 4 : 3)];
    next = min(next + 1, ceildiv(lanes_extent_, packed_width(item, true)) - 1);
    out.push_back(make(tile_ir::Prefetch{item.lanes.param, std::move(at), 2}));
  }
  return out;
}

Ref<tile_ir::Stmt> ContractionScheduler::widen_panel(const Item& item) const {
  if (item.bits > 0) return widen_words(item);
  const std::string& t = item.tag;
  const auto narrow = item.packed_lanes();
  Expr k = sym("kw" + t);
  Expr lane = sym("xw" + t);
  Expr half = 0;
  std::vector<Expr> to{k - chunk_start(item), lane};
  if (item.pairs) {  // the halves of all lanes lie side by side
    half = mod(lane, 2);
    lane = floordiv(lane, 2);
    to = {k - chunk_start(item), lane, half};
  }
  loop_ir::Load from{"nw" + t, narrow->dtype, item.lanes.param, packed_lanes(item, k, lane, half), {}, Scalar::of_float(narrow->dtype, 0)};
  const auto prologue = item.prologue();
  // The factors change where one of these ends: their loads stay outside of the loop over its steps.
  const int64_t share = prologue ? std::gcd(std::gcd(prologue->group, item.depth_block), chunk(item)) : 0;
  const bool apart = prologue && share % item.group() == 0;
  tile_ir::Block copy;
  std::string value = "ww" + t;
  if (prologue) {
    const Expr step = sym("kb" + t) * item.depth_block + (apart ? sym("kf" + t) * share : k * item.group() + half);
    std::map<std::string, loop_ir::Load> instead;
    for (const loop_ir::Load* factor : prologue->factors) {
      std::vector<Expr> at = outer_index(item.lanes);
      at.insert(at.end(), {floordiv(first_lane_, nr_) + panel(item), floordiv(step, prologue->group), lane});
      if (item.pairs) at.push_back(half);
      instead[factor->name] = loop_ir::Load{factor->name, factor->dtype, fmt::format("factor{}_{}", instead.size(), t), std::move(at), {}, {}};
    }
    instead[narrow->value] = std::move(from);
    value = operand_value(item.lanes, {}, ".w" + t, item.pairs ? item.lanes.narrow() : std::nullopt, copy, instead);
    // What dot2 reads may be rounded as it reads.
    const auto* last = item.pairs ? std::get_if<loop_ir::Let>(&copy.back()->node) : nullptr;
    if (last && last->name == value && last->fn == Fn::cast && rounds_to_bf16(copy, *last)) {
      loop_ir::Let rounded = *last;
      rounded.fn = Fn::narrow;
      copy.back() = make(std::move(rounded));
    }
  } else {
    copy = {make(std::move(from)), make(loop_ir::Let{value, item.pairs ? DType::bf16 : DType::f32, Fn::cast, {"nw" + t}, {}, 0})};
  }
  copy.push_back(make(loop_ir::Store{"pw" + t, std::move(to), value, {}, Combiner::set}));
  tile_ir::Block line = window_ ? tile_ir::Block{} : prefetch_panel(item, k);
  line.push_back(loop("xw" + t, 0, nr_ * item.group(), LoopKind::lanes, std::move(copy)));
  const Expr first = chunk_start(item) * item.group();
  const Expr end = in_chunks(item) ? min(first + item.chain, depth_of_block(item)) : depth_of_block(item);
  if (!apart) return loop("kw" + t, chunk_start(item), floordiv(end, item.group()), LoopKind::serial, std::move(line), item.unroll);
  const int64_t steps = share / item.group();
  auto inner = loop("kw" + t, sym("kf" + t) * steps, sym("kf" + t) * steps + steps, LoopKind::serial, std::move(line), item.unroll);
  return loop("kf" + t, floordiv(first, share), floordiv(end, share), LoopKind::serial, {inner});
}

tile_ir::Block ContractionScheduler::matrix_block(const Item& item, bool several, const RowBlocks& rows) const {
  const std::string& t = item.tag;
  const std::string sums = "acc" + t + rows.suffix;
  tile_ir::Block out{make(tile_ir::Alloc{sums, item.dtype(), {rows.mr, nr_}, Space::matrix})};
  auto add = [&](const PartProducts& products) {
    for (auto& stmt : matrix_products(item, several, rows, products)) out.push_back(stmt);
  };
  add({sums, (is_chained(item) ? "cg" : "c") + t, {{0, 0}}});
  if (item.parts == 1) return out;
  // The largest parts are summed apart: with infinities theirs is the sum, whatever the smaller ones give. Products that are left out are of the size
  // of a float32 product's rounding, or less.
  add({sums, "cr" + t, {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}}, false});
  return out;
}

tile_ir::Block ContractionScheduler::prefetch_pairs(const Item& item, Expr k) const {
  tile_ir::Block out;
  // Each tile of rows fetches some of the next panel's rows under this step.
  const std::string& t = item.tag;
  const int64_t pairs = item.matrix_depth() / item.group();
  const int64_t share = (pairs + row_tiles_ - 1) / row_tiles_;
  for (int64_t part = 0; part < item.parts; ++part)
    for (int64_t i = 0; i < share; ++i)
      for (int64_t lane = 0; lane < nr_; lane += kCacheLine) {
        const Expr pair = min(mod(sym("rt" + t), row_tiles_) * share + i, pairs - 1);
        std::vector<Expr> at = packed_lanes(item, k * pairs + pair, lane, 0, part);
        Expr& panel = at[at.size() - (item.parts > 1 ? 5 : item.words ? 3 : 4)];
        panel = min(panel + 1, ceildiv(lanes_extent_, nr_) - 1);
        out.push_back(make(tile_ir::Prefetch{item.lanes.param, std::move(at), 2}));
      }
  return out;
}

tile_ir::Block ContractionScheduler::matrix_products(const Item& item, bool several, const RowBlocks& rows, const PartProducts& products) const {
  using Kind = tile_ir::Matrix::Kind;
  const std::string& t = item.tag;
  const std::string& sums = products.name;
  const int64_t depth = item.matrix_depth();
  const Expr row = rows.first + sym("rt" + t) * rows.mr;
  const Expr k = sym("k" + t);
  const tile_ir::Matrix::Place tile{products.c, {row, tile_lane(item, 0)}};
  tile_ir::Block body = products.prefetch && item.lanes.is_static ? prefetch_pairs(item, k) : tile_ir::Block{};
  if (!item.rows.is_static && item.parts == 1 && !item.words) {
    // The rows come from the second cache, in pieces of one line each.
    const Expr ahead = sym("ra" + t);
    tile_ir::Block line{make(tile_ir::Prefetch{"pa" + t, {row + ahead, (k + kStepsAhead) * depth}, 1})};
    body.push_back(loop(ahead.name(), 0, rows.mr, LoopKind::unroll, std::move(line)));
  }
  for (const auto& [a, b] : products.parts) {
    tile_ir::Matrix::Place from{"pa" + t, {row, k * depth}};
    if (item.parts > 1) from.index.insert(from.index.begin(), a);
    if (item.rows.is_static) from = {item.rows.param, static_row(item, rows, k * depth, 0)};
    const Expr step = k * (depth / item.group());
    tile_ir::Matrix::Place by{"pb" + t, {step, panel(item) * nr_, 0}};
    if (item.lanes.is_static) by = {item.lanes.param, packed_lanes(item, step, 0, 0, b)};
    tile_ir::Matrix multiply{Kind::multiply, sums, std::move(from), std::move(by)};
    if (item.words) multiply.bytes = item.lanes.narrow()->dtype;
    body.push_back(make(std::move(multiply)));
  }
  // The sums go on from block to block of k, and from chain to chain: each addition brings the products of 32 steps, or of 64 bytes.
  const Ref<tile_ir::Stmt> zero = make(tile_ir::Matrix{Kind::zero, sums, {}, {}});
  const Ref<tile_ir::Stmt> load = make(tile_ir::Matrix{Kind::load, sums, tile, {}});
  tile_ir::Block out;
  if (const bool chains = has_chains(item); item.words && (several || chains)) {
    const Expr before = (several ? sym("kb" + t) : Expr(0)) + (chains ? sym("kg" + t) : Expr(0));
    out.push_back(make(tile_ir::If{{{Cond::Kind::eq0, before}}, {zero}}));
    out.push_back(make(tile_ir::If{{{Cond::Kind::ge0, before - 1}}, {load}}));
  } else {
    out.push_back(several ? load : zero);
  }
  Expr first = 0;
  Expr end = steps_of_block(item);
  if (item.words) {
    const Expr all = depth_of_block(item);
    first = has_chains(item) ? floordiv(sym("kg" + t) * item.chain, depth) : Expr(0);
    end = floordiv(has_chains(item) ? min(sym("kg" + t) * item.chain + item.chain, all) : all, depth);
  }
  out.push_back(loop("k" + t, first, end, LoopKind::serial, std::move(body), item.unroll));
  out.push_back(make(tile_ir::Matrix{Kind::store, sums, tile, {}}));
  return out;
}

ContractionScheduler::Depth ContractionScheduler::depth_at(const Item& item) const {
  if (!window_) return {sym("k" + item.tag), {}, {}, {}};
  Depth at{{}, sym("kc" + item.tag), 0, 0};
  if (window_->line.taps > 1) at.line_tap = sym("ky" + item.tag);
  if (window_->point.taps > 1) at.point_tap = sym("kx" + item.tag);
  at.k = at.channel * window_->taps() + at.line_tap * window_->point.taps + at.point_tap;
  return at;
}

Expr ContractionScheduler::line_of(const Item& item, const RowBlocks& rows, Expr row) const {
  return sym("rt" + item.tag) * block_lines_ + floordiv(row, rows.points.points);
}

Expr ContractionScheduler::point_of(const Item& item, const RowBlocks& rows, Expr row) {
  return sym("rx" + item.tag) * rows.points.points + rows.points.first + mod(row, rows.points.points);
}

Expr ContractionScheduler::row_of(const Item& item, const RowBlocks& rows, Expr row) { return rows.first + sym("rt" + item.tag) * rows.mr + row; }

std::vector<Expr> ContractionScheduler::packed_row(const Item& item, const RowBlocks& rows, Expr row, int64_t half) const {
  const Depth at = depth_at(item);
  if (window_) {
    std::vector<Expr> index{at.channel, line_of(item, rows, row) * window_->line.step + at.line_tap * window_->line.tap_step,
                            point_of(item, rows, row) * window_->point.step + at.point_tap * window_->point.tap_step};
    if (item.pairs) index.emplace_back(half);
    return index;
  }
  if (!item.rows.is_static && packs_rows_in_lines(item)) return {at.k, row_of(item, rows, row)};
  if (!item.rows.is_static) return {row_of(item, rows, row), at.k * item.group() + half};
  return static_row(item, rows, at.k * item.group() + half, row);
}

std::vector<Expr> ContractionScheduler::static_row(const Item& item, const RowBlocks& rows, Expr step, Expr row) const {
  std::vector<Expr> index = outer_index(item.rows);
  const Expr panel = floordiv(first_row_ + rows.first, mr_) + sym("rt" + item.tag);
  const Expr block = sym("kb" + item.tag);
  if (item.pairs)
    index.insert(index.end(), {block, panel, row, step});
  else
    index.insert(index.end(), {panel, block * item.depth_block + step, row});
  return index;
}

Ref<tile_ir::Stmt> ContractionScheduler::over_registers(const Item& item, const RowBlocks& rows, const std::string& suffix, tile_ir::Block of_row,
                                                        tile_ir::Block of_lane) const {
  of_row.push_back(loop("x" + item.tag + suffix, 0, nr_, LoopKind::lanes, std::move(of_lane)));
  return loop("r" + item.tag + suffix, 0, rows.mr, LoopKind::unroll, std::move(of_row));
}

Ref<tile_ir::Stmt> ContractionScheduler::multiply_add(const Item& item, const RowBlocks& rows, const std::string& acc) const {
  const std::string& t = item.tag;
  const Expr r = sym("r" + t);
  const Expr lane = sym("x" + t);
  const Expr k = depth_at(item).k;
  const auto f32 = item.dtype();
  const std::string rows_buffer = item.rows.is_static ? item.rows.param : "pa" + t;
  const std::string lanes_buffer = item.widened ? "pw" + t : item.lanes.is_static ? item.lanes.param : "pb" + t;
  auto lanes_at = [&](int64_t half) {
    if (item.widened) {
      const Expr step = k - chunk_start(item);
      return item.pairs ? std::vector<Expr>{step, lane, half} : std::vector<Expr>{step, lane};
    }
    if (item.lanes.is_static) return packed_lanes(item, k, lane, half);
    std::vector<Expr> at{k, panel(item) * nr_ + lane};
    if (item.pairs) at.emplace_back(half);
    return at;
  };
  auto load = [](tile_ir::Block& into, const std::string& name, DType dtype, const std::string& buffer, std::vector<Expr> index) {
    into.push_back(make(loop_ir::Load{name, dtype, buffer, std::move(index), {}, Scalar::of_float(dtype, 0)}));
  };
  tile_ir::Block row;
  tile_ir::Block step;
  loop_ir::Let add{"fv" + t, f32, Fn::fma, {"av" + t, "bv" + t, "cv" + t}, {}, 0};
  if (item.words) {
    add.fn = Fn::dot4;
    if (item.lanes.narrow()->dtype == DType::u8) std::swap(add.operands[0], add.operands[1]);  // the unsigned one first
  }
  if (item.pairs) {
    add.fn = Fn::dot2;
    add.operands = {"av" + t, "aw" + t, "bv" + t, "bw" + t, "cv" + t};
    const bool words = item.widened && item.bits > 0;
    for (int64_t half : {0, 1}) {
      load(row, add.operands[static_cast<size_t>(half)], DType::bf16, rows_buffer, packed_row(item, rows, r, half));
      if (!words) load(step, add.operands[static_cast<size_t>(half) + 2], DType::bf16, lanes_buffer, lanes_at(half));
    }
    if (words) {
      load(step, "bv" + t, DType::i32, lanes_buffer, {k - chunk_start(item), lane});
      const auto [even, odd] = Statements(step, "." + t).halves("bv" + t, "");
      add.operands[2] = even;
      add.operands[3] = odd;
    }
  } else {
    const auto narrow = item.lanes.is_static && !item.widened ? item.packed_lanes() : std::nullopt;
    if (item.words) {
      // Four bytes next to each other, which code generation loads as one word.
      Statements put(row, "." + t);
      std::string word;
      for (int64_t byte = 0; byte < 4; ++byte) {
        const std::string n = std::to_string(byte);
        const std::string loaded = put.load(fmt::format("byte{}", n), DType::u8, rows_buffer, packed_row(item, rows, r, byte));
        std::string value = put.word(fmt::format("wide{}", n), Fn::cast, {loaded});
        if (byte > 0) value = put.word(fmt::format("up{}", n), Fn::shl, {value, put.number(fmt::format("places{}", n), 8 * byte)});
        word = word.empty() ? value : put.word(fmt::format("word{}", n), Fn::bit_or, {word, value});
      }
      add.operands[static_cast<size_t>(std::find(add.operands.begin(), add.operands.end(), "av" + t) - add.operands.begin())] = word;
    } else if (item.rows.in_place) {
      Substitution map = outer_map_;
      join(map, unflatten(rows_, first_row_ + row_of(item, rows, r)));
      join(map, depth_map(item, sym("kb" + t) * item.depth_block + k));
      add.operands[0] = operand_value(item.rows, map, "." + t, std::nullopt, row);
    } else {
      load(row, "av" + t, f32, rows_buffer, packed_row(item, rows, r, 0));
    }
    load(step, narrow ? "nv" + t : "bv" + t, narrow ? narrow->dtype : f32, lanes_buffer, lanes_at(0));
    if (narrow) step.push_back(make(loop_ir::Let{"bv" + t, f32, Fn::cast, {"nv" + t}, {}, 0}));
  }
  load(step, "cv" + t, f32, acc, {r, lane});
  step.push_back(make(std::move(add)));
  step.push_back(make(loop_ir::Store{acc, {r, lane}, "fv" + t, {}, Combiner::set}));
  return over_registers(item, rows, "", std::move(row), std::move(step));
}

Ref<tile_ir::Stmt> ContractionScheduler::over_depth(const Item& item, const RowBlocks& rows, tile_ir::Block body) const {
  const Expr depth = depth_of_block(item);
  Expr first = 0;
  Expr end = depth;
  if (has_chains(item)) {
    first = sym("kg" + item.tag) * item.chain;
    end = min(first + item.chain, depth);
  }
  const int64_t step = window_ ? window_steps(item) : item.group();  // of k, in one of the loop
  first = floordiv(first, step);
  end = item.pads_depth() ? ceildiv(end, step) : floordiv(end, step);
  if (prefetches_rows(item)) return over_lines(item, rows, first, end, std::move(body));
  if (!window_) return loop("k" + item.tag, first, end, LoopKind::serial, std::move(body), item.unroll);
  int64_t unroll = item.unroll;  // of the innermost loop
  auto wrap = [&](const std::string& name, Expr lo, Expr hi) {
    auto around = loop(name + item.tag, lo, hi, LoopKind::serial, std::move(body), unroll);
    body = {around};
    unroll = 1;
    return around;
  };
  if (window_->point.taps > 1) wrap("kx", 0, window_->point.taps);
  if (window_->line.taps > 1) wrap("ky", 0, window_->line.taps);
  return wrap("kc", first, end);
}

tile_ir::Block ContractionScheduler::register_block(const Item& item, bool several, const RowBlocks& rows) const {
  if (item.matrix) return matrix_block(item, several, rows);
  if (item.folded) return folded_block(item, several, rows);
  const std::string& t = item.tag;
  const std::string acc = "acc" + t + rows.suffix;
  tile_ir::Block step;
  if (!prefetches_rows(item) && item.lanes.is_static && (!item.widened || window_))
    // Points of a window share elements: LLVM would keep them in registers over unrolled steps, until these are full, if nothing touched memory
    // between the steps.
    step = prefetch_panel(item, depth_at(item).k, window_ || rows.suffix.empty() ? Expr(0) : tiles_);
  step.push_back(multiply_add(item, rows, acc));
  // Each chain is summed by itself and then added, while the sums so far are in the first cache: errors grow as those of short chains, and the
  // tile goes through the second cache once for each long block of k.
  const std::vector<Expr> register_at{sym("r" + t + "i"), sym("x" + t + "i")};
  tile_ir::Block start = store_zero(acc, register_at, "start" + t, item.dtype());
  if (item.shifted()) {
    start = {make(loop_ir::Load{"start" + t, item.dtype(), item.lanes.param, packed_lanes(item, item.depth_block / 4, register_at[1], 0), {}, {}}),
             make(loop_ir::Store{acc, register_at, "start" + t, {}, Combiner::set})};
  }
  tile_ir::Block out = prefetch_finish(item, several, rows);
  for (auto& stmt : {make(tile_ir::Alloc{acc, item.dtype(), {rows.mr, nr_}, Space::reg}), over_registers(item, rows, "i", {}, std::move(start)),
                     over_depth(item, rows, std::move(step))})
    out.push_back(stmt);
  for (auto& stmt : add_to_tile(item, several, rows, acc)) out.push_back(stmt);
  if (!has_chains(item) || in_chunks(item)) return out;
  return {over_chains(item, std::move(out))};
}

Ref<tile_ir::Stmt> ContractionScheduler::over_chains(const Item& item, tile_ir::Block body) const {
  return loop("kg" + item.tag, 0, ceildiv(depth_of_block(item), item.chain), LoopKind::serial, std::move(body));
}

}  // namespace deplo::loop_to_tile
