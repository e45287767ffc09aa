#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Matrix products: a sum over k of a product of two maps, so that the levels below see their axes and nothing else.

namespace deplo::rules {
namespace {

// What the product accumulates in: float32 for 16-bit floats, the result's own type otherwise.
DType accumulator(const TensorType& result) {
  DEPLO_SUPPORT(result.dtype != DType::boolean, "a product of bool");
  return compute_type(result.dtype);
}

// Both operands in a type that the product keeps exactly: integers as the result, floats as they are.
Value product_operand(Builder& b, const Value& v, DType result) { return is_float(v.type.dtype) && is_float(result) ? v : b.cast(v, result); }

// sum_k a[..., m, k] * b[..., k, n] with `batch` leading dimensions in common, of size 1 where broadcast.
Value product(Builder& b, const Value& left, const Value& right, const Shape& batch, DType dtype) {
  auto r = static_cast<int64_t>(batch.size());
  int64_t left_rank = rank_of(left);
  int64_t right_rank = rank_of(right);
  Expr m = left.type.shape[left_rank - 2];
  Expr n = right.type.shape[right_rank - 1];
  Shape space = batch;
  space.insert(space.end(), {m, n, left.type.shape[left_rank - 1]});
  auto lead = [&](const Value& v) {
    std::vector<Expr> index;
    int64_t own = rank_of(v) - 2;
    for (int64_t d = 0; d < own; ++d) index.push_back(v.type.shape[d].is(1) ? Expr(0) : axis(r - own + d));
    return index;
  };
  std::vector<Expr> left_index = lead(left);
  left_index.insert(left_index.end(), {axis(r), axis(r + 2)});
  std::vector<Expr> right_index = lead(right);
  right_index.insert(right_index.end(), {axis(r + 2), axis(r + 1)});
  return b.contract(b.remap(product_operand(b, left, dtype), space, left_index), b.remap(product_operand(b, right, dtype), space, right_index), 1,
                    dtype);
}

void check_rank(const Value& v, int64_t rank) { DEPLO_SUPPORT(rank_of(v) == rank, "{} dimensions where {} are expected", rank_of(v), rank); }

Value matrix_product(Builder& b, const Value& left, const Value& right, DType dtype) {
  check_rank(left, 2);
  check_rank(right, 2);
  return product(b, left, right, {}, dtype);
}

Value batch_product(Builder& b, const Value& left, const Value& right, DType dtype) {
  check_rank(left, 3);
  check_rank(right, 3);
  return product(b, left, right, {left.type.shape[0]}, dtype);
}

Value vector_product(Builder& b, const Value& matrix, const Value& vector, DType dtype) {
  check_rank(matrix, 2);
  check_rank(vector, 1);
  return b.contract(product_operand(b, matrix, dtype), b.remap(product_operand(b, vector, dtype), matrix.type.shape, {axis(1)}), 1, dtype);
}

std::vector<Value> mm(Builder& b, const Call& call) {
  call.ignore("out_dtype");
  Value c = matrix_product(b, call.tensor("self"), call.tensor("mat2"), accumulator(call.result()));
  return {conform(b, c, call.result())};
}

std::vector<Value> bmm(Builder& b, const Call& call) {
  call.ignore("out_dtype");
  Value c = batch_product(b, call.tensor("self"), call.tensor("mat2"), accumulator(call.result()));
  return {conform(b, c, call.result())};
}

std::vector<Value> mv(Builder& b, const Call& call) {
  return {conform(b, vector_product(b, call.tensor("self"), call.tensor("vec"), accumulator(call.result())), call.result())};
}

// beta * self + alpha * c; self is not read when beta is 0, nor the product where BLAS computes it and alpha is 0.
std::vector<Value> add_product(Builder& b, const Call& call, const Value& c, bool blas) {
  call.ignore("out_dtype");
  Scalar beta = call.number("beta", 1);
  Value self = call.tensor("self");
  Scalar alpha = call.number("alpha", 1);
  Value out = alpha.as_double() == 0 && blas ? b.constant(c.type.dtype, c.type.shape, 0) : scaled(b, c, alpha);
  if (beta.as_double() != 0) out = b.apply(Fn::add, {scaled(b, compute_as(b, self, c.type.dtype), beta), out});
  return {conform(b, b.broadcast(out, call.result().shape), call.result())};
}

// Eager mode's products of 16 bits scale what they have computed.
bool has_blas(const Call& call) { return !is_float(call.result().dtype) || size_of(call.result().dtype) >= 4; }

std::vector<Value> addmm(Builder& b, const Call& call) {
  return add_product(b, call, matrix_product(b, call.tensor("mat1"), call.tensor("mat2"), accumulator(call.result())), has_blas(call));
}

std::vector<Value> baddbmm(Builder& b, const Call& call) {
  Value left = call.tensor("batch1");
  Value c = batch_product(b, left, call.tensor("batch2"), accumulator(call.result()));
  // ATen's own loops take small ones (LinearAlgebra.cpp).
  const Expr work = c.type.shape[1] * c.type.shape[2] * left.type.shape[2];
  return add_product(b, call, c, has_blas(call) && work.is_constant() && work.value() >= 400);
}

std::vector<Value> addmv(Builder& b, const Call& call) {
  return add_product(b, call, vector_product(b, call.tensor("mat"), call.tensor("vec"), accumulator(call.result())), has_blas(call));
}

// The batch is one more dimension of the sum.
std::vector<Value> addbmm(Builder& b, const Call& call) {
  Value left = call.tensor("batch1");
  Value right = call.tensor("batch2");
  check_rank(left, 3);
  check_rank(right, 3);
  DType dtype = accumulator(call.result());
  Shape space = {left.type.shape[1], right.type.shape[2], left.type.shape[0], left.type.shape[2]};
  Value l = b.remap(product_operand(b, left, dtype), space, {axis(2), axis(0), axis(3)});
  Value r = b.remap(product_operand(b, right, dtype), space, {axis(2), axis(3), axis(1)});
  return add_product(b, call, b.contract(l, r, 2, dtype), has_blas(call));
}

Value outer_product(Builder& b, const Value& left, const Value& right, DType dtype) {
  check_rank(left, 1);
  check_rank(right, 1);
  Shape space = {left.type.shape[0], right.type.shape[0]};
  return b.apply(Fn::mul, {b.remap(b.cast(left, dtype), space, {axis(0)}), b.remap(b.cast(right, dtype), space, {axis(1)})});
}

std::vector<Value> addr(Builder& b, const Call& call) {
  return add_product(b, call, outer_product(b, call.tensor("vec1"), call.tensor("vec2"), accumulator(call.result())), false);
}

std::vector<Value> outer(Builder& b, const Call& call) {
  return {conform(b, outer_product(b, call.tensor("self"), call.tensor("vec2"), accumulator(call.result())), call.result())};
}

std::vector<Value> dot(Builder& b, const Call& call) {
  Value left = call.tensor("self");
  Value right = call.tensor(call.op() == "aten.vdot.default" ? "other" : "tensor");
  check_rank(left, 1);
  check_rank(right, 1);
  DType dtype = accumulator(call.result());
  return {conform(b, b.contract(product_operand(b, left, dtype), product_operand(b, right, dtype), 1, dtype), call.result())};
}

std::vector<Value> linear(Builder& b, const Call& call) {
  Value x = call.tensor("input");
  Value w = call.tensor("weight");
  DType dtype = accumulator(call.result());
  int64_t free = rank_of(x) - 1;
  DEPLO_SUPPORT(free >= 0 && (rank_of(w) == 1 || rank_of(w) == 2), "linear of {} by {} dimensions", rank_of(x), rank_of(w));
  Shape space(x.type.shape.begin(), x.type.shape.end() - 1);
  std::vector<Expr> x_index = axes_from(0, free);
  std::vector<Expr> w_index;
  if (rank_of(w) == 2) {
    w_index.push_back(axis(free));
    space.push_back(w.type.shape[0]);
  }
  Expr k = axis(static_cast<int64_t>(space.size()));
  space.push_back(x.type.shape[free]);
  x_index.push_back(k);
  w_index.push_back(k);
  Value c = b.contract(b.remap(product_operand(b, x, dtype), space, x_index), b.remap(product_operand(b, w, dtype), space, w_index), 1, dtype);
  if (auto bias = call.optional_tensor("bias")) c = b.apply(Fn::add, {c, b.cast(*bias, dtype)});
  return {conform(b, c, call.result())};
}

// numpy's rule: a vector on the left is a row, on the right a column; leading dimensions broadcast.
std::vector<Value> matmul(Builder& b, const Call& call) {
  Value left = call.tensor("self");
  Value right = call.tensor("other");
  DEPLO_SUPPORT(rank_of(left) >= 1 && rank_of(right) >= 1, "matmul of a 0-d tensor");
  TensorType type = call.result();
  int64_t vectors = (rank_of(left) == 1 ? 1 : 0) + (rank_of(right) == 1 ? 1 : 0);
  if (rank_of(left) == 1) left = b.unsqueeze(left, 0);
  if (rank_of(right) == 1) right = b.unsqueeze(right, 1);
  Shape batch(type.shape.begin(), type.shape.end() - (2 - vectors));
  return {conform(b, product(b, left, right, batch, accumulator(type)), type)};
}

}  // namespace

const std::vector<Row>& contraction_rules() {
  static const std::vector<Row> rows = {
      {"aten.mm.default", mm},         {"aten.mm.dtype", mm},           {"aten._int_mm.default", mm},    {"aten.bmm.default", bmm},
      {"aten.bmm.dtype", bmm},         {"aten.addmm.default", addmm},   {"aten.addmm.dtype", addmm},     {"aten.baddbmm.default", baddbmm},
      {"aten.baddbmm.dtype", baddbmm}, {"aten.addbmm.default", addbmm}, {"aten.mv.default", mv},         {"aten.addmv.default", addmv},
      {"aten.addr.default", addr},     {"aten.outer.default", outer},   {"aten.ger.default", outer},     {"aten.dot.default", dot},
      {"aten.vdot.default", dot},      {"aten.linear.default", linear}, {"aten.matmul.default", matmul},
  };
  return rows;
}

}  // namespace deplo::rules
