#include <algorithm>

#include "base/error.h"
#include "lower/torch_to_tensor/common.h"
#include "lower/torch_to_tensor/formula.h"
#include "lower/torch_to_tensor/pointwise.h"

namespace deplo::rules {
namespace {

using tensor_ir::IndexMap;
using tensor_ir::Indirect;
using tensor_ir::Scatter;
using Values = std::vector<Value>;

int64_t dim_argument(const Call& call, int64_t rank) {
  int64_t dim = call.integer("dim");
  DEPLO_SUPPORT(dim >= -rank && dim < rank, "dim {} of {} dimensions", dim, rank);
  return dim < 0 ? dim + rank : dim;
}

std::vector<Expr> axes(int64_t first, int64_t count) {
  std::vector<Expr> index;
  for (int64_t d = 0; d < count; ++d) index.push_back(axis(first + d));
  return index;
}

// Indexing along a dimension takes a 0-d tensor as a 1-d one of one element, operands and results alike.
Value with_dimension(Builder& b, const Value& v) { return rank_of(v) == 0 ? b.unsqueeze(v, 0) : v; }

Values as_result(Builder& b, const Call& call, const Value& v) {
  const Shape& shape = call.result().shape;
  return {v.type.shape.size() == shape.size() ? v : b.reshape(v, shape)};
}

/// The combiner that does to bools what arithmetic on 0 and 1 would.
Combiner for_dtype(Combiner combiner, DType dtype) {
  if (dtype != DType::boolean) return combiner;
  return combiner == Combiner::sum ? Combiner::max : combiner == Combiner::prod ? Combiner::min : combiner;
}

/// Indices where eager refuses negative ones: they are moved out of range.
Value strict_index(Builder& b, const Value& index, Expr extent) {
  DEPLO_SUPPORT(is_integer(index.type.dtype) && index.type.dtype != DType::u8, "indices of dtype {}", to_string(index.type.dtype));
  Value i = b.cast(index, DType::i64);
  Value negative = b.apply(Fn::lt, i, 0);
  return b.apply(Fn::where, {negative, b.index(DType::i64, i.type.shape, extent), i});
}

Indirect coordinate(const std::string& name, const Value& tensor, std::vector<Expr> index, Expr extent) {
  return {name, tensor.name, std::move(index), extent, true};
}

Values embedding(Builder& b, const Call& call) {
  Value weight = call.tensor("weight");
  Value indices = strict_index(b, call.tensor("indices"), weight.type.shape.at(0));
  for (const char* name : {"padding_idx", "scale_grad_by_freq", "sparse"}) call.ignore(name);  // of the gradient
  int64_t rank = rank_of(indices);
  IndexMap map;
  map.axes = axis_names(rank + 1);
  map.indirects.push_back(coordinate("j", indices, axes(0, rank), weight.type.shape[0]));
  map.sources.push_back({weight.name, {Expr::symbol("j"), axis(rank)}, {}});
  return {b.map(call.result(), std::move(map))};
}

Values gather(Builder& b, const Call& call) {
  Value x = with_dimension(b, call.tensor("self"));
  call.ignore("sparse_grad");
  int64_t dim = dim_argument(call, rank_of(x));
  Value index = with_dimension(b, call.tensor("index"));
  DEPLO_SUPPORT(rank_of(index) == rank_of(x), "{} index dimensions for {}", rank_of(index), rank_of(x));
  Expr extent = x.type.shape.at(static_cast<size_t>(dim));
  index = strict_index(b, index, extent);
  IndexMap map;
  map.axes = axis_names(rank_of(x));
  map.indirects.push_back(coordinate("j", index, axes(0, rank_of(x)), extent));
  std::vector<Expr> at = axes(0, rank_of(x));
  at[static_cast<size_t>(dim)] = Expr::symbol("j");
  map.sources.push_back({x.name, at, {}});
  return as_result(b, call, b.map({x.type.dtype, index.type.shape}, std::move(map)));
}

Values index_select(Builder& b, const Call& call) {
  Value x = with_dimension(b, call.tensor("self"));
  int64_t dim = dim_argument(call, rank_of(x));
  Expr extent = x.type.shape.at(static_cast<size_t>(dim));
  Value index = strict_index(b, call.tensor("index"), extent);
  IndexMap map;
  map.axes = axis_names(rank_of(x));
  map.indirects.push_back(coordinate("j", index, rank_of(index) == 0 ? std::vector<Expr>{} : axes(dim, 1), extent));
  std::vector<Expr> at = axes(0, rank_of(x));
  at[static_cast<size_t>(dim)] = Expr::symbol("j");
  map.sources.push_back({x.name, at, {}});
  Shape shape = x.type.shape;
  shape[static_cast<size_t>(dim)] = rank_of(index) == 0 ? Expr(1) : index.type.shape[0];
  return as_result(b, call, b.map({x.type.dtype, shape}, std::move(map)));
}

/// x[a, :, b] as PyTorch reads it: the index tensors broadcast together; their dimensions stand where the first of them stood if they
/// are neighbours, else in front.
struct Indexing {
  Shape shape;           ///< of the result
  std::vector<Expr> at;  ///< a coordinate per dimension of x, over the result's axes
  std::vector<Indirect> indirects;
};

Indexing index_by(Builder& b, const Value& x, const std::vector<std::optional<Value>>& indices) {
  DEPLO_SUPPORT(indices.size() <= x.type.shape.size(), "{} indices for {} dimensions", indices.size(), x.type.shape.size());
  Shape common;
  std::vector<size_t> indexed;
  for (size_t d = 0; d < indices.size(); ++d) {
    if (!indices[d]) continue;
    DType dtype = indices[d]->type.dtype;
    DEPLO_SUPPORT(is_integer(dtype) && dtype != DType::u8, "an index of dtype {}: the result's size depends on values", to_string(dtype));
    common = b.common_shape(common, indices[d]->type.shape);
    indexed.push_back(d);
  }
  DEPLO_SUPPORT(!indexed.empty(), "no index");
  bool neighbours = indexed.back() - indexed.front() + 1 == indexed.size();
  size_t place = neighbours ? indexed.front() : 0;  // in the result, counted in kept dimensions of x
  Indexing made;
  made.at.resize(x.type.shape.size());
  auto count = static_cast<int64_t>(common.size());
  int64_t kept = 0;
  for (size_t d = 0; d < x.type.shape.size(); ++d) {
    if (d < indices.size() && indices[d]) continue;
    int64_t position = kept < static_cast<int64_t>(place) ? kept : kept + count;
    made.at[d] = axis(position);
    made.shape.push_back(x.type.shape[d]);
    ++kept;
  }
  made.shape.insert(made.shape.begin() + static_cast<long>(place), common.begin(), common.end());
  for (size_t d : indexed) {
    const Value& index = *indices[d];
    std::vector<Expr> at;
    int64_t shift = count - rank_of(index);
    for (int64_t k = 0; k < rank_of(index); ++k)
      at.push_back(index.type.shape[static_cast<size_t>(k)].is(1) ? Expr(0) : axis(static_cast<int64_t>(place) + shift + k));
    std::string name = "j" + std::to_string(d);
    made.indirects.push_back(coordinate(name, index, std::move(at), x.type.shape[d]));
    made.at[d] = Expr::symbol(name);
  }
  return made;
}

Values index_tensor(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Indexing made = index_by(b, x, call.optional_tensors("indices"));
  IndexMap map;
  map.axes = axis_names(static_cast<int64_t>(made.shape.size()));
  map.indirects = std::move(made.indirects);
  map.sources.push_back({x.name, made.at, {}});
  return {b.map({x.type.dtype, made.shape}, std::move(map))};
}

// x[mask] = one number: where(mask, number, x).
Value masked_put(Builder& b, const Value& x, const Value& mask, const Value& value) {
  for (Expr extent : value.type.shape) DEPLO_SUPPORT(extent.is(1), "a mask with {} values: their number depends on the mask", print(extent));
  DEPLO_SUPPORT(mask.type.shape.size() <= x.type.shape.size(), "a mask with more dimensions than the tensor");
  Value over = mask;
  while (rank_of(over) < rank_of(x)) over = b.unsqueeze(over, -1);
  return b.apply(Fn::where, {b.broadcast(over, x.type.shape), b.reshape(value, {}), x});
}

/// Whether two updates may have one place: an axis longer than 1 that is no coordinate itself.
bool may_meet(const Scatter& scatter, const Value& updates) {
  for (size_t d = 0; d < scatter.axes.size(); ++d) {
    Expr axis = Expr::symbol(scatter.axes[d]);
    if (!updates.type.shape[d].is(1) && std::find(scatter.index.begin(), scatter.index.end(), axis) == scatter.index.end()) return true;
  }
  return false;
}

/// base with `updates` combined in. Sums and products of 16-bit floats in one place are rounded once, not after each.
Value combined(Builder& b, Scatter scatter, const Value& base, const Value& updates) {
  DType dtype = base.type.dtype;
  bool rounds = scatter.combiner == Combiner::sum || scatter.combiner == Combiner::prod;
  if (!rounds || !is_float(dtype) || size_of(dtype) != 2 || !may_meet(scatter, updates)) {
    scatter.updates = updates.name;
    return b.scatter(std::move(scatter), base);
  }
  scatter.updates = b.cast(updates, DType::f32).name;
  return b.cast(b.scatter(std::move(scatter), b.cast(base, DType::f32)), dtype);
}

Values index_put(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  auto indices = call.optional_tensors("indices");
  Value values = b.cast(call.tensor("values"), x.type.dtype);
  bool accumulate = call.boolean("accumulate", false);
  call.ignore("unsafe");
  if (indices.size() == 1 && indices[0] && indices[0]->type.dtype == DType::boolean && !accumulate) return {masked_put(b, x, *indices[0], values)};
  Indexing made = index_by(b, x, indices);
  values = b.broadcast(values, made.shape);
  Scatter scatter;
  scatter.combiner = accumulate ? for_dtype(Combiner::sum, x.type.dtype) : Combiner::set;
  scatter.axes = axis_names(rank_of(values));
  scatter.indirects = std::move(made.indirects);
  scatter.index = made.at;
  return {combined(b, std::move(scatter), x, values)};
}

/// base with updates combined into base[..., index[...], ...], as scatter along `dim` does.
Value scatter_along(Builder& b, const Value& base, int64_t dim, const Value& index, const Value& updates, Combiner combiner) {
  Scatter scatter;
  scatter.combiner = combiner;
  scatter.axes = axis_names(rank_of(updates));
  scatter.indirects.push_back(coordinate("j", index, axes(0, rank_of(index)), base.type.shape.at(static_cast<size_t>(dim))));
  scatter.index = axes(0, rank_of(base));
  scatter.index[static_cast<size_t>(dim)] = Expr::symbol("j");
  return combined(b, std::move(scatter), base, updates);
}

/// The part of src that index covers.
Value covered(Builder& b, const Value& src, const Value& index) {
  DEPLO_SUPPORT(rank_of(src) == rank_of(index), "{} source dimensions for {} index dimensions", rank_of(src), rank_of(index));
  return b.remap(src, index.type.shape, axes(0, rank_of(src)));
}

struct ScatterCall {
  Value base;
  int64_t dim;
  Value index;
};

ScatterCall scatter_call(Builder& b, const Call& call) {
  Value base = with_dimension(b, call.tensor("self"));
  int64_t dim = dim_argument(call, rank_of(base));
  Value index = with_dimension(b, call.tensor("index"));
  DEPLO_SUPPORT(rank_of(index) == rank_of(base), "{} index dimensions for {}", rank_of(index), rank_of(base));
  return {base, dim, strict_index(b, index, base.type.shape.at(static_cast<size_t>(dim)))};
}

Value scatter_updates(Builder& b, const Call& call, const ScatterCall& s) {
  if (call.is_tensor("src")) return covered(b, with_dimension(b, b.cast(call.tensor("src"), s.base.type.dtype)), s.index);
  return b.broadcast(checked_scalar(b, call, "value", s.base.type.dtype), s.index.type.shape);
}

Values scatter(Builder& b, const Call& call) {
  ScatterCall s = scatter_call(b, call);
  Combiner combiner = Combiner::set;
  if (call.has("reduce")) {
    std::string reduce = call.word("reduce", "");
    DEPLO_SUPPORT(reduce == "add" || reduce == "multiply", "reduce={}", reduce);
    combiner = for_dtype(reduce == "add" ? Combiner::sum : Combiner::prod, s.base.type.dtype);
  }
  return as_result(b, call, scatter_along(b, s.base, s.dim, s.index, scatter_updates(b, call, s), combiner));
}

Values scatter_add(Builder& b, const Call& call) {
  ScatterCall s = scatter_call(b, call);
  Combiner combiner = for_dtype(Combiner::sum, s.base.type.dtype);
  return as_result(b, call, scatter_along(b, s.base, s.dim, s.index, scatter_updates(b, call, s), combiner));
}

/// scatter_along or put_along.
using Put = Value (*)(Builder& b, const Value& base, int64_t dim, const Value& index, const Value& updates, Combiner combiner);

// The sum at each place, divided by how many values went into it.
Value mean_of(Builder& b, const ScatterCall& s, const Value& start, const Value& updates, bool include_self, Put put) {
  DType dtype = s.base.type.dtype;
  Value sum = put(b, start, s.dim, s.index, updates, Combiner::sum);
  Value one = b.constant_int(DType::i64, updates.type.shape, 1);
  Value count = put(b, b.constant_int(DType::i64, s.base.type.shape, include_self ? 1 : 0), s.dim, s.index, one, Combiner::sum);
  count = b.cast(b.apply(Fn::max, count, 1), dtype);
  if (!is_float(dtype)) return b.apply(Fn::floor_div, {sum, count});
  return b.cast(b.apply(Fn::div, {as_compute(b, sum), as_compute(b, count)}), dtype);
}

Values reduced_into(Builder& b, const Call& call, const ScatterCall& s, const Value& updates, Put put) {
  std::string reduce = call.word("reduce", "");
  DType dtype = s.base.type.dtype;
  bool mean = reduce == "mean";
  DEPLO_SUPPORT(!mean || dtype != DType::boolean, "a mean of bool");
  Combiner combiner = reduce == "sum" || mean ? Combiner::sum : reduce == "prod" ? Combiner::prod : reduce == "amax" ? Combiner::max : Combiner::min;
  DEPLO_SUPPORT(combiner != Combiner::min || reduce == "amin", "reduce={}", reduce);
  combiner = for_dtype(combiner, dtype);
  Value base = s.base;
  bool include_self = call.boolean("include_self", true);
  // Without the old values, the places that are hit start from the identity.
  if (!include_self) base = put(b, base, s.dim, s.index, b.constant(updates.type.shape, deplo::identity(combiner, dtype)), Combiner::set);
  if (mean) return as_result(b, call, mean_of(b, s, base, updates, include_self, put));
  return as_result(b, call, put(b, base, s.dim, s.index, updates, combiner));
}

Values scatter_reduce(Builder& b, const Call& call) {
  ScatterCall s = scatter_call(b, call);
  return reduced_into(b, call, s, scatter_updates(b, call, s), scatter_along);
}

/// base with `updates` (its dimension `dim` counted by a 1-d index) combined in.
Value put_along(Builder& b, const Value& base, int64_t dim, const Value& index, const Value& updates, Combiner combiner) {
  DEPLO_SUPPORT(rank_of(index) <= 1 && rank_of(updates) == rank_of(base), "an index with {} dimensions", rank_of(index));
  Scatter scatter;
  scatter.combiner = combiner;
  scatter.axes = axis_names(rank_of(updates));
  std::vector<Expr> at = rank_of(index) == 0 ? std::vector<Expr>{} : axes(dim, 1);
  scatter.indirects.push_back(coordinate("j", index, std::move(at), base.type.shape.at(static_cast<size_t>(dim))));
  scatter.index = axes(0, rank_of(base));
  scatter.index[static_cast<size_t>(dim)] = Expr::symbol("j");
  return combined(b, std::move(scatter), base, updates);
}

Values index_add(Builder& b, const Call& call) {
  Value base = with_dimension(b, call.tensor("self"));
  int64_t dim = dim_argument(call, rank_of(base));
  Value index = strict_index(b, call.tensor("index"), base.type.shape.at(static_cast<size_t>(dim)));
  Value source = with_dimension(b, b.cast(call.tensor("source"), base.type.dtype));
  if (base.type.dtype == DType::boolean) {
    DEPLO_SUPPORT(call.number("alpha", 1).as_double() != 0, "alpha 0 for bool");
  } else if (call.has("alpha")) {
    Value alpha = checked_scalar(b, call, "alpha", compute_type(base.type.dtype));
    source = b.cast(b.apply(Fn::mul, {as_compute(b, source), alpha}), base.type.dtype);
  }
  return as_result(b, call, put_along(b, base, dim, index, source, for_dtype(Combiner::sum, base.type.dtype)));
}

Values index_copy(Builder& b, const Call& call) {
  Value base = with_dimension(b, call.tensor("self"));
  int64_t dim = dim_argument(call, rank_of(base));
  Value index = strict_index(b, call.tensor("index"), base.type.shape.at(static_cast<size_t>(dim)));
  Value source = with_dimension(b, b.cast(call.tensor("source"), base.type.dtype));
  return as_result(b, call, put_along(b, base, dim, index, source, Combiner::set));
}

Values index_reduce(Builder& b, const Call& call) {
  Value base = with_dimension(b, call.tensor("self"));
  int64_t dim = dim_argument(call, rank_of(base));
  Value index = strict_index(b, call.tensor("index"), base.type.shape.at(static_cast<size_t>(dim)));
  Value source = with_dimension(b, b.cast(call.tensor("source"), base.type.dtype));
  return reduced_into(b, call, {base, dim, index}, source, put_along);
}

// Negative indices count from the end here.
Values index_fill(Builder& b, const Call& call) {
  Value base = with_dimension(b, call.tensor("self"));
  int64_t dim = dim_argument(call, rank_of(base));
  Value index = call.tensor("index");
  DEPLO_SUPPORT(is_integer(index.type.dtype) && rank_of(index) <= 1, "an index of dtype {}", to_string(index.type.dtype));
  DType dtype = base.type.dtype;
  Value value = call.is_tensor("value") ? b.cast(call.tensor("value"), dtype) : checked_scalar(b, call, "value", dtype);
  Shape shape = base.type.shape;
  shape[static_cast<size_t>(dim)] = rank_of(index) == 0 ? Expr(1) : index.type.shape[0];
  return as_result(b, call, put_along(b, base, dim, index, b.broadcast(value, shape), Combiner::set));
}

Values take(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Value index = call.tensor("index");
  DEPLO_SUPPORT(index.type.dtype == DType::i64, "indices of dtype {}", to_string(index.type.dtype));
  Expr extent = product(x.type.shape);
  Value flat = b.reshape(x, {extent});
  IndexMap map;
  map.axes = axis_names(rank_of(index));
  map.indirects.push_back(coordinate("j", index, axes(0, rank_of(index)), extent));
  map.sources.push_back({flat.name, {Expr::symbol("j")}, {}});
  return {b.map(call.result(), std::move(map))};
}

// put: take's counterpart, negative indices count from the end.
Values put(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Value index = call.tensor("index");
  DEPLO_SUPPORT(index.type.dtype == DType::i64, "indices of dtype {}", to_string(index.type.dtype));
  Expr extent = product(x.type.shape);
  Value source = b.reshape(b.cast(call.tensor("source"), x.type.dtype), index.type.shape);
  Scatter scatter;
  scatter.combiner = call.boolean("accumulate", false) ? for_dtype(Combiner::sum, x.type.dtype) : Combiner::set;
  scatter.axes = axis_names(rank_of(index));
  scatter.indirects.push_back(coordinate("j", index, axes(0, rank_of(index)), extent));
  scatter.index = {Expr::symbol("j")};
  return {b.reshape(combined(b, std::move(scatter), b.reshape(x, {extent}), source), x.type.shape)};
}

// The values of source in order at the places where the mask holds: a running count of those says which.
Values masked_scatter(Builder& b, const Call& call) {
  Shape shape = call.result().shape;
  Value x = b.broadcast(call.tensor("self"), shape);
  Value mask = call.tensor("mask");
  Value source = call.tensor("source");
  Expr extent = product(source.type.shape);
  DEPLO_SUPPORT(!extent.is(0) && mask.type.dtype == DType::boolean, "a source of {} values", print(extent));
  Value flat = b.reshape(b.broadcast(mask, shape), {product(shape)});
  Value count = b.scan(Combiner::sum, {b.cast(flat, DType::i64)}, 0)[0];
  Value place = b.apply(Fn::where, {flat, b.apply(Fn::sub, count, 1), b.constant_int(DType::i64, {}, 0)});
  IndexMap map;
  map.axes = axis_names(1);
  map.indirects.push_back(coordinate("j", place, axes(0, 1), extent));
  map.sources.push_back({b.reshape(source, {extent}).name, {Expr::symbol("j")}, {}});
  Value taken = b.map({source.type.dtype, flat.type.shape}, std::move(map));
  return {b.reshape(b.apply(Fn::where, {flat, taken, b.reshape(x, flat.type.shape)}), shape)};
}

template <bool lower>
Values triangle(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t rank = rank_of(x);
  DEPLO_SUPPORT(rank >= 2, "a triangle of {} dimensions", rank);
  Expr above = axis(rank - 1) - axis(rank - 2) - call.size("diagonal", Expr(0));  // how far right of the diagonal
  IndexMap map;
  map.axes = axis_names(rank);
  map.fill = {x.type.dtype, 0, 0};
  map.sources.push_back({x.name, axes(0, rank), {lower ? less_equal(above, 0) : less_equal(0, above)}});
  return {b.map(x.type, std::move(map))};
}

}  // namespace

const std::vector<Row>& embedding_bag_rows();

const std::vector<Row>& index_rules() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all{
        {"aten._index_put_impl.default", index_put},
        {"aten._unsafe_index.Tensor", index_tensor},
        {"aten._unsafe_index_put.default", index_put},
        {"aten.embedding.default", embedding},
        {"aten.gather.default", gather},
        {"aten.index.Tensor", index_tensor},
        {"aten.index_add.default", index_add},
        {"aten.index_copy.default", index_copy},
        {"aten.index_fill.int_Scalar", index_fill},
        {"aten.index_fill.int_Tensor", index_fill},
        {"aten.index_put.default", index_put},
        {"aten.index_reduce.default", index_reduce},
        {"aten.index_select.default", index_select},
        {"aten.masked_scatter.default", masked_scatter},
        {"aten.put.default", put},
        {"aten.scatter.reduce", scatter},
        {"aten.scatter.src", scatter},
        {"aten.scatter.value", scatter},
        {"aten.scatter.value_reduce", scatter},
        {"aten.scatter_add.default", scatter_add},
        {"aten.scatter_reduce.two", scatter_reduce},
        {"aten.take.default", take},
        {"aten.tril.default", triangle<true>},
        {"aten.triu.default", triangle<false>},
    };
    all.insert(all.end(), embedding_bag_rows().begin(), embedding_bag_rows().end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
