#include <cmath>
#include <cstring>
#include <map>

#include "codegen/llvm/functions.h"

namespace deplo {
namespace {

double table_function(Fn fn, double x) {
  Scalar operand{DType::f64, x, 0};
  return apply(fn, DType::f64, &operand, Mode::typed, nullptr).f;
}
double deplo_digamma(double x) { return table_function(Fn::digamma, x); }
double deplo_erfinv(double x) { return table_function(Fn::erfinv, x); }

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
      {"deplo_digamma", address(&deplo_digamma)},
      {"deplo_erfinv", address(&deplo_erfinv)},
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
