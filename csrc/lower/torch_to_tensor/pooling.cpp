#include "lower/torch_to_tensor/pooling.h"

#include <cmath>
#include <limits>

#include "base/error.h"

// Max and average pooling of any rank, adaptive or not: a guarded window as extra axes, reduced.

namespace deplo::rules {

PoolWindow pool_window(const Call& call, size_t spatial) {
  PoolWindow w;
  w.kernel = spatial_argument(call, "kernel_size", spatial, {1});
  w.stride = spatial_argument(call, "stride", spatial, w.kernel);
  w.padding = spatial_argument(call, "padding", spatial, {0});
  w.dilation = spatial_argument(call, "dilation", spatial, {1});
  call.ignore("ceil_mode");
  return w;
}

Shape pooled_shape(const Shape& in, const std::vector<Expr>& out) {
  Shape shape(in.begin(), in.end() - static_cast<int64_t>(out.size()));
  shape.insert(shape.end(), out.begin(), out.end());
  return shape;
}

Windows windows_of(const Value& x, const Shape& out, const PoolWindow& w) {
  auto spatial = static_cast<int64_t>(w.kernel.size());
  int64_t lead = rank_of(x) - spatial;
  Windows windows;
  windows.space = out;
  windows.index = axes_from(0, lead);
  for (int64_t d = 0; d < spatial; ++d) {
    Expr extent = x.type.shape[lead + d];
    Expr position = axis(lead + d) * w.stride[d] - w.padding[d] + axis(lead + spatial + d) * w.dilation[d];
    windows.space.push_back(w.kernel[d]);
    windows.index.push_back(position);
    windows.reduced.push_back(lead + spatial + d);
    windows.guard.push_back({Cond::Kind::ge0, position});
    windows.guard.push_back(less(position, extent));
  }
  return windows;
}

AdaptiveRange adaptive_range(Expr o, Expr in, Expr out) { return {floordiv(o * in, out), ceildiv((o + 1) * in, out)}; }

Windows adaptive_windows(Builder& b, const Value& x, const Shape& out, size_t count) {
  auto spatial = static_cast<int64_t>(count);
  refuse_empty(x, spatial);
  int64_t lead = rank_of(x) - spatial;
  Windows windows;
  windows.space = out;
  windows.index = axes_from(0, lead);
  for (int64_t d = 0; d < spatial; ++d) {
    Expr in = x.type.shape[lead + d];
    Expr parts = divisor_of(b, out[lead + d]);
    auto exact = exact_quotient(in, parts);
    AdaptiveRange range = adaptive_range(axis(lead + d), in, parts);
    // The longest window: ceil(in / out), and one more where windows are not aligned.
    Expr longest = exact ? *exact : ceildiv(in, parts) + 1;
    Expr begin = exact ? axis(lead + d) * *exact : range.begin;
    Expr position = begin + axis(lead + spatial + d);
    windows.space.push_back(longest);
    windows.index.push_back(position);
    windows.reduced.push_back(lead + spatial + d);
    if (!exact) windows.guard.push_back(less(position, range.end));
  }
  return windows;
}

Value flat_position(Builder& b, const Value& x, const Windows& windows) {
  auto spatial = static_cast<int64_t>(windows.reduced.size());
  int64_t lead = rank_of(x) - spatial;
  Expr flat = 0;
  for (int64_t d = 0; d < spatial; ++d) flat = flat * x.type.shape[lead + d] + windows.index[lead + d];
  return b.index(DType::i64, windows.space, flat);
}

namespace {

double lowest(DType dtype) {
  if (is_float(dtype)) return -std::numeric_limits<double>::infinity();
  if (!is_signed(dtype)) return 0;
  return -std::exp2(static_cast<double>(size_of(dtype) * 8 - 1));
}

// The maximum and the flat position of the first element that equals it. Eager prefers the last NaN of a window.
std::vector<Value> maximum(Builder& b, const Call& call, const Value& x, const Windows& windows) {
  Value covered = guarded_map(b, x, windows.space, windows.index, windows.guard, lowest(x.type.dtype));
  std::vector<Value> results = {conform(b, b.reduce(Combiner::max, covered, windows.reduced, false), call.result(0))};
  if (call.result_count() == 1) return results;
  Value position = flat_position(b, x, windows);
  // Outside the input no position may win, not even against -inf inside it.
  Value last = b.constant_int(DType::i64, {}, std::numeric_limits<int64_t>::max());
  Value inside = guarded_map(b, b.broadcast(b.constant_int(DType::u8, {}, 1), x.type.shape), windows.space, windows.index, windows.guard, 0);
  Value candidate = windows.guard.empty() ? position : b.apply(Fn::where, {b.apply(Fn::ne, inside, 0), position, last});
  Value first = b.reduce_many(Combiner::argmax, {covered, candidate}, windows.reduced, false)[1];
  if (is_float(x.type.dtype)) {
    Value nan = b.apply(Fn::ne, {covered, covered});
    Value minus = b.constant_int(DType::i64, {}, -1);
    Value last_nan = b.reduce(Combiner::max, b.apply(Fn::where, {nan, position, minus}), windows.reduced, false);
    first = b.apply(Fn::where, {b.apply(Fn::lt, last_nan, 0), first, last_nan});
  }
  results.push_back(conform(b, first, call.result(1)));
  return results;
}

template <int spatial>
std::vector<Value> max_pool(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  Windows windows = windows_of(x, call.result().shape, pool_window(call, spatial));
  return maximum(b, call, x, windows);
}

template <int spatial>
std::vector<Value> adaptive_max_pool(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  call.ignore("output_size");
  return maximum(b, call, x, adaptive_windows(b, x, call.result().shape, spatial));
}

template <int spatial>
std::vector<Value> avg_pool(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  TensorType type = call.result();
  DEPLO_SUPPORT(is_float(type.dtype) || type.dtype == DType::i64, "average of {}", to_string(type.dtype));
  PoolWindow w = pool_window(call, spatial);
  Windows windows = windows_of(x, type.shape, w);
  Value total = b.reduce(Combiner::sum, guarded_map(b, x, windows.space, windows.index, windows.guard, 0), windows.reduced, false);
  Fn divide = is_float(type.dtype) ? Fn::div : Fn::trunc_div;
  return {conform(b, b.apply(divide, {total, average_divisor(b, call, x.type, type.shape, w)}), type)};
}

template <int spatial>
std::vector<Value> adaptive_avg_pool(Builder& b, const Call& call) {
  Value x = as_compute(b, call.tensor("self"));
  TensorType type = call.result();
  DEPLO_SUPPORT(is_float(type.dtype), "average of {}", to_string(type.dtype));
  call.ignore("output_size");
  Windows windows = adaptive_windows(b, x, type.shape, spatial);
  Value total = b.reduce(Combiner::sum, guarded_map(b, x, windows.space, windows.index, windows.guard, 0), windows.reduced, false);
  return {conform(b, b.apply(Fn::div, {total, b.index(x.type.dtype, type.shape, adaptive_count(b, x.type.shape, type.shape, spatial))}), type)};
}

}  // namespace

Value average_divisor(Builder& b, const Call& call, const TensorType& x, const Shape& out, const PoolWindow& w) {
  bool include_pad = call.boolean("count_include_pad", true);
  if (call.has("divisor_override")) return b.constant(x.dtype, {}, static_cast<double>(call.integer("divisor_override")));
  auto spatial = static_cast<int64_t>(w.kernel.size());
  int64_t lead = static_cast<int64_t>(x.shape.size()) - spatial;
  Expr count = 1;
  for (int64_t d = 0; d < spatial; ++d) {
    Expr extent = x.shape[lead + d];
    Expr begin = axis(lead + d) * w.stride[d] - w.padding[d];
    // Padding counts, but never what lies beyond it (ceil_mode).
    Expr end = min(begin + w.kernel[d], extent + w.padding[d]);
    count = count * (include_pad ? end - begin : min(end, extent) - max(begin, Expr(0)));
  }
  return b.index(x.dtype, out, count);
}

Expr adaptive_count(Builder& b, const Shape& in, const Shape& out, int64_t spatial) {
  auto lead = static_cast<int64_t>(in.size()) - spatial;
  Expr count = 1;
  for (int64_t d = lead; d < lead + spatial; ++d) {
    Expr parts = divisor_of(b, out[d]);
    AdaptiveRange range = adaptive_range(axis(d), in[d], parts);
    auto exact = exact_quotient(in[d], parts);
    count = count * (exact ? *exact : range.end - range.begin);
  }
  return count;
}

const std::vector<Row>& resize_rows();

const std::vector<Row>& pooling_rules() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten.max_pool2d_with_indices.default", max_pool<2>},
        {"aten.max_pool3d_with_indices.default", max_pool<3>},
        {"aten.avg_pool1d.default", avg_pool<1>},
        {"aten.avg_pool2d.default", avg_pool<2>},
        {"aten.avg_pool3d.default", avg_pool<3>},
        {"aten.adaptive_avg_pool1d.default", adaptive_avg_pool<1>},
        {"aten._adaptive_avg_pool2d.default", adaptive_avg_pool<2>},
        {"aten._adaptive_avg_pool3d.default", adaptive_avg_pool<3>},
        {"aten.adaptive_max_pool2d.default", adaptive_max_pool<2>},
        {"aten.adaptive_max_pool3d.default", adaptive_max_pool<3>},
    };
    all.insert(all.end(), resize_rows().begin(), resize_rows().end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
