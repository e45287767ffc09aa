#include "package/checksum.h"

#include <nmmintrin.h>

#include <array>
#include <cstring>

namespace deplo::package {
namespace {

uint64_t word_at(const unsigned char* place) {
  uint64_t word = 0;
  std::memcpy(&word, place, sizeof(word));
  return word;
}

__attribute__((target("sse4.2"))) uint32_t checksum_by_instruction(const unsigned char* data, size_t bytes) {
  std::array<uint64_t, 4> crc{~0U, ~0U, ~0U, ~0U};
  size_t at = 0;
  for (; at + 32 <= bytes; at += 32)
    for (size_t k = 0; k < 4; ++k) crc[k] = _mm_crc32_u64(crc[k], word_at(data + at + 8 * k));
  for (; at < bytes; ++at) crc[0] = _mm_crc32_u8(static_cast<uint32_t>(crc[0]), data[at]);
  uint64_t all = ~0U;
  for (uint64_t stream : crc) all = _mm_crc32_u64(all, stream);
  return ~static_cast<uint32_t>(all);
}

}  // namespace

uint32_t quick_checksum_by_table(const void* data, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  constexpr uint32_t kPolynomial = 0x82f63b78;  // of CRC-32C, reflected
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t n = 0; n < 256; ++n) {
      made[n] = n;
      for (int bit = 0; bit < 8; ++bit) made[n] = made[n] & 1 ? made[n] >> 1 ^ kPolynomial : made[n] >> 1;
    }
    return made;
  }();
  auto byte = [](uint32_t crc, unsigned char value) { return crc >> 8 ^ table[(crc ^ value) & 0xff]; };
  std::array<uint32_t, 4> crc{~0U, ~0U, ~0U, ~0U};
  size_t at = 0;
  for (; at + 32 <= bytes; at += 32)
    for (size_t k = 0; k < 32; ++k) crc[k / 8] = byte(crc[k / 8], from[at + k]);
  for (; at < bytes; ++at) crc[0] = byte(crc[0], from[at]);
  uint32_t all = ~0U;
  for (uint64_t stream : crc)
    for (int k = 0; k < 8; ++k) all = byte(all, static_cast<unsigned char>(stream >> (8 * k)));
  return ~all;
}

uint32_t quick_checksum(const void* data, size_t bytes) {
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  return has_instruction ? checksum_by_instruction(static_cast<const unsigned char*>(data), bytes) : quick_checksum_by_table(data, bytes);
}

}  // namespace deplo::package
