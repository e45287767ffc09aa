#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace deplo::runtime {

/// Tells one content from another. Four chains, so that one multiplication need not wait for the one before.
class Hash {
 public:
  void add(uint64_t bits) {
    uint64_t& chain = chains_[next_++ % chains_.size()];
    chain = (chain ^ bits) * 0x9e3779b97f4a7c15ULL;
    chain ^= chain >> 32;
  }
  void add(const char* begin, const char* end) {
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
  std::array<uint64_t, 4> chains_{1, 2, 3, 4};
  size_t next_ = 0;
};

}  // namespace deplo::runtime
