#include "base/error.h"
#include "lower/torch_to_tensor/pooling.h"

// Gradients of pooling, gathered: each input element sums the windows that may cover it, so that no store collides.

namespace deplo::rules {
namespace {

// The input's elements (leading axes, then spatial ones) times the windows that may cover each, one axis per dimension.
struct Covering {
  Shape space;
  std::vector<Expr> index;     ///< of the covering window in the output
  std::vector<Cond> guard;     ///< the window exists
  std::vector<Expr> position;  ///< of the element within the window, times nothing: i + padding - o * stride
  std::vector<int64_t> reduced;
};

Covering covering_windows(const Shape& in, const Shape& out, const PoolWindow& w) {
  auto spatial = static_cast<int64_t>(w.kernel.size());
  int64_t lead = static_cast<int64_t>(in.size()) - spatial;
  Covering c;
  c.space = in;
  c.index = axes_from(0, lead);
  for (int64_t d = 0; d < spatial; ++d) {
    Expr reach = (w.kernel[d] - 1) * w.dilation[d];
    Expr padded = axis(lead + d) + w.padding[d];
    Expr window = floordiv(padded, w.stride[d]) - axis(lead + spatial + d);
    c.space.push_back(floordiv(reach, w.stride[d]) + 1);
    c.index.push_back(window);
    c.reduced.push_back(lead + spatial + d);
    c.position.push_back(padded - window * w.stride[d]);
    c.guard.push_back({Cond::Kind::ge0, window});
    c.guard.push_back(less(window, out[lead + d]));
  }
  return c;
}

// The flattened spatial position of the element itself.
Expr own_position(const Shape& in, int64_t spatial) {
  auto lead = static_cast<int64_t>(in.size()) - spatial;
  Expr flat = 0;
  for (int64_t d = lead; d < lead + spatial; ++d) flat = flat * in[d] + axis(d);
  return flat;
}

template <int spatial>
std::vector<Value> max_pool_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  Value indices = call.tensor("indices");
  const Shape in = call.tensor("self").type.shape;
  Covering c = covering_windows(in, grad.type.shape, pool_window(call, spatial));
  Value chosen = guarded_map(b, indices, c.space, c.index, c.guard, -1);
  Value matches = b.apply(Fn::eq, {chosen, b.index(DType::i64, c.space, own_position(in, spatial))});
  Value incoming = guarded_map(b, grad, c.space, c.index, c.guard, 0);
  Value kept = b.apply(Fn::where, {matches, incoming, constant_like(b, grad, 0)});
  return {conform(b, b.reduce(Combiner::sum, kept, c.reduced, false), call.result())};
}

template <int spatial>
std::vector<Value> avg_pool_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  Value self = call.tensor("self");
  PoolWindow w = pool_window(call, spatial);
  Value share = b.apply(Fn::div, {grad, average_divisor(b, call, {grad.type.dtype, self.type.shape}, grad.type.shape, w)});
  Covering c = covering_windows(self.type.shape, grad.type.shape, w);
  for (size_t d = 0; d < spatial; ++d) c.guard.push_back(less(c.position[d], w.kernel[d]));
  Value incoming = guarded_map(b, share, c.space, c.index, c.guard, 0);
  return {conform(b, b.reduce(Combiner::sum, incoming, c.reduced, false), call.result())};
}

// Element i lies in the windows from floor(i * out / in) to ceil((i + 1) * out / in) - 1.
template <int spatial>
std::vector<Value> adaptive_avg_pool_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  const Shape in = call.tensor("self").type.shape;
  const Shape& out = grad.type.shape;
  Value count = b.index(grad.type.dtype, out, adaptive_count(b, in, out, spatial));
  Value share = b.apply(Fn::div, {grad, count});
  auto lead = static_cast<int64_t>(in.size()) - spatial;
  Shape space = in;
  std::vector<Expr> index = axes_from(0, lead);
  std::vector<Cond> guard;
  std::vector<int64_t> reduced;
  for (int64_t d = 0; d < spatial; ++d) {
    Expr parts = out[lead + d];
    Expr extent = divisor_of(b, in[lead + d]);
    reduced.push_back(lead + spatial + d);
    if (auto exact = exact_quotient(extent, parts)) {
      space.push_back(1);
      index.push_back(floordiv(axis(lead + d), *exact));
      continue;
    }
    AdaptiveRange range = adaptive_range(axis(lead + d), parts, extent);
    space.push_back(ceildiv(parts, extent) + 1);
    Expr window = range.begin + axis(lead + spatial + d);
    index.push_back(window);
    guard.push_back(less(window, range.end));
  }
  Value incoming = guarded_map(b, share, space, index, guard, 0);
  return {conform(b, b.reduce(Combiner::sum, incoming, reduced, false), call.result())};
}

// The windows' sizes vary, so the gradients are added where the indices say.
template <int spatial>
std::vector<Value> adaptive_max_pool_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  Value indices = call.tensor("indices");
  const Shape in = call.tensor("self").type.shape;
  auto lead = static_cast<int64_t>(in.size()) - spatial;
  Shape flat(in.begin(), in.begin() + lead);
  Expr extent = 1;
  for (int64_t d = lead; d < lead + spatial; ++d) extent = extent * in[d];
  flat.push_back(extent);
  tensor_ir::Scatter scatter;
  scatter.combiner = Combiner::sum;
  scatter.updates = grad.name;
  scatter.axes = axis_names(in.size());
  scatter.indirects = {{"j0", indices.name, axes_from(0, static_cast<int64_t>(in.size())), extent, true}};
  scatter.index = axes_from(0, lead);
  scatter.index.push_back(Expr::symbol("j0"));
  Value sums = b.scatter(std::move(scatter), b.constant(grad.type.dtype, flat, 0));
  return {conform(b, b.reshape(sums, in), call.result())};
}

}  // namespace

const std::vector<Row>& resize_backward_rows();

const std::vector<Row>& pooling_backward_rows() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten.max_pool2d_with_indices_backward.default", max_pool_backward<2>},
        {"aten.max_pool3d_with_indices_backward.default", max_pool_backward<3>},
        {"aten.avg_pool2d_backward.default", avg_pool_backward<2>},
        {"aten.avg_pool3d_backward.default", avg_pool_backward<3>},
        {"aten._adaptive_avg_pool2d_backward.default", adaptive_avg_pool_backward<2>},
        {"aten._adaptive_avg_pool3d_backward.default", adaptive_avg_pool_backward<3>},
        {"aten.adaptive_max_pool2d_backward.default", adaptive_max_pool_backward<2>},
        {"aten.adaptive_max_pool3d_backward.default", adaptive_max_pool_backward<3>},
    };
    all.insert(all.end(), resize_backward_rows().begin(), resize_backward_rows().end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
