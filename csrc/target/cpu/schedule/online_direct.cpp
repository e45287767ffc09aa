#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "loop_ir/places.h"
#include "target/cpu/schedule/online_copy.h"
#include "target/cpu/schedule/online_scheduler.h"

// Few rows read keys and values where they lie, each once for all rows of a block: one query a head, those of a group's heads, and a few tokens that
// were guessed. Packing would cost as much as the products.

namespace deplo::loop_to_tile {

using loop_ir::Block;
using loop_ir::Load;

namespace {

constexpr int64_t kRowsOfRegisters = 4;  // registers for each row of a block
constexpr int64_t kDirectKeys = 4;       // whose values one iteration takes
constexpr int64_t kDirectBlock = 256;    // keys of a block that is in no part
constexpr int64_t kDirectUnroll = 8;     // vectors of a key, in one iteration
constexpr int64_t kKeysAhead = 12;       // whose rows are fetched
constexpr int64_t kLineBytes = 64;

/// The block, whose loads of parameters read nothing but zeros where the condition does not hold.
tile_ir::Block limited(tile_ir::Block block, const Cond& cond) {
  for (auto& stmt : block)
    if (const auto* from = std::get_if<Load>(&stmt->node)) {
      Load load = *from;
      if (load.guard.empty()) load.fill = is_float(load.dtype) ? Scalar::of_float(load.dtype, 0) : Scalar::of_int(load.dtype, 0);
      load.guard.push_back(cond);
      stmt = make(std::move(load));
    }
  return block;
}

}  // namespace

bool OnlineScheduler::is_direct() const {
  const int64_t longest = rows_.empty() ? 1 : hint(row_.extent);
  // Packed rows are those of one axis.
  if (longest >= kLeastOnlineRows && hint(count(rows_)) > analysis::kFewQueries) return false;
  // Pairs of packed ones are multiplied faster than those of one row are added up.
  if (longest >= kLeastOnlineRows && can_pair(queries_, &keys_)) return false;
  return reads_in_place();
}

bool OnlineScheduler::reads_in_place() const {
  // Beyond the last element of a key there are zeros, as outside of guards.
  const bool zeros = std::all_of(keys_.slice.begin(), keys_.slice.end(), [](const auto& stmt) {
    const auto* load = std::get_if<Load>(&stmt->node);
    return !load || load->guard.empty() || (is_float(load->dtype) ? load->fill.f == 0 : load->fill.i == 0);
  });
  if (!zeros) return false;
  return unit_along(keys_, pair_->scores.reduce->axes[0].name) && unit_along(values_, sum_.column.name);
}

void OnlineScheduler::choose_direct(int64_t rows) {
  pair_scores_ = can_pair(queries_, &keys_) && depth_ % 2 == 0;
  const int64_t lanes = ctx_.target.vector_bytes / 4;
  const int64_t registers = ctx_.target.vector_registers;
  rows = std::max<int64_t>(rows, 1);
  const int64_t most = std::max<int64_t>(registers / kRowsOfRegisters, 1);
  const int64_t blocks = (rows + most - 1) / most;
  mr_ = rows_of_block_ = shared_ = (rows + blocks - 1) / blocks;
  const int64_t vectors = (columns_ + lanes - 1) / lanes;
  int64_t in_flight = std::clamp<int64_t>(registers * 3 / 4 / mr_, 1, vectors);
  while (vectors % in_flight != 0) --in_flight;
  column_lanes_ = in_flight * lanes;
  block_keys_ = part_ ? analysis::kKeyBlock : kDirectBlock;
}

std::vector<Directive> OnlineScheduler::describe_direct() const {
  std::vector<Argument> parallel;
  for (const auto& a : batch_) parallel.push_back({a.name, {}});
  parallel.push_back({"work", chunk_work_});
  return {{"parallel", std::move(parallel)},
          {"direct", {{"rows", mr_}}},
          {"tile", {{sum_.key.name, block_keys_}}},
          {"vectorize", {{sum_.column.name, {}}, {"by", column_lanes_ * 4 / ctx_.target.vector_bytes}}}};
}

void OnlineScheduler::read_direct(ScheduleReader& reader) {
  direct_ = true;
  set_batch();
  read_parallel(reader, "");
  const Directive& direct = reader.one("direct");
  reader.only(direct, {"rows"});
  mr_ = rows_of_block_ = shared_ = reader.number(direct, "rows", 1, analysis::kFewQueries);
  const Directive& tile = needed_directive(reader, "tile", sum_.key.name);
  reader.only(tile, {sum_.key.name});
  block_keys_ = reader.number(tile, sum_.key.name, 1, kMostOnlineTile);
  const Directive& vectors = needed_directive(reader, "vectorize", sum_.column.name);
  reader.only(vectors, {sum_.column.name, "by"});
  const int64_t in_flight = reader.number(vectors, "by", 1, 4 * ctx_.target.vector_registers, 1);
  if (in_flight * mr_ > 4 * ctx_.target.vector_registers) reader.fail(vectors, "few vectors are allowed, for they are kept for each row");
  column_lanes_ = in_flight * ctx_.target.vector_bytes / 4;
  bool matrix = false;
  pair_scores_ = read_dot(reader, depth_name(), can_pair(queries_, &keys_) && depth_ % 2 == 0, matrix, 0);
  if (matrix) reader.fail("a matrix unit takes packed keys; allowed: dot of 2");
  if (!reads_in_place()) reader.fail(direct, "memory must run along what scores are summed over, and along the columns of values");
  reader.finish("parallel, direct, tile, vectorize and dot");
}

tile_ir::Block OnlineScheduler::direct_body() const {
  const auto f32 = DType::f32;
  const int64_t width = round_up(columns_, column_lanes_);
  tile_ir::Block out{make(tile_ir::Alloc{"queries", pair_scores_ ? DType::bf16 : f32, {mr_, direct_depth()}, Space::scratch}),
                     make(tile_ir::Alloc{"scores", f32, {mr_, block_keys_}, Space::scratch}),
                     make(tile_ir::Alloc{"sums", f32, {mr_, width}, Space::scratch})};
  for (const char* name : {"most", "total", "factor", "base"}) out.push_back(make(tile_ir::Alloc{name, f32, {mr_}, Space::scratch}));
  append(out, pack_queries());
  if (direct_depth() > depth_) {
    tile_ir::Block zero{number("noned", 0, pair_scores_ ? DType::bf16 : f32), store("queries", {sym("rd"), sym("kd")}, "noned")};
    out.push_back(loop("rd", 0, mr_, LoopKind::serial, {loop("kd", depth_, direct_depth(), LoopKind::lanes, std::move(zero))}));
  }
  tile_ir::Block once = start();
  const KeyRange keys = keys_of_rows(once);
  tile_ir::Block block = direct_scores(keys.of_block);
  append(block, weigh(keys.of_block));
  append(block, direct_values(keys.of_block));
  append(once, over_blocks(keys, std::move(block)));
  append(out, with_soft_limits(std::move(once)));
  append(out, finish());
  return out;
}

int64_t OnlineScheduler::direct_depth() const { return round_up(depth_, ctx_.target.vector_bytes / (pair_scores_ ? 2 : 4)); }

tile_ir::Block OnlineScheduler::fetch_ahead(const Operand& operand, const std::string& value, const RowOfKey& row, const std::string& tag) const {
  Copy copy{outer(), ".a" + tag, {}};
  copy.map[row.key] = min(row.at + kKeysAhead, sum_.key.extent - 1);
  tile_ir::Block out;
  std::set<std::string> loaded;  // what follows from a row's elements
  bool apart = false;
  for (const auto& stmt : operand.statements_of(value)) {
    std::set<std::string> used;
    collect_uses(*stmt, used);
    if (std::any_of(used.begin(), used.end(), [&](const std::string& name) { return loaded.count(name) > 0; })) {
      loaded.insert(name_of(*stmt));
      continue;
    }
    const auto* from = std::get_if<Load>(&stmt->node);
    if (!from || used.count(row.along) == 0) {
      copy.add({stmt}, out);  // what leads to its place
      continue;
    }
    loaded.insert(from->name);
    Expr offset = 0;
    const auto* param = kernel_.find_param(from->buffer);
    for (size_t d = 0; d < from->index.size(); ++d) offset = offset + from->index[d] * param->strides[d];
    const auto step = linear_coefficient(offset, row.key);
    apart = apart || !step || !step->is(row.length);
    const int64_t line = kLineBytes / size_of(from->dtype);
    Substitution place = copy.map;
    place[row.along] = row.first + sym("fa" + tag) * line;
    std::vector<Expr> index;
    for (Expr e : from->index) index.push_back(substitute(e, place));
    tile_ir::Block fetch{make(tile_ir::Prefetch{from->buffer, std::move(index), 1})};
    out.push_back(loop("fa" + tag, 0, (row.count + line - 1) / line, LoopKind::unroll, std::move(fetch)));
  }
  return apart ? out : tile_ir::Block{};
}

tile_ir::Block OnlineScheduler::direct_scores(Expr keys) const {
  const int64_t lanes = ctx_.target.vector_bytes / 4;
  const int64_t at_once = pair_scores_ ? 2 : 1;
  const int64_t steps = direct_depth() / (lanes * at_once);
  const Expr r = sym("rs");
  const Expr x = sym("xs");
  const Expr word = sym("ks") * lanes + x;
  auto over = [&](const std::string& suffix, tile_ir::Block body) {
    return loop("rs" + suffix, 0, mr_, LoopKind::unroll, {loop("xs" + suffix, 0, lanes, LoopKind::lanes, std::move(body))});
  };
  const std::string wanted = pair_scores_ ? keys_.narrow()->value : keys_.source->value;
  const DType dtype = pair_scores_ ? DType::bf16 : DType::f32;
  tile_ir::Block step;
  std::vector<std::string> of_query;
  std::vector<std::string> of_key;
  for (int64_t half = 0; half < at_once; ++half) {
    const Expr k = word * at_once + half;
    Copy copy{outer(), fmt::format(".s{}", half), {}};
    copy.map[pair_->scores.reduce->axes[0].name] = k;
    copy.map[sum_.key.name] = first_key() + sym("js");
    tile_ir::Block key;
    copy.add(keys_.statements_of(wanted), key);
    append(step, direct_depth() > depth_ ? limited(std::move(key), less(k, depth_)) : std::move(key));
    of_key.push_back(copy.value(wanted));
    of_query.push_back(fmt::format("q{}s", half));
    step.push_back(load(of_query.back(), dtype, "queries", {r, k}));
  }
  step.push_back(load("olds", DType::f32, "accs", {r, x}));
  step.push_back(pair_scores_ ? let("news", Fn::dot2, {of_query[0], of_query[1], of_key[0], of_key[1], "olds"})
                              : let("news", Fn::fma, {of_query[0], of_key[0], "olds"}));
  step.push_back(store("accs", {r, x}, "news"));
  tile_ir::Block sum{make(tile_ir::Reduce{{"dots"},
                                          {DType::f32},
                                          Combiner::sum,
                                          {"terms"},
                                          {axis("xst", 0, lanes, LoopKind::lanes)},
                                          {load("terms", DType::f32, "accs", {sym("rst"), sym("xst")})}}),
                     store("scores", {sym("rst"), sym("js")}, "dots")};
  const RowOfKey row{sum_.key.name, first_key() + sym("js"), pair_->scores.reduce->axes[0].name, 0, depth_, depth_};
  tile_ir::Block of_key_row{make(tile_ir::Alloc{"accs", DType::f32, {mr_, lanes}, Space::reg}),
                            over("i", {number("starts", 0), store("accs", {sym("rsi"), sym("xsi")}, "starts")}),
                            loop("ks", 0, steps, LoopKind::serial, {over("", std::move(step))}, std::min(steps, kDirectUnroll)),
                            loop("rst", 0, mr_, LoopKind::unroll, std::move(sum))};
  const tile_ir::Block ahead = fetch_ahead(keys_, wanted, row, "s");
  of_key_row.insert(of_key_row.begin(), ahead.begin(), ahead.end());
  tile_ir::Block out{loop("js", 0, keys, LoopKind::serial, std::move(of_key_row))};
  if (sum_.scored == pair_->scores.result) return out;
  tile_ir::Block each{load("dvt", DType::f32, "scores", {sym("rt"), sym("jt")})};
  append(each, score_tail(row_at(sym("rt")), first_key() + sym("jt"), "dvt", ".t", {sym("rt"), sym("jt")}));
  out.push_back(loop("rt", 0, block_rows(), LoopKind::serial, {loop("jt", 0, keys, LoopKind::lanes, std::move(each))}));
  return out;
}

tile_ir::Block OnlineScheduler::direct_values(Expr keys) const {
  const Expr r = sym("rv");
  const Expr x = sym("xv");
  const Expr column = sym("pv") * column_lanes_;
  auto over = [&](const std::string& suffix, tile_ir::Block rows, tile_ir::Block body) {
    rows.push_back(loop("xv" + suffix, 0, column_lanes_, LoopKind::lanes, std::move(body)));
    return loop("rv" + suffix, 0, mr_, LoopKind::unroll, std::move(rows));
  };
  Copy copy{outer(), ".v", {}};
  copy.map[pair_->values.reduce->axes[0].name] = first_key() + sym("jv");
  copy.map[sum_.column.name] = column + x;
  tile_ir::Block step;
  copy.add(values_.statements_of(values_.source->value), step);
  if (columns_ % column_lanes_ != 0) step = limited(std::move(step), less(column + x, columns_));
  step.push_back(load("oldv", DType::f32, "accv", {r, x}));
  step.push_back(let("newv", Fn::fma, {"weightv", copy.value(values_.source->value), "oldv"}));
  step.push_back(store("accv", {r, x}, "newv"));
  const std::vector<Expr> to{sym("rvo"), column + sym("xvo")};
  const RowOfKey row{
      pair_->values.reduce->axes[0].name, first_key() + sym("jv"), sum_.column.name, column, std::min(column_lanes_, columns_), columns_};
  tile_ir::Block of_key = fetch_ahead(values_, values_.source->value, row, "v");
  of_key.push_back(over("", {load("weightv", DType::f32, "scores", {r, sym("jv")})}, std::move(step)));
  tile_ir::Block panel{make(tile_ir::Alloc{"accv", DType::f32, {mr_, column_lanes_}, Space::reg}),
                       over("i", {}, {number("startv", 0), store("accv", {sym("rvi"), sym("xvi")}, "startv")}),
                       loop("jv", 0, keys, LoopKind::serial, std::move(of_key), kDirectKeys),
                       over("o", {load("fvf", DType::f32, "factor", {sym("rvo")})},
                            {load("dvv", DType::f32, "accv", {sym("rvo"), sym("xvo")}), load("ovv", DType::f32, "sums", to),
                             let("svv", Fn::fma, {"ovv", "fvf", "dvv"}), store("sums", to, "svv")})};
  return {loop("pv", 0, round_up(columns_, column_lanes_) / column_lanes_, LoopKind::serial, std::move(panel))};
}

}  // namespace deplo::loop_to_tile
