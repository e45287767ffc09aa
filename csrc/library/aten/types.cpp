#include "library/aten/types.h"

#include "base/error.h"

namespace deplo::aten {

c10::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::boolean: return c10::ScalarType::Bool;
    case DType::u8: return c10::ScalarType::Byte;
    case DType::i8: return c10::ScalarType::Char;
    case DType::i16: return c10::ScalarType::Short;
    case DType::i32: return c10::ScalarType::Int;
    case DType::i64: return c10::ScalarType::Long;
    case DType::f16: return c10::ScalarType::Half;
    case DType::bf16: return c10::ScalarType::BFloat16;
    case DType::f32: return c10::ScalarType::Float;
    case DType::f64: return c10::ScalarType::Double;
    case DType::f8: return c10::ScalarType::Float8_e4m3fn;
  }
  throw InternalError("a dtype without a scalar type");
}

DType from_scalar_type(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Bool: return DType::boolean;
    case c10::ScalarType::Byte: return DType::u8;
    case c10::ScalarType::Char: return DType::i8;
    case c10::ScalarType::Short: return DType::i16;
    case c10::ScalarType::Int: return DType::i32;
    case c10::ScalarType::Long: return DType::i64;
    case c10::ScalarType::Half: return DType::f16;
    case c10::ScalarType::BFloat16: return DType::bf16;
    case c10::ScalarType::Float: return DType::f32;
    case c10::ScalarType::Double: return DType::f64;
    case c10::ScalarType::Float8_e4m3fn: return DType::f8;
    default: throw UnsupportedError(fmt::format("dtype {} is not one of deplo's", c10::toString(type)));
  }
}

}  // namespace deplo::aten
