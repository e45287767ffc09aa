#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deplo {

/// f8 is float8_e4m3fn: a sign, four bits of exponent and three of fraction, without infinities. It is stored, moved and converted; no arithmetic is
/// done in it.
enum class DType : uint8_t { boolean, u8, i8, i16, i32, i64, f16, bf16, f32, f64, f8 };

/// Bytes of one element in memory (a bool is one byte, 0 or 1).
int64_t size_of(DType dtype);
bool is_float(DType dtype);
/// True for the integers, without bool.
bool is_integer(DType dtype);
bool is_signed(DType dtype);
/// "bool", "u8", "i8", ... "f64", "f8e4m3": the spelling of every IR level.
std::string_view to_string(DType dtype);
std::optional<DType> parse_dtype(std::string_view text);
/// The type in which arithmetic on `dtype` happens: float32 for narrower floats, itself otherwise.
DType compute_type(DType dtype);

/// As literals: 0 differs from -0, and there is one NaN, which equals itself.
bool same_float(double a, double b);

// Round-to-nearest-even conversions of the narrow float formats, bit patterns in the low bits. f8 becomes its largest number beyond its range.
float bf16_to_f32(uint16_t bits);
uint16_t f32_to_bf16(float value);
float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);
float f8_to_f32(uint8_t bits);
uint8_t f32_to_f8(float value);

}  // namespace deplo
