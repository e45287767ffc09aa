#include "target/cuda/numbers.h"

#include <fmt/format.h>

#include "base/text.h"

namespace deplo::cuda {
namespace {

/// A float32 rounded to a narrower float.
std::string wrap(DType dtype, const std::string& f32) {
  if (dtype == DType::bf16) return fmt::format("deplo_to_bf16({})", f32);
  if (dtype == DType::f16) return fmt::format("deplo_to_f16({})", f32);
  if (dtype == DType::f8) return fmt::format("deplo_to_f8({})", f32);
  return f32;
}

}  // namespace

std::string_view memory_type(DType dtype) {
  switch (dtype) {
    case DType::boolean: return "bool";
    case DType::u8: return "unsigned char";
    case DType::i8: return "signed char";
    case DType::i16: return "short";
    case DType::i32: return "int";
    case DType::i64: return "long long";
    case DType::f16: return "deplo_f16";
    case DType::bf16: return "deplo_bf16";
    case DType::f32: return "float";
    case DType::f64: return "double";
    case DType::f8: return "deplo_f8";
  }
  return "";
}

std::string literal(const Scalar& value, DType dtype) {
  if (!is_float(dtype)) {
    if (dtype == DType::boolean) return value.i ? "true" : "false";
    if (value.i == INT64_MIN) return "(-9223372036854775807LL - 1)";
    return fmt::format("({}){}LL", memory_type(dtype), value.i);
  }
  std::string text = print_float(value.f);
  std::string suffix = dtype == DType::f64 ? "" : "f";
  if (text == "nan") return dtype == DType::f64 ? "deplo_nan64()" : wrap(dtype, "deplo_nan32()");
  if (text == "inf" || text == "-inf") {
    std::string call = fmt::format("{}deplo_inf{}()", text[0] == '-' ? "-" : "", dtype == DType::f64 ? "64" : "32");
    return wrap(dtype, call);
  }
  return wrap(dtype, text + suffix);
}

std::string cast(const std::string& operand, DType from, DType to) {
  if (from == to) return operand;
  const bool is_byte = from == DType::i8 || from == DType::u8;
  const bool to_f32 = is_float(to) && compute_type(to) == DType::f32;
  std::string wide = from == DType::bf16  ? fmt::format("deplo_from_bf16({})", operand)
                     : from == DType::f16 ? fmt::format("deplo_from_f16({})", operand)
                     : from == DType::f8  ? fmt::format("deplo_from_f8({})", operand)
                     : is_byte && to_f32  ? fmt::format("deplo_from_{}({})", to_string(from), operand)
                                          : operand;
  DType source = is_byte && to_f32 ? DType::f32 : compute_type(from);
  if (to == DType::f32 && source == DType::f32 && is_byte) return wide;
  if (to == DType::boolean) return fmt::format("({} != 0)", wide);
  if (compute_type(to) != to) return wrap(to, source == DType::f32 ? wide : fmt::format("(float){}", wide));
  if (is_float(source) && !is_float(to)) return fmt::format("({})deplo_float_to_{}({})", memory_type(to), to == DType::i64 ? "i64" : "i32", wide);
  return fmt::format("({}){}", memory_type(to), wide);
}

}  // namespace deplo::cuda
