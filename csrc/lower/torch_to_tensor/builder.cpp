#include "lower/torch_to_tensor/builder.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/tf32.h"
#include "lower/torch_to_tensor/common.h"
#include "lower/torch_to_tensor/sizes.h"
#include "tensor_ir/rewrite.h"

namespace deplo::rules {
namespace {

using tensor_ir::IndexMap;
using tensor_ir::Op;

Scalar literal(DType dtype, double value) {
  if (is_float(dtype)) return Scalar::of_float(dtype, value);
  if (dtype == DType::boolean) return Scalar::of_int(dtype, value != 0);
  return Scalar::of_int(dtype, static_cast<int64_t>(value));
}

size_t wrapped(int64_t dim, size_t rank, std::string_view what) {
  auto r = static_cast<int64_t>(rank);
  DEPLO_ASSERT(dim >= -r && dim < r, "[{}] dimension {} of a tensor with {} dimensions", what, dim, r);
  return static_cast<size_t>(dim < 0 ? dim + r : dim);
}

}  // namespace

Expr axis(int64_t d) { return Expr::symbol("i" + std::to_string(d)); }

std::string Builder::fresh() {
  while (true) {
    std::string name = "%v" + std::to_string(next_++);
    if (!reserved_.count(name)) return name;
  }
}

Value Builder::add(Ref<Op> op) {
  ops_.push_back(std::move(op));
  return ops_.back()->results[0];
}

std::vector<Ref<Op>> Builder::take() { return std::move(ops_); }

void Builder::locate_since(size_t mark, Location location) {
  for (size_t k = mark; k < ops_.size() && location.known(); ++k) {
    Op op = *ops_[k];
    op.location = location;
    ops_[k] = std::make_shared<const Op>(std::move(op));
  }
}

void Builder::rename_since(size_t mark, const std::map<std::string, std::string>& names) {
  if (names.empty()) return;
  const tensor_ir::Renaming renaming(names.begin(), names.end());
  for (size_t k = mark; k < ops_.size(); ++k) ops_[k] = tensor_ir::rename_all(ops_[k], renaming);
}

Value Builder::constant(DType dtype, const Shape& shape, double value) { return constant(shape, literal(dtype, value)); }

Value Builder::constant_int(DType dtype, const Shape& shape, int64_t value) {
  return constant(shape, is_float(dtype) ? Scalar::of_float(dtype, static_cast<double>(value)) : Scalar::of_int(dtype, value));
}

Value Builder::constant(const Shape& shape, const Scalar& value) {
  Value made = add(tensor_ir::make_constant(fresh(), {value.dtype, shape}, value, provenance_));
  constants_[made.name] = value;
  return made;
}

Value Builder::index(DType dtype, const Shape& shape, Expr value) {
  if (auto c = value.as_constant()) return constant_int(dtype, shape, *c);
  return add(tensor_ir::make_index(fresh(), {dtype, shape}, axis_names(shape.size()), simplified(value, shape), provenance_));
}

std::optional<Expr> Builder::index_of(const Value& v) const {
  for (const Ref<Op>& op : ops_) {
    if (op->results[0].name != v.name) continue;
    const auto* made = std::get_if<tensor_ir::Elementwise>(&op->node);
    return made && made->fn == Fn::index ? std::optional(made->index) : std::nullopt;
  }
  return std::nullopt;
}

bool Builder::same_size(Expr a, Expr b) const { return provably_equal(a, b, known_); }

bool Builder::same_shape(const Shape& a, const Shape& b) const {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [&](Expr x, Expr y) { return same_size(x, y); });
}

Shape Builder::common_shape(const Shape& a, const Shape& b) const {
  const Shape& longer = a.size() >= b.size() ? a : b;
  const Shape& shorter = a.size() >= b.size() ? b : a;
  Shape shape = longer;
  for (size_t d = 0; d < shorter.size(); ++d) {
    Expr& x = shape[longer.size() - shorter.size() + d];
    Expr y = shorter[d];
    if (same_size(x, y) || y.is(1)) continue;
    DEPLO_SUPPORT(x.is(1), "sizes {} and {} are not provably equal", print(x), print(y));
    x = y;
  }
  return shape;
}

Expr Builder::simplified(Expr e, const Shape& shape) const {
  Ranges ranges = known_.ranges;
  for (size_t d = 0; d < shape.size(); ++d) ranges["i" + std::to_string(d)] = axis_range(shape[d]);
  return simplify(e, ranges);
}

Value Builder::apply(Fn fn, const std::vector<Value>& operands) {
  Shape shape;
  for (const Value& v : operands) shape = common_shape(shape, v.type.shape);
  std::vector<Value> spread;
  for (const Value& v : operands) spread.push_back(broadcast(v, shape));
  Signature signature = info(fn).signature;
  DType dtype = operands.at(signature == Signature::select ? 1 : 0).type.dtype;
  if (signature == Signature::predicate) dtype = DType::boolean;
  return add(tensor_ir::make_elementwise(fresh(), fn, dtype, spread, provenance_));
}

Value Builder::apply(Fn fn, const Value& a, double value) { return apply(fn, {a, constant(a.type.dtype, a.type.shape, value)}); }

Value Builder::cast(const Value& a, DType dtype) {
  if (a.type.dtype == dtype) return a;
  return add(tensor_ir::make_elementwise(fresh(), Fn::cast, dtype, {a}, provenance_));
}

Value Builder::bitcast(const Value& a, DType dtype) {
  if (a.type.dtype == dtype) return a;
  return add(tensor_ir::make_elementwise(fresh(), Fn::bitcast, dtype, {a}, provenance_));
}

std::vector<Value> Builder::reduce_many(Combiner combiner, const std::vector<Value>& operands, std::vector<int64_t> axes, bool keepdim) {
  const Shape shape = operands.at(0).type.shape;
  std::set<int> reduced;
  for (int64_t d : axes) reduced.insert(static_cast<int>(wrapped(d, shape.size(), to_string(combiner))));
  if (axes.empty())
    for (size_t d = 0; d < shape.size(); ++d) reduced.insert(static_cast<int>(d));
  std::vector<std::string> names;
  for (int k = 0; k < deplo::result_count(combiner); ++k) names.push_back(fresh());
  auto op = tensor_ir::make_reduction(std::move(names), combiner, operands, {reduced.begin(), reduced.end()}, provenance_);
  ops_.push_back(op);
  if (!keepdim || reduced.empty()) return op->results;
  Shape kept;
  std::vector<Expr> index;
  for (size_t d = 0; d < shape.size(); ++d) {
    bool gone = reduced.count(static_cast<int>(d)) > 0;
    kept.push_back(gone ? Expr(1) : shape[d]);
    if (!gone) index.push_back(axis(static_cast<int64_t>(d)));
  }
  std::vector<Value> results;
  for (const Value& v : op->results) results.push_back(remap(v, kept, index));
  return results;
}

Value Builder::reduce(Combiner combiner, const Value& a, std::vector<int64_t> axes, bool keepdim) {
  return reduce_many(combiner, {a}, std::move(axes), keepdim).at(0);
}

std::vector<Value> Builder::scan(Combiner combiner, const std::vector<Value>& operands, int64_t dim) {
  auto d = static_cast<int>(wrapped(dim, operands.at(0).type.shape.size(), to_string(combiner)));
  std::vector<std::string> names;
  for (int k = 0; k < deplo::result_count(combiner); ++k) names.push_back(fresh());
  ops_.push_back(tensor_ir::make_scan(std::move(names), combiner, operands, d, provenance_));
  return ops_.back()->results;
}

Value Builder::map(const TensorType& type, IndexMap map) { return add(tensor_ir::make_map({fresh(), type}, std::move(map), provenance_)); }

Value Builder::remap(const Value& a, const Shape& shape, const std::vector<Expr>& index) {
  DEPLO_ASSERT(index.size() == a.type.shape.size(), "{} has {} dimensions, indexed with {}", a.name, a.type.shape.size(), index.size());
  bool identity = shape == a.type.shape;
  IndexMap map;
  map.axes = axis_names(shape.size());
  tensor_ir::Source source{a.name, {}, {}};
  for (size_t d = 0; d < index.size(); ++d) {
    source.index.push_back(simplified(index[d], shape));
    identity = identity && (source.index.back() == axis(static_cast<int64_t>(d)) || (shape[d].is(1) && source.index.back().is(0)));
  }
  if (identity) return a;
  // The same literal at every point; index expressions are always in range.
  if (auto it = constants_.find(a.name); it != constants_.end()) return constant(shape, it->second);
  map.sources.push_back(std::move(source));
  return this->map({a.type.dtype, shape}, std::move(map));
}

Value Builder::broadcast(const Value& a, const Shape& shape) {
  const Shape& from = a.type.shape;
  if (from == shape) return a;
  DEPLO_ASSERT(from.size() <= shape.size(), "[broadcast] {} dimensions do not fit {}", from.size(), shape.size());
  size_t shift = shape.size() - from.size();
  std::vector<Expr> index;
  for (size_t d = 0; d < from.size(); ++d) {
    bool same = same_size(from[d], shape[d + shift]);
    DEPLO_SUPPORT(same || from[d].is(1), "size {} does not provably broadcast to {}", print(from[d]), print(shape[d + shift]));
    index.push_back(same && !from[d].is(1) ? axis(static_cast<int64_t>(d + shift)) : Expr(0));
  }
  return remap(a, shape, index);
}

Value Builder::permute(const Value& a, const std::vector<int64_t>& dims) {
  size_t rank = a.type.shape.size();
  DEPLO_ASSERT(dims.size() == rank, "[permute] {} dims for {} dimensions", dims.size(), rank);
  Shape shape;
  std::vector<Expr> index(rank);
  for (size_t d = 0; d < rank; ++d) {
    size_t from = wrapped(dims[d], rank, "permute");
    shape.push_back(a.type.shape[from]);
    index[from] = axis(static_cast<int64_t>(d));
  }
  // Size-1 dimensions swapped with each other still need the map for its type.
  return remap(a, shape, index);
}

namespace {

/// Runs of dimensions of two shapes with equal products: [from0, from1) of one are [to0, to1) of the other.
struct Group {
  size_t from0, from1, to0, to1;
};

// Pairs dimensions from the right. A run ends where both products agree; when it is unknown which one is smaller the rest is one run.
std::vector<Group> matched_groups(const Shape& from, const Shape& to) {
  std::vector<Group> groups;
  size_t f = from.size();
  size_t t = to.size();
  while (f > 0 || t > 0) {
    Group g{f, f, t, t};
    Expr pf = 1;
    Expr pt = 1;
    do {
      auto cf = pf.as_constant();
      auto ct = pt.as_constant();
      bool from_smaller = cf && ct ? *cf < *ct : exact_quotient(pt, pf).has_value();
      bool to_smaller = cf && ct ? *ct < *cf : exact_quotient(pf, pt).has_value();
      if (pf == pt) from_smaller = !(to_smaller = f == 0);
      if (!from_smaller && !to_smaller) {
        for (; f > 0; --f) pf = pf * from[f - 1];
        for (; t > 0; --t) pt = pt * to[t - 1];
        break;
      }
      if (f == 0 && t == 0) break;
      bool take_from = t == 0 || (from_smaller && f > 0);
      if (take_from)
        pf = pf * from[--f];
      else
        pt = pt * to[--t];
    } while (pf != pt);
    g.from0 = f;
    g.to0 = t;
    groups.push_back(g);
  }
  return groups;
}

}  // namespace

Value Builder::reshape(const Value& a, const Shape& shape) {
  const Shape& from = a.type.shape;
  if (from == shape) return a;
  auto is_empty = [](const Shape& s) { return std::any_of(s.begin(), s.end(), [](Expr e) { return e.is(0); }); };
  if (is_empty(shape) || is_empty(from)) return constant(a.type.dtype, shape, 0);
  DEPLO_SUPPORT(same_size(product(from), product(shape)), "a reshape whose sizes {} and {} are not provably equal", print(product(from)),
                print(product(shape)));
  std::vector<Expr> index(from.size());
  for (const Group& g : matched_groups(from, shape)) {
    Expr linear = 0;
    for (size_t d = g.to0; d < g.to1; ++d) linear = linear * shape[d] + (shape[d].is(1) ? Expr(0) : axis(static_cast<int64_t>(d)));
    linear = simplified(linear, shape);
    // The outermost dimension of a run that is larger than 1 needs no mod.
    size_t outermost = g.from0;
    while (outermost < g.from1 && from[outermost].is(1)) ++outermost;
    Expr stride = 1;
    for (size_t d = g.from1; d-- > g.from0;) {
      Expr e = from[d].is(1) ? Expr(0) : simplified(floordiv(linear, stride), shape);
      index[d] = d == outermost ? e : simplified(mod(e, from[d]), shape);
      stride = stride * from[d];
    }
  }
  return remap(a, shape, index);
}

Value Builder::unsqueeze(const Value& a, int64_t dim) {
  Shape shape = a.type.shape;
  size_t at = wrapped(dim, shape.size() + 1, "unsqueeze");
  shape.insert(shape.begin() + static_cast<long>(at), Expr(1));
  std::vector<Expr> index;
  for (size_t d = 0; d < shape.size(); ++d)
    if (d != at) index.push_back(axis(static_cast<int64_t>(d)));
  return remap(a, shape, index);
}

Value Builder::squeeze(const Value& a, int64_t dim) {
  Shape shape = a.type.shape;
  size_t at = wrapped(dim, shape.size(), "squeeze");
  DEPLO_ASSERT(same_size(shape[at], 1), "[squeeze] dimension {} has size {}", dim, print(shape[at]));
  shape.erase(shape.begin() + static_cast<long>(at));
  std::vector<Expr> index;
  for (size_t d = 0; d < shape.size(); ++d) index.push_back(axis(static_cast<int64_t>(d)));
  index.insert(index.begin() + static_cast<long>(at), Expr(0));
  return remap(a, shape, index);
}

Value Builder::slice(const Value& a, int64_t dim, Expr start, Expr length, Expr step) {
  Shape shape = a.type.shape;
  size_t at = wrapped(dim, shape.size(), "slice");
  shape[at] = length;
  std::vector<Expr> index;
  for (size_t d = 0; d < shape.size(); ++d) index.push_back(axis(static_cast<int64_t>(d)));
  index[at] = start + index[at] * step;
  return remap(a, shape, index);
}

Value Builder::concatenate(const std::vector<Value>& parts, int64_t dim) {
  DEPLO_ASSERT(!parts.empty(), "[concatenate] nothing to concatenate");
  size_t at = wrapped(dim, parts[0].type.shape.size(), "concatenate");
  Expr i = axis(static_cast<int64_t>(at));
  Expr offset = 0;
  Expr total = 0;
  for (const Value& part : parts) total = total + part.type.shape[at];
  if (parts.size() == 1) return parts[0];
  IndexMap map;
  map.axes = axis_names(parts[0].type.shape.size());
  map.fill = literal(parts[0].type.dtype, 0);
  for (const Value& part : parts) {
    tensor_ir::Source source{part.name, {}, {}};
    for (size_t d = 0; d < map.axes.size(); ++d) source.index.push_back(axis(static_cast<int64_t>(d)));
    source.index[at] = i - offset;
    if (!offset.is(0)) source.guard.push_back(less_equal(offset, i));
    offset = offset + part.type.shape[at];
    if (offset != total) source.guard.push_back(less(i, offset));
    map.sources.push_back(std::move(source));
  }
  Shape shape = parts[0].type.shape;
  shape[at] = total;
  return this->map({parts[0].type.dtype, shape}, std::move(map));
}

Value Builder::pad(const Value& a, const std::vector<Expr>& before, const std::vector<Expr>& after, double fill) {
  return pad(a, before, after, literal(a.type.dtype, fill));
}

Value Builder::pad(const Value& a, const std::vector<Expr>& before, const std::vector<Expr>& after, Scalar fill) {
  Shape shape = a.type.shape;
  IndexMap map;
  map.axes = axis_names(shape.size());
  map.fill = fill;
  tensor_ir::Source source{a.name, {}, {}};
  bool same = true;
  for (size_t d = 0; d < shape.size(); ++d) {
    Expr i = axis(static_cast<int64_t>(d)) - before.at(d);
    source.index.push_back(i);
    if (!provably_nonnegative(Expr(0) - before[d], known_.ranges)) source.guard.push_back(less_equal(0, i));
    if (!provably_nonnegative(Expr(0) - after.at(d), known_.ranges)) source.guard.push_back(less(i, shape[d]));
    same = same && before[d].is(0) && after[d].is(0);
    shape[d] = shape[d] + before[d] + after[d];
  }
  if (same) return a;
  map.sources.push_back(std::move(source));
  return this->map({a.type.dtype, shape}, std::move(map));
}

Value Builder::scatter(tensor_ir::Scatter scatter, const Value& base) {
  scatter.base = base.name;
  return add(tensor_ir::make_scatter({fresh(), base.type}, std::move(scatter), provenance_));
}

/// By its bits, as analysis/tf32 finds it again (`base/tf32.h`); the carry of a NaN would leave its exponent.
Value Builder::rounded_to_tf32(const Value& a) {
  const Shape& shape = a.type.shape;
  const Value up = apply(Fn::add, {bitcast(a, DType::i32), constant_int(DType::i32, shape, kTf32Half)});
  const Value cut = apply(Fn::bit_and, {up, constant_int(DType::i32, shape, kTf32Mask)});
  return apply(Fn::where, {apply(Fn::ne, {a, a}), a, bitcast(cut, DType::f32)});
}

Value Builder::contract(const Value& a, const Value& b, int reduce_axes, DType result) {
  auto rank = static_cast<int64_t>(a.type.shape.size());
  std::vector<int64_t> axes;
  for (int64_t d = rank - reduce_axes; d < rank; ++d) axes.push_back(d);
  const bool rounds = tf32_ && reduce_axes > 0 && a.type.dtype == DType::f32 && b.type.dtype == DType::f32;
  const auto factor = [&](const Value& v) { return rounds ? rounded_to_tf32(v) : as_compute(*this, v); };
  Value products = apply(Fn::mul, {factor(a), factor(b)});
  if (reduce_axes == 0) return cast(products, result);
  return cast(reduce(Combiner::sum, products, axes, false), result);
}

std::vector<Value> Builder::library(std::string op, std::vector<std::pair<std::string, Attribute>> arguments, const std::vector<TensorType>& results,
                                    std::string reason) {
  std::vector<Value> values;
  tensor_ir::Library node{std::move(op), std::move(arguments), std::move(reason), {}, {}};
  for (const TensorType& type : results) {
    values.push_back({fresh(), type});
    node.strides.push_back(torch_ir::default_strides(type.shape));
  }
  ops_.push_back(tensor_ir::make_library(values, std::move(node), provenance_));
  return values;
}

Value as_compute(Builder& b, const Value& v) { return b.cast(v, compute_type(v.type.dtype)); }

}  // namespace deplo::rules
