#include "target/cpu/cost/tree.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <unordered_map>

#include "analysis/cost.h"
#include "base/dtype.h"
#include "lower/tile_to_kernel/plan.h"
#include "tile_ir/rewrite.h"

namespace deplo::cpu_cost {
namespace {

using tile_ir::Axis;
using tile_ir::Block;
using tile_ir::For;
using tile_ir::If;
using tile_ir::LoopKind;
using tile_ir::Reduce;
using tile_ir::Scan;
using tile_ir::Stmt;

constexpr double kLatency = 4;         ///< of a multiply-add
constexpr double kScalar = 0.5;        ///< an instruction on one element
constexpr double kTurn = 1;            ///< counting and branching
constexpr double kEnter = 4;           ///< a loop's first and last turn, which the core does not foresee
constexpr double kCombine = 12;        ///< the parts of a reduction, at its end
constexpr double kGather = 1;          ///< an element that is loaded alone into a vector
constexpr double kScatter = 4;         ///< an element that is stored alone
constexpr double kTranspose = 10;      ///< exchanges for each vector of a square
constexpr double kOnlineSoftmax = 24;  ///< an element of an online softmax
constexpr double kWelford = 8;
constexpr int64_t kLookedAt = 128;  ///< turns of a parallel loop
constexpr size_t kKinds = 8;        ///< of these

/// Bounds and guards inside of a block, and the names on which they depend.
struct Shapes {
  std::vector<Expr> bounds;
  std::set<std::string> names;
};

Shapes shapes_of(const Block& block) {
  Shapes made;
  auto add = [&](Expr e) {
    if (e.is_constant() || std::find(made.bounds.begin(), made.bounds.end(), e) != made.bounds.end()) return;
    made.bounds.push_back(e);
    collect_symbols(e, made.names);
  };
  auto add_axis = [&](const Axis& axis) {
    add(axis.lo);
    add(axis.hi);
  };
  tile_ir::visit_all(block, [&](const Stmt& stmt) {
    std::visit(Overloaded{[&](const For& s) { add_axis(s.axis); },
                          [&](const Reduce& s) {
                            for (const Axis& axis : s.axes) add_axis(axis);
                          },
                          [&](const Scan& s) { add_axis(s.axes[0]); },
                          [&](const If& s) {
                            for (const Cond& cond : s.guard) add(cond.expr);
                          },
                          [](const auto&) {}},
               stmt.node);
  });
  return made;
}

class Builder {
 public:
  Builder(const tile_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes, const PassContext& context, const Ratios& ratios, int threads)
      : kernel_(kernel), context_(context), ratios_(ratios), threads_(threads), plan_(tile_to_kernel::make_plan(kernel, context)), values_(sizes) {}

  Tree run() {
    for (const auto& param : kernel_.params) add_buffer(param.name, param.dtype, param.shape, param.strides, false);
    tree_.body = block(kernel_.body);
    return std::move(tree_);
  }

 private:
  struct Open {
    int id = 0;
    std::string name;
    int64_t lo = 0;
    int64_t step = 1;
    int64_t turns = 1;
    bool lanes = false;
    Expr begin = 0;                   ///< what lo was computed from
    std::set<std::string> follows{};  ///< loops around with which it begins elsewhere
  };

  double value(Expr e) {
    if (e.is_constant()) return static_cast<double>(e.value());
    return static_cast<double>(integer(e));
  }

  /// What is computed from elements counts as 0.
  int64_t integer(Expr e) {
    if (e.is_constant()) return e.value();
    for (const std::string& name : symbols_of(e)) values_.try_emplace(name, 0);
    return evaluate(e, values_);
  }

  void add_buffer(const std::string& name, DType dtype, const std::vector<Expr>& shape, const std::vector<Expr>& strides, bool local) {
    BufferSize made;
    made.bytes = size_of(dtype);
    made.local = local;
    for (Expr e : shape) made.shape.push_back(std::max<int64_t>(1, integer(e)));
    if (strides.empty()) {
      made.strides.assign(shape.size(), 1);
      for (size_t d = shape.size(); d-- > 1;) made.strides[d - 1] = made.strides[d] * made.shape[d];
    } else {
      for (Expr e : strides) made.strides.push_back(integer(e));
    }
    buffers_[name] = static_cast<int>(tree_.buffers.size());
    tree_.buffers.push_back(std::move(made));
  }

  bool in_lanes() const { return width_ > 1; }

  Body block(const Block& stmts) {
    Body body;
    for (const auto& stmt : stmts) std::visit([&](const auto& s) { add(body, s); }, stmt->node);
    return body;
  }

  // ---- leaves -------------------------------------------------------------------------------------------------------------------------------------

  void add(Body& body, const tile_ir::Let& s) {
    if (s.fn == Fn::constant) return;
    const double times = is_varying(s.operands) || s.fn == Fn::index ? 1 : 0;
    double cost = analysis::cost_of(s.fn);
    if (s.fn == Fn::dot2) cost = ratios_.dot2;
    if (s.fn == Fn::dot4) cost = ratios_.dot4;
    if (s.fn == Fn::fma) cost = 1;
    if (!in_lanes() || times == 0) {
      body.arithmetic += kScalar * cost;
    } else {
      body.arithmetic += cost * parts(s.dtype);
      varying_.insert(s.name);
    }
  }

  /// Vectors that hold the lanes of one turn in a dtype.
  double parts(DType dtype) const {
    return std::max(1.0, static_cast<double>(width_) * static_cast<double>(size_of(dtype)) / static_cast<double>(context_.target.vector_bytes));
  }

  bool is_varying(const std::vector<std::string>& operands) const {
    return std::any_of(operands.begin(), operands.end(), [&](const auto& name) { return varying_.count(name) > 0; });
  }

  void add(Body& body, const tile_ir::Load& s) {
    const bool varies = varies_in_lanes(s.index);
    if (varies) varying_.insert(s.name);
    if (plan_.in_registers(s.buffer)) {
      if (in_lanes()) varying_.insert(s.name);
      return;
    }
    access(body, s.buffer, s.index, false, body.loads, s.dtype, varies);
  }

  void add(Body& body, const tile_ir::Store& s) {
    if (plan_.in_registers(s.buffer)) {
      summed_ += 1;
      return;
    }
    const BufferSize& buffer = tree_.buffers[static_cast<size_t>(buffers_.at(s.buffer))];
    const DType dtype = buffer.bytes == 8 ? DType::f64 : buffer.bytes == 4 ? DType::f32 : buffer.bytes == 2 ? DType::bf16 : DType::i8;
    access(body, s.buffer, s.index, true, body.stores, dtype, varies_in_lanes(s.index));
    if (s.combiner != Combiner::set) body.loads += 1;
  }

  void add(Body& body, const For& s) { loop(body, s.axis, &s, s.body, 0, {}); }

  void add(Body& body, const Reduce& s) {
    double each = 1;
    if (s.combiner == Combiner::online_softmax) each = kOnlineSoftmax;
    if (s.combiner == Combiner::welford) each = kWelford;
    nested(body, s, 0, each);
    body.overhead += kCombine;
  }

  void add(Body& body, const Scan& s) {
    Block both = s.body;
    both.insert(both.end(), s.then.begin(), s.then.end());
    loop(body, s.axes[0], &s, both, 1, {});
  }

  void add(Body& body, const If& s) {
    bool known = true;  // once loops are unrolled
    bool holds = true;
    for (const Cond& cond : s.guard) {
      const std::set<std::string> names = symbols_of(cond.expr);
      for (const std::string& name : names) values_.try_emplace(name, 0);
      known = known && std::all_of(names.begin(), names.end(), [&](const auto& name) {
                return std::any_of(open_.begin(), open_.end(), [&](const Open& o) { return o.name == name && unrolled_.count(o.id); });
              });
      holds = holds && evaluate(cond, values_);
    }
    if (!known) body.overhead += kTurn;
    if (!holds) return;
    Body inner = block(s.body);
    append(body, std::move(inner));
  }

  static void append(Body& body, Body&& inner) {
    body.arithmetic += inner.arithmetic;
    body.loads += inner.loads;
    body.stores += inner.stores;
    body.latency += inner.latency;
    body.overhead += inner.overhead;
    for (auto& access : inner.accesses) body.accesses.push_back(std::move(access));
    for (auto& loop : inner.loops) body.loops.push_back(std::move(loop));
  }

  void add(Body&, const tile_ir::Alloc& s) {
    if (!plan_.in_registers(s.name)) add_buffer(s.name, s.dtype, s.shape, {}, true);
  }
  void add(Body& body, const tile_ir::Prefetch&) { body.loads += kScalar; }
  void add(Body& body, const tile_ir::Check&) { body.arithmetic += kScalar; }
  void add(Body& body, const tile_ir::Matrix& s) {
    // Sixteen rows and lanes of a matrix unit's register take sixteen turns of it.
    constexpr double kTile = tile_ir::kMatrixSide;
    if (s.kind == tile_ir::Matrix::Kind::zero) return;
    body.arithmetic += s.kind == tile_ir::Matrix::Kind::multiply ? kTile : 2 * kTile;
    if (s.kind == tile_ir::Matrix::Kind::multiply) {
      access(body, s.a.buffer, s.a.index, false, body.loads, s.bytes.value_or(DType::bf16), false);
      access(body, s.b.buffer, s.b.index, false, body.loads, s.bytes ? DType::i32 : DType::bf16, false);
    } else {
      access(body, s.a.buffer, s.a.index, s.kind == tile_ir::Matrix::Kind::store, body.stores, DType::f32, false);
    }
  }
  void add(Body&, const tile_ir::Barrier&) {}
  void add(Body&, const tile_ir::CopyAsync&) {}
  void add(Body&, const tile_ir::CopyGroup&) {}
  void add(Body&, const tile_ir::LoadMatrix&) {}
  void add(Body&, const tile_ir::JoinMatrix&) {}
  void add(Body&, const tile_ir::Mma&) {}
  void add(Body&, const tile_ir::MultiplyTiles&) {}
  void add(Body&, const tile_ir::MultiplyGroup&) {}

  bool varies_in_lanes(const std::vector<Expr>& index) const {
    if (!in_lanes()) return false;
    for (const Expr& e : index) {
      if (uses(e, lanes_axis_)) return true;
      for (const std::string& name : symbols_of(e))
        if (varying_.count(name)) return true;
    }
    return false;
  }

  // ---- accesses -----------------------------------------------------------------------------------------------------------------------------------

  void access(Body& body, const std::string& name, const std::vector<Expr>& index, bool writes, double& count, DType dtype, bool varies) {
    Access made;
    made.buffer = buffers_.at(name);
    made.writes = writes;
    made.dims.resize(index.size());
    const BufferSize& buffer = tree_.buffers[static_cast<size_t>(made.buffer)];
    bool scattered = false;
    double share = 1;         // what does not change as unrolled loops or vectors turn is loaded once
    bool neighbours = false;  // an unrolled loop goes to the next element
    std::set<int> moving;
    for (size_t d = 0; d < index.size(); ++d) {
      const std::set<std::string> names = symbols_of(index[d]);
      const bool computed = is_computed(names);
      made.first.push_back(integer(index[d]));
      for (size_t at = 0; at < open_.size(); ++at) {
        const Open& o = open_[at];
        Move move;
        if (computed) {
          // An element says where: anywhere.
          move.places = std::min(static_cast<double>(o.turns), static_cast<double>(buffer.shape[d]));
          move.span = static_cast<double>(buffer.shape[d]) - 1;
          scattered = scattered || o.lanes;
        } else if (depends(names, at)) {
          move = moved(index[d], at);
          if (unrolled_.count(o.id) && buffer.strides[d] == 1 && move.span == move.places - 1) neighbours = true;
        }
        if (move.places > 1) {
          made.dims[d].emplace(o.id, move);
          moving.insert(o.id);
        }
      }
    }
    const double stride = in_lanes() && varies && !scattered ? lanes_stride(index, buffer) : 0;
    for (const Open& o : open_)
      if (!moving.count(o.id) && (unrolled_.count(o.id) || (o.lanes && !varies))) share /= o.lanes ? lanes_turns_ : static_cast<double>(o.turns);
    body.accesses.push_back(std::move(made));
    if (!in_lanes() || !varies) {
      count += kScalar * share;
    } else if (!writes && stride > 1 && stride * static_cast<double>(buffer.bytes) * width_ <= context_.target.vector_bytes && !scattered) {
      count += share / stride;  // parts of pairs come with one load
    } else if (stride >= 0 && stride <= 1 && !scattered) {
      count += parts(dtype) * share;
    } else if (neighbours && !scattered) {
      count += parts(dtype) * share;
      body.arithmetic += kTranspose * share;
    } else {
      body.arithmetic += (writes ? kScatter : kGather) * width_ * share;
      count += kScalar * width_ * share;
    }
  }

  /// Elements between those of neighbouring lanes; below 0 where they are not evenly apart.
  double lanes_stride(const std::vector<Expr>& index, const BufferSize& buffer) {
    const Open& o = open_.back().lanes ? open_.back() : *std::find_if(open_.rbegin(), open_.rend(), [](const Open& x) { return x.lanes; });
    const int64_t kept = values_[o.name];
    auto place = [&](int64_t lane) {
      values_[o.name] = o.lo + lane * o.step;
      int64_t sum = 0;
      for (size_t d = 0; d < index.size(); ++d) sum += integer(index[d]) * buffer.strides[d];
      return sum;
    };
    const int64_t last = std::max<int64_t>(1, std::min<int64_t>(o.turns, width_) - 1);
    const int64_t first = place(0);
    const int64_t each = place(1) - first;
    const bool even = place(last) - first == each * last;
    values_[o.name] = kept;
    return even ? std::abs(static_cast<double>(each)) : -1;
  }

  /// Whether an element says where an access goes.
  bool is_computed(const std::set<std::string>& names) const {
    return std::any_of(names.begin(), names.end(), [&](const auto& n) {
      return kernel_.symbols.count(n) == 0 && std::none_of(open_.begin(), open_.end(), [&](const Open& o) { return o.name == n; });
    });
  }

  /// Whether an expression changes as an open loop turns: by itself, or because a loop inside begins elsewhere.
  bool depends(const std::set<std::string>& names, size_t at) const {
    const std::string& name = open_[at].name;
    if (names.count(name)) return true;
    return std::any_of(open_.begin() + static_cast<std::ptrdiff_t>(at) + 1, open_.end(),
                       [&](const Open& inner) { return inner.follows.count(name) && names.count(inner.name); });
  }

  /// What a dimension does over the turns of an open loop, the others where they are.
  Move moved(Expr e, size_t place) {
    const Open& o = open_[place];
    const auto kept = values_;
    const int64_t count = o.turns;
    auto at = [&](int64_t turn) {
      values_[o.name] = o.lo + turn * o.step;
      for (size_t i = place + 1; i < open_.size(); ++i)
        if (open_[i].follows.count(o.name)) values_[open_[i].name] = integer(open_[i].begin);
      return integer(e);
    };
    Move move;
    const int64_t first = at(0);
    const int64_t last = at(count - 1);
    const int64_t second = count > 1 ? at(1) : first;
    const int64_t middle = at(count / 2);
    const int64_t each = second - first;
    if (last - first == each * (count - 1) && middle - first == each * (count / 2)) {
      move.places = each == 0 ? 1 : static_cast<double>(count);
      move.span = std::abs(static_cast<double>(last - first));
    } else {
      constexpr int64_t kLooked = 48;
      std::set<int64_t> seen;
      const int64_t looked = std::min(count, kLooked);
      // Neighbours side by side, or a part of them and the last: quotients and remainders repeat.
      for (int64_t i = 0; i < looked; ++i) seen.insert(at(count <= kLooked ? i : i * (count - 1) / (looked - 1)));
      move.places = static_cast<double>(seen.size());
      if (count > kLooked && seen.size() == static_cast<size_t>(looked)) move.places = static_cast<double>(count);
      move.span = static_cast<double>(*seen.rbegin() - *seen.begin());
    }
    values_ = kept;
    return move;
  }

  // ---- loops --------------------------------------------------------------------------------------------------------------------------------------

  /// Axes of a reduction, one in the other.
  void nested(Body& body, const Reduce& s, size_t depth, double each) {
    const Axis& axis = s.axes[depth];
    if (depth + 1 == s.axes.size()) {
      loop(body, axis, &s, s.body, each, axis);
      return;
    }
    loop_of(body, axis, 1, shapes(&s, s.body), 0, 0, [&] {
      Body inner;
      nested(inner, s, depth + 1, each);
      return inner;
    });
  }

  void loop(Body& body, const Axis& axis, const void* node, const Block& stmts, double combine, const std::optional<Axis>& reduces) {
    int width = axis.kind == LoopKind::lanes ? plan_.width(node) : 1;
    const bool sums = combine > 0;
    double latency = 0;
    if (sums) latency = kLatency / static_cast<double>(std::max<int64_t>(1, axis.by));
    if (reduces && reduces->kind != LoopKind::lanes) latency = kLatency / static_cast<double>(in_flight_);
    loop_of(body, axis, width, shapes(node, stmts), combine, latency, [&] { return block(stmts); });
  }

  const Shapes& shapes(const void* node, const Block& stmts) {
    auto [it, fresh] = shapes_.try_emplace(node);
    if (fresh) it->second = shapes_of(stmts);
    return it->second;
  }

  /// Turns of an open loop that have other bounds inside, with how many there are of each kind. Blocks of several axes in one loop end at any
  /// distance from one another: most turns are looked at.
  std::map<std::vector<int64_t>, std::pair<int64_t, double>> kinds_of_turns(const Axis& axis, int64_t lo, int64_t step, int64_t count,
                                                                            const Shapes& shapes) {
    std::vector<Expr> bounds;
    for (Expr e : shapes.bounds)
      if (uses(e, axis.name)) bounds.push_back(e);
    std::map<std::vector<int64_t>, std::pair<int64_t, double>> kinds;
    const int64_t looked = std::min(count, kLookedAt);
    for (int64_t i = 0; i < looked; ++i) {
      const int64_t turn = i * count / looked;
      values_[axis.name] = lo + turn * step;
      std::vector<int64_t> kind;
      for (Expr e : bounds) kind.push_back(integer(e));
      auto& [first, weight] = kinds.try_emplace(std::move(kind), turn, 0).first->second;
      weight += static_cast<double>(count) / static_cast<double>(looked);
    }
    return kinds;
  }

  template <class Make>
  void loop_of(Body& body, const Axis& axis, int width, const Shapes& shapes, double combine, double latency, const Make& make) {
    const int64_t lo = integer(axis.lo);
    const int64_t hi = integer(axis.hi);
    const int64_t step = std::max<int64_t>(1, axis.step);
    int64_t count = hi > lo ? (hi - lo + step - 1) / step : 0;
    if (count == 0) return;
    if (axis.kind == LoopKind::parallel) count = share_of_thread(count);
    const bool lanes = axis.kind == LoopKind::lanes && width > 1;
    Loop loop;
    loop.id = next_id_++;
    loop.flat = axis.kind == LoopKind::unroll;
    loop.turns = static_cast<double>(lanes ? (count + width - 1) / width : count);
    // Registers of a block hold all of its lanes at once.
    const bool unroll = axis.kind == LoopKind::unroll;
    if (unroll) unrolled_.insert(loop.id);
    Open opened{loop.id, axis.name, lo, step, count, lanes, axis.lo, symbols_of(axis.lo)};
    for (const Open& o : open_)
      if (opened.follows.count(o.name)) opened.follows.insert(o.follows.begin(), o.follows.end());
    open_.push_back(std::move(opened));
    tree_.turns[loop.id] = static_cast<double>(count);
    const int outer_width = width_;
    const std::string outer_axis = lanes_axis_;
    const int64_t outer_flight = in_flight_;
    if (lanes) {
      width_ = width;
      lanes_axis_ = axis.name;
      in_flight_ = std::max<int64_t>(1, axis.by);
      lanes_turns_ = loop.turns;
    }
    const double turns = loop.turns;
    auto sample = [&](int64_t turn, double weight) {
      values_[axis.name] = lo + turn * step;
      const double summed = summed_;
      summed_ = 0;
      Body inner = make();
      if (combine > 0) {
        inner.arithmetic += combine * (lanes ? 1 : kScalar);
        inner.latency += latency;
      }
      // One sum after the other: too few of them do not hide how long each takes.
      if (axis.kind == LoopKind::serial && summed_ > 0 && is_innermost(inner)) inner.latency += kLatency;
      if (!unroll && !(lanes && turns <= 4)) inner.overhead += kTurn / static_cast<double>(std::max<int64_t>(1, axis.by));
      summed_ = unroll || lanes ? summed + summed_ : summed;
      loop.samples.push_back({weight, std::move(inner)});
    };
    const bool differs = shapes.names.count(axis.name) > 0 && !lanes;
    if (!differs || count == 1) {
      sample(0, turns);
    } else if (count <= (unroll ? 16 : 3)) {
      for (int64_t i = 0; i < count; ++i) sample(i, 1);
    } else if (axis.kind == LoopKind::parallel) {
      const auto kinds = kinds_of_turns(axis, lo, step, count, shapes);
      // Too many kinds (triangles): some of them, evenly.
      const size_t stride = (kinds.size() + kKinds - 1) / kKinds;
      double weight = 0;
      size_t at = 0;
      for (const auto& [kind, turn] : kinds) {
        weight += turn.second;
        ++at;
        if (at % stride == 0 || at == kinds.size()) {
          sample(turn.first, weight);
          weight = 0;
        }
      }
    } else {
      sample(0, 1);
      sample(count / 2, turns - 2);
      sample(count - 1, 1);
    }
    width_ = outer_width;
    lanes_axis_ = outer_axis;
    in_flight_ = outer_flight;
    open_.pop_back();
    values_.erase(axis.name);
    loop.flat = loop.flat || (lanes && loop.turns <= 4);
    if (!loop.flat) body.overhead += kEnter;
    body.loops.push_back(std::move(loop));
  }

  /// Turns of a parallel loop of which the thread that has most of them takes its share.
  int64_t share_of_thread(int64_t turns) {
    const auto pieces = std::clamp<int64_t>(static_cast<int64_t>(value(kernel_.chunks)), 1, turns);
    const int64_t threads = std::min<int64_t>(threads_, pieces);
    tree_.threads = static_cast<int>(std::max<int64_t>(tree_.threads, threads));
    const int64_t most = (pieces + threads - 1) / threads;
    return std::min(turns, (most * turns + pieces - 1) / pieces);
  }

  /// Whether all loops inside are unrolled or vectors: sums stay in registers.
  bool is_innermost(const Body& body) const {
    for (const Loop& loop : body.loops) {
      if (!loop.flat) return false;
      for (const Sample& sample : loop.samples)
        if (!is_innermost(sample.body)) return false;
    }
    return true;
  }

  const tile_ir::Kernel& kernel_;
  const PassContext& context_;
  const Ratios ratios_;
  const int threads_;
  tile_to_kernel::Plan plan_;
  std::map<std::string, int64_t> values_;
  Tree tree_;
  std::unordered_map<std::string, int> buffers_;
  std::unordered_map<const void*, Shapes> shapes_;
  std::vector<Open> open_;
  std::set<int> unrolled_;
  std::set<std::string> varying_;
  std::string lanes_axis_;
  double summed_ = 0;
  int width_ = 1;
  double lanes_turns_ = 1;  ///< vectors of the lanes loop around
  int64_t in_flight_ = 1;   ///< vectors of the lanes loop around
  int next_id_ = 0;
};

}  // namespace

Tree make_tree(const tile_ir::Kernel& kernel, const std::map<std::string, int64_t>& sizes, const PassContext& context, const Ratios& ratios,
               int threads) {
  return Builder(kernel, sizes, context, ratios, threads).run();
}

}  // namespace deplo::cpu_cost
