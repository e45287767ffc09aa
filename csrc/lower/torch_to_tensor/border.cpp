#include "base/error.h"
#include "lower/torch_to_tensor/common.h"

// Reflection and replication padding and their gradients, one dimension at a time.

namespace deplo::rules {
namespace {

enum class Border { reflect, replicate };

// PyTorch lists (before, after) pairs from the last dimension backwards.
struct Amount {
  Expr before, after;
};

std::vector<Amount> amounts_of(const Call& call, int spatial) {
  std::vector<Expr> padding = call.sizes("padding");
  DEPLO_SUPPORT(padding.size() == static_cast<size_t>(2 * spatial), "{} padding values", padding.size());
  std::vector<Amount> amounts;
  for (int k = spatial - 1; k >= 0; --k) amounts.push_back({padding[2 * k], padding[2 * k + 1]});
  return amounts;
}

Value pad_dim(Builder& b, const Value& x, int64_t d, const Amount& amount, Border border) {
  Expr size = x.type.shape[d];
  Shape shape = x.type.shape;
  shape[d] = size + amount.before + amount.after;
  Expr i = axis(d) - amount.before;
  auto source = [&](Expr at, std::vector<Cond> guard) {
    std::vector<Expr> index = axes_from(0, rank_of(x));
    index[d] = at;
    return tensor_ir::Source{x.name, index, std::move(guard)};
  };
  tensor_ir::IndexMap map;
  map.axes = axis_names(shape.size());
  map.fill.dtype = x.type.dtype;
  map.sources.push_back(source(i, {{Cond::Kind::ge0, i}, less(i, size)}));
  map.sources.push_back(source(border == Border::reflect ? Expr(0) - i : Expr(0), {less(i, 0)}));
  map.sources.push_back(source(border == Border::reflect ? (size - 1) * 2 - i : size - 1, {less_equal(size, i)}));
  return b.map({x.type.dtype, shape}, std::move(map));
}

template <Border border, int spatial>
std::vector<Value> pad_border(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  auto amounts = amounts_of(call, spatial);
  for (int k = 0; k < spatial; ++k) x = pad_dim(b, x, rank_of(x) - spatial + k, amounts[k], border);
  return {x};
}

// Elements [start, start + length) of dimension d, which may be none.
Value total_of(Builder& b, const Value& grad, int64_t d, Expr start, Expr length) {
  return b.reduce(Combiner::sum, b.slice(grad, d, start, length, 1), {d}, true);
}

Value unpad_dim(Builder& b, const Value& grad, int64_t d, const Amount& amount, Expr size, Border border) {
  Shape shape = grad.type.shape;
  Expr padded = shape[d];
  shape[d] = size;
  auto view = [&](Expr at, std::vector<Cond> guard) {
    std::vector<Expr> index = axes_from(0, rank_of(grad));
    index[d] = at;
    return guarded_map(b, grad, shape, index, guard, 0);
  };
  Expr i = axis(d);
  Expr own = i + amount.before;
  Value sum = view(own, {{Cond::Kind::ge0, own}, less(own, padded)});
  if (border == Border::reflect) {
    // The element at distance i from either end was also read by that end's mirror.
    Expr left = amount.before - i;
    Expr right = amount.before + (size - 1) * 2 - i;
    sum = b.apply(Fn::add, {sum, view(left, {{Cond::Kind::ge0, i - 1}, {Cond::Kind::ge0, left}, less(left, padded)})});
    return b.apply(Fn::add, {sum, view(right, {less(i, size - 1), {Cond::Kind::ge0, right}, less(right, padded)})});
  }
  auto add_edge = [&](Expr start, Expr length, Expr at) {
    if (length.is_constant() && length.value() <= 0) return;
    DEPLO_SUPPORT(length.is_constant(), "padding by a symbolic amount");
    Value total = total_of(b, grad, d, start, length);
    std::vector<Expr> index = axes_from(0, rank_of(grad));
    index[d] = 0;
    sum = b.apply(Fn::add, {sum, guarded_map(b, total, shape, index, {equal(i, at)}, 0)});
  };
  add_edge(0, amount.before, 0);
  add_edge(padded - amount.after, amount.after, size - 1);
  return sum;
}

template <Border border, int spatial>
std::vector<Value> pad_border_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  const Shape in = call.tensor("self").type.shape;
  auto amounts = amounts_of(call, spatial);
  for (int k = 0; k < spatial; ++k) {
    int64_t d = rank_of(grad) - spatial + k;
    grad = unpad_dim(b, grad, d, amounts[k], in[d], border);
  }
  return {conform(b, grad, call.result())};
}

}  // namespace

const std::vector<Row>& border_rows() {
  static const std::vector<Row> rows = {
      {"aten.reflection_pad1d.default", pad_border<Border::reflect, 1>},    {"aten.reflection_pad2d.default", pad_border<Border::reflect, 2>},
      {"aten.reflection_pad3d.default", pad_border<Border::reflect, 3>},    {"aten.replication_pad1d.default", pad_border<Border::replicate, 1>},
      {"aten.replication_pad2d.default", pad_border<Border::replicate, 2>}, {"aten.replication_pad3d.default", pad_border<Border::replicate, 3>},
  };
  return rows;
}

const std::vector<Row>& border_backward_rows() {
  static const std::vector<Row> rows = {
      {"aten.reflection_pad1d_backward.default", pad_border_backward<Border::reflect, 1>},
      {"aten.reflection_pad2d_backward.default", pad_border_backward<Border::reflect, 2>},
      {"aten.reflection_pad3d_backward.default", pad_border_backward<Border::reflect, 3>},
      {"aten.replication_pad1d_backward.default", pad_border_backward<Border::replicate, 1>},
      {"aten.replication_pad2d_backward.default", pad_border_backward<Border::replicate, 2>},
      {"aten.replication_pad3d_backward.default", pad_border_backward<Border::replicate, 3>},
  };
  return rows;
}

}  // namespace deplo::rules
