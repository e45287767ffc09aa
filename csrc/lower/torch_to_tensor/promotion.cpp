#include <algorithm>
#include <array>

#include "base/error.h"
#include "lower/torch_to_tensor/builder.h"

namespace deplo::rules {
namespace {

// torch.get_default_dtype(): what an integer tensor becomes beside a float number.
constexpr DType kDefaultFloat = DType::f32;

int category(DType dtype) { return dtype == DType::boolean ? 0 : is_float(dtype) ? 2 : 1; }

}  // namespace

// c10/core/ScalarType.cpp, promoteTypes.
DType promote(DType a, DType b) {
  if (a == b) return a;
  if (category(a) != category(b)) return category(a) > category(b) ? a : b;
  if (is_float(a)) {
    // float16 and bfloat16 together need float32.
    if (size_of(a) == size_of(b)) return DType::f32;
    return size_of(a) > size_of(b) ? a : b;
  }
  if (a == DType::u8 || b == DType::u8) {
    DType other = a == DType::u8 ? b : a;
    return other == DType::i8 ? DType::i16 : other;
  }
  return size_of(a) > size_of(b) ? a : b;
}

// aten/src/ATen/native/TypeProperties.cpp, result_type: a lower class of operands counts only by its category.
DType common_dtype(const Call& call, const std::vector<std::string_view>& names) {
  std::array<std::optional<DType>, 3> classes;  // with dimensions, 0-d, numbers
  for (std::string_view name : names) {
    DType dtype = DType::boolean;
    size_t rank_class = 2;
    if (call.is_tensor(name)) {
      Value v = call.tensor(name);
      dtype = v.type.dtype;
      rank_class = v.type.shape.empty() ? 1 : 0;
    } else if (call.is_symbolic(name)) {
      dtype = DType::i64;
    } else {
      Scalar number = call.number(name);
      dtype = is_float(number.dtype) ? kDefaultFloat : number.dtype;
    }
    auto& slot = classes[rank_class];
    slot = slot ? promote(*slot, dtype) : dtype;
  }
  std::optional<DType> result;
  for (const auto& slot : classes) {
    if (!slot) continue;
    if (!result || category(*slot) > category(*result)) result = result && category(*result) == 2 ? result : slot;
  }
  DEPLO_ASSERT(result, "{}: no operands to promote", call.op());
  return *result;
}

Value scalar_operand(Builder& b, const Call& call, std::string_view name, DType dtype, std::optional<double> fallback) {
  if (call.is_symbolic(name)) {
    DEPLO_SUPPORT(dtype != DType::boolean, "{}: a symbolic size as bool", call.op());
    return b.index(dtype, {}, call.size(name));
  }
  Scalar number = call.number(name, fallback);
  if (is_float(number.dtype)) {
    Scalar converted = deplo::apply(Fn::cast, dtype, &number, Mode::typed, nullptr);
    return b.constant({}, converted);
  }
  return b.constant_int(dtype, {}, dtype == DType::boolean ? number.i != 0 : number.i);
}

Value operand(Builder& b, const Call& call, std::string_view name, DType dtype) {
  if (!call.is_tensor(name)) return scalar_operand(b, call, name, dtype);
  Value v = call.tensor(name);
  // What is promoted to 16 bits, whole numbers or a tensor without dimensions, is rounded to them before it is computed with.
  const DType result = call.result().dtype;
  const bool narrows = is_float(result) && size_of(result) == 2 && dtype == compute_type(result);
  const bool is_promoted = is_float(v.type.dtype) ? size_of(v.type.dtype) > 2 && v.type.shape.empty() : size_of(v.type.dtype) > 1;
  return b.cast(narrows && is_promoted ? b.cast(v, result) : v, dtype);
}

}  // namespace deplo::rules
