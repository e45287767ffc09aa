#include "lower/tile_to_kernel/combine.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "base/error.h"

namespace deplo::tile_to_kernel {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of float64.
constexpr int64_t kFractionBits = 52, kExponentMask = 2047, kExponentBias = 1023;
constexpr int64_t kSubnormalShift = 64;  ///< by which subnormal numbers become normal ones

}  // namespace

Combination::Combination(Emitter& emit, std::string name, Combiner combiner, std::vector<DType> results, size_t operand_count, Use use)
    : emit_(emit), name_(std::move(name)), combiner_(combiner), results_(std::move(results)), operands_(operand_count) {
  DType own = compute_type(results_.at(0));
  const bool scans = use != Use::reduces;
  if (scans && own == DType::f32 && (combiner == Combiner::sum || combiner == Combiner::prod)) own = DType::f64;
  switch (combiner) {
    case Combiner::prod:
      dtypes_ = {own};
      // Each factor rounds, in whatever order: what was lost is kept beside. Scans give every partial product, and round as eager's do.
      if (own == DType::f64 && !scans) dtypes_.push_back(own);
      has_exponent_ = own == DType::f64 && use == Use::scans_parts;
      if (has_exponent_) dtypes_.push_back(DType::i64);
      break;
    case Combiner::sum:
    case Combiner::min:
    case Combiner::max: dtypes_ = {own}; break;
    case Combiner::argmin:
    case Combiner::argmax: dtypes_ = {own, results_.at(1)}; break;
    case Combiner::welford: dtypes_ = {own, own, own}; break;
    case Combiner::online_softmax: dtypes_ = {own, own}; break;
    case Combiner::set: DEPLO_ASSERT(false, "set does not reduce");
  }
}

Fn Combination::function() const {
  switch (combiner_) {
    case Combiner::sum: return Fn::add;
    case Combiner::prod: return Fn::mul;
    case Combiner::min: return Fn::min;
    default: return Fn::max;
  }
}

std::string Combination::number(DType dtype, int lanes, double value) {
  return emit_.constant({dtype, lanes}, is_float(dtype) ? Scalar::of_float(dtype, value) : Scalar::of_int(dtype, static_cast<int64_t>(value)));
}

std::string Combination::cast(const std::string& value, DType dtype) {
  Type type = emit_.type(value);
  return type.dtype == dtype ? value : emit_.let(value + "_x", {dtype, type.lanes}, Fn::cast, {value});
}

std::string Combination::op(Fn fn, const std::string& a, const std::string& b) {
  Type type = emit_.type(a);
  if (info(fn).signature == Signature::predicate) type.dtype = DType::boolean;
  return emit_.let(name_, type, fn, {a, b});
}

State Combination::identity(int lanes) {
  switch (combiner_) {
    case Combiner::argmin:
    case Combiner::argmax:
      return {emit_.constant({dtypes_[0], lanes}, deplo::identity(combiner_, dtypes_[0])),
              emit_.constant({dtypes_[1], lanes}, Scalar::of_int(dtypes_[1], std::numeric_limits<int64_t>::max()))};
    case Combiner::welford: {
      std::string zero = number(dtypes_[0], lanes, 0);
      return {zero, zero, zero};
    }
    case Combiner::online_softmax: return {number(dtypes_[0], lanes, -kInfinity), number(dtypes_[0], lanes, 0)};
    default: {
      State state{emit_.constant({dtypes_[0], lanes}, deplo::identity(combiner_, dtypes_[0]))};
      if (parts() == 2) state.push_back(number(dtypes_[1], lanes, 0));
      return state;
    }
  }
}

State Combination::step(const State& state, const std::vector<std::string>& operands) {
  std::vector<std::string> x;
  for (size_t k = 0; k < operands.size(); ++k) {
    bool index = k == 1 && (combiner_ == Combiner::argmin || combiner_ == Combiner::argmax);
    x.push_back(cast(operands[k], index ? dtypes_[1] : dtypes_[0]));
  }
  switch (combiner_) {
    case Combiner::argmin:
    case Combiner::argmax: return merge_extreme(state, x);
    case Combiner::welford: {
      if (operands_ == 3) return merge_welford(state, x);
      // Welford 1962: the mean moves by delta / n, m2 by delta times the remaining distance.
      std::string n = op(Fn::add, state[0], number(dtypes_[0], lanes(state), 1));
      std::string delta = op(Fn::sub, x[0], state[1]);
      std::string mean = op(Fn::add, state[1], op(Fn::div, delta, n));
      std::string rest = op(Fn::sub, x[0], mean);
      return {n, mean, emit_.let(name_, emit_.type(delta), Fn::fma, {delta, rest, state[2]})};
    }
    case Combiner::online_softmax:
      if (operands_ == 2) return merge_softmax(state, x);
      return merge_softmax(state, {x[0], number(dtypes_[0], lanes(state), 1)});
    default:
      if (has_exponent_) {  // the few elements of a thread, each below 2, need no exponent taken out of their product
        const State one = with_exponent(x[0], emit_.constant({DType::i64, lanes(state)}, Scalar::of_int(DType::i64, 0)));
        return {op(Fn::mul, state[0], one[0]), op(Fn::add, state[1], one[1])};
      }
      return parts() == 2 ? merge_product(state, x) : State{op(function(), state[0], x[0])};
  }
}

State Combination::step_product(const State& state, const std::string& a, const std::string& b) {
  return {emit_.let(name_, emit_.type(state[0]), Fn::fma, {cast(a, dtypes_[0]), cast(b, dtypes_[0]), state[0]})};
}

State Combination::merge(const State& a, const State& b) {
  switch (combiner_) {
    case Combiner::argmin:
    case Combiner::argmax: return merge_extreme(a, b);
    case Combiner::welford: return merge_welford(a, b);
    case Combiner::online_softmax: return merge_softmax(a, b);
    default:
      if (has_exponent_) return with_exponent(op(Fn::mul, a[0], b[0]), op(Fn::add, a[1], b[1]));
      return parts() == 2 ? merge_product(a, b) : State{op(function(), a[0], b[0])};
  }
}

// b wins if it is more extreme, or as extreme with the lower index; NaN is the most extreme value.
State Combination::merge_extreme(const State& a, const State& b) {
  std::string lower = op(Fn::lt, b[1], a[1]);
  std::string beats = op(combiner_ == Combiner::argmax ? Fn::gt : Fn::lt, b[0], a[0]);
  std::string same = op(Fn::bit_and, op(Fn::eq, b[0], a[0]), lower);
  std::string wins = op(Fn::bit_or, beats, same);
  if (is_float(dtypes_[0])) {
    Type mask{DType::boolean, lanes(a)};
    std::string b_nan = op(Fn::ne, b[0], b[0]);
    std::string a_number = op(Fn::eq, a[0], a[0]);
    std::string nan_wins = op(Fn::bit_and, b_nan, emit_.let(name_, mask, Fn::bit_or, {a_number, lower}));
    wins = op(Fn::bit_or, wins, nan_wins);
  }
  return select(wins, b, a);
}

// Chan, Golub, LeVeque 1979.
State Combination::merge_welford(const State& a, const State& b) {
  std::string n = op(Fn::add, a[0], b[0]);
  std::string zero = number(dtypes_[0], lanes(a), 0);
  std::string share = op(Fn::div, b[0], n);
  share = emit_.let(name_, emit_.type(a[0]), Fn::where, {op(Fn::eq, n, zero), zero, share});
  std::string delta = op(Fn::sub, b[1], a[1]);
  std::string mean = emit_.let(name_, emit_.type(a[0]), Fn::fma, {delta, share, a[1]});
  std::string spread = op(Fn::mul, op(Fn::mul, delta, delta), op(Fn::mul, a[0], share));
  return {n, mean, op(Fn::add, op(Fn::add, a[2], b[2]), spread)};
}

// (a + a') (b + b') = ab + (ab - ab rounded) + (a' b + a b'); Ogita, Rump, Oishi 2005. A factor alone has no error.
State Combination::merge_product(const State& a, const State& b) {
  Type type = emit_.type(a[0]);
  std::string product = op(Fn::mul, a[0], b[0]);
  std::string lost = emit_.let(name_, type, Fn::fma, {a[0], b[0], emit_.let(name_, type, Fn::neg, {product})});
  lost = emit_.let(name_, type, Fn::fma, {a[1], b[0], lost});
  if (b.size() == 2) lost = emit_.let(name_, type, Fn::fma, {a[0], b[1], lost});
  return {product, lost};
}

// x * 2^exponent with 1 <= |x| < 2: zeros, infinities and NaN stay what they are, and what stands beside them means nothing.
State Combination::with_exponent(const std::string& x, const std::string& exponent) {
  const int n = lanes({x});
  const Type real{DType::f64, n};
  const Type whole{DType::i64, n};
  auto integer = [&](int64_t value) { return emit_.constant(whole, Scalar::of_int(DType::i64, value)); };
  auto field = [&](const std::string& bits) { return op(Fn::bit_and, op(Fn::shr, bits, integer(kFractionBits)), integer(kExponentMask)); };
  auto bits_of = [&](const std::string& value) { return emit_.let(name_, whole, Fn::bitcast, {value}); };
  const std::string small = op(Fn::eq, field(bits_of(x)), integer(0));
  const std::string shifted = op(Fn::mul, x, number(DType::f64, n, std::ldexp(1.0, kSubnormalShift)));
  const std::string normal = emit_.let(name_, real, Fn::where, {small, shifted, x});
  const std::string bits = bits_of(normal);
  const std::string own = field(bits);
  const std::string special = op(Fn::bit_or, op(Fn::eq, own, integer(0)), op(Fn::eq, own, integer(kExponentMask)));
  const std::string fraction = op(Fn::bit_and, bits, integer(~(kExponentMask << kFractionBits)));
  const std::string near_one = emit_.let(name_, real, Fn::bitcast, {op(Fn::bit_or, fraction, integer(kExponentBias << kFractionBits))});
  const std::string bias = emit_.let(name_, whole, Fn::where, {small, integer(kExponentBias + kSubnormalShift), integer(kExponentBias)});
  const std::string more = op(Fn::add, exponent, op(Fn::sub, own, bias));
  return {emit_.let(name_, real, Fn::where, {special, x, near_one}), emit_.let(name_, whole, Fn::where, {special, exponent, more})};
}

// By two powers of 2, since one would not reach subnormal numbers; only the last product rounds.
std::string Combination::without_exponent(const State& state) {
  const int n = lanes(state);
  const Type whole{DType::i64, n};
  auto integer = [&](int64_t value) { return emit_.constant(whole, Scalar::of_int(DType::i64, value)); };
  auto limited = [&](const std::string& e) { return op(Fn::max, op(Fn::min, e, integer(kExponentBias)), integer(1 - kExponentBias)); };
  auto power = [&](const std::string& e) {
    return emit_.let(name_, {DType::f64, n}, Fn::bitcast, {op(Fn::shl, op(Fn::add, e, integer(kExponentBias)), integer(kFractionBits))});
  };
  const std::string first = limited(state[1]);
  const std::string rest = limited(op(Fn::sub, state[1], first));
  return op(Fn::mul, op(Fn::mul, state[0], power(first)), power(rest));
}

// Milakov, Gimelshein 2018: each sum is rescaled to the larger maximum. Equal maxima need no factor, and infinite ones have none.
State Combination::merge_softmax(const State& a, const State& b) {
  Type type = emit_.type(a[0]);
  std::string m = op(Fn::max, a[0], b[0]);
  std::string one = number(dtypes_[0], type.lanes, 1);
  auto scaled = [&](const State& part) {
    std::string factor = emit_.let(name_, type, Fn::exp, {op(Fn::sub, part[0], m)});
    return emit_.let(name_, type, Fn::where, {op(Fn::eq, part[0], m), one, factor});
  };
  std::string sum = op(Fn::mul, a[1], scaled(a));
  return {m, emit_.let(name_, type, Fn::fma, {b[1], scaled(b), sum})};
}

State Combination::select(const std::string& mask, const State& on, const State& off) {
  State out;
  for (size_t k = 0; k < on.size(); ++k)
    out.push_back(on[k] == off[k] ? on[k] : emit_.let(name_, emit_.type(on[k]), Fn::where, {mask, on[k], off[k]}));
  return out;
}

State Combination::across_lanes(State state) {
  if (parts() == 1) return {emit_.reduce_lanes(function(), state[0])};
  while (lanes(state) > 1) {
    int half = lanes(state) / 2;
    State low;
    State high;
    for (const std::string& part : state) {
      Type type{emit_.type(part).dtype, half};
      if (half == 1) {
        low.push_back(emit_.extract(part, 0));
        high.push_back(emit_.extract(part, 1));
        continue;
      }
      std::vector<int> first;
      std::vector<int> second;
      for (int l = 0; l < half; ++l) {
        first.push_back(l);
        second.push_back(half + l);
      }
      low.push_back(emit_.shuffle(type, part, "", first));
      high.push_back(emit_.shuffle(type, part, "", second));
    }
    state = merge(low, high);
  }
  return state;
}

State Combination::results(const State& state, const std::string& nonempty) {
  switch (combiner_) {
    case Combiner::argmin:
    case Combiner::argmax: return {cast(state[0], results_[0]), state[1]};
    case Combiner::welford: return {cast(state[1], results_[0]), cast(state[2], results_[1])};
    case Combiner::online_softmax: {
      // sum exp(x - m) has no value when m is infinite.
      Type type = emit_.type(state[0]);
      std::string size = emit_.let(name_, type, Fn::abs, {state[0]});
      std::string infinite = op(Fn::eq, size, number(dtypes_[0], type.lanes, kInfinity));
      if (!nonempty.empty()) infinite = op(Fn::bit_and, infinite, emit_.splat(nonempty, type.lanes));
      std::string nan = number(dtypes_[0], type.lanes, std::numeric_limits<double>::quiet_NaN());
      std::string s = emit_.let(name_, type, Fn::where, {infinite, nan, state[1]});
      return {cast(state[0], results_[0]), cast(s, results_[1])};
    }
    default: {
      if (has_exponent_) return {cast(without_exponent(state), results_[0])};
      if (parts() == 1) return {cast(state[0], results_[0])};
      // Zeros keep their sign; where the product left the range of its dtype, the error means nothing.
      Type type = emit_.type(state[0]);
      std::string small = op(Fn::lt, emit_.let(name_, type, Fn::abs, {state[1]}), emit_.let(name_, type, Fn::abs, {state[0]}));
      return {cast(emit_.let(name_, type, Fn::where, {small, op(Fn::add, state[0], state[1]), state[0]}), results_[0])};
    }
  }
}

}  // namespace deplo::tile_to_kernel
