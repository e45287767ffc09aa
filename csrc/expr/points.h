#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "expr/expr.h"

namespace deplo {

/// The points at which a statement runs: loops around it, outer first, and conditions on their axes. Finds accesses that leave their buffer at one of
/// them whatever the sizes are: what is found is a mistake of the program, what is not found may be one.
class Points {
 public:
  explicit Points(const Ranges& symbols);

  /// One more loop, inside of the others: name = lo, lo + step, ... < hi.
  void add_axis(const std::string& name, Expr lo, Expr hi, int64_t step = 1);
  /// Only points where the guard holds.
  void add_guard(const std::vector<Cond>& guard);
  /// Only points where a condition of the guard fails.
  void add_failed(const std::vector<Cond>& guard);
  /// Only some points, nobody knows which.
  void add_unknown() { unknown_ = true; }
  /// What a name stands for.
  void define(const std::string& name, Expr value);

  /// A loop around it has constant bounds and no iteration: there is no point.
  bool none() const { return none_; }

  /// "index i + 1 of dimension 0 of x is 8 at i = 7, outside 0..8" for an index that is proven to leave `shape` at a point; nothing for others.
  std::optional<std::string> escape(const std::string& buffer, const std::vector<Expr>& index, const std::vector<Expr>& shape,
                                    const std::vector<Cond>& guard = {}) const;

 private:
  struct Axis {
    std::string name;
    Expr lo;
    Expr hi;
    int64_t step;
  };
  struct Point {
    Substitution values;
    Expr value;  ///< of the expression that was to be large or small
  };

  /// A point that is proven to run where e is as large (or small) as choosing axis by axis makes it.
  std::optional<Point> extreme(Expr e, bool large) const;
  /// The same, found once: unrolled code asks for expressions that differ by a constant only.
  const std::optional<Point>& shared_extreme(Expr rest, bool large) const;
  /// The values of an axis, at those of the axes around it; nothing unless there provably are some.
  std::optional<Range> values_of(const Axis& axis, const Substitution& outer) const;
  Expr at(Expr e, const Substitution& values) const { return simplify(substitute(e, values), ranges_); }
  bool surely_inside(Expr index, Expr size) const;
  bool runs_at(const Substitution& values) const;
  std::optional<std::string> escape(const std::string& buffer, size_t dimension, Expr index, Expr size, bool large) const;
  /// How far an expression, with names replaced, stays from both ends of 0..size at least; nothing where no number bounds it.
  struct Slack {
    Expr rest;
    std::optional<int64_t> low;
    std::optional<int64_t> high;
  };
  const Slack& shared_slack(Expr rest, Expr size) const;

  Ranges ranges_;   ///< of symbols and axes
  Ranges numbers_;  ///< the same by numbers alone: they decide most accesses, and quickly
  std::vector<Axis> axes_;
  std::vector<Cond> holds_;
  std::vector<std::vector<Cond>> fails_;
  Substitution names_;
  bool unknown_ = false;
  bool none_ = false;
  /// What was found already: extremes of expressions by direction, slacks by size. A copy, which is made to add axes and guards, finds its own.
  struct Found {
    Found() = default;
    Found(const Found& /*other*/) {}
    Found(Found&&) = default;
    Found& operator=(const Found& /*other*/) {
      clear();
      return *this;
    }
    Found& operator=(Found&&) = default;
    ~Found() = default;
    void clear() {
      extremes.clear();
      slacks.clear();
      ranges.clear();
      runs.clear();
    }
    std::map<std::pair<const ExprNode*, bool>, std::optional<Point>> extremes;
    std::map<std::pair<const ExprNode*, const ExprNode*>, Slack> slacks;
    std::map<std::vector<const ExprNode*>, std::optional<Range>> ranges;  ///< of the axis behind those with these values
    std::map<std::vector<const ExprNode*>, bool> runs;                    ///< whether there is a point with these values
  };
  mutable Found found_;
};

}  // namespace deplo
