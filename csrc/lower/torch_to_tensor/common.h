#pragma once

#include <limits>
#include <vector>

#include "lower/torch_to_tensor/builder.h"

// What several families of rules share. Rules compute floats of 16 bits in float32 and round once, at the end.

namespace deplo::rules {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t rank_of(const Value& v);
/// Sorted, without negatives or repeats; an empty list stands for every dimension.
std::vector<int64_t> wrapped_dims(const std::vector<int64_t>& dims, int64_t rank);
int64_t wrapped_dim(int64_t dim, int64_t rank);
/// The list argument `name`; left out or None: empty.
std::vector<int64_t> dims_argument(const Call& call, std::string_view name = "dim");
/// `first`, `first + 1`, ... below `last`.
std::vector<int64_t> dim_range(int64_t first, int64_t last);

/// v rounded to `dtype`, as PyTorch does on entry, and then in the type in which arithmetic on `dtype` happens.
Value compute_as(Builder& b, const Value& v, DType dtype);
/// v with the dtype and (where sizes 1 or a 0-d tensor make them differ) the shape of result k.
Value conform(Builder& b, const Value& v, const TensorType& type);

/// reduce that treats a 0-d tensor as one element.
Value reduce_dims(Builder& b, Combiner combiner, const Value& v, const std::vector<int64_t>& dims, bool keepdim);
/// The number of elements that a reduction over dims combines.
Expr reduced_count(const Value& v, const std::vector<int64_t>& dims);
/// A size as a 0-d tensor.
Value size_value(Builder& b, DType dtype, Expr size);
/// v divided by (or multiplied with) a size; v is floating.
Value divide_by_size(Builder& b, const Value& v, Expr size);
Value mean_dims(Builder& b, const Value& v, const std::vector<int64_t>& dims, bool keepdim);

/// v * factor without a multiplication by 1; integers stay exact.
Value scaled(Builder& b, const Value& v, const Scalar& factor);
/// An operand and a number of v's dtype, exact for integers.
Value apply_number(Builder& b, Fn fn, const Value& v, const Scalar& number);
Value square(Builder& b, const Value& v);
/// 1 / sqrt(v)
Value inverse_sqrt(Builder& b, const Value& v);
/// A 0-d constant of v's dtype.
Value constant_like(Builder& b, const Value& v, double literal);
/// v[c] seen at every point of `shape`, c being dimension `dim`.
Value per_channel(Builder& b, const Value& v, const Shape& shape, int64_t dim = 1);

/// result[i...] = v[index] where guard holds, else fill; without a guard every index must be in range.
Value guarded_map(Builder& b, const Value& v, const Shape& shape, const std::vector<Expr>& index, const std::vector<Cond>& guard, double fill);
std::vector<std::string> axis_names(size_t rank);
/// axis(first), ..., axis(first + count - 1)
std::vector<Expr> axes_from(int64_t first, int64_t count);
/// `parts`, or 1 where it may be 0: a size to divide by. Nothing is computed where there are no parts, but sizes of loops are.
Expr divisor_of(Builder& b, Expr parts);
/// Leaves to ATen, for its error, a tensor whose last `count` dimensions have no elements.
void refuse_empty(const Value& v, int64_t count);
/// size / parts, which the op's definition makes exact.
Expr part_of(Expr size, Expr parts);
/// A list argument of `count` integers that may be given as one value for all, or be empty (`fallback`).
std::vector<Expr> spatial_argument(const Call& call, std::string_view name, size_t count, const std::vector<Expr>& fallback);

}  // namespace deplo::rules
