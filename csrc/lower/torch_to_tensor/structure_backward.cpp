#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Gradients of views and look-ups: zeros around the incoming gradient, or sums of it into rows.

namespace deplo::rules {
namespace {

// An index or start that PyTorch may count from the end.
Expr from_start(Builder& b, Expr index, Expr size) {
  if (auto constant = index.as_constant()) return *constant < 0 ? size + index : index;
  DEPLO_SUPPORT(provably_nonnegative(index, b.ranges()), "the sign of index {} is unknown", print(index));
  return index;
}

std::vector<Value> select_backward(Builder& b, const Call& call) {
  Value grad = call.tensor("grad_output");
  Shape shape = call.sizes("input_sizes");
  int64_t dim = wrapped_dim(call.integer("dim"), static_cast<int64_t>(shape.size()));
  Expr position = from_start(b, call.size("index"), shape[dim]);
  std::vector<Expr> index = axes_from(0, static_cast<int64_t>(shape.size()));
  index.erase(index.begin() + dim);
  return {guarded_map(b, grad, shape, index, {equal(axis(dim), position)}, 0)};
}

std::vector<Value> slice_backward(Builder& b, const Call& call) {
  Value grad = call.tensor("grad_output");
  Shape shape = call.sizes("input_sizes");
  int64_t dim = wrapped_dim(call.integer("dim"), static_cast<int64_t>(shape.size()));
  Expr start = min(from_start(b, call.size("start"), shape[dim]), shape[dim]);
  if (start.is_constant()) start = max(start, Expr(0));
  Expr step = call.size("step");
  call.ignore("end");  // the gradient's size says it
  std::vector<Expr> index = axes_from(0, static_cast<int64_t>(shape.size()));
  Expr offset = axis(dim) - start;
  index[dim] = floordiv(offset, step);
  std::vector<Cond> guard = {{Cond::Kind::ge0, offset}, less(offset, grad.type.shape[dim] * step)};
  if (!step.is(1)) guard.push_back({Cond::Kind::eq0, mod(offset, step)});
  return {guarded_map(b, grad, shape, index, guard, 0)};
}

std::vector<Value> diagonal_backward(Builder& b, const Call& call) {
  Value grad = call.tensor("grad_output");
  Shape shape = call.sizes("input_sizes");
  auto rank = static_cast<int64_t>(shape.size());
  int64_t first = wrapped_dim(call.integer("dim1"), rank);
  int64_t second = wrapped_dim(call.integer("dim2"), rank);
  int64_t offset = call.integer("offset");
  std::vector<Expr> index;
  for (int64_t d = 0; d < rank; ++d) {
    if (d != first && d != second) index.push_back(axis(d));
  }
  index.push_back(offset >= 0 ? axis(first) : axis(second));
  std::vector<Cond> guard = {equal(axis(first) + offset, axis(second))};
  return {guarded_map(b, grad, shape, index, guard, 0)};
}

// Windows overlap when size > step: each element sums the windows that cover it.
std::vector<Value> unfold_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_in"));
  Shape shape = call.sizes("input_sizes");
  auto rank = static_cast<int64_t>(shape.size());
  if (rank == 0) {
    for (const char* name : {"dim", "size", "step"}) call.ignore(name);
    return {conform(b, grad, call.result())};
  }
  int64_t dim = wrapped_dim(call.integer("dim"), rank);
  int64_t size = call.integer("size");
  int64_t step = call.integer("step");
  Shape space = shape;
  space.push_back((size + step - 1) / step);
  // Window w covers w*step + [0, size); the last one at or before the element, and those before it.
  Expr window = floordiv(axis(dim), step) - axis(rank);
  std::vector<Expr> index = axes_from(0, rank);
  // A gradient that is the same along another dimension may have it once (batched istft's window).
  for (int64_t d = 0; d < rank; ++d)
    if (grad.type.shape[d].is(1) && !shape[d].is(1)) index[d] = 0;
  index[dim] = window;
  index.push_back(axis(dim) - window * step);
  std::vector<Cond> guard = {{Cond::Kind::ge0, window}, less(window, grad.type.shape[dim]), less(axis(dim) - window * step, size)};
  return {conform(b, b.reduce(Combiner::sum, guarded_map(b, grad, space, index, guard, 0), {rank}, false), call.result())};
}

Value zeros(Builder& b, DType dtype, const Shape& shape) { return is_float(dtype) ? b.constant(dtype, shape, 0) : b.constant_int(dtype, shape, 0); }

// Occurrences of each index, for scale_grad_by_freq.
Value frequencies(Builder& b, const Value& indices, Expr rows, DType dtype) {
  tensor_ir::Scatter scatter;
  Value ones = b.broadcast(b.constant(dtype, {}, 1), indices.type.shape);
  scatter.combiner = Combiner::sum;
  scatter.updates = ones.name;
  scatter.axes = axis_names(indices.type.shape.size());
  scatter.indirects = {{"j0", indices.name, axes_from(0, rank_of(indices)), rows, true}};
  scatter.index = {Expr::symbol("j0")};
  return b.scatter(std::move(scatter), zeros(b, dtype, {rows}));
}

std::vector<Value> embedding_dense_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  Value indices = call.tensor("indices");
  Expr rows = call.size("num_weights");
  int64_t rank = rank_of(indices);
  std::vector<Expr> lookup = axes_from(0, rank);
  Expr j = Expr::symbol("j0");
  if (call.boolean("scale_grad_by_freq")) {
    Value counts = frequencies(b, indices, rows, grad.type.dtype);
    tensor_ir::IndexMap map;
    map.axes = axis_names(grad.type.shape.size());
    map.indirects = {{"j0", indices.name, lookup, rows, true}};
    map.sources = {{counts.name, {j}, {}}};
    map.fill = Scalar::of_float(grad.type.dtype, 0);
    grad = b.apply(Fn::div, {grad, b.map(grad.type, std::move(map))});
  }
  tensor_ir::Scatter scatter;
  scatter.combiner = Combiner::sum;
  scatter.updates = grad.name;
  scatter.axes = axis_names(grad.type.shape.size());
  scatter.indirects = {{"j0", indices.name, lookup, rows, true}};
  scatter.index = {j, axis(rank)};
  Expr padding = call.size("padding_idx");
  if (!padding.is(-1)) scatter.guard = {not_equal(j, padding)};
  return {conform(b, b.scatter(std::move(scatter), zeros(b, grad.type.dtype, call.result().shape)), call.result())};
}

// The gradient of masked_scatter's source: the k-th element whose mask holds gave its place to the source's k-th.
std::vector<Value> masked_scatter_backward(Builder& b, const Call& call) {
  Value grad = call.tensor("grad_output");
  Value mask = call.tensor("mask");
  DEPLO_SUPPORT(mask.type.dtype == DType::boolean, "a mask of {}", to_string(mask.type.dtype));
  Shape sizes = call.sizes("sizes");
  Expr count = product(sizes);
  Shape flat = {product(grad.type.shape)};
  Value holds = b.reshape(b.broadcast(mask, grad.type.shape), flat);
  Value number = b.scan(Combiner::sum, {b.cast(holds, DType::i64)}, 0)[0];
  // What the mask leaves out goes to a place of its own behind the others.
  Value place = b.apply(Fn::where, {holds, b.apply(Fn::sub, {number, b.constant_int(DType::i64, {}, 1)}), size_value(b, DType::i64, count)});
  tensor_ir::Scatter scatter;
  scatter.combiner = Combiner::set;
  scatter.updates = b.reshape(grad, flat).name;
  scatter.axes = axis_names(1);
  scatter.indirects = {{"j0", place.name, axes_from(0, 1), count + 1, true}};
  scatter.index = {Expr::symbol("j0")};
  Value packed = b.scatter(std::move(scatter), zeros(b, grad.type.dtype, {count + 1}));
  return {conform(b, b.reshape(b.slice(packed, 0, 0, count, 1), sizes), call.result())};
}

}  // namespace

const std::vector<Row>& structure_backward_rows() {
  static const std::vector<Row> rows = {
      {"aten.select_backward.default", select_backward},
      {"aten.slice_backward.default", slice_backward},
      {"aten.diagonal_backward.default", diagonal_backward},
      {"aten.unfold_backward.default", unfold_backward},
      {"aten.embedding_dense_backward.default", embedding_dense_backward},
      {"aten.masked_scatter_backward.default", masked_scatter_backward},
  };
  return rows;
}

}  // namespace deplo::rules
