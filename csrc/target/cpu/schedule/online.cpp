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
#include "loop_ir/places.h"
#include "lower/loop_to_tile/convert.h"
#include "schedule/reader.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using analysis::ContractionOperand;
using analysis::WeightedSum;
using loop_ir::Block;
using loop_ir::Let;
using loop_ir::Load;
using loop_ir::Store;

constexpr int64_t kLeastRows = 8;      // fewer do not pay for packing
constexpr int64_t kRowTiles = 5;       // register blocks of a block of rows
constexpr int64_t kKeys = 256;         // of a block
constexpr int64_t kSharedRows = 512;   // rows that share packed keys and values
constexpr int64_t kFewShared = 64;     // of these, where more leave threads idle
constexpr int64_t kWantedShares = 16;  // keep a few threads busy
constexpr int64_t kMostDepth = 512;    // of one chain of sums
constexpr int64_t kInFlight = 4;       // vectors
constexpr int64_t kMostTile = 4096;    // that a schedule may ask for
constexpr int64_t kMostWork = int64_t{1} << 40;

class OnlineScheduler {
 public:
  OnlineScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), ctx_(ctx), nest_(outer_nest(kernel)) {}

  std::optional<Schedule> propose() {
    if (!recognize() || hint(row_.extent) < kLeastRows) return std::nullopt;
    choose();
    return describe();
  }

  tile_ir::Kernel apply(const Schedule& schedule) {
    ScheduleReader reader(kernel_.name, schedule);
    if (!recognize()) reader.fail("the kernel's rows are no sums of values weighted by a softmax of scores");
    read(reader);
    tile_ir::Kernel out;
    out.name = kernel_.name;
    out.params = kernel_.params;
    out.symbols = kernel_.symbols;
    out.provenance = kernel_.provenance;
    const Expr extent = count(batch_) * shares();
    out.body = {loop("par", 0, extent, LoopKind::parallel, body())};
    out.chunks = max(1, min(extent, ceildiv(analysis::cost_of(kernel_).operations, chunk_work_)));
    out.schedule = schedule;
    return out;
  }

 private:
  // ---- recognition -----------------------------------------------------------------------------------------------

  bool recognize() {
    if (nest_.axes.empty() || !colliding_stores(kernel_).empty()) return false;
    auto found = analysis::find_weighted_sum(kernel_, *nest_.inner);
    if (!found) return false;
    if (!found->contractions) return false;
    sum_ = std::move(*found);
    pair_ = &*sum_.contractions;
    limits_ = analysis::key_limits(sum_);
    const auto depth = pair_->scores.reduce->axes[0].extent.as_constant();
    const auto columns = sum_.column.extent.as_constant();
    if (!depth || *depth < 1 || *depth > kMostDepth || !columns || *columns < 1) return false;
    depth_ = *depth;
    columns_ = *columns;
    return find_row() && find_operands() && reads_inputs_alone();
  }

  /// Of the axes that queries alone have, the longest one.
  bool find_row() {
    bool any = false;
    for (const auto& a : nest_.axes) {
      if (pair_->queries.axes.count(a.name) == 0 || pair_->keys.axes.count(a.name) > 0 || pair_->value.axes.count(a.name) > 0) continue;
      if (!any || hint(a.extent) > hint(row_.extent)) row_ = a;
      any = true;
    }
    for (const auto& a : nest_.axes)
      if (a.name != row_.name) batch_.push_back(a);
    return any;
  }

  /// With the statements outside of the reductions that the operands take: none may need what is known only at the end.
  bool find_operands() {
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

  bool is_early(const Block& block) const {
    std::set<std::string> used;
    for (const auto& s : block) collect_uses(*s, used);
    return used.count(sum_.max) == 0 && used.count(sum_.sum) == 0 && used.count(pair_->values.result) == 0;
  }

  /// Rows run in blocks: what one of them stores, no statement may read.
  bool reads_inputs_alone() const {
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

  int64_t hint(Expr e) const { return static_cast<int64_t>(analysis::estimate(e, ctx_.hints, kernel_.symbols)); }

  // ---- the schedule as data --------------------------------------------------------------------------------------

  bool can_pair(const Operand& a, const Operand* b) const {
    auto is_bf16 = [](const Operand& o) { return o.narrow() && o.narrow()->dtype == DType::bf16; };
    return ctx_.target.features.count("avx512bf16") > 0 && is_bf16(a) && (!b || is_bf16(*b));
  }

  /// Whether the sum of weights is a result itself, which rounded weights would show in. Else what both sums round alike is divided away.
  bool stores_sum() const {
    return std::any_of(sum_.rows.begin(), sum_.rows.end(), [](const auto& s) { return std::holds_alternative<loop_ir::Store>(s->node); });
  }

  void choose() {
    const int64_t lanes = ctx_.target.vector_bytes / 4;
    const int64_t rows = std::max<int64_t>(hint(row_.extent), 1);
    auto width = [&](int64_t n) { return n <= lanes ? lanes : kBlockVectors * lanes; };
    key_lanes_ = width(hint(sum_.key.extent));
    column_lanes_ = width(columns_);
    mr_ = row_.extent.is_constant() ? register_rows(rows, kBlockVectors, ctx_) : register_rows(kMostTile, kBlockVectors, ctx_);
    const int64_t wanted = std::max<int64_t>(1, kWantedShares / std::max<int64_t>(1, hint(count(batch_))));
    shared_ = std::clamp((rows + wanted - 1) / wanted, kFewShared, kSharedRows);
    const int64_t pieces = (rows + shared_ - 1) / shared_;
    const int64_t tiles = ((rows + pieces - 1) / pieces + mr_ - 1) / mr_;
    const int64_t blocks = (tiles + kRowTiles - 1) / kRowTiles;
    rows_of_block_ = (tiles + blocks - 1) / blocks * mr_;
    shared_ = rows_of_block_ * blocks;
    block_keys_ = std::min(kKeys, round_up(std::max<int64_t>(hint(sum_.key.extent), 1), key_lanes_));
    pair_scores_ = can_pair(queries_, &keys_) && depth_ % 2 == 0;
    pair_values_ = can_pair(values_, nullptr);
  }

  std::string depth_name() const { return pair_->scores.result + "." + pair_->scores.reduce->axes[0].name; }
  std::string key_name() const { return pair_->values.result + "." + pair_->values.reduce->axes[0].name; }

  Schedule describe() const {
    Schedule s{"online", {}};
    std::vector<Argument> parallel;
    for (const auto& a : batch_) parallel.push_back({a.name, {}});
    parallel.insert(parallel.end(), {{row_.name, {}}, {"work", chunk_work_}});
    s.directives = {{"parallel", std::move(parallel)},
                    {"tile", {{row_.name, rows_of_block_}}},
                    {"tile", {{sum_.key.name, block_keys_}}},
                    {"share", {{row_.name, shared_}}},
                    {"register_block", {{row_.name, mr_}, {sum_.key.name, key_lanes_}}},
                    {"register_block", {{row_.name, mr_}, {sum_.column.name, column_lanes_}}}};
    if (pair_scores_) s.directives.push_back({"dot", {{depth_name(), 2}}});
    if (pair_values_) s.directives.push_back({"dot", {{key_name(), 2}}});
    return s;
  }

  static const Directive& needed_directive(ScheduleReader& reader, const std::string& word, const std::string& name) {
    const Directive* d = reader.find(word, name);
    if (!d) reader.fail(fmt::format("it needs a '{}({})'", word, name));
    return *d;
  }

  void read(ScheduleReader& reader) {
    const Directive& parallel = reader.one("parallel");
    std::vector<std::string> names = reader.names(parallel);
    std::vector<std::string> wanted;
    for (const auto& a : batch_) wanted.push_back(a.name);
    wanted.push_back(row_.name);
    if (names.size() != wanted.size() || names.back() != row_.name || !std::is_permutation(names.begin(), names.end(), wanted.begin()))
      reader.fail(parallel, fmt::format("allowed: {} and work; the last one, the rows, stays in place", joined(wanted)));
    std::vector<loop_ir::Axis> ordered;
    for (const std::string& name : names)
      for (const auto& a : batch_)
        if (a.name == name) ordered.push_back(a);
    batch_ = std::move(ordered);
    wanted.push_back("work");
    reader.only(parallel, {wanted.begin(), wanted.end()});
    chunk_work_ = reader.number(parallel, "work", 1, kMostWork);
    auto number = [&](const std::string& word, const std::string& name) {
      const Directive& d = needed_directive(reader, word, name);
      reader.only(d, {name});
      return reader.number(d, name, 1, kMostTile);
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
      const int64_t mr = reader.number(*d, row_.name, 1, kMostTile);
      const int64_t width = reader.number(*d, name, 1, kMostTile);
      if (width % lanes != 0 || (width / lanes) * (mr + 1) > 4 * ctx_.target.vector_registers)
        reader.fail(*d, "whole vectors, and few of them, are allowed");
      if (d != blocks[0] && mr != mr_) reader.fail(*d, "both register blocks have as many rows");
      mr_ = mr;
      (of_keys ? key_lanes_ : column_lanes_) = width;
    }
    if (key_lanes_ == 0 || column_lanes_ == 0) reader.fail("it needs two register blocks, of keys and of columns");
    if (rows_of_block_ % mr_ != 0 || shared_ % rows_of_block_ != 0 || block_keys_ % key_lanes_ != 0)
      reader.fail("tiles hold whole register blocks, and rows that share keys whole tiles");
    auto dot = [&](const std::string& name, bool allowed) {
      const Directive* d = reader.find("dot", name);
      if (!d) return false;
      reader.only(*d, {name});
      reader.number(*d, name, 2, 2);
      if (!allowed) reader.fail(*d, "only bf16 numbers, where the CPU multiplies pairs of them, are allowed");
      return true;
    };
    pair_scores_ = dot(depth_name(), can_pair(queries_, &keys_) && depth_ % 2 == 0);
    pair_values_ = dot(key_name(), can_pair(values_, nullptr) && block_keys_ % 2 == 0);
    reader.finish("parallel, tile, share, register_block and dot");
  }

  // ---- statements ------------------------------------------------------------------------------------------------

  static Ref<tile_ir::Stmt> loop(const std::string& name, Expr lo, Expr hi, LoopKind kind, tile_ir::Block body, int64_t by = 1) {
    return make(tile_ir::For{axis(name, lo, hi, kind, 1, by), std::move(body)});
  }
  static Ref<tile_ir::Stmt> load(const std::string& name, DType dtype, const std::string& buffer, std::vector<Expr> index) {
    return make(Load{name, dtype, buffer, std::move(index), {}, {}});
  }
  static Ref<tile_ir::Stmt> store(const std::string& buffer, std::vector<Expr> index, const std::string& value) {
    return make(Store{buffer, std::move(index), value, {}, Combiner::set});
  }
  static Ref<tile_ir::Stmt> let(const std::string& name, Fn fn, std::vector<std::string> operands, DType dtype = DType::f32) {
    return make(Let{name, dtype, fn, std::move(operands), {}, 0});
  }
  static Ref<tile_ir::Stmt> number(const std::string& name, double value, DType dtype = DType::f32) {
    return make(Let{name, dtype, Fn::constant, {}, Scalar::of_float(dtype, value), 0});
  }
  static void append(tile_ir::Block& to, tile_ir::Block more) { to.insert(to.end(), more.begin(), more.end()); }
  static void join(Substitution& into, const Substitution& more) {
    for (const auto& [name, value] : more) into[name] = value;
  }

  /// Copies statements under a substitution of axes; names get a suffix, for a body holds several copies. Values in `given` stand for others.
  struct Copy {
    Substitution map;
    std::string suffix;
    std::map<std::string, std::string> renamed;

    void add(const Block& block, tile_ir::Block& into, const std::map<std::string, Load>& instead = {}) {
      for (const auto& stmt : block) {
        if (const auto* from = std::get_if<Let>(&stmt->node)) {
          if (renamed.count(from->name)) continue;
          Let s = substituted(*from, map);
          for (std::string& o : s.operands) o = value(o);
          define(from->name, s.name = from->name + suffix);
          into.push_back(make(std::move(s)));
        } else if (const auto* from = std::get_if<Load>(&stmt->node)) {
          if (renamed.count(from->name)) continue;
          auto other = instead.find(from->buffer);
          Load s = substituted(*from, map);
          if (other != instead.end()) {
            s.buffer = other->second.buffer;
            s.index = other->second.index;
          }
          define(from->name, s.name = from->name + suffix);
          into.push_back(make(std::move(s)));
        } else if (const auto* from = std::get_if<Store>(&stmt->node)) {
          Store s = substituted(*from, map);
          s.value = value(s.value);
          into.push_back(make(std::move(s)));
        }
      }
    }
    void define(const std::string& from, const std::string& to) {
      renamed[from] = to;
      map[from] = Expr::symbol(to);
    }
    std::string value(const std::string& name) const {
      auto it = renamed.find(name);
      return it == renamed.end() ? name : it->second;
    }
  };

  Expr shares() const { return ceildiv(row_.extent, shared_); }
  Expr first_shared() const { return mod(sym("par"), shares()) * shared_; }
  Expr shared_rows() const { return min(shared_, row_.extent - first_shared()); }
  Expr first_key() const { return sym("kb") * block_keys_; }
  Expr block_keys() const { return min(block_keys_, sum_.key.extent - first_key()); }
  Expr place() const { return sym("rb") * rows_of_block_; }
  Expr block_rows() const { return min(rows_of_block_, shared_rows() - place()); }
  Expr row_at(Expr of_block) const { return first_shared() + place() + of_block; }
  Substitution outer() const { return unflatten(batch_, floordiv(sym("par"), shares())); }

  /// Keys [lo, hi) outside of which all of some rows read -inf.
  struct Bounds {
    std::optional<Expr> lo, hi;
  };

  /// For `rows` rows from `first` on. What limits that are values take goes before.
  Bounds bounds_of(Expr first, Expr rows, const std::string& tag, tile_ir::Block& into) const {
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
      if (of_row.empty() && step && step->is_constant()) {
        map[row_.name] = (step->value() >= 0) == above ? first + rows - 1 : first;
        limit = substitute(limit, map);
      } else {
        const std::string name = fmt::format("limit{}{}", n, tag);
        const Expr row = sym("rl" + tag);
        map[row_.name] = first + row;
        tile_ir::Block body;
        Copy copy{map, "." + name, {}};
        copy.add(of_row, body);
        body.push_back(make(Let{"each" + name, DType::i64, Fn::index, {}, {}, substitute(limit, copy.map)}));
        into.push_back(make(tile_ir::Reduce{
            {name}, {DType::i64}, above ? Combiner::max : Combiner::min, {"each" + name}, {axis("rl" + tag, 0, rows)}, std::move(body)}));
        limit = above ? min(sym(name), sum_.key.extent - 1) : sym(name);  // a loaded position may be the largest integer
      }
      if (above)
        out.hi = out.hi ? min(*out.hi, limit + 1) : limit + 1;
      else
        out.lo = out.lo ? max(*out.lo, limit) : limit;
    }
    return out;
  }

  tile_ir::Block body() const {
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
    tile_ir::Block out{make(tile_ir::Alloc{"keys", packed, pairs({block_keys_ / key_lanes_, depth_, key_lanes_}, 1, pair_scores_), Space::scratch}),
                       make(tile_ir::Alloc{"values", pair_values_ ? DType::bf16 : f32,
                                           pairs({column_panels, block_keys_, column_lanes_}, 1, pair_values_), Space::scratch}),
                       make(tile_ir::Alloc{"queries", packed, {rows_of_block_, round_up(depth_, kCacheLine) + padding}, Space::scratch}),
                       make(tile_ir::Alloc{"scores", f32, {rows_of_block_, block_keys_ + padding}, Space::scratch})};
    if (pair_values_) out.push_back(make(tile_ir::Alloc{"weights", DType::bf16, {rows_of_block_, block_keys_ + 2 * padding}, Space::scratch}));
    out.push_back(make(tile_ir::Alloc{"sums", f32, {shared_, column_panels * column_lanes_}, Space::scratch}));
    for (const char* name : {"most", "total"}) out.push_back(make(tile_ir::Alloc{name, f32, {shared_}, Space::scratch}));
    out.push_back(make(tile_ir::Alloc{"factor", f32, {rows_of_block_}, Space::scratch}));
    append(out, start());

    Expr lo = 0;
    Expr hi = sum_.key.extent;
    const Bounds all = bounds_of(first_shared(), shared_rows(), "g", out);
    if (all.lo) lo = max(*all.lo, 0);
    if (all.hi) hi = max(min(*all.hi, hi), 0);
    tile_ir::Block block = pack_keys();
    append(block, pack_values());
    block.push_back(loop("rb", 0, ceildiv(shared_rows(), rows_of_block_), LoopKind::serial, row_block()));
    out.push_back(loop("kb", floordiv(lo, block_keys_), ceildiv(hi, block_keys_), LoopKind::serial, std::move(block)));
    append(out, finish());
    return out;
  }

  tile_ir::Block start() const {
    const int64_t width = (columns_ + column_lanes_ - 1) / column_lanes_ * column_lanes_;
    const Expr row = sym("r0");
    return {loop("r0", 0, shared_, LoopKind::serial,
                 {number("none0", -std::numeric_limits<double>::infinity()), store("most", {row}, "none0"), number("zero0", 0),
                  store("total", {row}, "zero0"),
                  loop("x0", 0, width, LoopKind::lanes, {number("clear0", 0), store("sums", {row, sym("x0")}, "clear0")})}),
            loop("r1", 0, rows_of_block_, LoopKind::serial, {number("zero1", 0), store("factor", {sym("r1")}, "zero1")})};
  }

  std::vector<Expr> paired(Expr panel, Expr k, Expr lane, bool pairs) const {
    if (!pairs) return {panel, k, lane};
    return {panel, floordiv(k, 2), lane, mod(k, 2)};
  }

  /// The operand's value at a point, as float32 or as it was before it was widened, stored at buffer[to].
  static tile_ir::Block copy_operand(const Operand& operand, const Substitution& map, const std::string& suffix, bool narrow,
                                     const std::string& buffer, std::vector<Expr> to) {
    const std::string wanted = narrow ? operand.narrow()->value : operand.source->value;
    tile_ir::Block out;
    Copy copy{map, suffix, {}};
    copy.add(operand.statements_of(wanted), out);
    out.push_back(store(buffer, std::move(to), copy.value(wanted)));
    return out;
  }

  /// Whether memory runs along an axis of the operand: all of its accesses step by one element there, or by none.
  bool unit_along(const Operand& operand, const std::string& axis) const {
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

  /// A panel's lanes [0, valid) x steps [0, depth) of k, in squares that are transposed in registers if memory runs along k; zeros up to its width.
  tile_ir::Block pack_panel(const Operand& operand, const std::string& k_axis, Expr depth, Expr whole, const std::string& lane_axis, Expr first_k,
                            Expr first_lane, Expr valid, int64_t width, const std::string& buffer, Expr panel, bool pairs,
                            const std::string& tag) const {
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

  tile_ir::Block pack_keys() const {
    const Expr panel = sym("pk");
    const Expr valid = min(key_lanes_, block_keys() - panel * key_lanes_);
    tile_ir::Block body = pack_panel(keys_, pair_->scores.reduce->axes[0].name, depth_, depth_, sum_.key.name, 0, first_key() + panel * key_lanes_,
                                     valid, key_lanes_, "keys", panel, pair_scores_, "k");
    return {loop("pk", 0, ceildiv(block_keys(), key_lanes_), LoopKind::serial, std::move(body))};
  }

  tile_ir::Block pack_values() const {
    const Expr panel = sym("pv");
    const Expr valid = min(column_lanes_, columns_ - panel * column_lanes_);
    tile_ir::Block body = pack_panel(values_, pair_->values.reduce->axes[0].name, block_keys(), round_up(block_keys(), 2), sum_.column.name,
                                     first_key(), panel * column_lanes_, valid, column_lanes_, "values", panel, pair_values_, "v");
    return {loop("pv", 0, (columns_ + column_lanes_ - 1) / column_lanes_, LoopKind::serial, std::move(body))};
  }

  tile_ir::Block pack_queries() const {
    Substitution map = outer();
    map[row_.name] = row_at(sym("rq"));
    map[pair_->scores.reduce->axes[0].name] = sym("kq");
    tile_ir::Block copy = copy_operand(queries_, map, ".q", pair_scores_, "queries", {sym("rq"), sym("kq")});
    tile_ir::Block zero{number("noneq", 0, pair_scores_ ? DType::bf16 : DType::f32), store("queries", {sym("rz"), sym("kq")}, "noneq")};
    return {loop("rq", 0, block_rows(), LoopKind::serial, {loop("kq", 0, depth_, LoopKind::lanes, std::move(copy))}),
            loop("rz", block_rows(), round_up(block_rows(), mr_), LoopKind::serial, {loop("kq", 0, depth_, LoopKind::lanes, std::move(zero))})};
  }

  /// One block of rows and of keys.
  tile_ir::Block row_block() const {
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

  struct Product {
    std::string rows, lanes, panel, tag;
    int64_t width = 0;
    Expr panels, depth;
    bool pairs = false;
  };

  /// For each panel and each block of rows: sums in registers, and what is done with them at [ro, xo].
  tile_ir::Block multiply(const Product& p, tile_ir::Block of_row, tile_ir::Block of_sum) const {
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
    return {loop(p.panel, 0, p.panels, LoopKind::serial, {loop("rt" + t, 0, ceildiv(block_rows(), mr_), LoopKind::serial, std::move(block))})};
  }

  /// Whether what follows the sum of products of scores is arithmetic on it and constants.
  bool simple_scores() const {
    return std::all_of(score_.begin(), score_.end(), [](const auto& s) {
      const auto* let = std::get_if<Let>(&s->node);
      return let && let->fn != Fn::index;
    });
  }

  tile_ir::Block compute_scores(Expr keys) const {
    const Product p{"queries", "keys", "ps", "s", key_lanes_, ceildiv(keys, key_lanes_), depth_, pair_scores_};
    tile_ir::Block tail;
    const std::vector<Expr> to{sym("rts") * mr_ + sym("rso"), sym("ps") * key_lanes_ + sym("xso")};
    if (!simple_scores()) {
      tail.push_back(store("scores", to, "dvs"));
      tile_ir::Block out = multiply(p, {}, std::move(tail));
      tile_ir::Block each{load("dvt", DType::f32, "scores", {sym("rt"), sym("jt")})};
      append(each, score_tail(row_at(sym("rt")), first_key() + sym("jt"), "dvt", ".t", {sym("rt"), sym("jt")}));
      out.push_back(loop("rt", 0, block_rows(), LoopKind::serial, {loop("jt", 0, keys, LoopKind::lanes, std::move(each))}));
      return out;
    }
    return multiply(p, {}, score_tail(0, 0, "dvs", ".s", to));
  }

  tile_ir::Block score_tail(Expr row, Expr key, const std::string& sum, const std::string& suffix, const std::vector<Expr>& to) const {
    tile_ir::Block out;
    Copy copy{outer(), suffix, {}};
    copy.map[row_.name] = row;
    copy.map[sum_.key.name] = key;
    copy.define(pair_->scores.result, sum);
    copy.add(score_, out);
    out.push_back(store("scores", to, copy.value(sum_.scored)));
    return out;
  }

  /// The score that the softmax is of, at a row and key of the block.
  std::string read_score(Expr row, Expr key, const std::string& suffix, tile_ir::Block& into) const {
    Copy copy{outer(), suffix, {}};
    copy.map[row_.name] = row_at(row);
    copy.map[sum_.read_axis] = first_key() + key;
    copy.add(read_, into, {{sum_.local, Load{"", DType::f32, "scores", {row, key}, {}, {}}}});
    return copy.value(sum_.read_value);
  }

  /// Scores become weights, relative to the maximum so far.
  tile_ir::Block weigh(Expr keys) const {
    const Expr row = sym("rw");
    const std::vector<Expr> at{place() + row};
    auto reduce = [&](const std::string& name, Combiner combiner, const std::string& operand, const std::string& axis_name, tile_ir::Block body) {
      return make(
          tile_ir::Reduce{{name}, {DType::f32}, combiner, {operand}, {axis(axis_name, 0, keys, LoopKind::lanes, 1, kInFlight)}, std::move(body)});
    };
    tile_ir::Block body;
    tile_ir::Block of_max;
    const std::string value = read_score(row, sym("jm"), ".m", of_max);
    body.push_back(reduce("here", Combiner::max, value, "jm", std::move(of_max)));
    body.push_back(load("before", DType::f32, "most", at));
    body.push_back(let("now", Fn::max, {"before", "here"}));
    body.push_back(store("most", at, "now"));
    // Where all so far are -inf, so is the difference: the weights are 0.
    body.push_back(number("never", -std::numeric_limits<double>::infinity()));
    body.push_back(let("nothing", Fn::eq, {"now", "never"}, DType::boolean));
    body.push_back(number("origin", 0));
    body.push_back(let("base", Fn::where, {"nothing", "origin", "now"}));
    body.push_back(let("grown", Fn::sub, {"before", "base"}));
    body.push_back(let("scale", Fn::exp, {"grown"}));
    body.push_back(store("factor", {row}, "scale"));
    tile_ir::Block of_weight;
    const std::string score = read_score(row, sym("je"), ".e", of_weight);
    of_weight.push_back(let("relative", Fn::sub, {score, "base"}));
    of_weight.push_back(let("weight", Fn::exp, {"relative"}));
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
    body.push_back(load("sofar", DType::f32, "total", at));
    body.push_back(let("sum", Fn::fma, {"sofar", "scale", "more"}));
    body.push_back(store("total", at, "sum"));
    if (pair_values_) {  // an odd last key has none beside it
      body.push_back(number("last", 0, DType::bf16));
      body.push_back(store("weights", {row, keys}, "last"));
    }
    tile_ir::Block out{loop("rw", 0, block_rows(), LoopKind::serial, std::move(body))};
    if (pair_values_) {
      const Expr padded = sym("rp");
      out.push_back(
          loop("rp", block_rows(), round_up(block_rows(), mr_), LoopKind::serial,
               {loop("jp", 0, keys + 1, LoopKind::lanes, {number("nonep", 0, DType::bf16), store("weights", {padded, sym("jp")}, "nonep")})}));
    }
    return out;
  }

  tile_ir::Block add_values(Expr keys) const {
    const Product p{
        pair_values_ ? "weights" : "scores", "values", "pv", "v", column_lanes_, (columns_ + column_lanes_ - 1) / column_lanes_, keys, pair_values_};
    const Expr row = sym("rtv") * mr_ + sym("rvo");
    const std::vector<Expr> to{place() + row, sym("pv") * column_lanes_ + sym("xvo")};
    return multiply(p, {load("fvf", DType::f32, "factor", {row})},
                    {load("ovv", DType::f32, "sums", to), let("svv", Fn::fma, {"ovv", "fvf", "dvv"}), store("sums", to, "svv")});
  }

  tile_ir::Block finish() const {
    const Expr row = sym("rf");
    Copy copy{outer(), "", {}};
    copy.map[row_.name] = first_shared() + row;
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

  const loop_ir::Kernel& kernel_;
  const PassContext& ctx_;
  OuterNest nest_;
  WeightedSum sum_;
  const WeightedSum::Contractions* pair_ = nullptr;
  std::vector<analysis::KeyLimit> limits_;
  loop_ir::Axis row_;
  std::vector<loop_ir::Axis> batch_;
  Operand queries_, keys_, values_;
  Block score_;  ///< what makes a score of a sum of products
  Block read_;   ///< what the softmax reads of it
  int64_t depth_ = 0, columns_ = 0;
  int64_t chunk_work_ = kChunkWork;
  int64_t mr_ = 0, key_lanes_ = 0, column_lanes_ = 0;
  int64_t rows_of_block_ = 0, block_keys_ = 0;
  int64_t shared_ = 0;  ///< rows that share packed keys and values
  bool pair_scores_ = false, pair_values_ = false;
};

}  // namespace

std::optional<Schedule> propose_cpu_online(const loop_ir::Kernel& kernel, const PassContext& ctx) { return OnlineScheduler(kernel, ctx).propose(); }

tile_ir::Kernel apply_cpu_online(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx) {
  return OnlineScheduler(kernel, ctx).apply(schedule);
}

}  // namespace deplo
