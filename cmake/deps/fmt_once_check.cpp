// Uses what deplo uses of fmt: where this does not link with fmt_once.cpp, fmt is taken as headers alone.
#include <fmt/format.h>

#include <iterator>
#include <string>
#include <vector>

int main(int count, char** words) {
  std::vector<int> numbers(static_cast<size_t>(count), 7);
  std::string text = fmt::format("{:>5} {:.17g} {:.3f} {:a} {}", words[0], 0.1 * count, 0.1f, 2.5, fmt::join(numbers, ", "));
  fmt::format_to(std::back_inserter(text), "{:x} {} {:<4}|{:{}}", count, true, 1.5f, 3, count);
  return text.empty() ? 1 : 0;
}
