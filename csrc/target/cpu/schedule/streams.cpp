#include "target/cpu/schedule/streams.h"

#include <algorithm>

#include "base/error.h"
#include "target/cpu/schedule/reductions.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kVectors = 2;          // in flight of each sum
constexpr int64_t kLeastVectors = 4;     // blocks of vectors that a sum must have
constexpr int64_t kLeastBlocks = 4;      // of streams
constexpr int64_t kChain = 128;          // additions to one accumulator, before it is added to the sum of those before
constexpr int64_t kRegistersPerSum = 2;  // the accumulator's, and as much again for what is multiplied

constexpr int64_t kCacheLineBytes = 64;

using loop_ir::Load;
using loop_ir::Reduce;

std::vector<const Reduce*> sums_of(const loop_ir::Block& block) {
  std::vector<const Reduce*> sums;
  for (const auto& stmt : block)
    if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) sums.push_back(reduce);
  return sums;
}

}  // namespace

bool can_stream(const loop_ir::Block& block) {
  std::vector<const Reduce*> sums = sums_of(block);
  if (sums.empty()) return false;
  std::set<std::string> results;
  for (const auto& stmt : block) {
    const auto* reduce = std::get_if<Reduce>(&stmt->node);
    if (!reduce) {
      if (!NestConverter::is_straight({stmt})) return false;
      if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) results.insert(store->buffer);
      continue;
    }
    if (reduce->combiner != Combiner::sum || reduce->dtypes[0] != DType::f32 || reduce->axes.size() != 1) return false;
    if (!NestConverter::is_straight(reduce->body) || reduce->axes[0].extent != sums[0]->axes[0].extent) return false;
    results.insert(reduce->results.begin(), reduce->results.end());
    for (const auto& inner : reduce->body)
      if (std::holds_alternative<loop_ir::Check>(inner->node) || std::holds_alternative<loop_ir::Store>(inner->node)) return false;
  }
  // What waits for another sum, or for a store, is not read beside it.
  for (const Reduce* sum : sums) {
    std::set<std::string> reads;
    for (const auto& stmt : sum->body) collect_reads(*stmt, reads);
    for (const auto& stmt : needed_before(block, *sum)) collect_reads(*stmt, reads);
    if (std::any_of(results.begin(), results.end(), [&](const auto& name) { return reads.count(name) > 0; })) return false;
  }
  return true;
}

std::optional<Streams> propose_streams(const loop_ir::Kernel& kernel, const loop_ir::Block& block, const loop_ir::Axis& axis,
                                       const PassContext& ctx) {
  if (!can_stream(block)) return std::nullopt;
  std::vector<const Reduce*> sums = sums_of(block);
  NestConverter converter(kernel, ctx);
  for (const Reduce* sum : sums) {
    // Memory runs along the sum, in a part of its own for each point of the axis; something else is the same for all of them.
    bool own = false;
    bool shared = false;
    for (const auto& stmt : sum->body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load) continue;
      Expr at = converter.offset(load->buffer, load->index);
      if (!uses(at, sum->axes[0].name)) continue;
      auto step = linear_coefficient(at, sum->axes[0].name);
      if (!step || !step->is(1) || !load->guard.empty()) return std::nullopt;
      (uses(at, axis.name) ? own : shared) = true;
    }
    if (!own || !shared) return std::nullopt;
  }
  const auto count = static_cast<int64_t>(sums.size());
  Streams streams{ctx.target.vector_registers / kRegistersPerSum / kVectors / count, kVectors};
  const int64_t width = kVectors * ctx.target.vector_bytes / 4;
  if (streams.count < 2 || converter.hint(axis.extent) < kLeastBlocks * streams.count) return std::nullopt;
  if (converter.hint(sums[0]->axes[0].extent) < kLeastVectors * width) return std::nullopt;
  return streams;
}

namespace {

/// Builds the body for one block of streams.
class StreamBuilder {
 public:
  StreamBuilder(const loop_ir::Block& block, const loop_ir::Axis& axis, Expr first, int64_t streams, const PassContext& ctx, NestConverter& converter,
                InnerLanes& lanes)
      : block_(block), axis_(axis), first_(first), streams_(streams), converter_(converter), lanes_(lanes), sums_(sums_of(block)) {
    for (const Reduce* sum : sums_) lanes_.take(sum->axes, true, "", vectors_);
    width_ = vectors_ * ctx.target.vector_bytes / 4;
    const std::string& k = sums_[0]->axes[0].name;
    // Axes of the result: none of the kernel's own names.
    stream_ = axis.name + ".stream";
    lane_ = k + ".lane";
    step_ = k + ".step";
    part_ = k + ".block";
  }

  tile_ir::Block build() {
    const Expr extent = sums_[0]->axes[0].extent;
    const Expr steps = floordiv(extent, width_);
    tile_ir::Block totals;
    tile_ir::Block inside;
    tile_ir::Block clear;
    tile_ir::Block zeros;
    tile_ir::Block step;
    tile_ir::Block add;
    tile_ir::Block rest;
    for (size_t j = 0; j < sums_.size(); ++j) {
      totals.push_back(make(tile_ir::Alloc{number("total", j), DType::f32, {streams_}, Space::stack}));
      inside.push_back(make(tile_ir::Alloc{number("acc", j), DType::f32, {streams_, width_}, Space::reg}));
      set_to_zero(number("none", j), number("total", j), {sym(stream_)}, clear);
      tile_ir::Block zero;
      set_to_zero(number("zero", j), number("acc", j), {sym(stream_), sym(lane_)}, zero);
      zeros.push_back(in_lanes(std::move(zero)));
      add_step(j, step);
      add_part(j, add);
      add_rest(j, steps * width_, extent, rest);
    }
    tile_ir::Block out = std::move(totals);
    out.push_back(each(std::move(clear)));
    inside.push_back(each(std::move(zeros)));
    inside.push_back(make(tile_ir::For{loop_to_tile::axis(step_, 0, min(kChain, steps - sym(part_) * kChain)), {each(std::move(step))}}));
    inside.push_back(each(std::move(add)));
    out.push_back(make(tile_ir::For{loop_to_tile::axis(part_, 0, ceildiv(steps, kChain)), std::move(inside)}));
    if (!(extent.is_constant() && extent.value() % width_ == 0)) out.push_back(each(std::move(rest)));
    out.push_back(finish());
    return out;
  }

 private:
  static std::string number(const char* name, size_t j) { return name + std::to_string(j); }

  static Ref<tile_ir::Stmt> load(const std::string& name, const std::string& buffer, std::vector<Expr> index) {
    return make(loop_ir::Load{name, DType::f32, buffer, std::move(index), {}, {}});
  }

  static Ref<tile_ir::Stmt> store(const std::string& buffer, std::vector<Expr> index, const std::string& value) {
    return make(loop_ir::Store{buffer, std::move(index), value, {}, Combiner::set});
  }

  static Ref<tile_ir::Stmt> let(const std::string& name, Fn fn, std::vector<std::string> operands) {
    return make(loop_ir::Let{name, DType::f32, fn, std::move(operands), {}, 0});
  }

  static void set_to_zero(const std::string& zero, const std::string& buffer, std::vector<Expr> index, tile_ir::Block& into) {
    into.push_back(make(loop_ir::Let{zero, DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, 0), 0}));
    into.push_back(store(buffer, std::move(index), zero));
  }

  Ref<tile_ir::Stmt> each(tile_ir::Block body) const {
    return make(tile_ir::For{tile_ir::Axis{stream_, 0, streams_, 1, LoopKind::unroll, 1}, std::move(body)});
  }

  Ref<tile_ir::Stmt> in_lanes(tile_ir::Block body) const {
    return make(tile_ir::For{loop_to_tile::axis(lane_, 0, width_, LoopKind::lanes), std::move(body)});
  }

  /// The last point of the axis again where it ends inside of the block: what that gives is not stored.
  Expr point() const { return min(first_ + sym(stream_), axis_.extent - 1); }

  tile_ir::Block at(Expr point, const loop_ir::Block& stmts, const std::string& k = "", Expr place = 0) {
    Substitution& map = converter_.map();
    const Substitution before = map;
    for (auto& [name, value] : map) value = substitute(value, {{axis_.name, point}});
    map[axis_.name] = point;
    if (!k.empty()) map[k] = place;
    tile_ir::Block out = converter_.convert(stmts, false, lanes_);
    map = before;
    return out;
  }

  /// A vector of each stream.
  void add_step(size_t j, tile_ir::Block& into) {
    const Reduce& sum = *sums_[j];
    for (auto& stmt : at(point(), needed_before(block_, sum))) into.push_back(stmt);
    for (auto& stmt : fetch_next(sum)) into.push_back(stmt);
    tile_ir::Block inner;
    const loop_ir::Let* product = product_of(sum);
    for (auto& stmt : at(point(), sum.body, sum.axes[0].name, (sym(part_) * kChain + sym(step_)) * width_ + sym(lane_))) {
      const auto* made = std::get_if<loop_ir::Let>(&stmt->node);
      if (!product || !made || made->name != product->name) inner.push_back(stmt);
    }
    inner.push_back(load(number("old", j), number("acc", j), {sym(stream_), sym(lane_)}));
    inner.push_back(product ? let(number("new", j), Fn::fma, {product->operands[0], product->operands[1], number("old", j)})
                            : let(number("new", j), Fn::add, {number("old", j), sum.operands[0]}));
    inner.push_back(store(number("acc", j), {sym(stream_), sym(lane_)}, number("new", j)));
    into.push_back(in_lanes(std::move(inner)));
  }

  /// Brings what the next block of streams reads nearer: theirs are many and short, and hardware follows few of them.
  tile_ir::Block fetch_next(const Reduce& sum) {
    tile_ir::Block out;
    const Substitution before = converter_.map();
    Substitution map = before;
    const Expr next = min(first_ + streams_ + sym(stream_), axis_.extent - 1);
    for (auto& [name, value] : map) value = substitute(value, {{axis_.name, next}});
    map[axis_.name] = next;
    for (const auto& stmt : sum.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || !uses(converter_.offset(load->buffer, load->index), axis_.name) || !load->guard.empty()) continue;
      const int64_t line = kCacheLineBytes / size_of(load->dtype);
      for (int64_t lane = 0; lane < width_; lane += line) {
        map[sum.axes[0].name] = (sym(part_) * kChain + sym(step_)) * width_ + lane;
        std::vector<Expr> index;
        for (Expr e : load->index) index.push_back(substitute(e, map));
        out.push_back(make(tile_ir::Prefetch{load->buffer, std::move(index), 2}));
      }
    }
    return out;
  }

  void add_to_total(size_t j, const std::string& value, tile_ir::Block& into) const {
    into.push_back(load(value + "_before", number("total", j), {sym(stream_)}));
    into.push_back(let(value + "_after", Fn::add, {value + "_before", value}));
    into.push_back(store(number("total", j), {sym(stream_)}, value + "_after"));
  }

  /// What the accumulators hold.
  void add_part(size_t j, tile_ir::Block& into) const {
    const std::string term = number("term", j);
    into.push_back(make(tile_ir::Reduce{{number("part", j)},
                                        {DType::f32},
                                        Combiner::sum,
                                        {term},
                                        {loop_to_tile::axis(lane_, 0, width_, LoopKind::lanes, 1, vectors_)},
                                        {load(term, number("acc", j), {sym(stream_), sym(lane_)})}}));
    add_to_total(j, number("part", j), into);
  }

  /// The points beyond the last whole step.
  void add_rest(size_t j, Expr from, Expr extent, tile_ir::Block& into) {
    const Reduce& sum = *sums_[j];
    for (auto& stmt : at(point(), needed_before(block_, sum))) into.push_back(stmt);
    into.push_back(make(tile_ir::Reduce{{number("tail", j)},
                                        {DType::f32},
                                        Combiner::sum,
                                        sum.operands,
                                        {loop_to_tile::axis(sum.axes[0].name, from, extent, LoopKind::lanes, 1, 1)},
                                        at(point(), sum.body)}));
    add_to_total(j, number("tail", j), into);
  }

  /// All else, in lanes along the axis.
  Ref<tile_ir::Stmt> finish() {
    tile_ir::Block body;
    size_t j = 0;
    for (const auto& stmt : block_) {
      if (const auto* sum = std::get_if<Reduce>(&stmt->node)) {
        body.push_back(load(sum->results[0], number("total", j++), {sym(stream_)}));
        continue;
      }
      for (auto& converted : at(first_ + sym(stream_), {stmt})) body.push_back(converted);
    }
    return make(tile_ir::For{loop_to_tile::axis(stream_, 0, min(streams_, axis_.extent - first_), LoopKind::lanes), std::move(body)});
  }

  const loop_ir::Block& block_;
  const loop_ir::Axis& axis_;
  Expr first_;
  int64_t streams_;
  NestConverter& converter_;
  InnerLanes& lanes_;
  std::vector<const Reduce*> sums_;
  int64_t vectors_ = 1;
  int64_t width_ = 1;
  std::string stream_, lane_, step_, part_;
};

}  // namespace

tile_ir::Block stream_sums(const loop_ir::Block& block, const loop_ir::Axis& axis, Expr first, int64_t streams, const PassContext& ctx,
                           NestConverter& converter, InnerLanes& lanes) {
  return StreamBuilder(block, axis, first, streams, ctx, converter, lanes).build();
}

}  // namespace deplo::loop_to_tile
