#include "passes/loop/sum_in_integers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "analysis/contraction.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;
using analysis::AxisClass;
using analysis::Contraction;
using analysis::ContractionOperand;

constexpr int64_t kStep = 4;  // bytes of a word, that are multiplied together
constexpr int64_t kMostProduct = 255 * 128;
constexpr int64_t kMostSum = (int64_t{1} << 31) - 1;
constexpr double kMostZeroPoint = 256;
constexpr double kMostPadding = 1.34;  // of an axis of taps, up to whole words: 3 to 4, 7 to 8
constexpr int64_t kWidestBorder = 4;   // times as long as the dimension

int64_t round_to_words(int64_t n) { return (n + kStep - 1) / kStep * kStep; }

/// (code - zero points) * scales.
struct Factor {
  Load code;
  struct ZeroPoint {
    std::string value;
    bool added = false;
  };
  std::vector<ZeroPoint> zeros;
  std::vector<std::string> scales;
};

/// The values of a kernel, and which of them vary in a reduction.
class Values {
 public:
  Values(const Block& kernel, const Reduce& reduce) {
    visit(kernel, [&](const Stmt& stmt, const auto&) {
      const auto* let = std::get_if<Let>(&stmt.node);
      const auto* load = std::get_if<Load>(&stmt.node);
      if (let) lets_[let->name] = let;
      if (load) loads_[load->name] = load;
      if (const auto* sum = std::get_if<Reduce>(&stmt.node))
        for (size_t i = 0; i < sum->results.size(); ++i) others_[sum->results[i]] = sum->dtypes[i];
    });
    for (const Axis& axis : reduce.axes) varying_.insert(axis.name);
    for (const auto& stmt : reduce.body) {
      const auto* let = std::get_if<Let>(&stmt->node);
      const auto* load = std::get_if<Load>(&stmt->node);
      const std::string& name = let ? let->name : load ? load->name : "";
      if (name.empty()) continue;
      inside_[name] = stmt;
      if (let ? varies(*let) : varies(*load)) varying_.insert(name);
    }
  }

  bool varies(const std::string& value) const { return varying_.count(value) > 0; }
  const Let* let(const std::string& value) const { return found(lets_, value); }
  const Load* load(const std::string& value) const { return found(loads_, value); }

  std::optional<DType> dtype(const std::string& value) const {
    if (const Let* l = let(value)) return l->dtype;
    if (const Load* l = load(value)) return l->dtype;
    auto it = others_.find(value);
    return it == others_.end() ? std::nullopt : std::optional(it->second);
  }

  /// The number that a value is, through casts.
  std::optional<double> constant(const std::string& value) const {
    const Let* l = let(value);
    if (l && l->fn == Fn::cast) return constant(l->operands[0]);
    return l && l->fn == Fn::constant ? std::optional(l->literal.as_double()) : std::nullopt;
  }

  /// The statements of the reduction that make these values, none of which varies in it.
  Block made_inside(const Reduce& reduce, std::set<std::string> wanted) const {
    Block out;
    for (size_t i = reduce.body.size(); i-- > 0;) {
      const auto* let = std::get_if<Let>(&reduce.body[i]->node);
      const auto* load = std::get_if<Load>(&reduce.body[i]->node);
      if ((!let && !load) || wanted.count(let ? let->name : load->name) == 0) continue;
      if (let) {
        wanted.insert(let->operands.begin(), let->operands.end());
        collect_symbols(let->index, wanted);
      } else {
        for (const Expr& e : load->index) collect_symbols(e, wanted);
        for (const Cond& c : load->guard) collect_symbols(c.expr, wanted);
      }
      out.insert(out.begin(), reduce.body[i]);
    }
    return out;
  }

  bool is_inside(const std::string& value) const { return inside_.count(value) > 0; }

 private:
  template <class T>
  static const T* found(const std::map<std::string, const T*>& all, const std::string& value) {
    auto it = all.find(value);
    return it == all.end() ? nullptr : it->second;
  }
  bool varies(Expr e) const {
    return std::any_of(varying_.begin(), varying_.end(), [&](const auto& name) { return uses(e, name); });
  }
  bool varies(const Let& let) const {
    return varies(let.index) || std::any_of(let.operands.begin(), let.operands.end(), [&](const auto& o) { return varies(o); });
  }
  bool varies(const Load& load) const {
    return std::any_of(load.index.begin(), load.index.end(), [&](Expr e) { return varies(e); }) ||
           std::any_of(load.guard.begin(), load.guard.end(), [&](const Cond& c) { return varies(c.expr); });
  }

  std::map<std::string, const Let*> lets_;
  std::map<std::string, const Load*> loads_;
  std::map<std::string, DType> others_;
  std::map<std::string, Ref<Stmt>> inside_;
  std::set<std::string> varying_;
};

std::optional<Factor> factor_of(const std::string& value, const Values& values) {
  Factor out;
  std::string at = value;
  while (true) {
    if (const Load* load = values.load(at)) {
      if (load->dtype != DType::i8 && load->dtype != DType::u8) return std::nullopt;
      // Its place is one of axes and symbols alone, so that sums of the bytes are kernels of their own.
      std::set<std::string> read;
      for (const Expr& e : load->index) collect_symbols(e, read);
      for (const Cond& c : load->guard) collect_symbols(c.expr, read);
      if (std::any_of(read.begin(), read.end(), [&](const auto& name) { return values.dtype(name).has_value(); })) return std::nullopt;
      out.code = *load;
      return out;
    }
    const Let* let = values.let(at);
    if (!let) return std::nullopt;
    if (let->fn == Fn::cast) {
      const auto from = values.dtype(let->operands[0]);
      // Differences of bytes and zero points are whole numbers that float32 holds.
      const bool whole = from && !is_float(*from) && *from != DType::boolean;
      if (!whole || (let->dtype != DType::f32 && let->dtype != DType::i64)) return std::nullopt;
      at = let->operands[0];
      continue;
    }
    if (let->dtype != DType::f32 && let->dtype != DType::i64) return std::nullopt;
    if (let->fn != Fn::mul && let->fn != Fn::sub && let->fn != Fn::add) return std::nullopt;
    const bool second = !values.varies(let->operands[0]);
    const std::string& other = let->operands[second ? 0 : 1];
    if (values.varies(other) || (second && !values.varies(let->operands[1])) || (second && let->fn == Fn::sub)) return std::nullopt;
    if (let->fn == Fn::mul) {
      if (!out.zeros.empty() || let->dtype != DType::f32) return std::nullopt;
      out.scales.push_back(other);
    } else {
      out.zeros.push_back({other, let->fn == Fn::add});
    }
    at = let->operands[second ? 1 : 0];
  }
}

/// The sum of the zero points if all are small whole numbers.
std::optional<int64_t> known_zero(const Factor& factor, const Values& values) {
  double sum = 0;
  for (const auto& zero : factor.zeros) {
    const auto number = values.constant(zero.value);
    if (!number || *number != std::floor(*number) || std::abs(*number) > kMostZeroPoint) return std::nullopt;
    sum += zero.added ? -*number : *number;
  }
  return std::abs(sum) <= kMostZeroPoint ? std::optional(static_cast<int64_t>(sum)) : std::nullopt;
}

struct Summer {
  ProgramGraph graph;

  bool is_static(const std::string& buffer) const {
    const Buffer* b = graph.find_buffer(buffer);
    return b && b->kind == BufferKind::input && b->is_static && !graph.is_versioned(buffer);
  }

  /// What is read of each dimension of the rows, beyond its ends where a guard's fill stands for that.
  struct Border {
    std::vector<int64_t> lo, hi;
  };

  struct Sum {
    const Reduce* reduce = nullptr;
    Factor rows, lanes;  ///< those of the static operand are lanes
    std::vector<Axis> row_axes, lane_axes, summed;
    int64_t depth = 1;
    std::optional<Border> border;  ///< of a copy of the rows that words of the last summed axis need
  };

  std::optional<Sum> sum_of(const Contraction& c, const Block& body) const {
    if (c.dtype != DType::f32) return std::nullopt;
    const Values values(body, *c.reduce);
    auto a = factor_of(c.a.value, values);
    auto b = factor_of(c.b.value, values);
    if (!a || !b || is_static(a->code.buffer) == is_static(b->code.buffer)) return std::nullopt;
    const bool swapped = is_static(a->code.buffer);
    Sum sum{c.reduce, swapped ? *b : *a, swapped ? *a : *b, {}, {}, c.reduce->axes, 1, {}};
    if (sum.rows.code.dtype == DType::u8 && sum.lanes.code.dtype == DType::u8) return std::nullopt;
    const ContractionOperand& rows = swapped ? c.b : c.a;
    const ContractionOperand& lanes = swapped ? c.a : c.b;
    for (const auto& axis : c.axes) {
      if (axis.kind == AxisClass::k || axis.kind == AxisClass::other) continue;
      if (rows.axes.count(axis.name)) sum.row_axes.push_back({axis.name, axis.extent});
      if (lanes.axes.count(axis.name)) {
        if (!axis.extent.is_constant()) return std::nullopt;
        sum.lane_axes.push_back({axis.name, axis.extent});
      }
    }
    for (const Axis& axis : sum.summed) {
      if (!axis.extent.is_constant()) return std::nullopt;
      sum.depth *= axis.extent.value();
      if (sum.depth * kMostProduct > kMostSum) return std::nullopt;
    }
    if (sum.depth == 0) return std::nullopt;
    // What are windows' taps goes outside of what may lie in memory as it is.
    auto own = [&](const Axis& axis) {
      const auto& index = sum.rows.code.index;
      return std::find(index.begin(), index.end(), Expr::symbol(axis.name)) != index.end();
    };
    std::vector<Axis> ordered = sum.summed;
    std::stable_sort(ordered.begin(), ordered.end(), [&](const Axis& x, const Axis& y) { return own(x) < own(y); });
    const bool whole = sum.depth % kStep == 0 && (ordered.size() == 1 || (own(ordered.back()) && ordered.back().extent.value() % kStep == 0));
    if (whole)
      sum.summed = ordered;
    else if (!add_border(sum))
      return std::nullopt;
    return sum;
  }

  /// Rows of few channels: where a window's taps lie along memory, and a few more of them whose weights are 0 fill words, sets the border of a copy
  /// in which they exist, and puts their axis last.
  bool add_border(Sum& sum) const {
    const Buffer& buffer = graph.buffer(sum.rows.code.buffer);
    const auto& index = sum.rows.code.index;
    if (buffer.strides != contiguous_strides(buffer.shape) || index.empty() || !sum.lanes.code.guard.empty()) return false;
    Border border;
    for (size_t d = 0; d < index.size(); ++d) {
      Expr rest = index[d];
      int64_t lo = 0;
      int64_t hi = 0;
      for (const auto& axes : {sum.row_axes, sum.summed}) {
        for (const Axis& axis : axes) {
          const auto step = linear_coefficient(index[d], axis.name);
          if (!step || !step->is_constant() || !axis.extent.is_constant()) return false;
          const int64_t far = step->value() * (axis.extent.value() - 1);
          (far < 0 ? lo : hi) += far;
          rest = substitute(rest, {{axis.name, Expr(0)}});
        }
      }
      if (!rest.is_constant() || !buffer.shape[d].is_constant()) return false;
      border.lo.push_back(lo + rest.value());
      border.hi.push_back(hi + rest.value());
      if (border.hi.back() - border.lo.back() > kWidestBorder * buffer.shape[d].value()) return false;
    }
    // The guard says nothing but that this is an element.
    for (const Cond& c : sum.rows.code.guard) {
      bool is_end = false;
      for (size_t d = 0; d < index.size(); ++d)
        is_end = is_end || (c.kind == Cond::Kind::ge0 && (c.expr == index[d] || c.expr == buffer.shape[d] - 1 - index[d]));
      if (!is_end) return false;
    }
    auto last = std::find_if(sum.summed.begin(), sum.summed.end(), [&](const Axis& axis) {
      const auto step = linear_coefficient(index.back(), axis.name);
      return step && step->is(1) && round_to_words(axis.extent.value()) <= kMostPadding * axis.extent.value();
    });
    if (last == sum.summed.end()) return false;
    std::rotate(last, last + 1, sum.summed.end());
    border.hi.back() += round_to_words(sum.summed.back().extent.value()) - sum.summed.back().extent.value();
    sum.border = std::move(border);
    return true;
  }

  /// The loads of a sum whose rows get a border, which a kernel of its own copies, and whose last axis ends with a word.
  void copy_with_border(Sum& sum, size_t like) {
    const Load& code = sum.rows.code;
    const std::vector<Expr> shape = graph.buffer(code.buffer).shape;
    Names names;
    std::vector<Axis> axes;
    Load from = code;
    from.name = names.fresh("v0");
    from.guard.clear();
    std::vector<Expr> place;
    Load to = code;
    to.guard.clear();
    for (size_t d = 0; d < shape.size(); ++d) {
      axes.push_back({names.fresh("i0"), Expr(sum.border->hi[d] - sum.border->lo[d] + 1)});
      place.push_back(Expr::symbol(axes.back().name));
      from.index[d] = place.back() + sum.border->lo[d];
      if (sum.border->lo[d] < 0) from.guard.push_back({Cond::Kind::ge0, from.index[d]});
      if (sum.border->hi[d] >= shape[d].value()) from.guard.push_back({Cond::Kind::ge0, shape[d] - 1 - from.index[d]});
      to.index[d] = code.index[d] - sum.border->lo[d];
    }
    if (!from.guard.empty() && code.guard.empty()) from.fill = zero_of(code.dtype);
    std::vector<Expr> extents;
    for (const Axis& axis : axes) extents.push_back(axis.extent);
    to.buffer = graph.add_buffer("bordered0", code.dtype, extents);
    Body body(names);
    body.append(make_stmt(from));
    body.store(to.buffer, place, from.name);
    graph.add_kernel(make_nest(axes, body.take()), like);
    sum.rows.code = std::move(to);
    Axis& last = sum.summed.back();
    sum.lanes.code.guard.push_back({Cond::Kind::ge0, last.extent - 1 - Expr::symbol(last.name)});
    sum.lanes.code.fill = zero_of(sum.lanes.code.dtype);
    last.extent = round_to_words(last.extent.value());
  }

  /// Whether the innermost dimension runs along an axis of the lanes, or may be laid so.
  bool stores_along(const Store& store, const Sum& sum) const {
    auto is_lane = [&](Expr index) {
      return std::any_of(sum.lane_axes.begin(), sum.lane_axes.end(), [&](const Axis& axis) { return index == Expr::symbol(axis.name); });
    };
    const Buffer* buffer = graph.find_buffer(store.buffer);
    if (!buffer || store.index.empty()) return false;
    for (size_t d = 0; d < store.index.size(); ++d)
      if (buffer->strides[d].is(1) && is_lane(store.index[d])) return true;
    const bool movable = buffer->kind == BufferKind::temp && !graph.is_versioned(store.buffer) && !graph.is_returned(store.buffer);
    return movable && buffer->strides == contiguous_strides(buffer->shape) && std::any_of(store.index.begin(), store.index.end(), is_lane);
  }

  /// All sums of a kernel, if its nest holds nothing but them and straight-line statements.
  std::vector<Sum> sums_of(const Block& body) const {
    const Nest nest = peel(body);
    size_t reductions = 0;
    for (const auto& stmt : nest.body) {
      if (std::holds_alternative<Reduce>(stmt->node)) ++reductions;
      if (std::holds_alternative<For>(stmt->node) || std::holds_alternative<Scan>(stmt->node) || std::holds_alternative<Local>(stmt->node)) return {};
    }
    Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = body;
    std::vector<Sum> sums;
    if (reductions == 0) return sums;
    for (const Contraction& c : analysis::find_contractions(kernel)) {
      auto sum = sum_of(c, body);
      if (!sum) return {};
      for (const auto& stmt : nest.body)
        if (const auto* store = std::get_if<Store>(&stmt->node); store && !stores_along(*store, *sum)) return {};
      // The reduction as this body has it, not the copy that was analysed.
      for (const auto& stmt : nest.body)
        if (const auto* reduce = std::get_if<Reduce>(&stmt->node); reduce && reduce->results == sum->reduce->results) sum->reduce = reduce;
      sums.push_back(std::move(*sum));
    }
    return sums.size() == reductions ? sums : std::vector<Sum>{};
  }

  /// A kernel of its own: sum(code) * factor + offset for each point of the axes, over as many steps as `share` of the outermost summed axis leaves.
  std::string sum_of_codes(const Load& code, const std::vector<Axis>& axes, std::vector<Axis> summed, int64_t factor, int64_t offset, Expr share,
                           size_t like) {
    std::vector<Expr> shape;
    std::vector<Expr> index;
    for (const Axis& axis : axes) {
      shape.push_back(axis.extent);
      index.push_back(Expr::symbol(axis.name));
    }
    const std::string buffer = graph.add_buffer("sums0", DType::i32, shape);
    Kernel around;
    Names names;
    names.reserve(code.name);
    for (const Axis& axis : axes) names.reserve(axis.name);
    for (const Axis& axis : summed) names.reserve(axis.name);
    Body inner(names);
    inner.append(make_stmt(code));
    const std::string wide = inner.cast(code.name, code.dtype, DType::i32);
    summed.front().extent = summed.front().extent * share;
    const std::string result = names.fresh("r0");
    Body body(names);
    body.append(make_stmt(Reduce{{result}, {DType::i32}, Combiner::sum, {wide}, summed, inner.take()}));
    std::string value = result;
    if (factor != 1) value = body.let(Fn::mul, DType::i32, {value, body.constant(Scalar::of_int(DType::i32, factor))});
    if (offset != 0) value = body.let(Fn::add, DType::i32, {value, body.constant(Scalar::of_int(DType::i32, offset))});
    body.store(buffer, index, value);
    graph.add_kernel(make_nest(axes, body.take()), like);
    return buffer;
  }

  /// A symbol that is 1 where all zero points are 0; nothing where that is not known before the call.
  std::optional<std::string> all_zero(const Factor& factor, const Values& values) {
    if (factor.zeros.size() != 1) return std::nullopt;
    std::string value = factor.zeros[0].value;
    while (const Let* let = values.let(value)) {
      if (let->fn != Fn::cast) return std::nullopt;
      value = let->operands[0];
    }
    const Load* load = values.load(value);
    if (!load || !load->guard.empty() || is_float(load->dtype) || load->dtype == DType::boolean || !is_static(load->buffer)) return std::nullopt;
    return graph.add_fact(load->buffer, 0, 0);
  }

  /// The zero points' sum as float32.
  static std::string zero_value(const Factor& factor, const Values& values, Body& body) {
    std::string sum;
    for (const auto& zero : factor.zeros) {
      std::string value = body.cast(zero.value, *values.dtype(zero.value), DType::f32);
      if (zero.added) value = body.let(Fn::neg, DType::f32, {value});
      sum = sum.empty() ? value : body.let(Fn::add, DType::f32, {sum, value});
    }
    return sum;
  }

  /// Zero points of static lanes as a buffer of float32, made by a kernel of its own; nothing where they are no elements of a buffer.
  std::optional<std::string> zeros_of(const Sum& sum, const Values& values, size_t like) {
    if (sum.lanes.zeros.size() != 1 || sum.lanes.zeros[0].added) return std::nullopt;
    std::string value = sum.lanes.zeros[0].value;
    while (const Let* let = values.let(value)) {
      if (let->fn != Fn::cast) return std::nullopt;
      value = let->operands[0];
    }
    const Load* load = values.load(value);
    if (!load || !load->guard.empty() || !is_static(load->buffer)) return std::nullopt;
    std::set<std::string> read;
    for (const Expr& e : load->index) collect_symbols(e, read);
    std::vector<Expr> shape;
    Names names;
    names.reserve(load->name);
    for (const Axis& axis : sum.lane_axes) {
      shape.push_back(axis.extent);
      names.reserve(axis.name);
      read.erase(axis.name);
    }
    if (!read.empty()) return std::nullopt;
    std::string buffer = graph.add_buffer("zeros0", DType::f32, shape);
    Body body(names);
    body.append(make_stmt(*load));
    body.store(buffer, places(sum.lane_axes), body.cast(load->name, load->dtype, DType::f32));
    graph.add_kernel(make_nest(sum.lane_axes, body.take()), like);
    return buffer;
  }

  static std::vector<Expr> places(const std::vector<Axis>& axes) {
    std::vector<Expr> out;
    for (const Axis& axis : axes) out.push_back(Expr::symbol(axis.name));
    return out;
  }

  /// What takes the reduction's place.
  Block in_integers(const Sum& sum, const Values& values, Names& names, size_t at) {
    Body body(names);
    std::set<std::string> wanted;
    for (const Factor* factor : {&sum.rows, &sum.lanes}) {
      wanted.insert(factor->scales.begin(), factor->scales.end());
      for (const auto& zero : factor->zeros) wanted.insert(zero.value);
    }
    body.append(values.made_inside(*sum.reduce, wanted));
    Sum words = sum;
    if (sum.border) copy_with_border(words, at);
    Body inner(names);
    inner.append(make_stmt(words.rows.code));
    const std::string a = inner.cast(words.rows.code.name, words.rows.code.dtype, DType::i32);
    inner.append(make_stmt(words.lanes.code));
    const std::string b = inner.cast(words.lanes.code.name, words.lanes.code.dtype, DType::i32);
    const std::string product = inner.let(Fn::mul, DType::i32, {a, b});
    const std::string whole = names.fresh(sum.reduce->results[0]);
    body.append(make_stmt(Reduce{{whole}, {DType::i32}, Combiner::sum, {product}, words.summed, inner.take()}));
    const auto rows_zero = known_zero(sum.rows, values);
    const auto lanes_zero = known_zero(sum.lanes, values);
    std::string value = whole;
    if (rows_zero && *rows_zero != 0) {
      const std::string sums = sum_of_codes(sum.lanes.code, sum.lane_axes, sum.summed, -*rows_zero, 0, 1, at);
      value = body.let(Fn::add, DType::i32, {value, body.load(sums, DType::i32, places(sum.lane_axes))});
    }
    value = body.cast(value, DType::i32, DType::f32);
    std::string rows_value;
    if (!rows_zero) {
      rows_value = zero_value(sum.rows, values, body);
      const std::string sums = sum_of_codes(sum.lanes.code, sum.lane_axes, sum.summed, 1, 0, 1, at);
      const std::string wide = body.cast(body.load(sums, DType::i32, places(sum.lane_axes)), DType::i32, DType::f32);
      value = body.let(Fn::sub, DType::f32, {value, body.let(Fn::mul, DType::f32, {rows_value, wide})});
    }
    if (!lanes_zero || *lanes_zero != 0) {
      const auto fact = all_zero(sum.lanes, values);
      const Expr share = fact ? Expr(1) - Expr::symbol(*fact) : Expr(1);
      const int64_t offset = rows_zero ? -*rows_zero * sum.depth : 0;
      const std::string sums = sum_of_codes(sum.rows.code, sum.row_axes, sum.summed, 1, offset, share, at);
      std::string wide = body.cast(body.load(sums, DType::i32, places(sum.row_axes)), DType::i32, DType::f32);
      if (!rows_zero) {
        const std::string depth = body.constant(Scalar::of_float(DType::f32, static_cast<double>(sum.depth)));
        wide = body.let(Fn::sub, DType::f32, {wide, body.let(Fn::mul, DType::f32, {depth, rows_value})});
      }
      const auto zeros = zeros_of(sum, values, at);
      const std::string zero = zeros ? body.load(*zeros, DType::f32, places(sum.lane_axes)) : zero_value(sum.lanes, values, body);
      value = body.let(Fn::sub, DType::f32, {value, body.let(Fn::mul, DType::f32, {zero, wide})});
    }
    std::string scale;
    for (const Factor* factor : {&sum.rows, &sum.lanes})
      for (const std::string& s : factor->scales) scale = scale.empty() ? s : body.let(Fn::mul, DType::f32, {scale, s});
    if (!scale.empty()) body.let(Fn::mul, DType::f32, {value, scale});
    Block out = body.take();
    Let last = std::get<Let>(out.back()->node);  // a cast at least
    last.name = sum.reduce->results[0];
    out.back() = make_stmt(std::move(last));
    return out;
  }

  /// With a loop over the only row of what is not static, so that sums are those of rows and lanes; unchanged where there is none.
  Block with_row(const Block& body) const {
    Nest nest = peel(body);
    Kernel kernel;
    kernel.body = body;
    Names names;
    names.reserve(kernel);
    const std::string row = names.fresh("i0");
    bool found = false;
    for (auto& stmt : nest.body) {
      const auto* reduce = std::get_if<Reduce>(&stmt->node);
      if (!reduce) continue;
      Reduce copy = *reduce;
      for (auto& inner : copy.body) {
        const auto* load = std::get_if<Load>(&inner->node);
        const Buffer* buffer = load ? graph.program().find_buffer(load->buffer) : nullptr;
        if (!buffer || is_static(load->buffer)) continue;
        for (size_t d = 0; d < load->index.size(); ++d) {
          if (!load->index[d].is(0) || !buffer->shape[d].is(1)) continue;
          Load with = *load;
          with.index[d] = Expr::symbol(row);
          inner = make_stmt(std::move(with));
          found = true;
          break;
        }
      }
      stmt = make_stmt(std::move(copy));
    }
    if (!found) return body;
    nest.axes.insert(nest.axes.begin(), {row, 1});
    return make_nest(nest.axes, nest.body);
  }

  void convert(size_t at) {
    Block before = graph.nodes()[at].body;
    std::vector<Sum> sums = sums_of(before);
    if (sums.empty()) {
      before = with_row(before);
      sums = sums_of(before);
    }
    if (sums.empty()) return;
    Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = before;
    Names names;
    names.reserve(kernel);
    for (const Buffer& buffer : graph.program().buffers) names.reserve(buffer.name);
    std::map<std::string, Block> instead;
    for (const Sum& sum : sums) {
      const Values values(before, *sum.reduce);
      instead[sum.reduce->results[0]] = in_integers(sum, values, names, at);
    }
    Block body = rewrite(before, [&](const Ref<Stmt>& stmt) -> Block {
      const auto* reduce = std::get_if<Reduce>(&stmt->node);
      return reduce ? instead.at(reduce->results[0]) : Block{stmt};
    });
    graph.set_body(at, clean(body, graph.program().symbols));
  }

  Module run() {
    for (size_t at = 0, count = graph.nodes().size(); at < count; ++at)
      if (graph.nodes()[at].alive && graph.nodes()[at].is_kernel) convert(at);
    return graph.finish();
  }
};

}  // namespace

Module sum_in_integers(Module module, const PassContext& context) {
  if (!target_of(context).multiplies_bytes(context.target) || context.training) return module;
  return Summer{ProgramGraph(std::move(module))}.run();
}

}  // namespace deplo
