#include "lower/loop_to_tile/gpu.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "lower/loop_to_tile/convert.h"
#include "schedule/reader.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using tile_ir::LoopKind;
using tile_ir::Space;

constexpr int64_t kThreads = 256;
constexpr int64_t kSharedBytes = 48 << 10;
constexpr int64_t kTile = 64;      // outputs of a block along m and n
constexpr int64_t kPerThread = 4;  // of a thread
constexpr int64_t kStep = 16;      // of k per stage

// What a schedule may ask for.
constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostTile = 1024;
constexpr int64_t kMostPerThread = 16;

tile_ir::Let zero(const std::string& name, DType dtype) {
  return {name, dtype, Fn::constant, {}, is_float(dtype) ? Scalar::of_float(dtype, 0) : Scalar::of_int(dtype, 0), 0};
}

Fn combine_fn(Combiner combiner) {
  switch (combiner) {
    case Combiner::sum: return Fn::add;
    case Combiner::prod: return Fn::mul;
    case Combiner::min: return Fn::min;
    case Combiner::max: return Fn::max;
    default: return Fn::constant;
  }
}

/// How the statements inside the outer axes run.
enum class Share : uint8_t {
  alone,     ///< by one thread, everything serial
  together,  ///< by all threads of the block in step
};

class GpuScheduler {
 public:
  explicit GpuScheduler(const loop_ir::Kernel& kernel) : kernel_(kernel) {
    OuterNest nest = outer_nest(kernel);
    outer_ = nest.axes;
    inner_ = nest.inner;
  }

  Schedule propose() {
    match();
    std::string kind = !colliding_stores(kernel_).empty() ? "gpu_serial" : matched_ ? "gpu_contraction" : shares_rows() ? "gpu_rows" : "gpu_points";
    Schedule s{kind, {}};
    if (kind == "gpu_contraction")
      s.directives = {{"tile", {{matched_->m, kTile}}},
                      {"tile", {{matched_->n, kTile}}},
                      {"tile", {{depth_name(), kStep}}},
                      {"register_block", {{matched_->m, kPerThread}, {matched_->n, kPerThread}}}};
    s.directives.push_back({"threads", {{"", kThreads}}});
    return s;
  }

  tile_ir::Kernel apply(const Schedule& schedule) {
    match();
    read(schedule);
    tile_ir::Kernel out;
    out.name = kernel_.name;
    out.params = kernel_.params;
    out.symbols = kernel_.symbols;
    out.provenance = kernel_.provenance;
    out.schedule = schedule;
    out.body = schedule.kind == "gpu_serial"        ? serial()
               : schedule.kind == "gpu_contraction" ? tile()
               : schedule.kind == "gpu_rows"        ? rows()
                                                    : points();
    return out;
  }

 private:
  // ---- the schedule as data ----------------------------------------------------------------------------------

  std::string depth_name() const {
    std::vector<std::string> axes;
    for (const auto& a : matched_->reduce->axes) axes.push_back(a.name);
    return matched_->reduce->results[0] + "." + group_name(axes);
  }

  void read(const Schedule& schedule) {
    ScheduleReader reader(kernel_.name, schedule);
    const std::string& kind = schedule.kind;
    if (kind != "gpu_serial" && kind != "gpu_contraction" && kind != "gpu_rows" && kind != "gpu_points")
      reader.fail("unknown kind; a GPU kernel is allowed to be gpu_points, gpu_rows, gpu_contraction or gpu_serial");
    if (kind != "gpu_serial" && !colliding_stores(kernel_).empty()) reader.fail("its stores may meet; allowed: gpu_serial");
    const Directive& threads = reader.one("threads");
    reader.only(threads, {""});
    threads_ = reader.number(threads, "", 1, kMostThreads);
    if ((threads_ & (threads_ - 1)) != 0) reader.fail(threads, "allowed: powers of two");
    if (kind == "gpu_contraction") read_contraction(reader, threads);
    reader.finish(kind == "gpu_contraction" ? "tile, register_block and threads" : "threads");
  }

  void read_contraction(ScheduleReader& reader, const Directive& threads) {
    if (!matched_) reader.fail("the kernel is no contraction");
    auto tile = [&](const std::string& axis) {
      const Directive* d = reader.find("tile", axis);
      if (!d) reader.fail(fmt::format("it needs 'tile({}=...)'", axis));
      reader.only(*d, {axis});
      return reader.number(*d, axis, 1, kMostTile);
    };
    tile_m_ = tile(matched_->m);
    tile_n_ = tile(matched_->n);
    step_ = tile(depth_name());
    const Directive& block = reader.one("register_block");
    reader.only(block, {matched_->m, matched_->n});
    per_m_ = reader.number(block, matched_->m, 1, kMostPerThread);
    per_n_ = reader.number(block, matched_->n, 1, kMostPerThread);
    if (tile_m_ % per_m_ != 0 || tile_n_ % per_n_ != 0) reader.fail(block, fmt::format("allowed: what divides the tiles, {} x {}", tile_m_, tile_n_));
    int64_t wanted = tile_m_ / per_m_ * (tile_n_ / per_n_);
    if (threads_ != wanted) reader.fail(threads, fmt::format("allowed: {}, one for each register block of the tile", wanted));
    if (step_ * tile_m_ % threads_ != 0 || step_ * tile_n_ % threads_ != 0)
      reader.fail(threads, fmt::format("allowed: what divides the operands' tiles, {} x {} and {} x {}", step_, tile_m_, step_, tile_n_));
    int64_t bytes = step_ * (tile_m_ + tile_n_) * 4;
    if (bytes > kSharedBytes) reader.fail(fmt::format("its tiles need {} bytes of shared memory, a block has {}", bytes, kSharedBytes));
  }

  // ---- choice ------------------------------------------------------------------------------------------------

  bool shares_rows() const {
    bool loops = false;
    for (const auto& stmt : *inner_)
      loops = loops || std::holds_alternative<loop_ir::For>(stmt->node) || std::holds_alternative<loop_ir::Reduce>(stmt->node);
    if (!loops) return false;
    // A single short reduction per point is cheaper in one thread.
    bool wide = false;
    visit_all(*inner_, [&](const loop_ir::Stmt& stmt) {
      if (const auto* loop = std::get_if<loop_ir::For>(&stmt.node)) wide = wide || !loop->extent.is_constant() || loop->extent.value() >= 32;
      if (const auto* reduce = std::get_if<loop_ir::Reduce>(&stmt.node)) {
        Expr count = 1;
        for (const auto& a : reduce->axes) count = count * a.extent;
        wide = wide || !count.is_constant() || count.value() >= 64;
      }
    });
    return wide;
  }

  // ---- outer axes as one linear index ------------------------------------------------------------------------

  tile_ir::Block grid(Expr blocks, tile_ir::Block body) const {
    tile_ir::Block threads{make(tile_ir::For{axis("t", 0, threads_, LoopKind::thread_x), std::move(body)})};
    return {make(tile_ir::For{axis("b", 0, blocks, LoopKind::block_x), std::move(threads)})};
  }

  tile_ir::Block points() {
    Expr linear = sym("b") * threads_ + sym("t");
    Expr n = count(outer_);
    map_ = unflatten(outer_, linear);
    tile_ir::Block body = convert(*inner_, Share::alone);
    return grid(ceildiv(n, threads_), {make(tile_ir::If{{less(linear, n)}, std::move(body)})});
  }

  tile_ir::Block rows() {
    map_ = unflatten(outer_, sym("b"));
    tile_ir::Block body = convert(*inner_, Share::together);
    return grid(count(outer_), std::move(body));
  }

  tile_ir::Block serial() {
    tile_ir::Block body = convert(kernel_.body, Share::alone);
    return grid(1, {make(tile_ir::If{{{Cond::Kind::eq0, sym("t")}}, std::move(body)})});
  }

  // ---- statements --------------------------------------------------------------------------------------------

  tile_ir::Block convert(const loop_ir::Block& block, Share share) {
    tile_ir::Block out;
    for (const auto& stmt : block) std::visit([&](const auto& s) { lower(s, share, out); }, stmt->node);
    return out;
  }

  void lower(loop_ir::Let s, Share /*share*/, tile_ir::Block& out) { out.push_back(make(substituted(std::move(s), map_))); }

  void lower(loop_ir::Load s, Share /*share*/, tile_ir::Block& out) { out.push_back(make(substituted(std::move(s), map_))); }

  void lower(loop_ir::Store s, Share share, tile_ir::Block& out) {
    s = substituted(std::move(s), map_);
    if (share == Share::alone) {
      out.push_back(make(std::move(s)));
      return;
    }
    out.push_back(make(tile_ir::If{{{Cond::Kind::eq0, sym("t")}}, {make(std::move(s))}}));
    out.push_back(make(tile_ir::Barrier{}));
  }

  void lower(loop_ir::Check s, Share /*share*/, tile_ir::Block& out) { out.push_back(make(substituted(s, map_))); }

  void lower(const loop_ir::Local& s, Share share, tile_ir::Block& out) {
    Expr n = product(s.shape);
    DEPLO_SUPPORT(n.is_constant(), "kernel {}: local buffer {} has {} elements, a GPU block needs a constant number", kernel_.name, s.name, print(n));
    if (share == Share::together) {
      shared_bytes_ += n.value() * size_of(s.dtype);
      DEPLO_SUPPORT(shared_bytes_ <= kSharedBytes, "kernel {}: its local buffers need {} bytes of shared memory, a block has {}", kernel_.name,
                    shared_bytes_, kSharedBytes);
    }
    out.push_back(make(tile_ir::Alloc{s.name, s.dtype, s.shape, share == Share::together ? Space::shared : Space::stack}));
  }

  void lower(const loop_ir::For& s, Share share, tile_ir::Block& out) {
    Expr extent = substitute(s.extent, map_);
    bool together = share == Share::together;
    tile_ir::Block body = convert(s.body, Share::alone);
    out.push_back(
        make(tile_ir::For{axis(s.axis, together ? sym("t") : Expr(0), extent, LoopKind::serial, together ? threads_ : 1), std::move(body)}));
    if (together) out.push_back(make(tile_ir::Barrier{}));
  }

  void lower(const loop_ir::Scan& s, Share share, tile_ir::Block& out) {
    tile_ir::Scan scan{s.results,
                       s.dtypes,
                       s.combiner,
                       s.operands,
                       axis(s.axis.name, 0, substitute(s.axis.extent, map_)),
                       convert(s.body, Share::alone),
                       convert(s.then, Share::alone)};
    if (share == Share::alone) {
      out.push_back(make(std::move(scan)));
      return;
    }
    out.push_back(make(tile_ir::If{{{Cond::Kind::eq0, sym("t")}}, {make(std::move(scan))}}));
    out.push_back(make(tile_ir::Barrier{}));
  }

  tile_ir::Reduce serial_reduce(const loop_ir::Reduce& s) {
    tile_ir::Reduce reduce{s.results, s.dtypes, s.combiner, s.operands, {}, convert(s.body, Share::alone)};
    for (const auto& a : s.axes) reduce.axes.push_back(axis(a.name, 0, substitute(a.extent, map_)));
    return reduce;
  }

  void lower(const loop_ir::Reduce& s, Share share, tile_ir::Block& out) {
    tile_ir::Reduce reduce = serial_reduce(s);
    Fn fn = combine_fn(s.combiner);
    // Pairs (argmax, Welford, online softmax) are reduced by every thread alike: right, not yet fast.
    if (share == Share::alone || fn == Fn::constant || s.dtypes[0] == DType::boolean) {
      out.push_back(make(std::move(reduce)));
      return;
    }
    tile_ir::Axis& split = reduce.axes.back();
    split.lo = sym("t");
    split.step = threads_;
    std::string result = s.results[0];
    std::string partial = result + ".part";
    reduce.results[0] = partial;
    DType dtype = s.dtypes[0];
    std::string shared = shared_for(dtype, out);
    out.push_back(make(std::move(reduce)));
    out.push_back(make(tile_ir::Store{shared, {sym("t")}, partial, {}, Combiner::set}));
    out.push_back(make(tile_ir::Barrier{}));
    for (int64_t stride = threads_ / 2; stride > 0; stride /= 2) {
      std::string tag = result + ".s" + std::to_string(stride);
      tile_ir::Block step{make(tile_ir::Load{tag + "a", dtype, shared, {sym("t")}, {}, {}}),
                          make(tile_ir::Load{tag + "b", dtype, shared, {sym("t") + stride}, {}, {}}),
                          make(tile_ir::Let{tag + "c", dtype, fn, {tag + "a", tag + "b"}, {}, 0}),
                          make(tile_ir::Store{shared, {sym("t")}, tag + "c", {}, Combiner::set})};
      out.push_back(make(tile_ir::If{{less(sym("t"), stride)}, std::move(step)}));
      out.push_back(make(tile_ir::Barrier{}));
    }
    out.push_back(make(tile_ir::Load{result, dtype, shared, {0}, {}, {}}));
    // The next reduction reuses the array.
    out.push_back(make(tile_ir::Barrier{}));
  }

  /// One shared array of an element for each thread per dtype, declared where first needed (the block of shared statements).
  std::string shared_for(DType dtype, tile_ir::Block& out) {
    std::string name = fmt::format("shared_{}", to_string(dtype));
    if (arrays_.insert(name).second) {
      shared_bytes_ += threads_ * size_of(dtype);
      out.push_back(make(tile_ir::Alloc{name, dtype, {threads_}, Space::shared}));
    }
    return name;
  }

  // ---- contraction -------------------------------------------------------------------------------------------

  struct Operand {
    loop_ir::Block slice;  ///< statements that compute it
    std::string value;
  };

  /// Axes and loads that each name of a straight-line block depends on.
  static bool straight(const loop_ir::Block& block) {
    return std::all_of(block.begin(), block.end(),
                       [](const auto& s) { return std::holds_alternative<loop_ir::Let>(s->node) || std::holds_alternative<loop_ir::Load>(s->node); });
  }

  static std::set<std::string> reads(const loop_ir::Stmt& stmt) {
    std::set<std::string> out;
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) {
      out.insert(let->operands.begin(), let->operands.end());
      collect_symbols(let->index, out);
    }
    if (const auto* load = std::get_if<loop_ir::Load>(&stmt.node)) {
      for (Expr e : load->index) collect_symbols(e, out);
      for (const Cond& c : load->guard) collect_symbols(c.expr, out);
    }
    return out;
  }

  static std::string name_of(const loop_ir::Stmt& stmt) {
    if (const auto* let = std::get_if<loop_ir::Let>(&stmt.node)) return let->name;
    return std::get<loop_ir::Load>(stmt.node).name;
  }

  /// The statements of `block` that `value` needs, and every name they use.
  static std::pair<loop_ir::Block, std::set<std::string>> slice(const loop_ir::Block& block, const std::string& value) {
    std::set<std::string> needed{value};
    loop_ir::Block out;
    for (size_t i = block.size(); i-- > 0;) {
      if (!needed.count(name_of(*block[i]))) continue;
      for (const std::string& r : reads(*block[i])) needed.insert(r);
      out.insert(out.begin(), block[i]);
    }
    return {out, needed};
  }

  void match() {
    if (outer_.size() < 2 || inner_->empty()) return;
    const auto* reduce = std::get_if<loop_ir::Reduce>(&inner_->front()->node);
    if (!reduce || reduce->combiner != Combiner::sum || reduce->dtypes[0] != DType::f32 || !straight(reduce->body)) return;
    for (size_t i = 1; i < inner_->size(); ++i) {
      const auto& node = (*inner_)[i]->node;
      if (!std::holds_alternative<loop_ir::Let>(node) && !std::holds_alternative<loop_ir::Load>(node) &&
          !std::holds_alternative<loop_ir::Store>(node))
        return;
    }
    const loop_ir::Let* product = nullptr;
    for (const auto& s : reduce->body)
      if (const auto* let = std::get_if<loop_ir::Let>(&s->node); let && let->name == reduce->operands[0] && let->fn == Fn::mul) product = let;
    if (!product) return;
    auto [a_slice, a_uses] = slice(reduce->body, product->operands[0]);
    auto [b_slice, b_uses] = slice(reduce->body, product->operands[1]);
    const std::string n = outer_.back().name;
    const std::string m = outer_[outer_.size() - 2].name;
    Operand a{a_slice, product->operands[0]};
    Operand b{b_slice, product->operands[1]};
    if (a_uses.count(n) && !b_uses.count(n)) {
      std::swap(a, b);
      std::swap(a_uses, b_uses);
    }
    if (a_uses.count(n) || b_uses.count(m) || !a_uses.count(m) || !b_uses.count(n)) return;
    matched_ = Match{std::move(a), std::move(b), reduce, m, n};
  }

  tile_ir::Block tile() {
    const auto& [a, b, reduce_at, m, n] = *matched_;
    const loop_ir::Reduce& reduce = *reduce_at;
    const Expr rows_m = outer_[outer_.size() - 2].extent;
    const Expr cols_n = outer_.back().extent;
    std::vector<loop_ir::Axis> batch(outer_.begin(), outer_.end() - 2);
    const Expr tiles_n = ceildiv(cols_n, tile_n_);
    const Expr tiles_m = ceildiv(rows_m, tile_m_);
    const Expr block_m = mod(floordiv(sym("b"), tiles_n), tiles_m) * tile_m_;
    const Expr block_n = mod(sym("b"), tiles_n) * tile_n_;
    const Substitution batch_map = unflatten(batch, floordiv(sym("b"), tiles_n * tiles_m));
    const Expr depth = count(reduce.axes);

    tile_ir::Block body{make(tile_ir::Alloc{"a_tile", DType::f32, {step_, tile_m_}, Space::shared}),
                        make(tile_ir::Alloc{"b_tile", DType::f32, {step_, tile_n_}, Space::shared}),
                        make(tile_ir::Alloc{"acc", DType::f32, {per_m_, per_n_}, Space::reg}),
                        make(tile_ir::Alloc{"part", DType::f32, {per_m_, per_n_}, Space::reg})};
    body.push_back(clear("acc"));
    tile_ir::Block stage;
    stage.push_back(load_tile(a, "a_tile", tile_m_, m, block_m, rows_m, reduce, batch_map, depth));
    stage.push_back(load_tile(b, "b_tile", tile_n_, n, block_n, cols_n, reduce, batch_map, depth));
    stage.push_back(make(tile_ir::Barrier{}));
    // Partial sums per stage keep the chain of additions short.
    stage.push_back(clear("part"));
    stage.push_back(make(tile_ir::For{axis("kk", 0, step_), {per_thread(multiply())}}));
    stage.push_back(per_thread(accumulate()));
    stage.push_back(make(tile_ir::Barrier{}));
    body.push_back(make(tile_ir::For{axis("kb", 0, depth, LoopKind::serial, step_), std::move(stage)}));

    map_ = batch_map;
    map_[m] = block_m + floordiv(sym("t"), tile_n_ / per_n_) * per_m_ + sym("u");
    map_[n] = block_n + mod(sym("t"), tile_n_ / per_n_) * per_n_ + sym("v");
    tile_ir::Block finish{make(tile_ir::Load{reduce.results[0], DType::f32, "acc", {sym("u"), sym("v")}, {}, {}})};
    loop_ir::Block rest(inner_->begin() + 1, inner_->end());
    for (auto& s : convert(rest, Share::alone)) finish.push_back(s);
    tile_ir::If inside{{less(map_[m], rows_m), less(map_[n], cols_n)}, std::move(finish)};
    body.push_back(per_thread({make(std::move(inside))}));
    return grid(count(batch) * tiles_m * tiles_n, std::move(body));
  }

  /// for u, v: body, over the thread's own outputs.
  Ref<tile_ir::Stmt> per_thread(tile_ir::Block body) const {
    tile_ir::Block inner{make(tile_ir::For{axis("v", 0, per_n_, LoopKind::unroll), std::move(body)})};
    return make(tile_ir::For{axis("u", 0, per_m_, LoopKind::unroll), std::move(inner)});
  }

  Ref<tile_ir::Stmt> clear(const std::string& array) const {
    std::string name = array + ".zero";
    return per_thread({make(zero(name, DType::f32)), make(tile_ir::Store{array, {sym("u"), sym("v")}, name, {}, Combiner::set})});
  }

  tile_ir::Block multiply() const {
    Expr row = floordiv(sym("t"), tile_n_ / per_n_) * per_m_ + sym("u");
    Expr col = mod(sym("t"), tile_n_ / per_n_) * per_n_ + sym("v");
    return {make(tile_ir::Load{"av", DType::f32, "a_tile", {sym("kk"), row}, {}, {}}),
            make(tile_ir::Load{"bv", DType::f32, "b_tile", {sym("kk"), col}, {}, {}}),
            make(tile_ir::Load{"cv", DType::f32, "part", {sym("u"), sym("v")}, {}, {}}),
            make(tile_ir::Let{"dv", DType::f32, Fn::fma, {"av", "bv", "cv"}, {}, 0}),
            make(tile_ir::Store{"part", {sym("u"), sym("v")}, "dv", {}, Combiner::set})};
  }

  static tile_ir::Block accumulate() {
    return {make(tile_ir::Load{"pv", DType::f32, "part", {sym("u"), sym("v")}, {}, {}}),
            make(tile_ir::Load{"sv", DType::f32, "acc", {sym("u"), sym("v")}, {}, {}}),
            make(tile_ir::Let{"tv", DType::f32, Fn::add, {"sv", "pv"}, {}, 0}),
            make(tile_ir::Store{"acc", {sym("u"), sym("v")}, "tv", {}, Combiner::set})};
  }

  /// All threads fill tile[step][width] with one operand, zero beyond the edges.
  Ref<tile_ir::Stmt> load_tile(const Operand& operand, const std::string& tile, int64_t width, const std::string& free_axis, Expr first, Expr extent,
                               const loop_ir::Reduce& reduce, const Substitution& batch_map, Expr depth) {
    std::string q = tile + ".q";
    Expr element = sym("t") + sym(q) * threads_;
    Expr k = floordiv(element, width);
    Expr position = mod(element, width);
    map_ = batch_map;
    map_[free_axis] = first + position;
    for (auto& [name, value] : unflatten(reduce.axes, sym("kb") + k)) map_[name] = value;
    tile_ir::Block inside = convert(operand.slice, Share::alone);
    inside.push_back(make(tile_ir::Store{tile, {k, position}, operand.value, {}, Combiner::set}));
    std::string none = tile + ".zero";
    tile_ir::Block body{make(zero(none, DType::f32)), make(tile_ir::Store{tile, {k, position}, none, {}, Combiner::set}),
                        make(tile_ir::If{{less(first + position, extent), less(sym("kb") + k, depth)}, std::move(inside)})};
    return make(tile_ir::For{axis(q, 0, step_ * width / threads_), std::move(body)});
  }

  const loop_ir::Kernel& kernel_;
  std::vector<loop_ir::Axis> outer_;
  const loop_ir::Block* inner_ = nullptr;
  Substitution map_;
  std::set<std::string> arrays_;

  struct Match {
    Operand a;
    Operand b;
    const loop_ir::Reduce* reduce = nullptr;
    std::string m, n;
  };
  std::optional<Match> matched_;  ///< the kernel as a contraction

  // The schedule.
  int64_t threads_ = kThreads;
  int64_t tile_m_ = kTile, tile_n_ = kTile, step_ = kStep;
  int64_t per_m_ = kPerThread, per_n_ = kPerThread;

  int64_t shared_bytes_ = 0;
};

}  // namespace

Schedule propose_gpu(const loop_ir::Kernel& kernel, const PassContext& /*ctx*/) { return GpuScheduler(kernel).propose(); }

tile_ir::Kernel apply_gpu(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& /*ctx*/) {
  return GpuScheduler(kernel).apply(schedule);
}

}  // namespace deplo
