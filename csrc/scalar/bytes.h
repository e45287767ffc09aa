#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace deplo {

/// What matrix units of a CPU multiply four to a word.
inline bool is_byte(DType dtype) { return dtype == DType::u8 || dtype == DType::i8; }

/// Byte `at` of an int32 word, the lowest one first, as u8 or i8.
inline int64_t byte_of_word(int64_t word, int64_t at, DType dtype) {
  const auto bits = static_cast<uint8_t>(static_cast<uint64_t>(word) >> (8 * at));
  return dtype == DType::i8 ? static_cast<int64_t>(static_cast<int8_t>(bits)) : static_cast<int64_t>(bits);
}

}  // namespace deplo
