#include "base/dtype.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace deplo {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t size;
  bool floating;
  bool integer;
  bool is_signed;
};

constexpr std::array<Row, 11> kRows{{
    {DType::boolean, "bool", 1, false, false, false},
    {DType::u8, "u8", 1, false, true, false},
    {DType::i8, "i8", 1, false, true, true},
    {DType::i16, "i16", 2, false, true, true},
    {DType::i32, "i32", 4, false, true, true},
    {DType::i64, "i64", 8, false, true, true},
    {DType::f16, "f16", 2, true, false, true},
    {DType::bf16, "bf16", 2, true, false, true},
    {DType::f32, "f32", 4, true, false, true},
    {DType::f64, "f64", 8, true, false, true},
    {DType::f8, "f8e4m3", 1, true, false, true},
}};

const Row& row(DType dtype) { return kRows[static_cast<size_t>(dtype)]; }

}  // namespace

int64_t size_of(DType dtype) { return row(dtype).size; }
bool is_float(DType dtype) { return row(dtype).floating; }
bool is_integer(DType dtype) { return row(dtype).integer; }
bool is_signed(DType dtype) { return row(dtype).is_signed; }
std::string_view to_string(DType dtype) { return row(dtype).name; }

std::optional<DType> parse_dtype(std::string_view text) {
  for (const Row& r : kRows)
    if (r.name == text) return r.dtype;
  return std::nullopt;
}

DType compute_type(DType dtype) { return is_float(dtype) && size_of(dtype) < 4 ? DType::f32 : dtype; }

bool same_float(double a, double b) { return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b)); }

float bf16_to_f32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t f32_to_bf16(float value) {
  auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float f16_to_f32(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  uint32_t exponent = (half >> 10) & 0x1fU;
  uint32_t mantissa = half & 0x3ffU;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13) | (mantissa ? 0x400000U : 0U));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t f32_to_f16(float value) {
  auto bits = std::bit_cast<uint32_t>(value);
  auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
  if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // 65520 and above round to infinity
  if (magnitude < 0x38800000U) {  // below 2^-14: a subnormal half, a multiple of 2^-24; the addition rounds to even
    float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5F)));
  }
  uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

float f8_to_f32(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80U) << 24;
  const uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7ff00000U);
  if (magnitude >= 8) return std::bit_cast<float>(sign | ((magnitude << 20) + (120U << 23)));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9F));
}

uint8_t f32_to_f8(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return sign | 0x7fU;
  if (magnitude < 0x3c800000U) {  // below 2^-6: a multiple of 2^-9; the addition rounds to even
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14F)));
  }
  const uint32_t rounded = magnitude + 0x7ffffU + ((magnitude >> 20) & 1U);
  return static_cast<uint8_t>(sign | std::min((rounded - (120U << 23)) >> 20, 0x7eU));
}

}  // namespace deplo
