#include "lower/torch_to_tensor/convolution.h"

#include <numeric>

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

Value convolution_operand(Builder& b, const Value& v, DType dtype) { return is_float(v.type.dtype) ? v : b.cast(v, dtype); }

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
  Value left = guarded_map(b, convolution_operand(b, x, dtype), space.shape, access.index, access.guard, 0);
  Value right = b.remap(convolution_operand(b, w, dtype), space.shape, w_index);
  return merge_groups(b, b.contract(left, right, 1 + static_cast<int>(kernel.size()), dtype), grouped, 1, w.type.shape[0]);
}

namespace {

// Output i meets tap k and input m where i + padding = k*dilation + m*stride. With g = gcd(stride, dilation), period = stride/g, step = dilation/g
// and k = k0 + j*period, the outputs of phase k0 are the i of i + padding = g*(k0*step + q*period), and m = q - j*step: a correlation without
// stride that makes no product with zeros between inputs. i + padding that g does not divide are 0.
struct Phases {
  int64_t stride, gcd, period, step;
  int64_t inverse;  // of step modulo period
  Expr padding, out;
  struct Range {
    int64_t first, count;  // phases k0 = first ... with as many taps each
    Expr taps;
    bool partial = false;  // some of these taps lie behind the kernel's end
  };
  std::vector<Range> ranges;

  // q runs along a dimension of its own from the least one that an output of the range has. That of one phase alone counts
  // i // stride, so that every output of this remainder has its place and none else.
  Expr remainder(const Range& range) const { return mod(range.first * step * gcd - padding, stride); }
  Expr first_q(const Range& range) const {
    if (range.count == 1) return floordiv(floordiv(remainder(range) + padding, gcd) - range.first * step, period);
    return ceildiv(ceildiv(padding, gcd) - (range.first + range.count - 1) * step, period);
  }
  Expr count_q(const Range& range) const {
    if (range.count == 1) return ceildiv(out, stride);
    return floordiv(floordiv(padding + out - 1, gcd) - range.first * step, period) + 1 - first_q(range);
  }
  // Where output i lies among those of a range, with the phase of several, and whether it does.
  void place(const Range& range, Expr i, std::vector<Expr>& q, std::vector<Expr>& phase, std::vector<Cond>& guard) const {
    if (range.count == 1) {
      q.push_back(floordiv(i, stride));
      if (stride > 1) guard.push_back({Cond::Kind::eq0, mod(i, stride) - remainder(range)});
      return;
    }
    Expr shifted = floordiv(i + padding, gcd);
    Expr k0 = mod(shifted * inverse, period);
    q.push_back(floordiv(shifted - (step == 1 ? Expr(0) : k0 * step), period) - first_q(range));
    phase.push_back(k0 - range.first);
    if (gcd > 1) guard.push_back({Cond::Kind::eq0, mod(i + padding, gcd)});
    if (range.first > 0) guard.push_back(less_equal(range.first, k0));
    if (range.first + range.count < period) guard.push_back(less(k0, range.first + range.count));
  }
};

Phases phases_of(Expr kernel, Expr stride, Expr dilation, Expr padding, Expr out) {
  auto s = stride.as_constant();
  auto d = dilation.as_constant();
  DEPLO_SUPPORT(s && d, "transposed convolution of symbolic stride or dilation");
  int64_t gcd = std::gcd(*s, *d);
  Phases phases{*s, gcd, *s / gcd, *d / gcd, 0, padding, out, {}};
  while (phases.period > 1 && phases.inverse * phases.step % phases.period != 1) ++phases.inverse;
  auto size = kernel.as_constant();
  if (!size) {
    phases.ranges.push_back({0, phases.period, ceildiv(kernel, phases.period), phases.period > 1});
    return phases;
  }
  int64_t rest = *size % phases.period;
  int64_t taps = *size / phases.period;
  if (rest > 0) phases.ranges.push_back({0, rest, taps + 1});
  if (taps > 0) phases.ranges.push_back({rest, phases.period - rest, taps});
  return phases;
}

// The operands of an adjoint and the axes that all its parts share.
struct Adjoint {
  Value x, w;
  const Shape& out;
  const Window& window;
  DType dtype;
  bool grouped;
  Expr c_size, a_size;
  std::vector<Phases> phases;  // per spatial dimension
};

// The outputs of one range of phases per dimension as [n, g, a, k0, k0, ..., q, q, ...] without the k0 of single phases, and which they are. The q of
// all dimensions are the points of one small image, whose lines follow one another.
tensor_ir::Source phase_outputs(Builder& b, const Adjoint& adjoint, const std::vector<Phases::Range>& ranges) {
  Space space;
  Expr n = space.add(adjoint.x.type.shape[0]);
  Expr g = adjoint.grouped ? space.add(adjoint.window.groups) : Expr(0);
  Expr a = space.add(adjoint.a_size);
  std::vector<Expr> q;
  std::vector<Expr> k0;
  for (const Phases::Range& range : ranges) k0.push_back(range.count == 1 ? Expr(range.first) : space.add(range.count) + range.first);
  for (size_t d = 0; d < ranges.size(); ++d) q.push_back(space.add(adjoint.phases[d].count_q(ranges[d])) + adjoint.phases[d].first_q(ranges[d]));
  size_t free_axes = space.shape.size();
  Expr c = space.add(adjoint.c_size);
  Access access;
  access.index = {n, channel(adjoint.grouped, g, adjoint.c_size, c)};
  std::vector<Expr> w_index = {access.index[1], a};
  std::vector<Cond> w_guard;
  for (size_t d = 0; d < ranges.size(); ++d) {
    Expr tap = ranges[d].taps.is(1) ? Expr(0) : space.add(ranges[d].taps);
    Expr position = q[d] - tap * adjoint.phases[d].step;
    access.index.push_back(position);
    access.guard.push_back({Cond::Kind::ge0, position});
    access.guard.push_back(less(position, adjoint.x.type.shape[d + 2]));
    w_index.push_back(k0[d] + tap * adjoint.phases[d].period);
    if (ranges[d].partial) w_guard.push_back(less(w_index.back(), adjoint.w.type.shape[d + 2]));
  }
  access.guard.insert(access.guard.end(), w_guard.begin(), w_guard.end());
  Value left = guarded_map(b, adjoint.x, space.shape, access.index, access.guard, 0);
  Value right = guarded_map(b, adjoint.w, space.shape, w_index, w_guard, 0);
  Value part = b.contract(left, right, static_cast<int>(space.shape.size() - free_axes), adjoint.dtype);
  tensor_ir::Source source{part.name, {axis(0)}, {}};
  if (adjoint.grouped) source.index.push_back(floordiv(axis(1), adjoint.a_size));
  source.index.push_back(adjoint.grouped ? mod(axis(1), adjoint.a_size) : axis(1));
  std::vector<Expr> points;
  for (size_t d = 0; d < ranges.size(); ++d)
    adjoint.phases[d].place(ranges[d], axis(static_cast<int64_t>(d) + 2), points, source.index, source.guard);
  source.index.insert(source.index.end(), points.begin(), points.end());
  return source;
}

}  // namespace

Value correlate_adjoint(Builder& b, const Value& x, const Value& w, const Shape& out, const Window& window, DType dtype) {
  bool grouped = !window.groups.is(1);
  Adjoint adjoint{convolution_operand(b, x, dtype),
                  convolution_operand(b, w, dtype),
                  out,
                  window,
                  dtype,
                  grouped,
                  part_of(w.type.shape[0], window.groups),
                  w.type.shape[1],
                  {}};
  std::vector<std::vector<Phases::Range>> parts = {{}};
  for (size_t d = 0; d < out.size(); ++d) {
    adjoint.phases.push_back(phases_of(w.type.shape[d + 2], window.stride[d], window.dilation[d], window.padding[d], out[d]));
    std::vector<std::vector<Phases::Range>> longer;
    for (const auto& part : parts) {
      for (const Phases::Range& range : adjoint.phases[d].ranges) {
        longer.push_back(part);
        longer.back().push_back(range);
      }
    }
    parts = std::move(longer);
  }
  tensor_ir::IndexMap map;
  map.axes = axis_names(out.size() + 2);
  map.fill = is_float(dtype) ? Scalar::of_float(dtype, 0) : Scalar::of_int(dtype, 0);
  for (const auto& ranges : parts) map.sources.push_back(phase_outputs(b, adjoint, ranges));
  Shape shape = {x.type.shape[0], adjoint.a_size * window.groups};
  shape.insert(shape.end(), out.begin(), out.end());
  return b.map({dtype, shape}, std::move(map));
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
  Value left = b.remap(convolution_operand(b, y, dtype), space.shape, y_index);
  Value right = guarded_map(b, convolution_operand(b, x, dtype), space.shape, access.index, access.guard, 0);
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
  const bool transposed = call.boolean("transposed");
  const std::vector<Expr> more = spatial_argument(call, "output_padding", out.size(), {0});
  for (size_t d = 0; d < out.size() && transposed; ++d)
    DEPLO_SUPPORT(!provably_nonnegative(more[d] - max(window.stride[d], window.dilation[d]), b.ranges()), "output padding of {} at stride {}",
                  print(more[d]), print(window.stride[d]));
  Value y = transposed ? correlate_adjoint(b, x, w, out, window, dtype) : correlate(b, x, w, out, window, dtype);
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
