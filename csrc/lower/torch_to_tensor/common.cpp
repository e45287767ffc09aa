#include "lower/torch_to_tensor/common.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace deplo::rules {

int64_t rank_of(const Value& v) { return static_cast<int64_t>(v.type.shape.size()); }

int64_t wrapped_dim(int64_t dim, int64_t rank) {
  int64_t bound = std::max<int64_t>(rank, 1);
  DEPLO_SUPPORT(dim >= -bound && dim < bound, "dimension {} of a tensor with {} dimensions", dim, rank);
  return dim < 0 ? dim + bound : dim;
}

std::vector<int64_t> wrapped_dims(const std::vector<int64_t>& dims, int64_t rank) {
  if (dims.empty()) return dim_range(0, rank);
  std::vector<int64_t> out;
  for (int64_t dim : dims) out.push_back(wrapped_dim(dim, rank));
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::vector<int64_t> dims_argument(const Call& call, std::string_view name) {
  if (!call.has(name)) return {};
  return call.integers(name);
}

std::vector<int64_t> dim_range(int64_t first, int64_t last) {
  std::vector<int64_t> out;
  for (int64_t dim = first; dim < last; ++dim) out.push_back(dim);
  return out;
}

Value compute_as(Builder& b, const Value& v, DType dtype) { return b.cast(b.cast(v, dtype), compute_type(dtype)); }

Value conform(Builder& b, const Value& v, const TensorType& type) {
  Value out = b.cast(v, type.dtype);
  return out.type.shape == type.shape ? out : b.reshape(out, type.shape);
}

Value reduce_dims(Builder& b, Combiner combiner, const Value& v, const std::vector<int64_t>& dims, bool keepdim) {
  if (rank_of(v) == 0) return b.reduce(combiner, b.unsqueeze(v, 0), {0}, false);
  return b.reduce(combiner, v, wrapped_dims(dims, rank_of(v)), keepdim);
}

Expr reduced_count(const Value& v, const std::vector<int64_t>& dims) {
  Expr count = 1;
  if (rank_of(v) == 0) return count;
  for (int64_t dim : wrapped_dims(dims, rank_of(v))) count = count * v.type.shape[dim];
  return count;
}

Value size_value(Builder& b, DType dtype, Expr size) {
  if (auto constant = size.as_constant()) {
    return is_float(dtype) ? b.constant(dtype, {}, static_cast<double>(*constant)) : b.constant_int(dtype, {}, *constant);
  }
  return b.index(dtype, {}, size);
}

Value divide_by_size(Builder& b, const Value& v, Expr size) { return b.apply(Fn::div, {v, size_value(b, v.type.dtype, size)}); }

Value mean_dims(Builder& b, const Value& v, const std::vector<int64_t>& dims, bool keepdim) {
  return divide_by_size(b, reduce_dims(b, Combiner::sum, v, dims, keepdim), reduced_count(v, dims));
}

Value apply_number(Builder& b, Fn fn, const Value& v, const Scalar& number) {
  if (is_float(v.type.dtype)) return b.apply(fn, v, number.as_double());
  DEPLO_SUPPORT(!is_float(number.dtype), "a float number with a tensor of {}", to_string(v.type.dtype));
  return b.apply(fn, {v, b.constant_int(v.type.dtype, {}, number.i)});
}

Value scaled(Builder& b, const Value& v, const Scalar& factor) { return factor.as_double() == 1 ? v : apply_number(b, Fn::mul, v, factor); }

Value square(Builder& b, const Value& v) { return b.apply(Fn::mul, {v, v}); }

Value inverse_sqrt(Builder& b, const Value& v) { return b.apply(Fn::div, {constant_like(b, v, 1), b.apply(Fn::sqrt, {v})}); }

Value constant_like(Builder& b, const Value& v, double literal) { return b.constant(v.type.dtype, {}, literal); }

Value per_channel(Builder& b, const Value& v, const Shape& shape, int64_t dim) { return b.remap(v, shape, {axis(dim)}); }

std::vector<std::string> axis_names(size_t rank) {
  std::vector<std::string> names;
  for (size_t d = 0; d < rank; ++d) names.push_back(axis(static_cast<int64_t>(d)).name());
  return names;
}

std::vector<Expr> axes_from(int64_t first, int64_t count) {
  std::vector<Expr> out;
  for (int64_t d = 0; d < count; ++d) out.push_back(axis(first + d));
  return out;
}

Value guarded_map(Builder& b, const Value& v, const Shape& shape, const std::vector<Expr>& index, const std::vector<Cond>& guard, double fill) {
  if (guard.empty()) return b.remap(v, shape, index);
  tensor_ir::IndexMap map;
  map.axes = axis_names(shape.size());
  map.sources.push_back({v.name, index, guard});
  DType dtype = v.type.dtype;
  map.fill = is_float(dtype) ? Scalar::of_float(dtype, fill) : Scalar::of_int(dtype, static_cast<int64_t>(fill));
  return b.map({dtype, shape}, std::move(map));
}

Expr divisor_of(Builder& b, Expr parts) { return provably_nonnegative(parts - 1, b.known_sizes()) ? parts : max(parts, Expr(1)); }

void refuse_empty(const Value& v, int64_t count) {
  for (int64_t d = rank_of(v) - count; d < rank_of(v); ++d) DEPLO_SUPPORT(!v.type.shape[d].is(0), "an operand without elements");
}

Expr part_of(Expr size, Expr parts) {
  if (auto quotient = exact_quotient(size, parts)) return *quotient;
  return floordiv(size, parts);
}

std::vector<Expr> spatial_argument(const Call& call, std::string_view name, size_t count, const std::vector<Expr>& fallback) {
  std::vector<Expr> values = call.sizes(name, fallback);
  if (values.empty()) values = fallback;
  if (values.size() == 1) values.assign(count, values[0]);
  DEPLO_SUPPORT(values.size() == count, "{} values for {} where {} are expected", values.size(), name, count);
  return values;
}

}  // namespace deplo::rules
