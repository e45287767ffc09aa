#include "runtime/unpacking.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace deplo::runtime {
namespace {

template <class Bits>
Bits bits_at(const char* place) {
  Bits bits;
  std::memcpy(&bits, place, sizeof(Bits));
  return bits;
}

constexpr int64_t kHalves = 8;  ///< of a word

int half_at(const char* packed, int64_t place, int turn) {
  const auto word = bits_at<uint32_t>(packed + place / kHalves * 4);
  return static_cast<int>(std::rotr(word, turn) >> (place % kHalves * 4) & 15);
}

/// Calls f(element, its bits) for elements first .. last, until it returns false.
template <class Bits, class F>
bool each_element(const Unpacking& how, const char* packed, int64_t first, int64_t last, const F& f) {
  int64_t row = first / how.cols;
  int64_t col = first % how.cols;
  const int64_t* col_at = how.col_at.data();
  for (int64_t k = first; k < last; ++row, col = 0) {
    const int64_t at = how.row_at.data()[row];
    for (const int64_t end = std::min(how.cols, col + last - k); col < end; ++col, ++k) {
      Bits bits;
      if constexpr (sizeof(Bits) == 1) {
        bits = how.halved ? static_cast<Bits>(((half_at(packed, at + col_at[col], how.turn) - how.zero - how.least) & 15) + how.least)
                          : bits_at<Bits>(packed + at + col_at[col]);
      } else {
        bits = bits_at<Bits>(packed + at + col_at[col]);
      }
      if (!f(k, bits)) return false;
    }
  }
  return true;
}

/// The same for elements of the input's width.
template <class F>
bool each_element(const Unpacking& how, const char* packed, int64_t first, int64_t last, const F& f) {
  switch (how.element) {
    case 1: return each_element<uint8_t>(how, packed, first, last, f);
    case 2: return each_element<uint16_t>(how, packed, first, last, f);
    case 4: return each_element<uint32_t>(how, packed, first, last, f);
    default: return each_element<uint64_t>(how, packed, first, last, f);
  }
}

/// Numbers elements in several inputs, one digit in each: elements are 0 but for those numbered, whose digits are from 1 to `base`.
struct Numbering {
  int64_t rows, cols;
  int element;
  int64_t base;

  int64_t count() const { return rows + cols - 1; }
  int planes() const {
    int planes = 1;
    for (int64_t reach = base; reach < count(); reach *= base) ++planes;
    return planes;
  }
  /// The element with this number: the first column's, then the first row's.
  int64_t element_of(int64_t number) const { return number < rows ? number * cols : number - rows + 1; }
  void write(char* input, int64_t weight) const {
    for (int64_t number = 0; number < count(); ++number) {
      const int64_t digit = number / weight % base + 1;
      std::memcpy(input + element_of(number) * element, &digit, static_cast<size_t>(element));  // little-endian
    }
  }
};

/// Places of an output that held a digit in every input so far, with the number that the digits make.
class Places {
 public:
  Places(int64_t base, int64_t count) : base_(base), count_(count) {}

  /// `digit_at(place)` is what lies there after packing the next input; places that hold no digit go.
  template <class F>
  void narrow(const F& digit_at, int64_t places) {
    auto is_digit = [&](int64_t digit) { return digit >= 1 && digit <= base_; };
    if (weight_ == 1) {
      // Far more than there are numbers are no copies.
      for (int64_t place = 0; place < places && static_cast<int64_t>(found_.size()) <= 4 * count_; ++place)
        if (const int64_t digit = digit_at(place); is_digit(digit)) found_.emplace_back(place, digit - 1);
      if (static_cast<int64_t>(found_.size()) > 4 * count_) found_.clear();
    } else {
      std::erase_if(found_, [&](auto& item) {
        const int64_t digit = digit_at(item.first);
        item.second += (digit - 1) * weight_;
        return !is_digit(digit);
      });
    }
    weight_ *= base_;
  }

  /// The first place of each number; nothing if one has none.
  std::optional<std::vector<int64_t>> by_number() const {
    std::vector<int64_t> places(static_cast<size_t>(count_), -1);
    for (const auto& [place, number] : found_)
      if (number < count_ && places[static_cast<size_t>(number)] < 0) places[static_cast<size_t>(number)] = place;
    if (std::find(places.begin(), places.end(), -1) != places.end()) return std::nullopt;
    return places;
  }

 private:
  int64_t base_;
  int64_t count_;
  int64_t weight_ = 1;
  std::vector<std::pair<int64_t, int64_t>> found_;
};

/// The half that most zeros became.
int commonest_half(const Bytes& output, int turn) {
  std::array<int64_t, 16> counts{};
  for (int64_t place = 0; place < output.bytes / 4 * kHalves; ++place) ++counts[static_cast<size_t>(half_at(output.data, place, turn))];
  return static_cast<int>(std::max_element(counts.begin(), counts.end()) - counts.begin());
}

template <class Bits>
int64_t digit_of(const char* place) {
  const auto bits = bits_at<Bits>(place);
  return bits <= INT32_MAX ? static_cast<int64_t>(bits) : -1;
}

int64_t digit_at(const Bytes& output, int64_t place, int element) {
  const char* at = output.data + place * element;
  switch (element) {
    case 1: return digit_of<uint8_t>(at);
    case 2: return digit_of<uint16_t>(at);
    case 4: return digit_of<uint32_t>(at);
    default: return digit_of<uint64_t>(at);
  }
}

/// Whether all elements lie at places below `end`: what was numbered does, the others may not where rows and columns do not add up.
bool stays_within(const Unpacking& how, int64_t end) {
  const auto [first_row, last_row] = std::minmax_element(how.row_at.begin(), how.row_at.end());
  const auto [first_col, last_col] = std::minmax_element(how.col_at.begin(), how.col_at.end());
  return *first_row + *first_col >= 0 && *last_row + *last_col < end;
}

/// One way in which elements may lie in one output.
struct Guess {
  Unpacking how;
  Places places;
};

std::optional<Unpacking> find(const Numbering& numbers, bool halved, const std::vector<Bytes>& outputs,
                              const std::function<void(const char*)>& pack) {
  Zeros input(numbers.rows * numbers.cols * numbers.element);
  std::vector<Guess> guesses;
  if (halved) pack(input.data());
  for (size_t o = 0; o < outputs.size(); ++o)
    for (int turn = 0; turn < (halved ? 4 : 1); ++turn) {
      Unpacking how;
      how.element = numbers.element;
      how.halved = halved;
      how.turn = turn;
      how.zero = halved ? commonest_half(outputs[o], turn) : 0;
      how.rows = numbers.rows;
      how.cols = numbers.cols;
      how.output = o;
      guesses.push_back({std::move(how), Places(numbers.base, numbers.count())});
    }
  int64_t weight = 1;
  for (int plane = 0; plane < numbers.planes(); ++plane, weight *= numbers.base) {
    numbers.write(input.data(), weight);
    pack(input.data());
    for (auto& [how, places] : guesses) {
      const Bytes& output = outputs[how.output];
      if (halved)
        places.narrow([&](int64_t place) { return (half_at(output.data, place, how.turn) - how.zero) & 15; }, output.bytes / 4 * kHalves);
      else
        places.narrow([&](int64_t place) { return digit_at(output, place, numbers.element); }, output.bytes / numbers.element);
    }
  }
  for (auto& [how, places] : guesses) {
    const auto found = places.by_number();
    if (!found) continue;
    const int64_t unit = halved ? 1 : numbers.element;
    for (int64_t r = 0; r < numbers.rows; ++r) how.row_at.push_back(((*found)[static_cast<size_t>(r)] - (*found)[0]) * unit);
    for (int64_t c = 0; c < numbers.cols; ++c) how.col_at.push_back((*found)[c == 0 ? 0 : static_cast<size_t>(numbers.rows + c - 1)] * unit);
    const int64_t size = outputs[how.output].bytes;
    if (stays_within(how, halved ? size / 4 * kHalves : size - numbers.element + 1)) return how;
  }
  return std::nullopt;
}

}  // namespace

void Unpacking::read(const char* packed, int64_t first, int64_t last, char* out) const {
  each_element(*this, packed, first, last, [&](int64_t k, auto bits) {
    std::memcpy(out + (k - first) * static_cast<int64_t>(sizeof(bits)), &bits, sizeof(bits));
    return true;
  });
}

bool Unpacking::gives(const char* packed, const char* elements) const {
  return each_element(*this, packed, 0, rows * cols,
                      [&](int64_t k, auto bits) { return bits_at<decltype(bits)>(elements + k * static_cast<int64_t>(sizeof(bits))) == bits; });
}

std::optional<Unpacking> find_unpacking(DType dtype, int64_t rows, int64_t cols, const std::vector<Bytes>& outputs,
                                        const std::function<void(const char*)>& pack) {
  // Digits are finite floats that no conversion between floats changes, integers of the same sign, and of halves what four bits hold.
  constexpr int64_t kOfByte = 126;
  constexpr int64_t kOfTwoBytes = 0x7800;
  constexpr int64_t kOfFourBytes = 1 << 30;
  constexpr int64_t kOfHalf = 7;
  const auto element = static_cast<int>(size_of(dtype));
  if (dtype == DType::boolean) return std::nullopt;
  if (auto how = find({rows, cols, element, element == 1 ? kOfByte : element == 2 ? kOfTwoBytes : kOfFourBytes}, false, outputs, pack)) return how;
  if (dtype != DType::i8 && dtype != DType::u8) return std::nullopt;
  auto how = find({rows, cols, element, kOfHalf}, true, outputs, pack);
  if (how && dtype == DType::i8) how->least = -8;
  return how;
}

Zeros::Zeros(int64_t bytes) : bytes_(std::max<int64_t>(bytes, 1)) {
  void* data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw ExecutionError(fmt::format("out of memory: {} bytes to learn how a weight is packed", bytes_));
  data_ = static_cast<char*>(data);
}

Zeros::~Zeros() { munmap(data_, static_cast<size_t>(bytes_)); }

}  // namespace deplo::runtime
