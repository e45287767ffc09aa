#include "base/error.h"
#include "lower/torch_to_tensor/resample.h"

// Upsampling and its gradient: separable taps along each spatial dimension.

namespace deplo::rules {
namespace {

using Taps = std::vector<std::vector<Tap>>;  // per spatial dimension

Taps all_taps(Builder& b, const Call& call, Interpolation mode, const Shape& in, const Shape& out, size_t spatial, DType dtype) {
  bool align = mode != Interpolation::nearest && mode != Interpolation::nearest_exact && call.boolean("align_corners");
  auto scales = scales_of(call, spatial);
  Taps taps;
  for (size_t k = 0; k < spatial; ++k) {
    size_t d = in.size() - spatial + k;
    taps.push_back(taps_of(b, mode, {in[d], out[d], scales[k], align}, static_cast<int64_t>(d), dtype));
  }
  return taps;
}

// Calls visit(choice) with every combination of one tap per dimension.
template <class Visit>
void for_each_combination(const Taps& taps, const Visit& visit) {
  std::vector<size_t> choice(taps.size(), 0);
  for (;;) {
    visit(choice);
    size_t k = taps.size();
    while (k > 0 && ++choice[k - 1] == taps[k - 1].size()) choice[--k] = 0;
    if (k == 0) return;
  }
}

struct Corner {
  std::vector<Expr> index;  ///< into the spatial dimensions
  std::vector<tensor_ir::Indirect> indirects;
  std::optional<Value> weight;  ///< over the output
};

Corner corner_of(Builder& b, const Taps& taps, const std::vector<size_t>& choice, const Shape& out) {
  Corner corner;
  for (size_t k = 0; k < taps.size(); ++k) {
    const Tap& tap = taps[k][choice[k]];
    corner.index.push_back(tap.index);
    if (tap.indirect) corner.indirects.push_back(*tap.indirect);
    if (!tap.weight) continue;
    Value w = b.remap(*tap.weight, out, {axis(static_cast<int64_t>(out.size() - taps.size() + k))});
    corner.weight = corner.weight ? b.apply(Fn::mul, {*corner.weight, w}) : w;
  }
  return corner;
}

// One image interpolated along its dimensions, the last one first: so eager does, whose products of 0 and infinity are these and no others.
class Interpolator {
 public:
  Interpolator(Builder& b, const Value& x, const Taps& taps, const Shape& out) : b_(b), x_(x), taps_(taps), out_(out) {}
  Value run() { return along(0); }

 private:
  Builder& b_;
  const Value& x_;
  const Taps& taps_;
  const Shape& out_;
  std::vector<const Tap*> chosen_;  // of the dimensions before

  Value along(size_t k) {
    if (k == taps_.size()) return element();
    std::optional<Value> sum;
    for (const Tap& tap : taps_[k]) {
      chosen_.push_back(&tap);
      Value v = along(k + 1);
      chosen_.pop_back();
      if (tap.weight) v = b_.apply(Fn::mul, {v, b_.remap(*tap.weight, out_, {axis(static_cast<int64_t>(out_.size() - taps_.size() + k))})});
      sum = sum ? b_.apply(Fn::add, {*sum, v}) : v;
    }
    return *sum;
  }

  Value element() {
    tensor_ir::IndexMap map;
    map.axes = axis_names(out_.size());
    std::vector<Expr> index = axes_from(0, static_cast<int64_t>(out_.size() - taps_.size()));
    for (const Tap* tap : chosen_) {
      index.push_back(tap->index);
      if (tap->indirect) map.indirects.push_back(*tap->indirect);
    }
    map.sources.push_back({x_.name, index, {}});
    map.fill.dtype = x_.type.dtype;
    return b_.map({x_.type.dtype, out_}, std::move(map));
  }
};

template <Interpolation mode, int spatial>
std::vector<Value> upsample(Builder& b, const Call& call) {
  Value input = call.tensor("self");
  call.ignore("output_size");
  bool weighted = mode == Interpolation::linear || mode == Interpolation::cubic;
  DEPLO_SUPPORT(is_float(input.type.dtype) || !weighted, "interpolation of {}", to_string(input.type.dtype));
  DType dtype = is_float(input.type.dtype) ? compute_type(input.type.dtype) : DType::f32;
  Value x = weighted ? b.cast(input, dtype) : input;
  const Shape out = call.result().shape;
  refuse_empty(x, spatial + 1);
  for (int d = 1; d <= spatial; ++d) DEPLO_SUPPORT(!out[out.size() - d].is(0), "a result without elements");
  Taps taps = all_taps(b, call, mode, x.type.shape, out, spatial, dtype);
  return {conform(b, Interpolator(b, x, taps, out).run(), call.result())};
}

// Nearest by an integer factor repeats each element: the gradient sums a block of the same size.
std::optional<Value> block_sums(Builder& b, const Value& grad, const Shape& in, const Taps& taps) {
  size_t lead = in.size() - taps.size();
  Shape space = in;
  std::vector<Expr> index = axes_from(0, static_cast<int64_t>(lead));
  std::vector<int64_t> reduced;
  for (size_t k = 0; k < taps.size(); ++k) {
    size_t d = lead + k;
    auto factor = exact_quotient(grad.type.shape[d], in[d]);
    if (!factor || taps[k][0].indirect || taps[k][0].index != floordiv(axis(static_cast<int64_t>(d)), *factor)) return std::nullopt;
    index.push_back(axis(static_cast<int64_t>(d)) * *factor + axis(static_cast<int64_t>(space.size())));
    reduced.push_back(static_cast<int64_t>(space.size()));
    space.push_back(*factor);
  }
  return b.reduce(Combiner::sum, b.remap(grad, space, index), reduced, false);
}

template <Interpolation mode, int spatial>
std::vector<Value> upsample_backward(Builder& b, const Call& call) {
  Value grad = as_compute(b, call.tensor("grad_output"));
  DEPLO_SUPPORT(is_float(grad.type.dtype), "gradient of {}", to_string(grad.type.dtype));
  call.ignore("output_size");
  Shape in = call.sizes("input_size");
  const Shape out = grad.type.shape;
  Taps taps = all_taps(b, call, mode, in, out, spatial, grad.type.dtype);
  if (auto sums = block_sums(b, grad, in, taps)) return {conform(b, *sums, call.result())};
  Value total = b.constant(grad.type.dtype, in, 0);
  for_each_combination(taps, [&](const std::vector<size_t>& choice) {
    Corner corner = corner_of(b, taps, choice, out);
    Value share = corner.weight ? b.apply(Fn::mul, {grad, *corner.weight}) : grad;
    tensor_ir::Scatter scatter;
    scatter.combiner = Combiner::sum;
    scatter.updates = share.name;
    scatter.axes = axis_names(out.size());
    scatter.indirects = corner.indirects;
    scatter.index = axes_from(0, static_cast<int64_t>(out.size()) - spatial);
    scatter.index.insert(scatter.index.end(), corner.index.begin(), corner.index.end());
    total = b.scatter(std::move(scatter), total);
  });
  return {conform(b, total, call.result())};
}

std::vector<Value> pixel_shuffle(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t factor = call.integer("upscale_factor");
  int64_t c = rank_of(x) - 3;
  DEPLO_SUPPORT(c >= 0, "pixel_shuffle of {} dimensions", rank_of(x));
  std::vector<Expr> index = axes_from(0, c);
  Expr h = axis(c + 1);
  Expr w = axis(c + 2);
  index.insert(index.end(), {(axis(c) * factor + mod(h, factor)) * factor + mod(w, factor), floordiv(h, factor), floordiv(w, factor)});
  return {b.remap(x, call.result().shape, index)};
}

std::vector<Value> pixel_unshuffle(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  int64_t factor = call.integer("downscale_factor");
  int64_t c = rank_of(x) - 3;
  DEPLO_SUPPORT(c >= 0, "pixel_unshuffle of {} dimensions", rank_of(x));
  std::vector<Expr> index = axes_from(0, c);
  Expr channel = axis(c);
  index.insert(index.end(), {floordiv(channel, factor * factor), axis(c + 1) * factor + mod(floordiv(channel, factor), factor),
                             axis(c + 2) * factor + mod(channel, factor)});
  return {b.remap(x, call.result().shape, index)};
}

std::vector<Value> channel_shuffle(Builder& b, const Call& call) {
  Value x = call.tensor("self");
  Expr groups = call.size("groups");
  DEPLO_SUPPORT(rank_of(x) >= 2, "channel_shuffle of {} dimensions", rank_of(x));
  Expr part = part_of(x.type.shape[1], groups);
  std::vector<Expr> index = axes_from(0, rank_of(x));
  index[1] = mod(axis(1), groups) * part + floordiv(axis(1), groups);
  return {b.remap(x, x.type.shape, index)};
}

}  // namespace

const std::vector<Row>& antialias_rows();
const std::vector<Row>& border_rows();
const std::vector<Row>& border_backward_rows();
const std::vector<Row>& grid_sampler_rows();

const std::vector<Row>& resize_rows() {
  using I = Interpolation;
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten.upsample_nearest1d.default", upsample<I::nearest, 1>},
        {"aten.upsample_nearest2d.default", upsample<I::nearest, 2>},
        {"aten.upsample_nearest3d.default", upsample<I::nearest, 3>},
        {"aten._upsample_nearest_exact1d.default", upsample<I::nearest_exact, 1>},
        {"aten._upsample_nearest_exact2d.default", upsample<I::nearest_exact, 2>},
        {"aten._upsample_nearest_exact3d.default", upsample<I::nearest_exact, 3>},
        {"aten.upsample_linear1d.default", upsample<I::linear, 1>},
        {"aten.upsample_bilinear2d.default", upsample<I::linear, 2>},
        {"aten.upsample_trilinear3d.default", upsample<I::linear, 3>},
        {"aten.upsample_bicubic2d.default", upsample<I::cubic, 2>},
        {"aten.pixel_shuffle.default", pixel_shuffle},
        {"aten.pixel_unshuffle.default", pixel_unshuffle},
        {"aten.channel_shuffle.default", channel_shuffle},
    };
    for (const auto* more : {&antialias_rows(), &border_rows(), &grid_sampler_rows()}) all.insert(all.end(), more->begin(), more->end());
    return all;
  }();
  return rows;
}

const std::vector<Row>& resize_backward_rows() {
  using I = Interpolation;
  static const std::vector<Row> rows = [] {
    std::vector<Row> all = {
        {"aten.upsample_nearest1d_backward.default", upsample_backward<I::nearest, 1>},
        {"aten.upsample_nearest2d_backward.default", upsample_backward<I::nearest, 2>},
        {"aten.upsample_nearest3d_backward.default", upsample_backward<I::nearest, 3>},
        {"aten._upsample_nearest_exact1d_backward.default", upsample_backward<I::nearest_exact, 1>},
        {"aten._upsample_nearest_exact2d_backward.default", upsample_backward<I::nearest_exact, 2>},
        {"aten._upsample_nearest_exact3d_backward.default", upsample_backward<I::nearest_exact, 3>},
        {"aten.upsample_linear1d_backward.default", upsample_backward<I::linear, 1>},
        {"aten.upsample_bilinear2d_backward.default", upsample_backward<I::linear, 2>},
        {"aten.upsample_trilinear3d_backward.default", upsample_backward<I::linear, 3>},
        {"aten.upsample_bicubic2d_backward.default", upsample_backward<I::cubic, 2>},
    };
    all.insert(all.end(), border_backward_rows().begin(), border_backward_rows().end());
    return all;
  }();
  return rows;
}

}  // namespace deplo::rules
