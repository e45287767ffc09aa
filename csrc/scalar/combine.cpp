#include "scalar/combine.h"

#include <cmath>
#include <limits>

#include "base/error.h"

namespace deplo {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Fn function_of(Combiner combiner) {
  switch (combiner) {
    case Combiner::sum: return Fn::add;
    case Combiner::prod: return Fn::mul;
    case Combiner::min:
    case Combiner::argmin: return Fn::min;
    case Combiner::max:
    case Combiner::argmax: return Fn::max;
    case Combiner::welford:
    case Combiner::online_softmax:
    case Combiner::set: break;
  }
  DEPLO_ASSERT(false, "{} is no scalar function", to_string(combiner));
}

Scalar apply2(Fn fn, const Scalar& a, const Scalar& b, Mode mode) {
  // The table has no arithmetic on bool: sums of bool do not occur, min and max do.
  Scalar operands[] = {a, b};
  return apply(fn, a.dtype, operands, mode, nullptr);
}

// True if (a, i) beats (b, j): NaN first, then the extreme value, then the lower index.
bool beats(Combiner combiner, const Scalar& a, int64_t i, const Scalar& b, int64_t j) {
  if (is_float(a.dtype)) {
    bool a_nan = std::isnan(a.f);
    bool b_nan = std::isnan(b.f);
    if (a_nan || b_nan) return a_nan && (!b_nan || i < j);
    if (a.f != b.f) return combiner == Combiner::argmax ? a.f > b.f : a.f < b.f;
    return i < j;
  }
  if (a.i != b.i) return combiner == Combiner::argmax ? a.i > b.i : a.i < b.i;
  return i < j;
}

}  // namespace

Accumulator::Accumulator(Combiner combiner, DType dtype, Mode mode) : combiner_(combiner), dtype_(dtype), mode_(mode) {
  if (combiner == Combiner::online_softmax)
    a_ = -kInfinity;
  else if (combiner != Combiner::welford)
    value_ = identity(combiner, dtype);
}

void Accumulator::add(const std::vector<Scalar>& operands) {
  const Scalar& x = operands.at(0);
  switch (combiner_) {
    case Combiner::sum:
    case Combiner::prod:
      if (is_float(dtype_)) {
        value_.f = combiner_ == Combiner::sum ? value_.f + x.f : value_.f * x.f;
        return;
      }
      [[fallthrough]];
    case Combiner::min:
    case Combiner::max: value_ = apply2(function_of(combiner_), value_, x, mode_); return;
    case Combiner::argmin:
    case Combiner::argmax:
      if (beats(combiner_, x, operands.at(1).i, value_, index_)) {
        value_ = x;
        index_ = operands[1].i;
      }
      return;
    case Combiner::welford: {
      // Chan et al. 1979: merging (n, mean, m2) pairwise; one element is (1, x, 0).
      bool partial = operands.size() == 3;
      double n = partial ? x.as_double() : 1;
      double mean = partial ? operands[1].f : x.f;
      if (n == 0) return;
      double total = count_ + n;
      double delta = mean - a_;
      b_ += (partial ? operands[2].f : 0) + delta * delta * count_ * n / total;
      a_ += delta * n / total;
      count_ = total;
      return;
    }
    case Combiner::online_softmax: {
      bool partial = operands.size() == 2;  // (m, s)
      double s = partial ? operands[1].f : 1;
      count_ += 1;
      double m = std::isnan(a_) || std::isnan(x.f) ? std::nan("") : std::max(a_, x.f);
      b_ = b_ * (a_ == m ? 1 : std::exp(a_ - m)) + s * (x.f == m ? 1 : std::exp(x.f - m));
      a_ = m;
      return;
    }
    case Combiner::set: break;
  }
  DEPLO_ASSERT(false, "{} does not reduce", to_string(combiner_));
}

std::vector<Scalar> Accumulator::results(const std::vector<DType>& dtypes) const {
  auto number = [&](size_t k, double value) {
    Scalar s;
    s.dtype = dtypes.at(k);
    s.f = value;
    return mode_ == Mode::exact ? s : Scalar::of_float(s.dtype, value);
  };
  switch (combiner_) {
    case Combiner::argmin:
    case Combiner::argmax: return {value_, Scalar::of_int(dtypes.at(1), index_)};
    case Combiner::welford: return {number(0, a_), number(1, b_)};
    // The meaning is sum exp(x - m): NaN when m is infinite, unless nothing was added.
    case Combiner::online_softmax: return {number(0, a_), number(1, std::isinf(a_) && count_ > 0 ? std::nan("") : b_)};
    default: break;
  }
  return {is_float(dtype_) ? number(0, value_.f) : value_};
}

Scalar combine(Combiner combiner, const Scalar& old, const Scalar& value, Mode mode) {
  if (combiner == Combiner::set) return value;
  return apply2(function_of(combiner), old, value, mode);
}

}  // namespace deplo
