#pragma once

#include <bit>
#include <cstdint>

namespace deplo {

// tf32, what matrix units of NVIDIA GPUs multiply of float32 numbers: 10 bits of mantissa, the exponent and the sign.

constexpr int32_t kTf32Half = 1 << 12;     ///< of the last bit that stays of a float32's mantissa
constexpr int32_t kTf32Mask = -(1 << 13);  ///< of the bits that stay

/// To nearest, halves away from 0, as cvt.rna.tf32 does; NaN stays as it is.
inline float round_to_tf32(float x) {
  return x != x ? x
                : std::bit_cast<float>(static_cast<int32_t>((std::bit_cast<uint32_t>(x) + uint32_t{kTf32Half}) & static_cast<uint32_t>(kTf32Mask)));
}

}  // namespace deplo
