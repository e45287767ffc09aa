#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace deplo::runtime {

/// Tells one content from another. Four chains, so that one multiplication need not wait for the one before.
class Hash {
 public:
  void add(uint64_t bits) { mix(chains_[next_++ % chains_.size()], bits); }
  void add(const char* begin, const char* end) {
    constexpr std::ptrdiff_t kAllChains = 4 * sizeof(uint64_t);
    for (; end - begin >= kAllChains && next_ % chains_.size() == 0; begin += kAllChains)
      for (size_t chain = 0; chain < chains_.size(); ++chain) {
        uint64_t bits;
        std::memcpy(&bits, begin + chain * sizeof(bits), sizeof(bits));
        mix(chains_[chain], bits);
      }
    for (; begin < end; begin += sizeof(uint64_t)) {
      uint64_t bits = 0;
      const auto left = static_cast<size_t>(end - begin);
      std::memcpy(&bits, begin, left < sizeof(bits) ? left : sizeof(bits));
      add(bits);
    }
  }
  uint64_t value() const {
    uint64_t all = 0;
    for (uint64_t chain : chains_) all = (all ^ chain) * 0x9e3779b97f4a7c15ULL;
    return all;
  }

 private:
  static void mix(uint64_t& chain, uint64_t bits) {
    chain = (chain ^ bits) * 0x9e3779b97f4a7c15ULL;
    chain ^= chain >> 32;
  }

  std::array<uint64_t, 4> chains_{1, 2, 3, 4};
  size_t next_ = 0;
};

}  // namespace deplo::runtime
