#include "target/cpu/callable.h"

#include <cmath>
#include <cstring>
#include <map>

#include "scalar/functions.h"
#include "scalar/special.h"

namespace deplo {
namespace {

int64_t deplo_pow_i64(int64_t base, int64_t exponent) {
  Scalar operands[] = {Scalar::of_int(DType::i64, base), Scalar::of_int(DType::i64, exponent)};
  return apply(Fn::pow, DType::i64, operands, Mode::typed, nullptr).i;
}

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

using Unary = double(double);
using Binary = double(double, double);
using UnaryF = float(float);

/// Functions of libm that generated code calls for what has no vector sequence, and those that LLVM calls when an
/// instruction is missing (rounding before SSE4.1, fused multiply-add before FMA).
const std::map<std::string, void*>& table() {
  static const std::map<std::string, void*> symbols{
      {"exp", address<Unary>(std::exp)},
      {"exp2", address<Unary>(std::exp2)},
      {"expm1", address<Unary>(std::expm1)},
      {"log", address<Unary>(std::log)},
      {"log2", address<Unary>(std::log2)},
      {"log10", address<Unary>(std::log10)},
      {"log1p", address<Unary>(std::log1p)},
      {"sin", address<Unary>(std::sin)},
      {"cos", address<Unary>(std::cos)},
      {"tan", address<Unary>(std::tan)},
      {"asin", address<Unary>(std::asin)},
      {"acos", address<Unary>(std::acos)},
      {"atan", address<Unary>(std::atan)},
      {"sinh", address<Unary>(std::sinh)},
      {"cosh", address<Unary>(std::cosh)},
      {"tanh", address<Unary>(std::tanh)},
      {"asinh", address<Unary>(std::asinh)},
      {"acosh", address<Unary>(std::acosh)},
      {"atanh", address<Unary>(std::atanh)},
      {"erf", address<Unary>(std::erf)},
      {"erfc", address<Unary>(std::erfc)},
      {"lgamma", address<Unary>(std::lgamma)},
      {"pow", address<Binary>(std::pow)},
      {"atan2", address<Binary>(std::atan2)},
      {"hypot", address<Binary>(std::hypot)},
      {"fmod", address<Binary>(std::fmod)},
      {"nextafter", address<Binary>(std::nextafter)},
      {"nextafterf", address<float(float, float)>(std::nextafter)},
      {"floor", address<Unary>(std::floor)},
      {"ceil", address<Unary>(std::ceil)},
      {"trunc", address<Unary>(std::trunc)},
      {"roundeven", address<Unary>(std::nearbyint)},
      {"floorf", address<UnaryF>(std::floor)},
      {"ceilf", address<UnaryF>(std::ceil)},
      {"truncf", address<UnaryF>(std::trunc)},
      {"roundevenf", address<UnaryF>(std::nearbyint)},
      {"fma", address<double(double, double, double)>(std::fma)},
      {"fmaf", address<float(float, float, float)>(std::fma)},
      {"memcpy", address<void*(void*, const void*, size_t)>(std::memcpy)},
      {"memset", address<void*(void*, int, size_t)>(std::memset)},
      {"deplo_log10", address<Unary>(special::log10)},
      {"deplo_sinh", address<Unary>(special::sinh)},
      {"deplo_cosh", address<Unary>(special::cosh)},
      {"deplo_tanh", address<Unary>(special::tanh)},
      {"deplo_atanh", address<Unary>(special::atanh)},
      {"deplo_sigmoid", address<Unary>(special::sigmoid)},
      {"deplo_softplus", address<Unary>(special::softplus)},
      {"deplo_silu", address<Unary>(special::silu)},
      {"deplo_mish", address<Unary>(special::mish)},
      {"deplo_gelu", address<Unary>(special::gelu)},
      {"deplo_gelu_tanh", address<Unary>(special::gelu_tanh)},
      {"deplo_logit", address<Unary>(special::logit)},
      {"deplo_sinc", address<Unary>(special::sinc)},
      {"deplo_erfc", address<Unary>(special::erfc)},
      {"deplo_lgamma", address<Unary>(special::lgamma)},
      {"deplo_erfinv", address<Unary>(special::erfinv)},
      {"deplo_erfcx", address<Unary>(special::erfcx)},
      {"deplo_ndtri", address<Unary>(special::ndtri)},
      {"deplo_digamma", address<Unary>(special::digamma)},
      {"deplo_i0", address<Unary>(special::i0)},
      {"deplo_i0e", address<Unary>(special::i0e)},
      {"deplo_i1", address<Unary>(special::i1)},
      {"deplo_i1e", address<Unary>(special::i1e)},
      {"deplo_xlogy", address<Binary>(special::xlogy)},
      {"deplo_logaddexp", address<Binary>(special::logaddexp)},
      {"deplo_logaddexp2", address<Binary>(special::logaddexp2)},
      {"deplo_zeta", address<Binary>(special::zeta)},
      {"deplo_pow_i64", address(&deplo_pow_i64)},
  };
  return symbols;
}

}  // namespace

void* callable_address(const std::string& symbol) {
  auto it = table().find(symbol);
  return it == table().end() ? nullptr : it->second;
}

const std::vector<std::string>& callable_symbols() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& [name, where] : table()) all.push_back(name);
    return all;
  }();
  return names;
}

}  // namespace deplo
