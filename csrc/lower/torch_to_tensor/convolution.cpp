#include "lower/torch_to_tensor/convolution.h"

#include "base/error.h"

// Convolutions of any rank as contractions over an affine access; the group is an axis of its own, so that indices stay affine.

namespace deplo::rules {
namespace {

// Appends axes and remembers their symbols.
struct Space {
  Shape shape;
  Expr add(Expr extent) {
    shape.push_back(extent);
    return axis(static_cast<int64_t>(shape.size()) - 1);
  }
  std::vector<Expr> add(const Shape& extents) {
    std::vector<Expr> axes;
    for (const Expr& e : extents) axes.push_back(add(e));
    return axes;
  }
};

Shape spatial_of(const Value& v) { return {v.type.shape.begin() + 2, v.type.shape.end()}; }

Expr channel(bool grouped, Expr group, Expr size, Expr c) { return grouped ? group * size + c : c; }

struct Access {
  std::vector<Expr> index;
  std::vector<Cond> guard;
};

// o*stride - padding + k*dilation; without padding the definition of the output size keeps it inside.
void window_position(Access& access, const Window& window, size_t d, Expr o, Expr k, Expr extent) {
  Expr position = o * window.stride[d] - window.padding[d] + k * window.dilation[d];
  access.index.push_back(position);
  if (window.padding[d].is(0)) return;
  access.guard.push_back({Cond::Kind::ge0, position});
  access.guard.push_back(less(position, extent));
}

// v[..., group, c, ...] as [..., channel, ...]; `channels` is groups * c by the definition of a convolution, also where nothing proves it.
Value merge_groups(Builder& b, const Value& v, bool grouped, int64_t dim, Expr channels) {
  if (!grouped) return v;
  Shape shape = v.type.shape;
  Expr size = shape[dim + 1];
  shape[dim] = channels;
  shape.erase(shape.begin() + dim + 1);
  std::vector<Expr> index = axes_from(0, rank_of(v) - 1);
  index[dim] = floordiv(axis(dim), size);
  index.insert(index.begin() + dim + 1, mod(axis(dim), size));
  return b.remap(v, shape, index);
}

Value operand(Builder& b, const Value& v, DType dtype) { return is_float(v.type.dtype) ? v : b.cast(v, dtype); }

}  // namespace

Value correlate(Builder& b, const Value& x, const Value& w, const Shape& out, const Window& window, DType dtype) {
  bool grouped = !window.groups.is(1);
  Expr a_size = part_of(w.type.shape[0], window.groups);
  Expr c_size = w.type.shape[1];
  Space space;
  Expr n = space.add(x.type.shape[0]);
  Expr g = grouped ? space.add(window.groups) : Expr(0);
  Expr a = space.add(a_size);
  std::vector<Expr> o = space.add(out);
  Expr c = space.add(c_size);
  Shape kernel = spatial_of(w);
  std::vector<Expr> k = space.add(kernel);
  Access access;
  access.index = {n, channel(grouped, g, c_size, c)};
  for (size_t d = 0; d < out.size(); ++d) window_position(access, window, d, o[d], k[d], x.type.shape[d + 2]);
  std::vector<Expr> w_index = {channel(grouped, g, a_size, a), c};
  w_index.insert(w_index.end(), k.begin(), k.end());
  Value left = guarded_map(b, operand(b, x, dtype), space.shape, access.index, access.guard, 0);
  Value right = b.remap(operand(b, w, dtype), space.shape, w_index);
  return merge_groups(b, b.contract(left, right, 1 + static_cast<int>(kernel.size()), dtype), grouped, 1, w.type.shape[0]);
}

Value correlate_adjoint(Builder& b, const Value& x, const Value& w, const Shape& out, const Window& window, DType dtype) {
  bool grouped = !window.groups.is(1);
  Expr c_size = part_of(w.type.shape[0], window.groups);
  Expr a_size = w.type.shape[1];
  Space space;
  Expr n = space.add(x.type.shape[0]);
  Expr g = grouped ? space.add(window.groups) : Expr(0);
  Expr a = space.add(a_size);
  std::vector<Expr> i = space.add(out);
  Expr c = space.add(c_size);
  Shape kernel = spatial_of(w);
  std::vector<Expr> k = space.add(kernel);
  Access access;
  access.index = {n, channel(grouped, g, c_size, c)};
  for (size_t d = 0; d < out.size(); ++d) {
    Expr stride = window.stride[d];
    Expr scaled_position = i[d] + window.padding[d] - k[d] * window.dilation[d];
    access.index.push_back(floordiv(scaled_position, stride));
    access.guard.push_back({Cond::Kind::ge0, scaled_position});
    access.guard.push_back(less(scaled_position, x.type.shape[d + 2] * stride));
    if (!stride.is(1)) access.guard.push_back({Cond::Kind::eq0, mod(scaled_position, stride)});
  }
  std::vector<Expr> w_index = {channel(grouped, g, c_size, c), a};
  w_index.insert(w_index.end(), k.begin(), k.end());
  Value left = guarded_map(b, operand(b, x, dtype), space.shape, access.index, access.guard, 0);
  Value right = b.remap(operand(b, w, dtype), space.shape, w_index);
  return merge_groups(b, b.contract(left, right, 1 + static_cast<int>(kernel.size()), dtype), grouped, 1, a_size * window.groups);
}

Value correlate_weight(Builder& b, const Value& y, const Value& x, const Shape& kernel, const Window& window, DType dtype) {
  bool grouped = !window.groups.is(1);
  Expr a_size = part_of(y.type.shape[1], window.groups);
  Expr c_size = part_of(x.type.shape[1], window.groups);
  Space space;
  Expr g = grouped ? space.add(window.groups) : Expr(0);
  Expr a = space.add(a_size);
  Expr c = space.add(c_size);
  std::vector<Expr> k = space.add(kernel);
  Expr n = space.add(x.type.shape[0]);
  Shape positions = spatial_of(y);
  std::vector<Expr> o = space.add(positions);
  Access access;
  access.index = {n, channel(grouped, g, c_size, c)};
  for (size_t d = 0; d < kernel.size(); ++d) window_position(access, window, d, o[d], k[d], x.type.shape[d + 2]);
  std::vector<Expr> y_index = {n, channel(grouped, g, a_size, a)};
  y_index.insert(y_index.end(), o.begin(), o.end());
  Value left = b.remap(operand(b, y, dtype), space.shape, y_index);
  Value right = guarded_map(b, operand(b, x, dtype), space.shape, access.index, access.guard, 0);
  return merge_groups(b, b.contract(left, right, 1 + static_cast<int>(positions.size()), dtype), grouped, 0, y.type.shape[1]);
}

namespace {

// stride, padding, dilation and groups of a convolution call; output_padding only shows in the output's size.
Window window_of(const Call& call, size_t spatial) {
  Window window;
  window.stride = spatial_argument(call, "stride", spatial, {1});
  window.padding = spatial_argument(call, "padding", spatial, {0});
  window.dilation = spatial_argument(call, "dilation", spatial, {1});
  window.groups = call.size("groups");
  call.ignore("output_padding");
  for (const char* name : {"benchmark", "deterministic", "cudnn_enabled", "allow_tf32"}) call.ignore(name);
  return window;
}

size_t spatial_rank(const Value& x, const Value& w) {
  DEPLO_SUPPORT(rank_of(x) >= 3 && rank_of(x) == rank_of(w), "convolution of {} by {} dimensions", rank_of(x), rank_of(w));
  return x.type.shape.size() - 2;
}

std::vector<Value> convolution(Builder& b, const Call& call) {
  Value x = call.tensor("input");
  Value w = call.tensor("weight");
  Window window = window_of(call, spatial_rank(x, w));
  TensorType type = call.result();
  DEPLO_SUPPORT(type.dtype != DType::boolean, "convolution of bool");
  DType dtype = compute_type(type.dtype);
  Shape out(type.shape.begin() + 2, type.shape.end());
  Value y = call.boolean("transposed") ? correlate_adjoint(b, x, w, out, window, dtype) : correlate(b, x, w, out, window, dtype);
  if (auto bias = call.optional_tensor("bias")) y = b.apply(Fn::add, {y, per_channel(b, b.cast(*bias, dtype), y.type.shape)});
  return {conform(b, y, type)};
}

std::vector<Value> convolution_backward(Builder& b, const Call& call) {
  Value grad = call.tensor("grad_output");
  Value x = call.tensor("input");
  Value w = call.tensor("weight");
  Window window = window_of(call, spatial_rank(x, w));
  bool transposed = call.boolean("transposed");
  call.ignore("bias_sizes");
  call.ignore("output_mask");
  std::vector<Value> results(3);
  DType dtype = compute_type(grad.type.dtype);
  DEPLO_SUPPORT(is_float(dtype), "gradient of a convolution of {}", to_string(dtype));
  if (call.result_used(0)) {
    Shape in = spatial_of(x);
    Value g = transposed ? correlate(b, grad, w, in, window, dtype) : correlate_adjoint(b, grad, w, in, window, dtype);
    results[0] = conform(b, g, call.result(0));
  }
  if (call.result_used(1)) {
    Shape kernel = spatial_of(w);
    Value g = transposed ? correlate_weight(b, x, grad, kernel, window, dtype) : correlate_weight(b, grad, x, kernel, window, dtype);
    results[1] = conform(b, g, call.result(1));
  }
  if (call.result_used(2)) {
    std::vector<int64_t> dims = dim_range(2, rank_of(grad));
    dims.push_back(0);
    results[2] = conform(b, reduce_dims(b, Combiner::sum, as_compute(b, grad), dims, false), call.result(2));
  }
  return results;
}

// kernel_size, dilation, padding and stride of im2col and col2im.
struct Blocks {
  std::vector<Expr> kernel, dilation, padding, stride;
};

Blocks blocks_of(const Call& call) {
  return {spatial_argument(call, "kernel_size", 2, {1}), spatial_argument(call, "dilation", 2, {1}), spatial_argument(call, "padding", 2, {0}),
          spatial_argument(call, "stride", 2, {1})};
}

Expr positions_of(const Blocks& blocks, size_t d, Expr extent) {
  return floordiv(extent + blocks.padding[d] * 2 - blocks.dilation[d] * (blocks.kernel[d] - 1) - 1, blocks.stride[d]) + 1;
}

std::vector<Value> im2col(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  if (rank_of(x) == 3) x = b.unsqueeze(x, 0);
  DEPLO_SUPPORT(rank_of(x) == 4, "im2col of {} dimensions", rank_of(x));
  Blocks blocks = blocks_of(call);
  const Shape& in = x.type.shape;
  Shape space = {in[0], in[1], blocks.kernel[0], blocks.kernel[1], positions_of(blocks, 0, in[2]), positions_of(blocks, 1, in[3])};
  Window window{blocks.stride, blocks.padding, blocks.dilation, 1};
  Access access;
  access.index = {axis(0), axis(1)};
  for (size_t d = 0; d < 2; ++d) window_position(access, window, d, axis(4 + static_cast<int64_t>(d)), axis(2 + static_cast<int64_t>(d)), in[d + 2]);
  return {b.reshape(guarded_map(b, x, space, access.index, access.guard, 0), call.result().shape)};
}

// Each pixel sums the blocks that cover it.
std::vector<Value> col2im(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  if (rank_of(x) == 2) x = b.unsqueeze(x, 0);
  DEPLO_SUPPORT(rank_of(x) == 3, "col2im of {} dimensions", rank_of(x));
  Blocks blocks = blocks_of(call);
  std::vector<Expr> out = spatial_argument(call, "output_size", 2, {1});
  Expr channels = part_of(x.type.shape[1], blocks.kernel[0] * blocks.kernel[1]);
  Expr rows = positions_of(blocks, 0, out[0]);
  Expr columns = positions_of(blocks, 1, out[1]);
  Value blocked = b.reshape(x, {x.type.shape[0], channels, blocks.kernel[0], blocks.kernel[1], rows, columns});
  Shape space = {x.type.shape[0], channels, out[0], out[1], blocks.kernel[0], blocks.kernel[1]};
  std::vector<Expr> index = {axis(0), axis(1), axis(4), axis(5)};
  std::vector<Cond> guard;
  for (int64_t d = 0; d < 2; ++d) {
    Expr position = axis(2 + d) + blocks.padding[d] - axis(4 + d) * blocks.dilation[d];
    index.push_back(floordiv(position, blocks.stride[d]));
    guard.push_back({Cond::Kind::ge0, position});
    guard.push_back(less(position, (d == 0 ? rows : columns) * blocks.stride[d]));
    guard.push_back({Cond::Kind::eq0, mod(position, blocks.stride[d])});
  }
  Value covering = guarded_map(b, as_compute(b, blocked), space, index, guard, 0);
  return {conform(b, b.reduce(Combiner::sum, covering, {4, 5}, false), call.result())};
}

}  // namespace

const std::vector<Row>& convolution_rules() {
  static const std::vector<Row> rows = {
      {"aten.convolution.default", convolution},
      {"aten._convolution.default", convolution},
      {"aten.convolution_backward.default", convolution_backward},
      {"aten.im2col.default", im2col},
      {"aten.col2im.default", col2im},
  };
  return rows;
}

}  // namespace deplo::rules
