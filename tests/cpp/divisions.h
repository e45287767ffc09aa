#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "base/text.h"
#include "programs.h"

// Quotients and remainders of numbers, symbols and axes of both signs, for whatever evaluates index expressions.

namespace deplo::testing {

struct DivisionPoint {
  int64_t s = 0, t = 0;  ///< symbols
  int64_t i = 0, j = 0;  ///< axes, of kRows and kColumns
};

struct DivisionOperand {
  std::string text;
  std::function<int64_t(const DivisionPoint&)> value;
  bool is_number = false;

  bool has_axis(char axis) const { return text.find(axis) != std::string::npos; }
};

struct Division {
  DivisionOperand left;
  bool is_quotient;
  DivisionOperand right;

  std::string text() const { return fmt::format("({}) {} ({})", left.text, is_quotient ? "//" : "%", right.text); }
  /// As Python has it.
  int64_t value(const DivisionPoint& at) const {
    const int64_t a = left.value(at);
    const int64_t b = right.value(at);
    const auto quotient = static_cast<int64_t>(std::floor(static_cast<double>(a) / static_cast<double>(b)));
    return is_quotient ? quotient : a - b * quotient;
  }
};

/// One program with every division, at sizes that make every pair of -9..9 of numbers, symbols and values of axes.
///
/// A result has the axes that its divisions have, and as many of them as 64 bits hold, each one a digit: fewer ops than divisions lower quickly.
/// Others read %x, which holds its places less kMiddle, at a quotient or remainder.
class Divisions {
 public:
  static constexpr int64_t kRows = 19, kColumns = 9;

  /// The ranges of the symbols, which decide what is known of signs; axes in either order.
  explicit Divisions(std::pair<int64_t, int64_t> s = {-9, 9}, std::pair<int64_t, int64_t> t = {-9, 9}, bool rows_last = false)
      : s_(std::move(s)), t_(std::move(t)), axes_(rows_last ? "ji" : "ij") {
    auto number = [](int64_t n) { return DivisionOperand{std::to_string(n), [n](const DivisionPoint&) { return n; }, true}; };
    std::vector<DivisionOperand> lefts{{"i - 9", [](const DivisionPoint& p) { return p.i - 9; }},
                                       {"s", [](const DivisionPoint& p) { return p.s; }},
                                       {"s + i", [](const DivisionPoint& p) { return p.s + p.i; }}};
    std::vector<DivisionOperand> rights{{"t", [](const DivisionPoint& p) { return p.t; }},
                                        {"j + 1", [](const DivisionPoint& p) { return p.j + 1; }},
                                        {"-1 - j", [](const DivisionPoint& p) { return -1 - p.j; }}};
    for (int64_t n = -9; n <= 9; ++n) {
      lefts.push_back(number(n));
      if (n != 0) rights.push_back(number(n));
    }
    for (const DivisionOperand& left : lefts)
      for (const DivisionOperand& right : rights) {
        if (left.is_number && right.is_number) continue;
        for (bool is_quotient : {true, false}) add({left, is_quotient, right});
      }
  }

  std::string text() const {
    std::string ops;
    std::string returned;
    for (size_t k = 0; k < results_.size(); ++k) {
      const Result& result = results_[k];
      std::vector<std::string> names, extents, strides;
      for (char axis : result.axes) {
        names.emplace_back(1, axis);
        extents.push_back(std::to_string(extent(axis)));
        strides.push_back(axis == result.axes.back() ? "1" : std::to_string(extent(result.axes.back())));
      }
      std::string value;
      int64_t place = 1;
      for (const Division& division : result.divisions) {
        value += fmt::format("{}({})*{}", value.empty() ? "" : " + ", division.text(), place);
        place *= kBase;
      }
      ops += fmt::format("  %v{}: i64[{}] = ", k, joined(extents));
      ops += result.is_read ? fmt::format("map ({}) -> %x[{} + {}]\n", joined(names), value, kMiddle)
                            : fmt::format("index ({}) -> {}\n", joined(names), value);
      returned += fmt::format("%v{} strides [{}], ", k, joined(strides));
    }
    return fmt::format("tensor @divisions(s: sym, t: sym, %x: i64[{}] strides [1] user) where s in {}..{}, t in {}..{}\n{}  return {}s // t, s % t\n",
                       kBase, s_.first, s_.second, t_.first, t_.second, ops, returned);
  }

  /// Values of s and t: each of t with the least s, by which s + i goes over all, and each of s. `all`: every pair.
  std::vector<DivisionPoint> sizes(bool all = false) const {
    std::vector<DivisionPoint> found;
    for (int64_t s = s_.first; s <= s_.second; ++s)
      for (int64_t t = t_.first; t <= t_.second; ++t)
        if (t != 0 && (all || s == s_.first || t == t_.second)) found.push_back({s, t});
    return found;
  }

  static std::vector<Array> inputs(const DivisionPoint& at) {
    std::vector<Array> made;
    for (int64_t symbol : {at.s, at.t}) made.push_back(Array::filled(DType::i64, {}, Scalar::of_int(DType::i64, symbol)));
    made.push_back(Array::zeros(DType::i64, {kBase}));
    for (int64_t k = 0; k < kBase; ++k) made.back().ints[static_cast<size_t>(k)] = k - kMiddle;
    return made;
  }

  /// Requires what the program must return.
  void check(const std::vector<Array>& got, DivisionPoint at) const {
    REQUIRE(got.size() == results_.size() + 2);
    for (size_t k = 0; k < results_.size(); ++k) {
      const Result& result = results_[k];
      const bool by_rows = !result.axes.empty() && result.axes.back() == 'j';
      const bool both = result.axes.size() == 2;
      REQUIRE(got[k].count() == (both ? kRows * kColumns : result.axes.empty() ? 1 : extent(result.axes[0])));
      for (int64_t flat = 0; flat < got[k].count(); ++flat) {
        at.i = both ? (by_rows ? flat / kColumns : flat % kRows) : flat;
        at.j = both ? (by_rows ? flat % kColumns : flat / kRows) : flat;
        compare(result, got[k].ints[static_cast<size_t>(flat)], at);
      }
    }
    const Division quotient{{"s", [](const DivisionPoint& p) { return p.s; }}, true, {"t", [](const DivisionPoint& p) { return p.t; }}};
    INFO("returned sizes where s is " << at.s << ", t " << at.t);
    REQUIRE(got[got.size() - 2].ints == std::vector<int64_t>{quotient.value(at)});
    REQUIRE(got.back().ints == std::vector<int64_t>{at.s - at.t * quotient.value(at)});
  }

 private:
  /// Every quotient and remainder is a digit of this base less the middle.
  static constexpr int64_t kBase = 64, kMiddle = 32;
  static constexpr size_t kDigits = 10;

  struct Result {
    std::string axes;  ///< in their order
    bool is_read;      ///< of %x at the one division
    std::vector<Division> divisions;
  };

  static int64_t extent(char axis) { return axis == 'i' ? kRows : kColumns; }

  void add(const Division& division) {
    std::string axes;
    for (char axis : axes_)
      if (division.left.has_axis(axis) || division.right.has_axis(axis)) axes += axis;
    auto open =
        std::find_if(results_.begin(), results_.end(), [&](const Result& r) { return r.axes == axes && !r.is_read && r.divisions.size() < kDigits; });
    if (open == results_.end()) open = results_.insert(results_.end(), {axes, false, {}});
    open->divisions.push_back(division);
    const bool is_typical = !division.left.is_number && (!division.right.is_number || division.right.text == "4" || division.right.text == "-3");
    if (!axes.empty() && is_typical) results_.push_back({axes, true, {division}});
  }

  static void compare(const Result& result, int64_t got, const DivisionPoint& at) {
    int64_t wanted = 0;
    int64_t shift = 0;
    int64_t place = 1;
    for (const Division& division : result.divisions) {
      wanted += division.value(at) * place;
      shift += kMiddle * place;
      place *= kBase;
    }
    if (got == wanted) return;
    std::string wrong;
    for (size_t digit = 0; digit < result.divisions.size(); ++digit) {
      const int64_t value = (((got + shift) >> (6 * digit)) & (kBase - 1)) - kMiddle;
      const Division& division = result.divisions[digit];
      if (value != division.value(at)) wrong += fmt::format("{} is {} for {}\n", division.text(), value, division.value(at));
    }
    FAIL((result.is_read ? "read at " : "") << wrong << "where i is " << at.i << ", j " << at.j << ", s " << at.s << ", t " << at.t);
  }

  std::pair<int64_t, int64_t> s_, t_;
  std::string axes_;
  std::vector<Result> results_;
};

/// By what is known of signs.
inline std::vector<Divisions> divisions_by_signs() {
  return {Divisions(), Divisions({-9, 9}, {-9, 9}, true), Divisions({-9, -1}, {1, 9}), Divisions({0, 9}, {-9, -1}),
          Divisions({-9, -1}, {-9, -1}, true)};
}

}  // namespace deplo::testing
