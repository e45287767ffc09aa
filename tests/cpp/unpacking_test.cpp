#include "runtime/unpacking.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <vector>

using namespace deplo;
using namespace deplo::runtime;

namespace {

constexpr int64_t kRows = 48;
constexpr int64_t kCols = 40;
constexpr int64_t kCount = kRows * kCols;

/// How shorts are found that packing moves to `place_of(k)`.
std::optional<Unpacking> find_shorts(std::vector<char>& packed, const std::function<int64_t(int64_t)>& place_of) {
  return find_unpacking(DType::i16, kRows, kCols, {{packed.data(), static_cast<int64_t>(packed.size())}}, [&](const char* elements) {
    for (int64_t k = 0; k < kCount; ++k) std::memcpy(packed.data() + place_of(k) * 2, elements + k * 2, 2);
  });
}

}  // namespace

TEST_CASE("elements are found where rows and columns add up", "[unpacking]") {
  std::vector<char> packed(kCount * 2);
  const auto how = find_shorts(packed, [](int64_t k) { return k % kCols * kRows + k / kCols; });
  REQUIRE(how);
  std::vector<char> elements(kCount * 2);
  for (size_t k = 0; k < elements.size(); ++k) elements[k] = static_cast<char>(k * 7);
  for (int64_t k = 0; k < kCount; ++k) std::memcpy(packed.data() + (k % kCols * kRows + k / kCols) * 2, elements.data() + k * 2, 2);
  CHECK(how->gives(packed.data(), elements.data()));
  std::vector<char> read(elements.size());
  how->read(packed.data(), 0, kCount, read.data());
  CHECK(read == elements);
  elements.back() ^= 1;
  CHECK_FALSE(how->gives(packed.data(), elements.data()));
}

TEST_CASE("no element is looked for outside of what was packed", "[unpacking]") {
  // A roll of all elements: the first row and column lie in it, and the places that they add up to do not.
  for (int64_t shift : {int64_t{1}, kCols / 2, kCount / 2 + 3, kCount - 1}) {
    std::vector<char> packed(kCount * 2);
    const auto how = find_shorts(packed, [&](int64_t k) { return (k + shift) % kCount; });
    if (!how) continue;
    for (int64_t row : how->row_at)
      for (int64_t col : how->col_at) {
        REQUIRE(row + col >= 0);
        REQUIRE(row + col + 2 <= static_cast<int64_t>(packed.size()));
      }
  }
  std::vector<char> packed(kCount * 2);
  CHECK_FALSE(find_shorts(packed, [](int64_t k) { return (k + kCount / 2 + 3) % kCount; }));
}

TEST_CASE("no half is looked for outside of what was packed", "[unpacking]") {
  std::vector<char> packed(kCount / 2);
  auto find_rolled = [&](int64_t shift) {
    return find_unpacking(DType::i8, kRows, kCols, {{packed.data(), static_cast<int64_t>(packed.size())}}, [&](const char* elements) {
      std::fill(packed.begin(), packed.end(), '\0');
      for (int64_t k = 0; k < kCount; ++k) {
        const int64_t place = (k + shift) % kCount;
        packed[static_cast<size_t>(place / 2)] |= static_cast<char>((elements[k] & 15) << (place % 2 * 4));
      }
    });
  };
  CHECK(find_rolled(0));
  CHECK_FALSE(find_rolled(kCount / 2 + 3));
}
