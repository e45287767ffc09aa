#include "package/checksum.h"

#include <fmt/format.h>
#include <nmmintrin.h>

#include <array>
#include <bit>
#include <cstring>

namespace deplo::package {
namespace {

constexpr size_t kBlock = 64;

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_block(std::array<uint32_t, 8>& state, const unsigned char* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t)
    w[t] = static_cast<uint32_t>(block[4 * t]) << 24 | static_cast<uint32_t>(block[4 * t + 1]) << 16 | static_cast<uint32_t>(block[4 * t + 2]) << 8 |
           block[4 * t + 3];
  for (size_t t = 16; t < 64; ++t) {
    uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
    uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t t = 0; t < 64; ++t) {
    uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> added{a, b, c, d, e, f, g, h};
  for (size_t k = 0; k < 8; ++k) state[k] += added[k];
}

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

std::string sha256_of(const void* data, size_t bytes) {
  std::array<uint32_t, 8> state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* at = static_cast<const unsigned char*>(data);
  size_t left = bytes;
  for (; left >= kBlock; at += kBlock, left -= kBlock) add_block(state, at);
  std::array<unsigned char, 2 * kBlock> tail{};
  if (left > 0) std::memcpy(tail.data(), at, left);
  tail[left] = 0x80;
  const size_t end = left < kBlock - 8 ? kBlock : 2 * kBlock;
  for (size_t k = 0; k < 8; ++k) tail[end - 1 - k] = static_cast<unsigned char>(static_cast<uint64_t>(bytes) * 8 >> (8 * k));
  for (size_t k = 0; k < end; k += kBlock) add_block(state, tail.data() + k);
  std::string text;
  for (uint32_t word : state) text += fmt::format("{:08x}", word);
  return text;
}

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
