#include "target/cpu/schedule/streams.h"

#include <algorithm>

#include "analysis/scaled.h"
#include "base/error.h"
#include "target/cpu/schedule/reductions.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kStreams = 4;          // of memory, far apart: hardware follows a few long ones
constexpr int64_t kVectorsOfGroups = 2;  // in flight of each sum over groups of numbers
constexpr int64_t kLeastVectors = 4;     // blocks of vectors that a sum must have
constexpr int64_t kLeastBlocks = 4;      // of streams
constexpr int64_t kStreamChain = 128;    // additions to one accumulator, before it is added to the sum of those before
constexpr int64_t kRegistersPerSum = 2;  // the accumulator's, and as much again for what is multiplied

constexpr int64_t kAddedChain = 32;   // where nothing is multiplied: beside additions of numbers those of chains show
constexpr int64_t kMostSteps = 1024;  // of such sums: as many chains as a chain has additions
constexpr size_t kLightBody = 4;      // statements
constexpr double kFullCaches = 4;     // second caches that are not read again before they are full

constexpr int64_t kCacheLineBytes = 64;

using loop_ir::Load;
using loop_ir::Reduce;

std::vector<const Reduce*> sums_of(const loop_ir::Block& block) {
  std::vector<const Reduce*> sums;
  for (const auto& stmt : block)
    if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) sums.push_back(reduce);
  return sums;
}

Expr count_of(const std::vector<loop_ir::Axis>& axes) {
  Expr count = 1;
  for (const auto& a : axes) count = count * a.extent;
  return count;
}

/// Whether vectors of so many lanes end where the last axis does.
bool whole_groups(const std::vector<loop_ir::Axis>& axes, int64_t width) {
  return axes.back().extent.is_constant() && axes.back().extent.value() % width == 0 && axes.back().extent.value() > 0;
}

}  // namespace

bool can_stream(const loop_ir::Block& block, const loop_ir::Axis& axis) {
  std::vector<const Reduce*> sums = sums_of(block);
  if (sums.empty()) return false;
  for (const auto& a : sums[0]->axes)
    if (uses(a.extent, axis.name)) return false;  // as long as its point is far: no two sums are alike
  std::set<std::string> results;
  for (const auto& stmt : block) {
    const auto* reduce = std::get_if<Reduce>(&stmt->node);
    if (!reduce) {
      if (!NestConverter::is_straight({stmt})) return false;
      if (const auto* store = std::get_if<loop_ir::Store>(&stmt->node)) results.insert(store->buffer);
      continue;
    }
    if (reduce->combiner != Combiner::sum || reduce->dtypes[0] != DType::f32 || !NestConverter::is_straight(reduce->body)) return false;
    const bool alike = std::equal(reduce->axes.begin(), reduce->axes.end(), sums[0]->axes.begin(), sums[0]->axes.end(),
                                  [](const auto& a, const auto& b) { return a.extent == b.extent; });
    if (!alike) return false;
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
  if (!can_stream(block, axis)) return std::nullopt;
  std::vector<const Reduce*> sums = sums_of(block);
  const int64_t most = ctx.target.vector_registers / kRegistersPerSum / kStreams;  // vectors of each
  NestConverter converter(kernel, ctx);
  for (const Reduce* sum : sums) {
    // Memory runs along the sum, in a part of its own for each point of the axis; something else is the same for all of them. Factors of groups
    // of neighbours do not vary along its last axis.
    const std::string& along = sum->axes.back().name;
    bool own = false;
    bool shared = false;
    for (const auto& stmt : sum->body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load) continue;
      Expr at = converter.offset(load->buffer, load->index);
      if (!uses(at, along)) continue;
      auto step = linear_coefficient(at, along);
      if (!step || !step->is(1) || !load->guard.empty()) return std::nullopt;
      (uses(at, axis.name) ? own : shared) = true;
    }
    // Or all of it comes from memory, which one stream does not keep busy, and little is done with it.
    const int64_t terms = converter.hint(count_of(sum->axes));
    const double bytes = 4.0 * static_cast<double>(converter.hint(axis.extent)) * static_cast<double>(terms);
    const bool known = count_of(sum->axes).is_constant() && terms <= kMostSteps * most * (ctx.target.vector_bytes / 4);
    shared = shared || (known && sum->body.size() <= kLightBody && bytes > kFullCaches * static_cast<double>(ctx.target.l2_bytes));
    if (!own || !shared) return std::nullopt;
  }
  const auto& axes = sums[0]->axes;
  const auto count = static_cast<int64_t>(sums.size());
  Streams streams{std::max<int64_t>(2, kStreams / count), most};
  // Numbers of groups take more time than memory does: more sums share what is loaded and widened.
  if (axes.size() > 1) streams = {ctx.target.vector_registers / kRegistersPerSum / kVectorsOfGroups / count, kVectorsOfGroups, false};
  if (streams.count < 2) return std::nullopt;
  const int64_t width = streams.vectors * ctx.target.vector_bytes / 4;
  if (converter.hint(axis.extent) < kLeastBlocks * streams.count) return std::nullopt;
  if (axes.size() > 1 && !whole_groups(axes, width)) return std::nullopt;
  if (converter.hint(count_of(axes)) < kLeastVectors * width) return std::nullopt;
  return streams;
}

namespace {

/// Builds the body for one block of streams.
class StreamBuilder {
 public:
  StreamBuilder(const loop_ir::Block& block, const loop_ir::Axis& axis, const StreamedPoints& points, const PassContext& ctx,
                NestConverter& converter, InnerLanes& lanes)
      : block_(block), axis_(axis), points_(points), streams_(points.count), converter_(converter), lanes_(lanes), sums_(sums_of(block)) {
    for (const Reduce* sum : sums_) {
      const std::string lanes = lanes_.take(sum->axes, true, "", vectors_);
      if (!lanes.empty() && lanes != sum->axes.back().name)
        throw UserError(fmt::format("streams of sums have the lanes on their last axis, {}, not on {}", sum->axes.back().name, lanes));
    }
    width_ = vectors_ * ctx.target.vector_bytes / 4;
    const bool multiplies = std::any_of(sums_.begin(), sums_.end(), [&](const Reduce* sum) {
      return std::any_of(sum->body.begin(), sum->body.end(), [&](const auto& stmt) {
        const auto* load = std::get_if<Load>(&stmt->node);
        return load && !uses(converter_.offset(load->buffer, load->index), axis_.name);
      });
    });
    if (!multiplies) chain_ = kAddedChain;
    std::vector<loop_ir::Axis> outer = sums_[0]->axes;
    const loop_ir::Axis last = outer.back();
    outer.pop_back();
    if (!outer.empty()) {
      if (!whole_groups(sums_[0]->axes, width_))
        throw UserError(fmt::format("streams of sums over {}: the last axis must be of a known extent in multiples of {} lanes", last.name, width_));
      group_steps_ = last.extent.value() / width_;
    }
    // Axes of the result: none of the kernel's own names.
    stream_ = axis.name + ".stream";
    lane_ = last.name + ".lane";
    step_ = last.name + ".step";
    part_ = last.name + ".block";
    group_ = last.name + ".group";
  }

  tile_ir::Block build() {
    const Expr extent = count_of(sums_[0]->axes);
    const Expr steps = floordiv(extent, width_);
    const Expr groups = floordiv(steps, group_steps());
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
      if (!group_steps_) add_rest(j, steps * width_, extent, rest);
    }
    tile_ir::Block out = std::move(totals);
    out.push_back(each(std::move(clear)));
    inside.push_back(each(std::move(zeros)));
    auto body = each(std::move(step));
    if (group_steps_ && *group_steps_ > 1) body = make(tile_ir::For{loop_to_tile::axis(step_, 0, *group_steps_), {body}});
    inside.push_back(make(tile_ir::For{loop_to_tile::axis(group_steps_ ? group_ : step_, 0, min(chain(), groups - sym(part_) * chain())), {body}}));
    inside.push_back(each(std::move(add)));
    out.push_back(make(tile_ir::For{loop_to_tile::axis(part_, 0, ceildiv(groups, chain())), std::move(inside)}));
    if (!group_steps_ && !(extent.is_constant() && extent.value() % width_ == 0)) out.push_back(each(std::move(rest)));
    out.push_back(finish());
    return out;
  }

 private:
  /// Vectors of a group of neighbours that share factors; 1 where there are no groups.
  int64_t group_steps() const { return group_steps_.value_or(1); }
  /// Such groups, or vectors, that are added up before they are added to the sum of those before.
  int64_t chain() const { return std::max<int64_t>(1, chain_ / group_steps()); }

  /// The reduce axes in the step in hand, `lane` elements further on.
  Substitution place(const Reduce& sum, Expr lane) const {
    const loop_ir::Axis& last = sum.axes.back();
    if (!group_steps_) return {{last.name, (sym(part_) * chain_ + sym(step_)) * width_ + lane}};
    Substitution map = unflatten({sum.axes.begin(), sum.axes.end() - 1}, sym(part_) * chain() + sym(group_));
    map[last.name] = *group_steps_ > 1 ? sym(step_) * width_ + lane : lane;
    return map;
  }

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
  Expr point() const { return min(points_.first + sym(stream_) * points_.apart, axis_.extent - 1); }

  tile_ir::Block at(Expr point, const loop_ir::Block& stmts, const Substitution& place = {}) {
    Substitution& map = converter_.map();
    const Substitution before = map;
    for (auto& [name, value] : map) value = substitute(value, {{axis_.name, point}});
    map[axis_.name] = point;
    for (const auto& [name, value] : place) map[name] = value;
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
    std::vector<std::string> factors = product ? product->operands : std::vector<std::string>{};
    for (std::string& factor : factors) factor = analysis::scaled_whole_number(sum.body, factor, sum.axes.back().name).value_or(factor);
    for (auto& stmt : at(point(), sum.body, place(sum, sym(lane_)))) {
      const auto* made = std::get_if<loop_ir::Let>(&stmt->node);
      if (!product || !made || made->name != product->name) inner.push_back(stmt);
    }
    inner.push_back(load(number("old", j), number("acc", j), {sym(stream_), sym(lane_)}));
    inner.push_back(product ? let(number("new", j), Fn::fma, {factors[0], factors[1], number("old", j)})
                            : let(number("new", j), Fn::add, {number("old", j), sum.operands[0]}));
    inner.push_back(store(number("acc", j), {sym(stream_), sym(lane_)}, number("new", j)));
    into.push_back(in_lanes(std::move(inner)));
  }

  /// Brings what the next block of streams reads nearer: theirs are many and short, and hardware follows few of them.
  tile_ir::Block fetch_next(const Reduce& sum) {
    tile_ir::Block out;
    if (!points_.ahead) return out;
    const Substitution before = converter_.map();
    Substitution map = before;
    const Expr next = points_.apart.is(1) ? max(min(points_.first + streams_, axis_.extent - streams_), 0) + sym(stream_)
                                          : min(points_.first + 1 + sym(stream_) * points_.apart, axis_.extent - 1);
    for (auto& [name, value] : map) value = substitute(value, {{axis_.name, next}});
    map[axis_.name] = next;
    for (const auto& stmt : sum.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      if (!load || !load->guard.empty()) continue;
      const Expr at = converter_.offset(load->buffer, load->index);
      if (!uses(at, axis_.name) || !uses(at, sum.axes.back().name)) continue;
      const int64_t line = kCacheLineBytes / size_of(load->dtype);
      for (int64_t lane = 0; lane < width_; lane += line) {
        for (const auto& [name, value] : place(sum, lane)) map[name] = value;
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
      for (auto& converted : at(points_.first + sym(stream_) * points_.apart, {stmt})) body.push_back(converted);
    }
    return make(tile_ir::For{loop_to_tile::axis(stream_, 0, min(streams_, ceildiv(axis_.extent - points_.first, points_.apart)), LoopKind::lanes),
                             std::move(body)});
  }

  const loop_ir::Block& block_;
  const loop_ir::Axis& axis_;
  StreamedPoints points_;
  int64_t streams_;
  NestConverter& converter_;
  InnerLanes& lanes_;
  std::vector<const Reduce*> sums_;
  int64_t vectors_ = 1;
  int64_t chain_ = kStreamChain;
  int64_t width_ = 1;
  std::optional<int64_t> group_steps_;  ///< of sums over several axes
  std::string stream_, lane_, step_, part_, group_;
};

}  // namespace

tile_ir::Block stream_sums(const loop_ir::Block& block, const loop_ir::Axis& axis, const StreamedPoints& points, const PassContext& ctx,
                           NestConverter& converter, InnerLanes& lanes) {
  return StreamBuilder(block, axis, points, ctx, converter, lanes).build();
}

}  // namespace deplo::loop_to_tile
