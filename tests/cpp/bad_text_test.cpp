#include <catch2/catch.hpp>
#include <random>
#include <regex>

#include "base/error.h"
#include "base/text.h"
#include "pipeline.h"
#include "programs.h"
#include "target/cuda/text.h"

using namespace deplo;

namespace {

const char* const kTorch = R"(torch @net(%w: f32[5, 8] strides [8, 1] parameter static, s0: sym, %x: f32[s0, 8] user) where s0 in 2..
  %t: f32[8, 5] strides [1, 8] = aten.t.default(self=%w)
  %m: f32[s0, 5] = aten.mm.default(self=%x, mat2=%t) at "net.py:3" in "fc"
  %r: f32[s0, 5] = aten.relu.default(self=%m)
  %s: f32[s0, 5] = aten._softmax.default(self=%r, dim=-1, half_to_float=false)
  %c: f32[s0 + 3, 5] = aten.constant_pad_nd.default(self=%s, pad=[0, 0, 1, 2], value=0.5)
  %k: f32[s0 - 1, 5] = aten.slice.Tensor(self=%c, dim=0, start=4, end=9223372036854775807)
  return %k, s0*2, none
)";

std::string print_of(const Compiled& made) {
  if (made.reached == "tensor") return print(made.tensor);
  if (made.reached == "loop") return print(made.loop);
  if (made.reached == "tile") return print(made.tile);
  return print(made.kernel);
}

/// The text of a few programs at every level.
std::vector<std::string> texts() {
  std::vector<std::string> result{kTorch};
  std::vector<std::string> programs{kTorch};
  for (const auto& c : deplo::testing::cases()) programs.push_back(c.text);
  for (const std::string& program : programs)
    for (const char* level : {"tensor", "loop", "tile", "kernel"}) {
      PipelineOptions options;
      options.stop_after = level;
      result.push_back(print_of(run_pipeline_from_text(program, "f.ir", {}, options)));
    }
  return result;
}

/// Changes text as an editor's slips would: tokens and lines that are lost, moved, doubled or replaced.
class Mutator {
 public:
  explicit Mutator(unsigned seed) : rng_(seed) {}

  size_t pick(size_t count) { return rng_() % count; }

  std::string operator()(const std::string& text) {
    static const std::regex token(R"("[^"\n]*"|[%@$]?[A-Za-z_][\w.]*|\d+\.\d+(e[+-]?\d+)?|\d+|->|<=|>=|==|!=|\.\.|//|\S)");
    std::vector<std::pair<size_t, std::string>> all;
    for (std::sregex_iterator it(text.begin(), text.end(), token), end; it != end; ++it)
      all.emplace_back(static_cast<size_t>(it->position()), it->str());
    if (all.empty()) return text;
    const auto& one = all[pick(all.size())];
    const auto& other = all[pick(all.size())];
    auto replaced = [&](const auto& place, const std::string& by) {
      return text.substr(0, place.first) + by + text.substr(place.first + place.second.size());
    };
    auto some = [&](auto&& fits) {
      for (size_t at = pick(all.size()), n = 0; n < all.size(); ++n, at = (at + 1) % all.size())
        if (fits(all[at].second)) return all[at];
      return one;
    };
    static const std::vector<std::string> numbers{
        "0",   "1", "2", "3", "7", "-1", "64", "100000", "2147483648", "4611686018427387904", "9223372036854775807", "-9223372036854775808",
        "1.5", "s0"};
    static const std::vector<std::string> dtypes{"bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "c64", "f32x8", "i64x3"};
    switch (pick(9)) {
      case 0: return replaced(one, "");
      case 1: return replaced(one, one.second + " " + one.second);
      case 2: return replaced(one, other.second);
      case 3: {
        auto [first, second] = std::minmax(one, other);
        if (first.first == second.first) return text;
        std::string changed = text;
        changed.replace(second.first, second.second.size(), first.second);
        return changed.replace(first.first, first.second.size(), second.second);
      }
      case 4:
        return replaced(some([](const std::string& s) { return std::isdigit(static_cast<unsigned char>(s[0])) != 0; }),
                        numbers[pick(numbers.size())]);
      case 5:
        return replaced(some([](const std::string& s) { return s.size() <= 4 && std::find(dtypes.begin(), dtypes.end(), s) != dtypes.end(); }),
                        dtypes[pick(dtypes.size())]);
      case 6:
        return replaced(
            some([](const std::string& s) { return std::isalpha(static_cast<unsigned char>(s[0])) != 0 || s[0] == '%' || s[0] == '@'; }),
            some([](const std::string& s) { return std::isalpha(static_cast<unsigned char>(s[0])) != 0 || s[0] == '%' || s[0] == '@'; }).second);
      case 7: return text.substr(0, pick(text.size()));
      default: {  // a line is lost, or stands elsewhere
        std::vector<std::string> lines;
        std::istringstream in(text);
        for (std::string line; std::getline(in, line);) lines.push_back(line);
        std::swap(lines[pick(lines.size())], lines[pick(lines.size())]);
        if (pick(2) == 0) lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(pick(lines.size())));
        return joined(lines, "\n") + "\n";
      }
    }
  }

 private:
  std::mt19937 rng_;
};

}  // namespace

TEST_CASE("text that was changed at random is taken or refused where it is wrong") {
  static const std::regex place(R"(f\.ir:\d+:\d+: )");
  std::vector<std::string> originals = texts();
  int taken = 0;
  int refused = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    Mutator mutate(seed);
    std::string text = originals[mutate.pick(originals.size())];
    for (size_t n = 1 + mutate.pick(5) / 3; n > 0; --n) text = mutate(text);
    INFO("seed " << seed << "\n" << text);
    PipelineOptions options;
    options.by_hand = true;
    PassContext context;
    context.target.name = seed % 4 == 0 ? "cuda" : "cpu";
    try {
      Compiled made = run_pipeline_from_text(text, "f.ir", context, options);
      for (const auto& kernel : made.kernel.kernels)
        if (context.target.name == "cuda") cuda_text(*kernel);
      ++taken;
    } catch (const UserError& error) {
      INFO(error.what());
      CHECK(std::regex_search(error.what(), place, std::regex_constants::match_continuous));
      ++refused;
    } catch (const UnsupportedError&) {
      ++refused;
    } catch (const std::exception& error) {
      FAIL_CHECK("threw " << error.what());
    }
  }
  CHECK(taken > 10);
  CHECK(refused > 100);
}

TEST_CASE("numbers that fit nowhere are refused where they stand") {
  static const std::regex place(R"(f\.ir:\d+:\d+: )");
  static const std::regex number(R"(\b\d+\b)");
  static const std::regex shape(R"((f32|f64|i64|bool)\[([^\]\n]*)\](?! strides))");
  int refused = 0;
  auto refuses = [&](const std::string& text) {
    INFO(text);
    PipelineOptions options;
    options.by_hand = true;
    try {
      run_pipeline_from_text(text, "f.ir", {}, options);
    } catch (const UserError& error) {
      INFO(error.what());
      CHECK(std::regex_search(error.what(), place, std::regex_constants::match_continuous));
      ++refused;
    } catch (const UnsupportedError&) {
      ++refused;
    } catch (const std::exception& error) {
      FAIL_CHECK("threw " << error.what());
    }
  };
  constexpr unsigned kEach = 149;  // a sample: whoever changes a verifier looks at them all
  unsigned step = 0;
  for (const std::string& text : texts()) {
    for (std::sregex_iterator it(text.begin(), text.end(), number), end; it != end; ++it)
      for (const char* by : {"zz", "-8", "9223372036854775808", "(7 // 0)", "(7 % (0))", "4611686018427387904"})
        if (step++ % kEach == 0) refuses(text.substr(0, it->position()) + by + text.substr(it->position() + it->length()));
    for (std::sregex_iterator it(text.begin(), text.end(), shape), end; it != end; ++it) {
      std::string sizes = (*it)[2];
      if (sizes.empty()) continue;
      for (const char* by : {"zz", "-8", "9223372036854775808", "7 // 0", "zz // zz", "4611686018427387904"}) {
        std::string strides = by;
        for (char c : sizes)
          if (c == ',') strides += fmt::format(", {}", by);
        if (step++ % kEach == 0)
          refuses(text.substr(0, it->position() + it->length()) + " strides [" + strides + "]" + text.substr(it->position() + it->length()));
      }
    }
  }
  CHECK(refused > 100);
}
