#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"
#include "lower/torch_to_tensor/formula.h"
#include "lower/torch_to_tensor/pointwise.h"

namespace deplo::rules {
namespace {

using Values = std::vector<Value>;

int64_t dim_argument(const Call& call, std::string_view name, int64_t rank, std::optional<int64_t> fallback = std::nullopt) {
  int64_t dim = call.integer(name, fallback);
  int64_t bound = std::max<int64_t>(rank, 1);
  DEPLO_SUPPORT(dim >= -bound && dim < bound, "{} {} of {} dimensions", name, dim, rank);
  return dim < 0 ? dim + bound : dim;
}

std::vector<Expr> identity_index(int64_t rank) {
  std::vector<Expr> index;
  for (int64_t d = 0; d < rank; ++d) index.push_back(axis(d));
  return index;
}

tensor_ir::IndexMap new_map(int64_t rank, DType dtype) {
  tensor_ir::IndexMap map;
  for (int64_t d = 0; d < rank; ++d) map.axes.push_back(axis(d).name());
  map.fill = {dtype, 0, 0};
  return map;
}

Values identity(Builder&, const Call& call) { return {call.tensor("self")}; }

// The same elements in row-major order.
Values reshape(Builder& b, const Call& call) {
  call.ignore("size");
  call.ignore("shape");
  return {b.reshape(call.tensor("self"), call.result().shape)};
}

Values squeeze(Builder& b, const Call& call) {
  call.ignore("dim");
  return {b.reshape(call.tensor("self"), call.result().shape)};
}

Values view_dtype(Builder& b, const Call& call) {
  call.ignore("dtype");
  Value x = call.tensor("self");
  DType dtype = call.result().dtype;
  DEPLO_SUPPORT(size_of(dtype) == size_of(x.type.dtype), "a view of {} as {}", to_string(x.type.dtype), to_string(dtype));
  // A byte of bool is 0 or 1; one that was an integer may be any, and keeps its bits.
  DEPLO_SUPPORT(dtype != DType::boolean || x.type.dtype == DType::boolean, "a view of {} as bool", to_string(x.type.dtype));
  return {x.type.dtype == DType::boolean ? b.cast(x, dtype) : b.bitcast(x, dtype)};
}

Values expand(Builder& b, const Call& call) {
  call.ignore("size");
  call.ignore("implicit");
  return {b.broadcast(call.tensor("self"), call.result().shape)};
}

Values narrow(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t dim = dim_argument(call, "dim", rank_of(x));
  call.ignore("length");
  std::vector<Expr> index = identity_index(rank_of(x));
  std::optional<int64_t> start = call.size("start").as_constant();
  DEPLO_SUPPORT(start && *start >= 0, "a start that counts from the end");
  index[static_cast<size_t>(dim)] = axis(dim) + *start;
  return {b.remap(x, call.result().shape, index)};
}

Values permute(Builder& b, const Call& call) { return {b.permute(call.tensor("self"), call.integers("dims"))}; }

Value swap_dims(Builder& b, const Value& x, int64_t d0, int64_t d1) {
  std::vector<int64_t> dims(x.type.shape.size());
  std::iota(dims.begin(), dims.end(), 0);
  if (!dims.empty()) std::swap(dims[static_cast<size_t>(d0)], dims[static_cast<size_t>(d1)]);
  return b.permute(x, dims);
}

Values transpose(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  return {swap_dims(b, x, dim_argument(call, "dim0", rank_of(x)), dim_argument(call, "dim1", rank_of(x)))};
}

Values t(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  return {rank_of(x) < 2 ? x : swap_dims(b, x, 0, 1)};
}

/// A position as Python counts it, negative from the end; clamped to [0, size] if `clamps`.
Expr position(const Builder& b, Expr e, Expr size, bool clamps) {
  bool known_positive = provably_nonnegative(e, b.ranges());
  DEPLO_SUPPORT(known_positive || provably_nonnegative(Expr(-1) - e, b.ranges()), "position {} of unknown sign", print(e));
  Expr at = known_positive ? e : size + e;
  return simplify(clamps ? min(max(at, 0), size) : at, b.ranges());
}

Expr slice_start(const Builder& b, const Call& call, Expr size) { return position(b, call.size("start", Expr(0)), size, true); }

int64_t slice_step(const Call& call) {
  int64_t step = call.integer("step", 1);
  DEPLO_SUPPORT(step > 0, "step {}", step);
  return step;
}

Values slice(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t dim = dim_argument(call, "dim", rank_of(x), 0);
  call.ignore("end");  // the result's size says it
  Expr start = slice_start(b, call, x.type.shape.at(static_cast<size_t>(dim)));
  return {b.slice(x, dim, start, call.result().shape.at(static_cast<size_t>(dim)), slice_step(call))};
}

Value select_at(Builder& b, const Value& x, int64_t dim, Expr at) {
  Shape shape = x.type.shape;
  shape.erase(shape.begin() + dim);
  std::vector<Expr> index = identity_index(rank_of(x) - 1);
  index.insert(index.begin() + dim, at);
  return b.remap(x, shape, index);
}

Values select(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t dim = dim_argument(call, "dim", rank_of(x));
  return {select_at(b, x, dim, position(b, call.size("index"), x.type.shape.at(static_cast<size_t>(dim)), false))};
}

Values unsqueeze(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  return {b.unsqueeze(x, dim_argument(call, "dim", rank_of(x) + 1))};
}

// Consecutive pieces, as long as PyTorch made the results.
Values split(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  for (const char* name : {"split_size", "split_sizes"}) call.ignore(name);
  int64_t dim = dim_argument(call, "dim", rank_of(x), 0);
  Values parts;
  Expr offset = 0;
  for (int k = 0; k < call.result_count(); ++k) {
    Expr length = call.result(k).shape.at(static_cast<size_t>(dim));
    parts.push_back(b.slice(x, dim, offset, length, 1));
    offset = offset + length;
  }
  return parts;
}

Values unbind(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t dim = dim_argument(call, "dim", rank_of(x), 0);
  Values parts;
  for (int k = 0; k < call.result_count(); ++k) parts.push_back(select_at(b, x, dim, k));
  return parts;
}

// A 1-d tensor without elements joins anything.
Values cat(Builder& b, const Call& call) {
  Values parts;
  auto rank = static_cast<int64_t>(call.result().shape.size());
  for (const Value& part : call.tensors("tensors")) {
    bool empty = rank_of(part) == 1 && part.type.shape[0].is(0);
    if (!empty) parts.push_back(b.cast(part, call.result().dtype));
  }
  int64_t dim = dim_argument(call, "dim", rank, 0);
  if (parts.empty()) return {b.constant(call.result().dtype, call.result().shape, 0)};
  return {b.concatenate(parts, dim)};
}

Values stack(Builder& b, const Call& call) {
  int64_t dim = dim_argument(call, "dim", static_cast<int64_t>(call.result().shape.size()), 0);
  Values parts;
  for (const Value& part : call.tensors("tensors")) parts.push_back(b.unsqueeze(b.cast(part, call.result().dtype), dim));
  return {b.concatenate(parts, dim)};
}

Values flip(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  std::vector<Expr> index = identity_index(rank_of(x));
  std::set<size_t> dims;
  for (int64_t d : call.integers("dims")) dims.insert(static_cast<size_t>(d < 0 ? d + rank_of(x) : d));
  for (size_t d : dims)
    if (d < index.size()) index[d] = x.type.shape[d] - 1 - index[d];
  return {b.remap(x, x.type.shape, index)};
}

// out[i] = x[(i - shift) mod size]: along the contiguous dimension two affine pieces, where the split point is known; elsewhere one
// access, whose position all neighbours share.
Value rolled(Builder& b, const Value& x, size_t d, Expr shift) {
  bool contiguous = d + 1 >= x.type.shape.size();
  Expr size = x.type.shape.at(d);
  std::vector<Expr> index = identity_index(rank_of(x));
  auto s = shift.as_constant();
  auto n = size.as_constant();
  if (size.is(0)) return x;
  if (!s || !n) {
    bool small = s && provably_nonnegative(size - Expr(std::abs(*s)), b.ranges());
    if (!small || !contiguous) {
      index[d] = mod(index[d] - shift, size);
      return b.remap(x, x.type.shape, index);
    }
    shift = *s < 0 ? size + *s : shift;
  } else {
    shift = ((*s % *n) + *n) % *n;
  }
  if (shift.is(0)) return x;
  if (!contiguous) {
    index[d] = mod(index[d] - shift + size, size);
    return b.remap(x, x.type.shape, index);
  }
  tensor_ir::IndexMap map = new_map(rank_of(x), x.type.dtype);
  Expr i = axis(static_cast<int64_t>(d));
  index[d] = i - shift;
  map.sources.push_back({x.name, index, {less_equal(shift, i)}});
  index[d] = i - shift + size;
  map.sources.push_back({x.name, index, {less(i, shift)}});
  return b.map(x.type, std::move(map));
}

Values roll(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  std::vector<Expr> shifts = call.sizes("shifts");
  std::vector<int64_t> dims = call.integers("dims", std::vector<int64_t>{});
  if (dims.empty()) {
    DEPLO_SUPPORT(shifts.size() == 1, "{} shifts of a flattened tensor", shifts.size());
    Value flat = b.reshape(x, {product(x.type.shape)});
    return {b.reshape(rolled(b, flat, 0, shifts[0]), x.type.shape)};
  }
  DEPLO_SUPPORT(shifts.size() == dims.size(), "{} shifts for {} dims", shifts.size(), dims.size());
  for (size_t k = 0; k < dims.size(); ++k) x = rolled(b, x, static_cast<size_t>(dims[k] < 0 ? dims[k] + rank_of(x) : dims[k]), shifts[k]);
  return {x};
}

Values repeat(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  call.ignore("repeats");
  const Shape shape = call.result().shape;
  size_t shift = shape.size() - x.type.shape.size();
  std::vector<Expr> index;
  for (size_t d = 0; d < x.type.shape.size(); ++d) {
    Expr i = axis(static_cast<int64_t>(d + shift));
    Expr size = x.type.shape[d];
    if (size.is(0)) return {b.constant(x.type.dtype, shape, 0)};
    index.push_back(size.is(1) ? Expr(0) : b.same_size(size, shape[d + shift]) ? i : mod(i, size));
  }
  return {b.remap(x, shape, index)};
}

Values repeat_interleave(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Expr repeats = call.size("repeats");
  call.ignore("output_size");
  if (!call.has("dim")) x = b.reshape(x, {product(x.type.shape)});
  int64_t dim = dim_argument(call, "dim", rank_of(x), 0);
  if (repeats.is(0)) return {b.constant(x.type.dtype, call.result().shape, 0)};
  std::vector<Expr> index = identity_index(rank_of(x));
  index[static_cast<size_t>(dim)] = floordiv(axis(dim), repeats);
  return {b.remap(x, call.result().shape, index)};
}

Values unfold(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  if (rank_of(x) == 0) {
    for (const char* name : {"dimension", "size", "step"}) call.ignore(name);
    return {b.remap(x, call.result().shape, {})};
  }
  int64_t dim = dim_argument(call, "dimension", rank_of(x));
  call.ignore("size");
  std::vector<Expr> index = identity_index(rank_of(x));
  index[static_cast<size_t>(dim)] = axis(dim) * call.size("step") + axis(rank_of(x));
  return {b.remap(x, call.result().shape, index)};
}

struct Diagonal {
  int64_t dim1, dim2;
  Expr row, column;  ///< of the diagonal's element at i
};

Diagonal diagonal_arguments(const Call& call, int64_t rank, Expr i, int64_t default1, int64_t default2) {
  int64_t offset = call.integer("offset", 0);
  return {dim_argument(call, "dim1", rank, default1), dim_argument(call, "dim2", rank, default2), i + std::max<int64_t>(-offset, 0),
          i + std::max<int64_t>(offset, 0)};
}

Values diagonal(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Diagonal at = diagonal_arguments(call, rank_of(x), axis(rank_of(x) - 2), 0, 1);
  std::vector<Expr> index;
  for (int64_t d = 0, next = 0; d < rank_of(x); ++d) index.push_back(d == at.dim1 ? at.row : d == at.dim2 ? at.column : axis(next++));
  return {b.remap(x, call.result().shape, index)};
}

Values diag_embed(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t rank = rank_of(x) + 1;
  int64_t offset = call.integer("offset", 0);
  int64_t dim1 = dim_argument(call, "dim1", rank, -2);
  int64_t dim2 = dim_argument(call, "dim2", rank, -1);
  tensor_ir::IndexMap map = new_map(rank, x.type.dtype);
  tensor_ir::Source source{x.name, {}, {equal(axis(dim2), axis(dim1) + offset)}};
  for (int64_t d = 0; d < rank; ++d)
    if (d != dim1 && d != dim2) source.index.push_back(axis(d));
  source.index.push_back(offset >= 0 ? axis(dim1) : axis(dim2));
  map.sources.push_back(std::move(source));
  return {b.map(call.result(), std::move(map))};
}

Values constant_pad(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  std::vector<Expr> pads = call.sizes("pad");
  size_t rank = x.type.shape.size();
  DEPLO_SUPPORT(pads.size() % 2 == 0 && pads.size() / 2 <= rank, "{} pads for {} dimensions", pads.size(), rank);
  std::vector<Expr> before(rank, Expr(0));
  std::vector<Expr> after(rank, Expr(0));
  for (size_t k = 0; k < pads.size() / 2; ++k) {
    before[rank - 1 - k] = pads[2 * k];
    after[rank - 1 - k] = pads[2 * k + 1];
  }
  require_fit(call, "value", x.type.dtype);
  Scalar number = call.number("value", 0.0);
  Scalar fill = deplo::apply(Fn::cast, x.type.dtype, &number, Mode::typed, nullptr);
  return {b.pad(x, before, after, fill)};
}

// `inside` where its guard holds, else `around`.
Values overlay(Builder& b, const Value& around, tensor_ir::Source inside) {
  tensor_ir::IndexMap map = new_map(rank_of(around), around.type.dtype);
  map.sources.push_back(std::move(inside));
  map.sources.push_back({around.name, identity_index(rank_of(around)), {}});
  return {b.map(around.type, std::move(map))};
}

Values slice_scatter(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Value src = b.cast(call.tensor("src"), x.type.dtype);
  int64_t dim = dim_argument(call, "dim", rank_of(x), 0);
  auto d = static_cast<size_t>(dim);
  call.ignore("end");  // src has the size of the slice
  Expr start = slice_start(b, call, x.type.shape.at(d));
  int64_t step = slice_step(call);
  Shape expected = x.type.shape;
  expected[d] = src.type.shape.at(d);
  DEPLO_SUPPORT(b.same_shape(src.type.shape, expected), "a source that is not shaped as the slice");
  if (start.is(0) && step == 1 && b.same_size(expected[d], x.type.shape[d])) return {src};
  Expr i = axis(dim);
  tensor_ir::Source source{src.name, identity_index(rank_of(x)), {}};
  source.index[d] = step == 1 ? i - start : floordiv(i - start, step);
  if (!start.is(0)) source.guard.push_back(less_equal(start, i));
  source.guard.push_back(less(i, start + (expected[d] - 1) * step + 1));
  if (step != 1) source.guard.push_back(equal(mod(i - start, step), 0));
  return overlay(b, x, std::move(source));
}

Values select_scatter(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Value src = b.cast(call.tensor("src"), x.type.dtype);
  int64_t dim = dim_argument(call, "dim", rank_of(x));
  Expr at = position(b, call.size("index"), x.type.shape.at(static_cast<size_t>(dim)), false);
  tensor_ir::Source source{src.name, identity_index(rank_of(x)), {equal(axis(dim), at)}};
  source.index.erase(source.index.begin() + dim);
  return overlay(b, x, std::move(source));
}

Values diagonal_scatter(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Value src = b.cast(call.tensor("src"), x.type.dtype);
  int64_t offset = call.integer("offset", 0);
  Diagonal at = diagonal_arguments(call, rank_of(x), 0, 0, 1);
  tensor_ir::Source source{src.name, {}, {equal(axis(at.dim2), axis(at.dim1) + offset)}};
  for (int64_t d = 0; d < rank_of(x); ++d)
    if (d != at.dim1 && d != at.dim2) source.index.push_back(axis(d));
  source.index.push_back(offset >= 0 ? axis(at.dim1) : axis(at.dim2));
  return overlay(b, x, std::move(source));
}

Values copy(Builder& b, const Call& call) {
  call.tensor("self");
  return finish(b, call, call.tensor("src"));
}

/// The address i*stride + ..., from the first element of `self`, of each point of a view that is shaped `shape`.
Expr view_address(const Builder& b, const Call& call, const Value& self, const Shape& shape) {
  std::vector<Expr> strides = call.sizes("stride");
  DEPLO_SUPPORT(strides.size() == shape.size(), "{} strides for {} dimensions", strides.size(), shape.size());
  Expr first = call.size("storage_offset", Expr(0));
  Expr address = first;
  Expr last = first;
  bool empty = false;
  for (size_t d = 0; d < shape.size(); ++d) {
    address = address + axis(static_cast<int64_t>(d)) * strides[d];
    last = last + (shape[d] - 1) * strides[d];
    empty = empty || shape[d].is(0);
  }
  bool inside = provably_nonnegative(first, b.known_sizes()) && provably_nonnegative(product(self.type.shape) - 1 - last, b.known_sizes());
  DEPLO_SUPPORT(empty || inside, "elements {} to {} of memory of which the source shows {}", print(first), print(last),
                print(product(self.type.shape)));
  return address;
}

/// Where the element at `address` (over the points of `shape`) sits in `self`.
std::vector<Expr> index_of_address(const Builder& b, const Call& call, const Value& self, const Shape& shape) {
  Expr address = view_address(b, call, self, shape);
  std::vector<Expr> strides = call.strides("self");
  std::vector<Expr> index(self.type.shape.size(), Expr(0));
  const auto order = b.memory_order(self.type.shape, strides);
  DEPLO_SUPPORT(order, "the source's elements do not fill one block of memory");
  for (size_t d : *order) {
    Expr e = b.simplified(floordiv(address, strides[d]), shape);
    index[d] = d == order->back() ? e : b.simplified(mod(e, self.type.shape[d]), shape);
  }
  return index;
}

Values as_strided(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  call.ignore("size");
  const Shape shape = call.result().shape;
  if (std::any_of(shape.begin(), shape.end(), [](Expr size) { return size.is(0); })) {
    for (const char* name : {"stride", "storage_offset"}) call.ignore(name);
    return {b.constant(x.type.dtype, shape, 0)};
  }
  return {b.remap(x, shape, index_of_address(b, call, x, shape))};
}

Values as_strided_scatter(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Value src = b.cast(call.tensor("src"), x.type.dtype);
  call.ignore("size");
  tensor_ir::Scatter scatter;
  scatter.combiner = Combiner::set;
  scatter.updates = src.name;
  for (int64_t d = 0; d < rank_of(src); ++d) scatter.axes.push_back(axis(d).name());
  scatter.index = index_of_address(b, call, x, src.type.shape);
  return {b.scatter(std::move(scatter), x)};
}

}  // namespace

const std::vector<Row>& view_rules() {
  static const std::vector<Row> rows{
      {"aten._reshape_alias.default", [](Builder& b, const Call& call) { return call.ignore("stride"), reshape(b, call); }},
      {"aten._reshape_copy.default", reshape},
      {"aten._unsafe_view.default", reshape},
      {"aten.alias.default", identity},
      {"aten.alias_copy.default", identity},
      {"aten.as_strided.default", as_strided},
      {"aten.as_strided_copy.default", as_strided},
      {"aten.as_strided_scatter.default", as_strided_scatter},
      {"aten.cat.default", cat},
      {"aten.clone.default", identity},
      {"aten.constant_pad_nd.default", constant_pad},
      {"aten.contiguous.default", identity},
      {"aten.copy.default", copy},
      {"aten.detach.default", identity},
      {"aten.diag_embed.default", diag_embed},
      {"aten.diagonal.default", diagonal},
      {"aten.diagonal_scatter.default", diagonal_scatter},
      {"aten.expand.default", expand},
      {"aten.flip.default", flip},
      {"aten.lift.default", identity},
      {"aten.lift_fresh.default", identity},
      {"aten.lift_fresh_copy.default", identity},
      {"aten.permute.default", permute},
      {"aten.repeat.default", repeat},
      {"aten.repeat_interleave.self_int", repeat_interleave},
      {"aten.reshape.default", reshape},
      {"aten.roll.default", roll},
      {"aten.select.int", select},
      {"aten.select_scatter.default", select_scatter},
      {"aten.slice.Tensor", slice},
      {"aten.slice_scatter.default", slice_scatter},
      {"aten.split.Tensor", split},
      {"aten.split_with_sizes.default", split},
      {"aten.squeeze.default", squeeze},
      {"aten.squeeze.dim", squeeze},
      {"aten.squeeze.dims", squeeze},
      {"aten.stack.default", stack},
      {"aten.t.default", t},
      {"aten.transpose.int", transpose},
      {"aten.unbind.int", unbind},
      {"aten.unfold.default", unfold},
      {"aten.unsafe_split.Tensor", split},
      {"aten.unsafe_split_with_sizes.default", split},
      {"aten.unsqueeze.default", unsqueeze},
      {"aten.view.default", reshape},
      {"aten.view.dtype", view_dtype},
      {"aten.view_copy.default", reshape},
      {"aten.detach_copy.default", identity},
      {"aten.diagonal_copy.default", diagonal},
      {"aten.expand_copy.default", expand},
      {"aten.narrow_copy.default", narrow},
      {"aten.permute_copy.default", permute},
      {"aten.select_copy.int", select},
      {"aten.slice_copy.Tensor", slice},
      {"aten.split_copy.Tensor", split},
      {"aten.split_with_sizes_copy.default", split},
      {"aten.squeeze_copy.default", squeeze},
      {"aten.squeeze_copy.dim", squeeze},
      {"aten.squeeze_copy.dims", squeeze},
      {"aten.t_copy.default", t},
      {"aten.transpose_copy.int", transpose},
      {"aten.unbind_copy.int", unbind},
      {"aten.unfold_copy.default", unfold},
      {"aten.unsqueeze_copy.default", unsqueeze},
      {"aten.view_copy.dtype", view_dtype},
  };
  return rows;
}

}  // namespace deplo::rules
