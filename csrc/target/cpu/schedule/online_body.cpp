#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/error.h"
#include "loop_ir/places.h"
#include "lower/loop_to_tile/convert.h"
#include "target/cpu/schedule/contraction_scheduler.h"
#include "target/cpu/schedule/online_copy.h"
#include "target/cpu/schedule/online_scheduler.h"

namespace deplo::loop_to_tile {

using loop_ir::Block;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Store;

namespace {

constexpr int64_t kInFlight = 4;                   // vectors
constexpr int64_t kBeyondKeys = int64_t{1} << 40;  // more than there are

}  // namespace

Ref<tile_ir::Stmt> OnlineScheduler::loop(const std::string& name, Expr lo, Expr hi, LoopKind kind, tile_ir::Block body, int64_t by) {
  return make(tile_ir::For{axis(name, lo, hi, kind, 1, by), std::move(body)});
}

Ref<tile_ir::Stmt> OnlineScheduler::load(const std::string& name, DType dtype, const std::string& buffer, std::vector<Expr> index) {
  return make(Load{name, dtype, buffer, std::move(index), {}, {}});
}

Ref<tile_ir::Stmt> OnlineScheduler::store(const std::string& buffer, std::vector<Expr> index, const std::string& value) {
  return make(Store{buffer, std::move(index), value, {}, Combiner::set});
}

Ref<tile_ir::Stmt> OnlineScheduler::let(const std::string& name, Fn fn, std::vector<std::string> operands, DType dtype) {
  return make(Let{name, dtype, fn, std::move(operands), {}, 0});
}

Ref<tile_ir::Stmt> OnlineScheduler::number(const std::string& name, double value, DType dtype) {
  return make(Let{name, dtype, Fn::constant, {}, Scalar::of_float(dtype, value), 0});
}

void OnlineScheduler::join(Substitution& into, const Substitution& more) {
  for (const auto& [name, value] : more) into[name] = value;
}

OnlineScheduler::Bounds OnlineScheduler::bounds_of(Expr first, Expr rows, const std::string& tag, tile_ir::Block& into) const {
  Bounds out;
  std::set<std::string> axes;
  for (const auto& a : nest_.axes) axes.insert(a.name);
  for (size_t n = 0; n < limits_.size(); ++n) {
    const bool above = limits_[n].above;
    Expr limit = limits_[n].limit;
    const auto step = linear_coefficient(limit, row_.name);
    const auto used = symbols_of(limit);
    const Block of_row = statements_for(sum_.rows, used);
    Substitution map = outer();
    if (of_row.empty() && step && step->is_constant() && (!direct_ || rows_.size() <= 1)) {
      set_row(map, (step->value() >= 0) == above ? first + rows - 1 : first);
      limit = substitute(limit, map);
    } else {
      const std::string name = fmt::format("limit{}{}", n, tag);
      const Expr row = sym("rl" + tag);
      set_row(map, first + row);
      tile_ir::Block body;
      Copy copy{map, "." + name, {}};
      copy.add(of_row, body);
      body.push_back(make(Let{"each" + name, DType::i64, Fn::index, {}, {}, substitute(limit, copy.map)}));
      into.push_back(make(tile_ir::Reduce{
          {name}, {DType::i64}, above ? Combiner::max : Combiner::min, {"each" + name}, {axis("rl" + tag, 0, rows)}, std::move(body)}));
      limit = above ? min(sym(name), sum_.key.extent - 1) : max(sym(name), 0);  // a loaded position may be the largest integer
    }
    if (n >= hard_limits_) limit = limit + sym("again") * (above ? kBeyondKeys : -kBeyondKeys);
    if (above)
      out.hi = out.hi ? min(*out.hi, limit + 1) : limit + 1;
    else
      out.lo = out.lo ? max(*out.lo, limit) : limit;
  }
  return out;
}

tile_ir::Block OnlineScheduler::body() const {
  if (direct_) return direct_body();
  const auto f32 = DType::f32;
  const int64_t padding = kRowPadding;
  const DType packed = pair_scores_ ? DType::bf16 : f32;
  auto pairs = [](std::vector<Expr> shape, size_t at, bool paired) {
    if (!paired) return shape;
    shape[at] = ceildiv(shape[at], 2);
    shape.emplace_back(2);
    return shape;
  };
  const int64_t column_panels = (columns_ + column_lanes_ - 1) / column_lanes_;
  tile_ir::Block out{
      make(tile_ir::Alloc{"keys", packed, pairs({block_keys_ / key_lanes_, packed_depth(), key_lanes_}, 1, pair_scores_), Space::scratch}),
      make(tile_ir::Alloc{"values", pair_values_ ? DType::bf16 : f32, pairs({column_panels, block_keys_, column_lanes_}, 1, pair_values_),
                          Space::scratch}),
      make(tile_ir::Alloc{"queries", packed, {rows_of_block_, query_elements()}, Space::scratch}),
      make(tile_ir::Alloc{"scores", f32, {rows_of_block_, block_keys_ + padding}, Space::scratch})};
  if (pair_values_) out.push_back(make(tile_ir::Alloc{"weights", DType::bf16, {rows_of_block_, block_keys_ + 2 * padding}, Space::scratch}));
  out.push_back(make(tile_ir::Alloc{"sums", f32, {shared_, column_panels * column_lanes_}, Space::scratch}));
  for (const char* name : {"most", "total"}) out.push_back(make(tile_ir::Alloc{name, f32, {shared_}, Space::scratch}));
  for (const char* name : {"factor", "base"}) out.push_back(make(tile_ir::Alloc{name, f32, {rows_of_block_}, Space::scratch}));
  if (matrix_values_) out.push_back(make(tile_ir::Alloc{"products", f32, {mr_, column_lanes_}, Space::scratch}));
  tile_ir::Block once = start();
  const KeyRange keys = keys_of_rows(once);
  tile_ir::Block block = pack_keys(keys.of_block);
  append(block, pack_values(keys.of_block));
  block.push_back(loop("rb", 0, ceildiv(shared_rows(), rows_of_block_), LoopKind::serial, row_block()));
  append(once, over_blocks(keys, std::move(block)));
  append(out, with_soft_limits(std::move(once)));
  append(out, finish());
  return out;
}

tile_ir::Block OnlineScheduler::with_soft_limits(tile_ir::Block once) const {
  if (hard_limits_ == limits_.size()) return once;
  tile_ir::Block masked{load("largesta", DType::f32, "most", {sym("ra")}),
                        number("leasta", analysis::kLeastMaximum),
                        let("hasa", Fn::gt, {"largesta", "leasta"}, DType::boolean),
                        make(Let{"nonea", DType::i64, Fn::constant, {}, Scalar::of_int(DType::i64, 0), 0}),
                        make(Let{"onea", DType::i64, Fn::constant, {}, Scalar::of_int(DType::i64, 1), 0}),
                        let("masked", Fn::where, {"hasa", "nonea", "onea"}, DType::i64)};
  tile_ir::Block body{make(tile_ir::Reduce{{"any"}, {DType::i64}, Combiner::max, {"masked"}, {axis("ra", 0, shared_rows())}, std::move(masked)}),
                      make(tile_ir::If{{less(sym("again"), sym("any") + 1)}, std::move(once)})};
  return {loop("ri", 0, shared_rows(), LoopKind::serial,
               {number("nonei", -std::numeric_limits<double>::infinity()), store("most", {sym("ri")}, "nonei")}),
          loop("again", 0, 2, LoopKind::serial, std::move(body))};
}

OnlineScheduler::KeyRange OnlineScheduler::keys_of_rows(tile_ir::Block& into) const {
  KeyRange keys{0, sum_.key.extent, 0};
  const Bounds all = bounds_of(first_shared(), shared_rows(), "g", into);
  if (all.lo) keys.lo = max(*all.lo, 0);
  if (all.hi) keys.hi = max(min(*all.hi, keys.hi), 0);
  keys.of_block = min(block_keys_, keys.hi - first_key());
  return keys;
}

tile_ir::Block OnlineScheduler::over_blocks(const KeyRange& keys, tile_ir::Block body) const {
  Expr first = floordiv(keys.lo, block_keys_);
  Expr end = ceildiv(keys.hi, block_keys_);
  if (part_) {  // every so manieth block
    first = floordiv(first, part_->axis.extent);
    end = ceildiv(end, part_->axis.extent);
    body = {make(tile_ir::If{{less(first_key(), keys.hi)}, std::move(body)})};
  }
  return {loop("kb", first, end, LoopKind::serial, std::move(body))};
}

tile_ir::Block OnlineScheduler::start() const {
  const int64_t width = (columns_ + column_lanes_ - 1) / column_lanes_ * column_lanes_;
  const Expr row = sym("r0");
  tile_ir::Block out{
      loop("r0", 0, shared_, LoopKind::serial,
           {number("none0", -std::numeric_limits<double>::infinity()), store("most", {row}, "none0"), number("zero0", 0),
            store("total", {row}, "zero0"), loop("x0", 0, width, LoopKind::lanes, {number("clear0", 0), store("sums", {row, sym("x0")}, "clear0")})}),
      loop("r1", 0, rows_of_block_, LoopKind::serial, {number("zero1", 0), store("factor", {sym("r1")}, "zero1")})};
  if (sum_.extra) {
    // As if a block before all others had it alone.
    Copy copy{outer(), ".x", {}};
    set_row(copy.map, first_shared() + sym("r2"));
    tile_ir::Block body;
    copy.add(statements_for(sum_.rows, {*sum_.extra}), body);
    append(body, {store("most", {sym("r2")}, copy.value(*sum_.extra)), number("never2", -std::numeric_limits<double>::infinity()),
                  let("nothing2", Fn::eq, {copy.value(*sum_.extra), "never2"}, DType::boolean), number("zero2", 0),
                  let("from2", Fn::where, {"nothing2", "zero2", copy.value(*sum_.extra)}), let("grown2", Fn::sub, {copy.value(*sum_.extra), "from2"}),
                  let("weight2", Fn::exp, {"grown2"}), store("total", {sym("r2")}, "weight2")});
    out.push_back(loop("r2", 0, shared_rows(), LoopKind::serial, std::move(body)));
  }
  return out;
}

std::vector<Expr> OnlineScheduler::paired(Expr panel, Expr k, Expr lane, bool pairs) const {
  if (!pairs) return {panel, k, lane};
  return {panel, floordiv(k, 2), lane, mod(k, 2)};
}

tile_ir::Block OnlineScheduler::copy_operand(const Operand& operand, const Substitution& map, const std::string& suffix, bool narrow,
                                             const std::string& buffer, std::vector<Expr> to) {
  const std::string wanted = narrow ? operand.narrow()->value : operand.source->value;
  tile_ir::Block out;
  Copy copy{map, suffix, {}};
  copy.add(operand.statements_of(wanted), out);
  out.push_back(store(buffer, std::move(to), copy.value(wanted)));
  return out;
}

bool OnlineScheduler::unit_along(const Operand& operand, const std::string& axis) const {
  bool any = false;
  for (const auto& stmt : operand.slice) {
    const auto* from = std::get_if<Load>(&stmt->node);
    if (!from) continue;
    const auto* param = kernel_.find_param(from->buffer);
    Expr offset = 0;
    for (size_t d = 0; d < from->index.size(); ++d) offset = offset + from->index[d] * param->strides[d];
    if (!uses(offset, axis)) continue;
    const auto step = linear_coefficient(offset, axis);
    if (!step || !step->is(1)) return false;
    any = true;
  }
  return any;
}

tile_ir::Block OnlineScheduler::pack_panel(const Operand& operand, const std::string& k_axis, Expr depth, Expr whole, const std::string& lane_axis,
                                           Expr first_k, Expr first_lane, Expr valid, int64_t width, const std::string& buffer, Expr panel,
                                           bool pairs, const std::string& tag) const {
  const int64_t side = ctx_.target.vector_bytes / 4;
  const std::string k = "k" + tag;
  const std::string x = "x" + tag;
  auto at = [&](Expr step, const std::string& suffix) {
    Substitution map = outer();
    map[k_axis] = first_k + step;
    map[lane_axis] = first_lane + sym(x);
    return copy_operand(operand, map, suffix, pairs, buffer, paired(panel, step, sym(x), pairs));
  };
  tile_ir::Block out;
  Expr done = 0;
  const bool squares = unit_along(operand, k_axis);
  if (squares) {
    done = floordiv(depth, side) * side;
    const Expr step = sym(k + "s") * side + sym(k + "i");
    out.push_back(loop(k + "s", 0, floordiv(depth, side), LoopKind::serial,
                       {loop(x, 0, valid, LoopKind::lanes, {loop(k + "i", 0, side, LoopKind::unroll, at(step, "." + tag))})}));
  }
  if (!squares || !depth.is_constant() || depth.value() % side != 0) {
    const std::string suffix = "." + tag + "r";
    if (pairs) {
      const Expr step = sym(k) * 2 + sym(k + "h");
      out.push_back(loop(k, floordiv(done, 2), floordiv(depth, 2), LoopKind::serial,
                         {loop(x, 0, valid, LoopKind::lanes, {loop(k + "h", 0, 2, LoopKind::unroll, at(step, suffix))})}));
      // An odd last step has none beside it.
      const Expr last = floordiv(depth, 2) * 2;
      out.push_back(loop(k + "l", last, depth, LoopKind::serial, {loop(x, 0, valid, LoopKind::lanes, at(sym(k + "l"), suffix + "l"))}));
    } else {
      out.push_back(loop(k, done, depth, LoopKind::serial, {loop(x, 0, valid, LoopKind::lanes, at(sym(k), suffix))}));
    }
  }
  const std::string none = "none" + tag;
  const DType dtype = pairs ? DType::bf16 : DType::f32;
  auto zeros = [&](const std::string& name, Expr from, Expr to, Expr lo) {
    tile_ir::Block zero{number(none, 0, dtype), store(buffer, paired(panel, sym(name), sym(x), pairs), none)};
    out.push_back(loop(name, from, to, LoopKind::serial, {loop(x, lo, width, LoopKind::lanes, std::move(zero))}));
  };
  zeros(k + "z", 0, depth, valid);
  if (pairs) zeros(k + "e", depth, whole, 0);
  return out;
}

tile_ir::Block OnlineScheduler::pack_keys(Expr keys) const {
  const Expr panel = sym("pk");
  const Expr valid = min(key_lanes_, keys - panel * key_lanes_);
  tile_ir::Block body = pack_panel(keys_, pair_->scores.reduce->axes[0].name, depth_, packed_depth(), sum_.key.name, 0,
                                   first_key() + panel * key_lanes_, valid, key_lanes_, "keys", panel, pair_scores_, "k");
  return {loop("pk", 0, ceildiv(keys, key_lanes_), LoopKind::serial, std::move(body))};
}

tile_ir::Block OnlineScheduler::pack_values(Expr keys) const {
  const Expr panel = sym("pv");
  const Expr valid = min(column_lanes_, columns_ - panel * column_lanes_);
  tile_ir::Block body = pack_panel(values_, pair_->values.reduce->axes[0].name, keys, packed_keys(keys), sum_.column.name, first_key(),
                                   panel * column_lanes_, valid, column_lanes_, "values", panel, pair_values_, "v");
  return {loop("pv", 0, (columns_ + column_lanes_ - 1) / column_lanes_, LoopKind::serial, std::move(body))};
}

tile_ir::Block OnlineScheduler::pack_queries() const {
  Substitution map = outer();
  set_row(map, row_at(sym("rq")));
  map[pair_->scores.reduce->axes[0].name] = sym("kq");
  tile_ir::Block copy = copy_operand(queries_, map, ".q", pair_scores_, "queries", {sym("rq"), sym("kq")});
  auto zeros = [&](const std::string& row, int64_t from) {
    tile_ir::Block zero{number("noneq", 0, pair_scores_ ? DType::bf16 : DType::f32), store("queries", {sym(row), sym("kq")}, "noneq")};
    return loop("kq", from, packed_depth(), LoopKind::lanes, std::move(zero));
  };
  tile_ir::Block of_row{loop("kq", 0, depth_, LoopKind::lanes, std::move(copy))};
  if (packed_depth() > depth_) of_row.push_back(zeros("rq", depth_));
  return {loop("rq", 0, block_rows(), LoopKind::serial, std::move(of_row)),
          loop("rz", block_rows(), round_up(block_rows(), mr_), LoopKind::serial, {zeros("rz", 0)})};
}

tile_ir::Block OnlineScheduler::row_block() const {
  Expr keys = block_keys();
  tile_ir::Block whole;
  const Bounds here = bounds_of(row_at(0), block_rows(), "b", whole);
  std::vector<Cond> any;
  if (here.hi) {
    keys = min(keys, *here.hi - first_key());
    any.push_back(less(first_key(), *here.hi));
  }
  if (here.lo) any.push_back(less(*here.lo, first_key() + block_keys()));
  tile_ir::Block out = pack_queries();
  append(out, compute_scores(keys));
  append(out, weigh(keys));
  append(out, add_values(keys));
  if (any.empty()) return out;
  whole.push_back(make(tile_ir::If{std::move(any), std::move(out)}));
  return whole;
}

tile_ir::Block OnlineScheduler::multiply(const Product& p, tile_ir::Block of_row, tile_ir::Block of_sum) const {
  const std::string& t = p.tag;
  const Expr r = sym("r" + t);
  const Expr x = sym("x" + t);
  const Expr k = sym("k" + t);
  const Expr row = sym("rt" + t) * mr_ + r;
  auto over = [&](const std::string& suffix, tile_ir::Block rows, tile_ir::Block lanes) {
    rows.push_back(loop("x" + t + suffix, 0, p.width, LoopKind::lanes, std::move(lanes)));
    return loop("r" + t + suffix, 0, mr_, LoopKind::unroll, std::move(rows));
  };
  const std::string acc = "acc" + t;
  tile_ir::Block row_loads;
  tile_ir::Block step;
  if (p.pairs) {
    for (int64_t half : {0, 1}) {
      const std::string name = half == 0 ? "v" : "w";
      row_loads.push_back(load(fmt::format("a{}{}", name, t), DType::bf16, p.rows, {row, k * 2 + half}));
      step.push_back(load(fmt::format("b{}{}", name, t), DType::bf16, p.lanes, {sym(p.panel), k, x, half}));
    }
  } else {
    row_loads.push_back(load("av" + t, DType::f32, p.rows, {row, k}));
    step.push_back(load("bv" + t, DType::f32, p.lanes, {sym(p.panel), k, x}));
  }
  step.push_back(load("cv" + t, DType::f32, acc, {r, x}));
  step.push_back(p.pairs ? let("fv" + t, Fn::dot2, {"av" + t, "aw" + t, "bv" + t, "bw" + t, "cv" + t})
                         : let("fv" + t, Fn::fma, {"av" + t, "bv" + t, "cv" + t}));
  step.push_back(store(acc, {r, x}, "fv" + t));
  of_sum.insert(of_sum.begin(), load("dv" + t, DType::f32, acc, {sym("r" + t + "o"), sym("x" + t + "o")}));
  tile_ir::Block block{
      make(tile_ir::Alloc{acc, DType::f32, {mr_, p.width}, Space::reg}),
      over("i", {}, {number("start" + t, 0), store(acc, {sym("r" + t + "i"), sym("x" + t + "i")}, "start" + t)}),
      loop("k" + t, 0, p.pairs ? ceildiv(p.depth, 2) : p.depth, LoopKind::serial, {over("", std::move(row_loads), std::move(step))}, kDepthUnroll),
      over("o", std::move(of_row), std::move(of_sum))};
  return over_register_blocks(p, std::move(block));
}

tile_ir::Block OnlineScheduler::over_register_blocks(const Product& p, tile_ir::Block block) const {
  return {loop(p.panel, 0, p.panels, LoopKind::serial, {loop("rt" + p.tag, 0, ceildiv(block_rows(), mr_), LoopKind::serial, std::move(block))})};
}

tile_ir::Block OnlineScheduler::multiply_in_matrices(const Product& p, const std::string& to, std::vector<Expr> at, tile_ir::Block then) const {
  using tile_ir::kMatrixDepth;
  using Kind = tile_ir::Matrix::Kind;
  const std::string acc = "acc" + p.tag;
  const Expr k = sym("k" + p.tag);
  tile_ir::Block products{make(tile_ir::Matrix{
      Kind::multiply, acc, {p.rows, {sym("rt" + p.tag) * mr_, k * kMatrixDepth}}, {p.lanes, {sym(p.panel), k * (kMatrixDepth / 2), 0, 0}}})};
  tile_ir::Block block{make(tile_ir::Alloc{acc, DType::f32, {mr_, p.width}, Space::matrix}), make(tile_ir::Matrix{Kind::zero, acc, {}, {}}),
                       loop("k" + p.tag, 0, ceildiv(p.depth, kMatrixDepth), LoopKind::serial, std::move(products)),
                       make(tile_ir::Matrix{Kind::store, acc, {to, std::move(at)}, {}})};
  append(block, std::move(then));
  return over_register_blocks(p, std::move(block));
}

bool OnlineScheduler::simple_scores() const {
  return std::all_of(score_.begin(), score_.end(), [](const auto& s) {
    const auto* let = std::get_if<Let>(&s->node);
    return let && let->fn != Fn::index;
  });
}

bool OnlineScheduler::recomputes_scores() const {
  constexpr Fn kCheap[] = {Fn::constant, Fn::index, Fn::cast, Fn::neg, Fn::add, Fn::sub, Fn::mul, Fn::fma,     Fn::max,   Fn::min,
                           Fn::where,    Fn::eq,    Fn::ne,   Fn::lt,  Fn::le,  Fn::gt,  Fn::ge,  Fn::bit_and, Fn::bit_or};
  constexpr size_t kMost = 12;
  return matrix_scores_ && score_.size() <= kMost && std::all_of(score_.begin(), score_.end(), [&](const auto& s) {
           const auto* let = std::get_if<Let>(&s->node);
           return let && std::find(std::begin(kCheap), std::end(kCheap), let->fn) != std::end(kCheap);
         });
}

tile_ir::Block OnlineScheduler::compute_scores(Expr keys) const {
  const Product p{"queries", "keys", "ps", "s", key_lanes_, ceildiv(keys, key_lanes_), depth_, pair_scores_};
  tile_ir::Block tail;
  const std::vector<Expr> to{sym("rts") * mr_ + sym("rso"), sym("ps") * key_lanes_ + sym("xso")};
  if (matrix_scores_ || !simple_scores()) {
    tail.push_back(store("scores", to, "dvs"));
    tile_ir::Block out =
        matrix_scores_ ? multiply_in_matrices(p, "scores", {sym("rts") * mr_, sym("ps") * key_lanes_}, {}) : multiply(p, {}, std::move(tail));
    if (recomputes_scores()) return out;
    tile_ir::Block each{load("dvt", DType::f32, "scores", {sym("rt"), sym("jt")})};
    append(each, score_tail(row_at(sym("rt")), first_key() + sym("jt"), "dvt", ".t", {sym("rt"), sym("jt")}));
    out.push_back(loop("rt", 0, block_rows(), LoopKind::serial, {loop("jt", 0, keys, LoopKind::lanes, std::move(each))}));
    return out;
  }
  return multiply(p, {}, score_tail(0, 0, "dvs", ".s", to));
}

tile_ir::Block OnlineScheduler::score_tail(Expr row, Expr key, const std::string& sum, const std::string& suffix, const std::vector<Expr>& to) const {
  tile_ir::Block out;
  const std::string score = score_of(row, key, sum, suffix, out);
  out.push_back(store("scores", to, score));
  return out;
}

std::string OnlineScheduler::score_of(Expr row, Expr key, const std::string& sum, const std::string& suffix, tile_ir::Block& into) const {
  Copy copy{outer(), suffix, {}};
  set_row(copy.map, row);
  copy.map[sum_.key.name] = key;
  copy.define(pair_->scores.result, sum);
  copy.add(score_, into);
  return copy.value(sum_.scored);
}

std::string OnlineScheduler::read_score(Expr row, Expr key, const std::string& suffix, tile_ir::Block& into) const {
  Copy copy{outer(), suffix, {}};
  set_row(copy.map, row_at(row));
  copy.map[sum_.read_axis] = first_key() + key;
  if (recomputes_scores()) {
    const std::string sum = "dv" + suffix;
    into.push_back(load(sum, DType::f32, "scores", {row, key}));
    Ranges ranges;
    for (const auto& a : nest_.axes) ranges[a.name] = axis_range(a.extent);
    ranges[sum_.read_axis] = {0, sum_.key.extent - 1};
    copy.add(read_, into, {}, {{sum_.local, {score_of(row_at(row), first_key() + key, sum, ".s" + suffix, into), std::move(ranges)}}});
    return copy.value(sum_.read_value);
  }
  copy.add(read_, into, {{sum_.local, Load{"", DType::f32, "scores", {row, key}, {}, {}}}});
  return copy.value(sum_.read_value);
}

tile_ir::Block OnlineScheduler::weigh(Expr keys) const {
  const Expr row = sym("rw");
  auto reduce = [&](const std::string& name, Combiner combiner, const std::string& operand, const std::string& axis_name, tile_ir::Block body) {
    return make(
        tile_ir::Reduce{{name}, {DType::f32}, combiner, {operand}, {axis(axis_name, 0, keys, LoopKind::lanes, 1, kInFlight)}, std::move(body)});
  };
  auto over_rows = [&](LoopKind kind, tile_ir::Block body) { return loop("rw", 0, block_rows(), kind, std::move(body)); };
  tile_ir::Block of_max;
  const std::string value = read_score(row, sym("jm"), ".m", of_max);
  tile_ir::Block out{over_rows(LoopKind::serial, {reduce("here", Combiner::max, value, "jm", std::move(of_max)), store("base", {row}, "here")})};
  append(out, {over_rows(LoopKind::lanes, move_maximum(row))});

  tile_ir::Block body{load("origin", DType::f32, "base", {row})};
  tile_ir::Block of_weight;
  const std::string score = read_score(row, sym("je"), ".e", of_weight);
  of_weight.push_back(let("relative", Fn::sub, {score, "origin"}));
  if (pair_values_) {  // rounded to 16 bits anyway
    body.push_back(number("log2e", 1.44269504088896340736));
    of_weight.push_back(let("exponent", Fn::mul, {"relative", "log2e"}));
    of_weight.push_back(let("weight", Fn::exp2_near, {"exponent"}));
  } else {
    of_weight.push_back(let("weight", Fn::exp, {"relative"}));
  }
  const std::vector<Expr> here{row, sym("je")};
  tile_ir::Block of_sum;
  if (pair_values_) {
    of_weight.push_back(let("rounded", Fn::narrow, {"weight"}, DType::bf16));
    of_weight.push_back(store("weights", here, "rounded"));
  }
  if (pair_values_ && !stores_sum()) {
    of_sum = {load("stored", DType::bf16, "weights", {row, sym("jw")}), let("added", Fn::cast, {"stored"})};
  } else {
    of_weight.push_back(store("scores", here, "weight"));
    of_sum = {load("added", DType::f32, "scores", {row, sym("jw")})};
  }
  body.push_back(loop("je", 0, keys, LoopKind::lanes, std::move(of_weight), 2));
  body.push_back(reduce("more", Combiner::sum, "added", "jw", std::move(of_sum)));
  body.push_back(store("base", {row}, "more"));
  if (matrix_values_) {
    body.push_back(
        loop("jl", keys, packed_keys(keys), LoopKind::lanes, {number("last", 0, DType::bf16), store("weights", {row, sym("jl")}, "last")}));
  } else if (pair_values_) {  // an odd last key has none beside it
    body.push_back(number("last", 0, DType::bf16));
    body.push_back(store("weights", {row, keys}, "last"));
  }
  out.push_back(over_rows(LoopKind::serial, std::move(body)));
  const std::vector<Expr> at{place() + row};
  out.push_back(over_rows(
      LoopKind::lanes, {load("sofar", DType::f32, "total", at), load("scale", DType::f32, "factor", {row}), load("added", DType::f32, "base", {row}),
                        let("sum", Fn::fma, {"sofar", "scale", "added"}), store("total", at, "sum")}));
  if (pair_values_) {
    const Expr padded = sym("rp");
    out.push_back(loop("rp", block_rows(), round_up(block_rows(), mr_), LoopKind::serial,
                       {loop("jp", 0, matrix_values_ ? packed_keys(keys) : keys + 1, LoopKind::lanes,
                             {number("nonep", 0, DType::bf16), store("weights", {padded, sym("jp")}, "nonep")})}));
  }
  return out;
}

tile_ir::Block OnlineScheduler::move_maximum(Expr row) const {
  const std::vector<Expr> at{place() + row};
  // Where all so far are -inf, so is the difference: the weights are 0.
  return {load("largest", DType::f32, "base", {row}),
          load("before", DType::f32, "most", at),
          let("now", Fn::max, {"before", "largest"}),
          store("most", at, "now"),
          number("never", -std::numeric_limits<double>::infinity()),
          let("nothing", Fn::eq, {"now", "never"}, DType::boolean),
          number("zero", 0),
          let("from", Fn::where, {"nothing", "zero", "now"}),
          let("grown", Fn::sub, {"before", "from"}),
          let("factors", Fn::exp, {"grown"}),
          store("factor", {row}, "factors"),
          store("base", {row}, "from")};
}

tile_ir::Block OnlineScheduler::add_values(Expr keys) const {
  const Product p{
      pair_values_ ? "weights" : "scores", "values", "pv", "v", column_lanes_, (columns_ + column_lanes_ - 1) / column_lanes_, keys, pair_values_};
  const Expr row = sym("rtv") * mr_ + sym("rvo");
  const std::vector<Expr> to{place() + row, sym("pv") * column_lanes_ + sym("xvo")};
  if (matrix_values_) {
    tile_ir::Block of_sum{load("dvv", DType::f32, "products", {sym("rvo"), sym("xvo")}), load("ovv", DType::f32, "sums", to),
                          let("svv", Fn::fma, {"ovv", "fvf", "dvv"}), store("sums", to, "svv")};
    return multiply_in_matrices(p, "products", {0, 0},
                                {loop("rvo", 0, mr_, LoopKind::serial,
                                      {load("fvf", DType::f32, "factor", {row}), loop("xvo", 0, p.width, LoopKind::lanes, std::move(of_sum))})});
  }
  return multiply(p, {load("fvf", DType::f32, "factor", {row})},
                  {load("ovv", DType::f32, "sums", to), let("svv", Fn::fma, {"ovv", "fvf", "dvv"}), store("sums", to, "svv")});
}

tile_ir::Block OnlineScheduler::finish() const {
  const Expr row = sym("rf");
  Copy copy{outer(), "", {}};
  set_row(copy.map, first_shared() + row);
  tile_ir::Block body{load(sum_.max, DType::f32, "most", {row}), load(sum_.sum, DType::f32, "total", {row})};
  Block before(sum_.rows.begin(), sum_.rows.begin() + static_cast<std::ptrdiff_t>(sum_.before));
  copy.add(before, body);
  tile_ir::Block column;
  Copy inner = copy;
  inner.map[sum_.column.name] = sym("xf");
  const std::string raw = sum_.normalized ? pair_->values.result + ".sum" : pair_->values.result;
  for (const auto& s : sum_.column_body) {
    if (!std::holds_alternative<loop_ir::Reduce>(s->node)) {
      inner.add({s}, column);
      continue;
    }
    column.push_back(load(raw, DType::f32, "sums", {row, sym("xf")}));
    if (sum_.normalized) column.push_back(let(pair_->values.result, Fn::div, {raw, sum_.sum}));
  }
  body.push_back(loop("xf", 0, columns_, LoopKind::lanes, std::move(column)));
  copy.add({sum_.rows.begin() + static_cast<std::ptrdiff_t>(sum_.before), sum_.rows.end()}, body);
  return {loop("rf", 0, shared_rows(), LoopKind::serial, std::move(body))};
}

}  // namespace deplo::loop_to_tile
