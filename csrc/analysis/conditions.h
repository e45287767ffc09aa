#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "loop_ir/ir.h"

namespace deplo::analysis {

/// Conditions on axes and integers without which a value of straight-line statements is -inf, or 0. Where a number is made by adding to -inf it
/// counts as -inf, and where it is made by multiplying 0 as 0, whatever the other number was.
class ValueConditions {
 public:
  /// A buffer of which a load gives a known value.
  struct Stored {
    std::string buffer, value;
  };
  /// `rows`: statements outside of the loop that `keys` are in.
  ValueConditions(const loop_ir::Block& rows, const std::vector<const loop_ir::Block*>& keys, Stored stored = {});

  std::vector<Cond> finite(const std::string& value);
  /// Conditions without which the value is made by adding to a number of at most `bound`.
  std::vector<Cond> above(const std::string& value, double bound);
  std::vector<Cond> nonzero(const std::string& value);
  /// Whether one of the factors of the value is the exponential of something.
  bool is_weight(const std::string& value) const;

 private:
  const loop_ir::Stmt* definition(const std::string& name) const;
  const loop_ir::Let* let(const std::string& name) const;
  template <class Is>
  bool is_constant(const std::string& name, Is is) const;
  void find_above(const std::string& name);
  void find_nonzero(const std::string& name);
  void holds(const std::string& name, bool wanted);
  std::optional<Expr> index_of(const std::string& name) const;

  Stored stored_;
  std::map<std::string, const loop_ir::Stmt*> rows_, keys_;
  std::vector<Cond> conds_;
  double bound_ = 0;  ///< at most which values do not count
};

/// What is computed counts for no key > limit (`above`), or for none < limit. The limit is made of the outer axes, sizes and i64 values of the outer
/// nest.
struct KeyLimit {
  bool above = true;
  Expr limit;
  bool operator==(const KeyLimit&) const = default;
};

/// Those of the conditions that bound keys: `axis` is the key, in terms of `key`.
std::vector<KeyLimit> key_limits(const std::vector<Cond>& conds, const std::string& axis, const std::string& key);

}  // namespace deplo::analysis
