#include "lower/loop_to_tile/streams.h"

#include <algorithm>

#include "base/error.h"

namespace deplo::loop_to_tile {

using tile_ir::LoopKind;
using tile_ir::Space;

namespace {

constexpr int64_t kVectors = 2;          // in flight of each sum
constexpr int64_t kLeastVectors = 4;     // blocks of vectors that a sum must have
constexpr int64_t kLeastBlocks = 4;      // of streams
constexpr int64_t kChain = 128;          // additions to one accumulator, before it is added to the sum of those before
constexpr int64_t kRegistersPerSum = 2;  // the accumulator's, and as much again for what is multiplied

using loop_ir::Load;
using loop_ir::Reduce;

std::vector<const Reduce*> sums_of(const loop_ir::Block& block) {
  std::vector<const Reduce*> sums;
  for (const auto& stmt : block)
    if (const auto* reduce = std::get_if<Reduce>(&stmt->node)) sums.push_back(reduce);
  return sums;
}

/// Names that a statement defines, and those that it reads.
std::string defined_by(const loop_ir::Stmt& stmt) {
  if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return let->name;
  if (const auto* load = std::get_if<Load>(&stmt.node)) return load->name;
  return "";
}

void collect_reads(const loop_ir::Stmt& stmt, std::set<std::string>& reads) {
  std::visit(Overloaded{[&](const loop_ir::Let& s) {
                          reads.insert(s.operands.begin(), s.operands.end());
                          collect_symbols(s.index, reads);
                        },
                        [&](const Load& s) {
                          for (const Expr& e : s.index) collect_symbols(e, reads);
                          for (const Cond& c : s.guard) collect_symbols(c.expr, reads);
                        },
                        [&](const loop_ir::Check& s) { collect_symbols(s.cond.expr, reads); },
                        [&](const Reduce& s) {
                          for (const auto& inner : s.body) collect_reads(*inner, reads);
                        },
                        [](const auto&) {}},
             stmt.node);
}

/// What stands in front of a sum that its body needs.
loop_ir::Block needed_before(const loop_ir::Block& block, const Reduce& sum) {
  std::set<std::string> reads;
  for (const auto& stmt : sum.body) collect_reads(*stmt, reads);
  loop_ir::Block needed;
  bool before = false;
  for (size_t at = block.size(); at-- > 0;) {
    if (std::get_if<Reduce>(&block[at]->node) == &sum) {
      before = true;
      continue;
    }
    if (!before || !reads.count(defined_by(*block[at]))) continue;
    collect_reads(*block[at], reads);
    needed.insert(needed.begin(), block[at]);
  }
  return needed;
}

/// The multiplication that feeds the sum and nothing else, or null.
const loop_ir::Let* product_of(const Reduce& sum) {
  const loop_ir::Let* product = nullptr;
  std::set<std::string> reads;
  for (const auto& stmt : sum.body) {
    collect_reads(*stmt, reads);
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt->node); let && let->name == sum.operands[0] && let->fn == Fn::mul) product = let;
  }
  return reads.count(sum.operands[0]) > 0 ? nullptr : product;
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
      continue;
    }
    if (reduce->combiner != Combiner::sum || reduce->dtypes[0] != DType::f32 || reduce->axes.size() != 1) return false;
    if (!NestConverter::is_straight(reduce->body) || reduce->axes[0].extent != sums[0]->axes[0].extent) return false;
    results.insert(reduce->results.begin(), reduce->results.end());
    for (const auto& inner : reduce->body)
      if (std::holds_alternative<loop_ir::Check>(inner->node) || std::holds_alternative<loop_ir::Store>(inner->node)) return false;
  }
  // A sum that another one waits for is not read beside it.
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

tile_ir::Block stream_sums(const loop_ir::Block& block, const loop_ir::Axis& axis, Expr first, int64_t streams, const PassContext& ctx,
                           NestConverter& converter, InnerLanes& lanes) {
  std::vector<const Reduce*> sums = sums_of(block);
  const Substitution before = converter.map();
  auto at = [&](Expr point, const loop_ir::Block& stmts, const std::string& k = "", Expr place = 0) {
    Substitution& map = converter.map();
    for (auto& [name, value] : map) value = substitute(value, {{axis.name, point}});
    map[axis.name] = point;
    if (!k.empty()) map[k] = place;
    tile_ir::Block out = converter.convert(stmts, false, lanes);
    map = before;
    return out;
  };
  int64_t vectors = 1;
  for (const Reduce* sum : sums) lanes.take(sum->axes, true, "", vectors);
  const int64_t width = vectors * ctx.target.vector_bytes / 4;
  const Expr extent = sums[0]->axes[0].extent;
  // Axes of the result: none of the kernel's own names.
  const std::string stream_axis = axis.name + ".stream";
  const std::string lane_axis = sums[0]->axes[0].name + ".lane";
  const std::string step_axis = sums[0]->axes[0].name + ".step";
  const std::string block_axis = sums[0]->axes[0].name + ".block";
  const Expr stream = sym(stream_axis);
  const Expr lane = sym(lane_axis);
  const Expr steps = floordiv(extent, width);
  const Expr blocks = ceildiv(steps, kChain);
  // The last points again where the axis ends: what they give is not stored.
  const Expr point = min(first + stream, axis.extent - 1);
  auto each = [&](tile_ir::Block body) {
    return make(tile_ir::For{tile_ir::Axis{stream_axis, 0, streams, 1, LoopKind::unroll, 1}, std::move(body)});
  };
  auto number = [](const char* name, size_t j) { return name + std::to_string(j); };
  auto load = [](const std::string& name, const std::string& buffer, std::vector<Expr> index) {
    return make(loop_ir::Load{name, DType::f32, buffer, std::move(index), {}, {}});
  };
  auto store = [](const std::string& buffer, std::vector<Expr> index, const std::string& value) {
    return make(loop_ir::Store{buffer, std::move(index), value, {}, Combiner::set});
  };
  auto in_lanes = [&](tile_ir::Block body) { return make(tile_ir::For{loop_to_tile::axis(lane_axis, 0, width, LoopKind::lanes), std::move(body)}); };

  tile_ir::Block out;
  tile_ir::Block clear;
  tile_ir::Block zeros;
  tile_ir::Block step;
  tile_ir::Block add;
  tile_ir::Block rest;
  for (size_t j = 0; j < sums.size(); ++j) {
    const Reduce& sum = *sums[j];
    const std::string& k = sum.axes[0].name;
    const std::string total = number("total", j);
    out.push_back(make(tile_ir::Alloc{total, DType::f32, {streams}, Space::stack}));
    clear.push_back(make(loop_ir::Let{number("none", j), DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, 0), 0}));
    clear.push_back(store(total, {stream}, number("none", j)));
    zeros.push_back(in_lanes({make(loop_ir::Let{number("zero", j), DType::f32, Fn::constant, {}, Scalar::of_float(DType::f32, 0), 0}),
                              store(number("acc", j), {stream, lane}, number("zero", j))}));
    // One step: a vector of each stream.
    for (auto& stmt : at(point, needed_before(block, sum))) step.push_back(stmt);
    tile_ir::Block inner;
    const loop_ir::Let* product = product_of(sum);
    for (auto& stmt : at(point, sum.body, k, ((sym(block_axis) * kChain) + sym(step_axis)) * width + lane)) {
      const auto* let = std::get_if<loop_ir::Let>(&stmt->node);
      if (!product || !let || let->name != product->name) inner.push_back(stmt);
    }
    inner.push_back(load(number("old", j), number("acc", j), {stream, lane}));
    if (product)
      inner.push_back(
          make(loop_ir::Let{number("new", j), DType::f32, Fn::fma, {product->operands[0], product->operands[1], number("old", j)}, {}, 0}));
    else
      inner.push_back(make(loop_ir::Let{number("new", j), DType::f32, Fn::add, {number("old", j), sum.operands[0]}, {}, 0}));
    inner.push_back(store(number("acc", j), {stream, lane}, number("new", j)));
    step.push_back(in_lanes(std::move(inner)));
    // What a block brings, and what is left of the axis.
    auto add_to_total = [&](const std::string& value, tile_ir::Block& into) {
      into.push_back(load(value + "_before", total, {stream}));
      into.push_back(make(loop_ir::Let{value + "_after", DType::f32, Fn::add, {value + "_before", value}, {}, 0}));
      into.push_back(store(total, {stream}, value + "_after"));
    };
    tile_ir::Reduce across{{number("part", j)},
                           {DType::f32},
                           Combiner::sum,
                           {number("term", j)},
                           {loop_to_tile::axis(lane_axis, 0, width, LoopKind::lanes, 1, vectors)},
                           {load(number("term", j), number("acc", j), {stream, lane})}};
    add.push_back(make(std::move(across)));
    add_to_total(number("part", j), add);
    for (auto& stmt : at(point, needed_before(block, sum))) rest.push_back(stmt);
    tile_ir::Reduce tail{
        {number("tail", j)}, {DType::f32}, Combiner::sum, sum.operands, {loop_to_tile::axis(k, steps * width, extent, LoopKind::lanes, 1, 1)},
        at(point, sum.body)};
    rest.push_back(make(std::move(tail)));
    add_to_total(number("tail", j), rest);
  }
  out.push_back(each(std::move(clear)));
  tile_ir::Block in_block;
  for (size_t j = 0; j < sums.size(); ++j) in_block.push_back(make(tile_ir::Alloc{number("acc", j), DType::f32, {streams, width}, Space::reg}));
  in_block.push_back(each(std::move(zeros)));
  const Expr in_this = min(kChain, steps - sym(block_axis) * kChain);
  in_block.push_back(make(tile_ir::For{loop_to_tile::axis(step_axis, 0, in_this), {each(std::move(step))}}));
  in_block.push_back(each(std::move(add)));
  out.push_back(make(tile_ir::For{loop_to_tile::axis(block_axis, 0, blocks), std::move(in_block)}));
  if (!(extent.is_constant() && extent.value() % width == 0)) out.push_back(each(std::move(rest)));
  // All else, in lanes along the axis.
  tile_ir::Block last;
  size_t j = 0;
  for (const auto& stmt : block) {
    if (const auto* sum = std::get_if<Reduce>(&stmt->node)) {
      last.push_back(load(sum->results[0], number("total", j++), {stream}));
      continue;
    }
    for (auto& converted : at(first + stream, {stmt})) last.push_back(converted);
  }
  const Expr valid = min(streams, axis.extent - first);
  out.push_back(make(tile_ir::For{loop_to_tile::axis(stream_axis, 0, valid, LoopKind::lanes), std::move(last)}));
  return out;
}

}  // namespace deplo::loop_to_tile
