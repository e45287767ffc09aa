#include "lower/torch_to_tensor/resample.h"

#include <cmath>
#include <string>

#include "base/error.h"

namespace deplo::rules {
namespace {

// A source coordinate as an exact fraction of integer expressions.
struct Fraction {
  Expr numerator, denominator;
};

// in / out in lowest terms where that can be seen.
Fraction ratio(Expr in, Expr out) {
  if (in == out) return {1, 1};
  if (auto k = exact_quotient(out, in)) return {1, *k};
  if (auto k = exact_quotient(in, out)) return {*k, 1};
  return {in, out};
}

// What eager computes in floating point against the fraction, for outputs 0 to last.
template <class T>
bool rounds_alike(bool exact, T scale, int64_t numerator, int64_t denominator, int64_t last) {
  for (int64_t o = 0; o < last; ++o) {
    T at = static_cast<T>(o);
    T source = exact ? (at + T(0.5)) * scale : at * scale;
    T shifted = exact ? (at + T(0.5)) * scale - T(0.5) + T(0.5) : source;
    int64_t closed = exact ? (2 * o + 1) * numerator / (2 * denominator) : o * numerator / denominator;
    if (static_cast<int64_t>(std::floor(static_cast<float>(source))) != closed ||
        static_cast<int64_t>(std::floor(static_cast<float>(shifted))) != closed)
      return false;
  }
  return true;
}

// Eager rounds the source coordinate in floating point: the closed form serves if it is sure to choose the same elements.
bool rounds_alike(Interpolation mode, Expr in, Expr out) {
  Fraction f = ratio(in, out);
  auto numerator = f.numerator.as_constant();
  auto denominator = f.denominator.as_constant();
  if (!numerator || !denominator) return false;
  bool exact = mode == Interpolation::nearest_exact;
  if (*denominator == 1 && !exact) return true;
  // For an integer factor two periods decide: later ones only scale by integers that float32 holds.
  int64_t last = out.as_constant().value_or(*numerator == 1 ? 2 * *denominator : 0);
  if (last == 0 || last > 1 << 20) return false;
  double a = static_cast<double>(in.as_constant().value_or(*numerator));
  double c = static_cast<double>(in.is_constant() ? last : *denominator);
  return rounds_alike<float>(exact, static_cast<float>(a) / static_cast<float>(c), *numerator, *denominator, last) &&
         rounds_alike<double>(exact, a / c, *numerator, *denominator, last);
}

// The source coordinate of output o as a fraction; nothing if a scale says otherwise than the sizes.
std::optional<Fraction> closed_source(Interpolation mode, const Resample& r, Expr o) {
  if (r.align_corners) {
    if (r.out.is(1)) return Fraction{0, 1};
    return Fraction{o * (r.in - 1), r.out - 1};
  }
  if (r.scale) {
    auto in = r.in.as_constant();
    auto out = r.out.as_constant();
    auto factor = exact_quotient(r.out, r.in);
    bool agrees = in && out ? static_cast<double>(*in) * *r.scale == static_cast<double>(*out)
                            : factor && factor->is_constant() && static_cast<double>(factor->value()) == *r.scale;
    if (!agrees) return std::nullopt;
  }
  Fraction f = ratio(r.in, r.out);
  switch (mode) {
    case Interpolation::nearest: return Fraction{o * f.numerator, f.denominator};
    case Interpolation::nearest_exact: return Fraction{(o * 2 + 1) * f.numerator, f.denominator * 2};
    case Interpolation::linear: return Fraction{max((o * 2 + 1) * f.numerator - f.denominator, Expr(0)), f.denominator * 2};
    case Interpolation::cubic: return Fraction{(o * 2 + 1) * f.numerator - f.denominator, f.denominator * 2};
  }
  DEPLO_ASSERT(false, "interpolation");
}

// The source coordinate of every output as a tensor, by eager's formula in `dtype`.
Value source_tensor(Builder& b, Interpolation mode, const Resample& r, DType dtype) {
  Value scale;
  auto quotient = [&](Expr a, Expr c) { return b.apply(Fn::div, {size_value(b, dtype, a), size_value(b, dtype, c)}); };
  if (r.align_corners) {
    scale = r.out.is(1) ? b.constant(dtype, {}, 0) : quotient(r.in - 1, r.out - 1);
  } else {
    scale = r.scale ? b.constant(dtype, {}, 1 / *r.scale) : quotient(r.in, r.out);
  }
  Value o = b.index(dtype, {r.out}, axis(0));
  if (r.align_corners || mode == Interpolation::nearest) return b.apply(Fn::mul, {o, scale});
  Value source = b.apply(Fn::sub, b.apply(Fn::mul, {b.apply(Fn::add, o, 0.5), scale}), 0.5);
  return mode == Interpolation::linear ? b.apply(Fn::max, source, 0) : source;
}

// An index tensor kept inside [0, in) as a coordinate along dimension d.
Tap indirect_tap(Builder& b, const Value& whole, int64_t offset, const Resample& r, int64_t d, std::optional<Value> weight) {
  Value index = b.apply(Fn::add, {whole, b.constant_int(DType::i64, {}, offset)});
  index = b.apply(Fn::max, {b.apply(Fn::min, {index, size_value(b, DType::i64, r.in - 1)}), b.constant_int(DType::i64, {}, 0)});
  std::string name = "j" + std::to_string(d);
  return {Expr::symbol(name), tensor_ir::Indirect{name, index.name, {axis(d)}, r.in, false}, std::move(weight)};
}

Tap closed_tap(Expr whole, int64_t offset, const Resample& r, std::optional<Value> weight) {
  Expr index = offset == 0 && weight == std::nullopt ? whole : max(min(whole + offset, r.in - 1), Expr(0));
  return {index, std::nullopt, std::move(weight)};
}

constexpr double kCubicFactor = -0.75;

// Horner's rule, highest coefficient first.
Value polynomial(Builder& b, const Value& x, std::initializer_list<double> coefficients) {
  Value y = constant_like(b, x, *coefficients.begin());
  for (const double* c = coefficients.begin() + 1; c != coefficients.end(); ++c)
    y = b.apply(Fn::add, {b.apply(Fn::mul, {y, x}), constant_like(b, x, *c)});
  return y;
}

}  // namespace

std::vector<Value> cubic_weights(Builder& b, const Value& t) {
  auto near = [&](const Value& x) { return polynomial(b, x, {kCubicFactor + 2, -(kCubicFactor + 3), 0, 1}); };
  auto far = [&](const Value& x) { return polynomial(b, x, {kCubicFactor, -5 * kCubicFactor, 8 * kCubicFactor, -4 * kCubicFactor}); };
  Value rest = b.apply(Fn::sub, {constant_like(b, t, 1), t});
  return {far(b.apply(Fn::add, t, 1)), near(t), near(rest), far(b.apply(Fn::add, rest, 1))};
}

std::vector<Value> cubic_slopes(Builder& b, const Value& t) {
  auto near = [&](const Value& x) { return polynomial(b, x, {3 * (kCubicFactor + 2), -2 * (kCubicFactor + 3), 0}); };
  auto far = [&](const Value& x) { return polynomial(b, x, {3 * kCubicFactor, -10 * kCubicFactor, 8 * kCubicFactor}); };
  Value rest = b.apply(Fn::sub, {constant_like(b, t, 1), t});
  return {far(b.apply(Fn::add, t, 1)), near(t), b.apply(Fn::neg, {near(rest)}), b.apply(Fn::neg, {far(b.apply(Fn::add, rest, 1))})};
}

std::vector<Tap> taps_of(Builder& b, Interpolation mode, const Resample& r, int64_t d, DType dtype) {
  bool nearest = mode == Interpolation::nearest || mode == Interpolation::nearest_exact;
  auto closed = closed_source(mode, r, axis(d));
  if (closed && nearest && !rounds_alike(mode, r.in, r.out)) closed.reset();
  if (nearest) {
    if (closed) return {closed_tap(floordiv(closed->numerator, closed->denominator), 0, r, std::nullopt)};
    // Here eager's choice between two elements may depend on the memory format.
    DEPLO_SUPPORT(mode == Interpolation::nearest && dtype != DType::f64,
                  "the {} elements nearest to those of an axis of {} in {}: which these are depends on rounding", print(r.out), print(r.in),
                  to_string(dtype));
    Value whole = b.cast(b.apply(Fn::floor, {source_tensor(b, mode, r, dtype)}), DType::i64);
    return {indirect_tap(b, whole, 0, r, d, std::nullopt)};
  }
  Value fraction, whole;
  Expr closed_whole;
  if (closed) {
    closed_whole = floordiv(closed->numerator, closed->denominator);
    // The remainder over axis 0, which is the only axis of the weights.
    Expr rest = substitute(mod(closed->numerator, closed->denominator), {{axis(d).name(), axis(0)}});
    fraction = divide_by_size(b, b.index(dtype, {r.out}, rest), closed->denominator);
  } else {
    Value source = source_tensor(b, mode, r, dtype);
    Value floor = b.apply(Fn::floor, {source});
    fraction = b.apply(Fn::sub, {source, floor});
    whole = b.cast(floor, DType::i64);
  }
  std::vector<Value> weights = mode == Interpolation::linear
                                   ? std::vector<Value>{b.apply(Fn::sub, {constant_like(b, fraction, 1), fraction}), fraction}
                                   : cubic_weights(b, fraction);
  int64_t first = mode == Interpolation::linear ? 0 : -1;
  std::vector<Tap> taps;
  for (size_t k = 0; k < weights.size(); ++k) {
    // Eager keeps an image of its own size as it is: the neighbour's weight of 0 goes to the element itself.
    int64_t offset = mode == Interpolation::linear && b.same_size(r.in, r.out) ? 0 : first + static_cast<int64_t>(k);
    taps.push_back(closed ? closed_tap(closed_whole, offset, r, weights[k]) : indirect_tap(b, whole, offset, r, d, weights[k]));
  }
  return taps;
}

std::vector<std::optional<double>> scales_of(const Call& call, size_t spatial) {
  std::vector<std::optional<double>> scales(spatial);
  static const std::vector<std::vector<std::string>> names = {{"scales"}, {"scales_h", "scales_w"}, {"scales_d", "scales_h", "scales_w"}};
  for (size_t k = 0; k < spatial; ++k) {
    const std::string& name = names[spatial - 1][k];
    if (call.has(name) && call.real(name) > 0) scales[k] = call.real(name);
  }
  return scales;
}

}  // namespace deplo::rules
