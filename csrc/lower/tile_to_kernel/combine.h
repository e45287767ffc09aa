#pragma once

#include <string>
#include <vector>

#include "lower/tile_to_kernel/emit.h"

namespace deplo::tile_to_kernel {

/// The running state of a reduction or scan in registers: one value per part, all of one lane count.
/// sum, prod, min, max: (value); prod of float64: (value, error), or (value, exponent). argmin, argmax: (value, index). welford: (count, mean, m2).
/// online_softmax: (m, s).
using State = std::vector<std::string>;

class Combination {
 public:
  /// Whether every partial result counts, and whether parts from the middle are combined before what comes first. In scans sums and products of
  /// float32 run in float64; products of parts, which may leave its range where no partial result does, have an exponent of their own.
  enum class Use : uint8_t { reduces, scans, scans_parts };
  Combination(Emitter& emit, std::string name, Combiner combiner, std::vector<DType> results, size_t operand_count, Use use);

  size_t parts() const { return dtypes_.size(); }
  DType dtype(size_t part) const { return dtypes_[part]; }
  State identity(int lanes);
  /// The state after one more element, whose operands have as many lanes as the state.
  State step(const State& state, const std::vector<std::string>& operands);
  /// state + a * b for sums, with one rounding.
  State step_product(const State& state, const std::string& a, const std::string& b);
  State merge(const State& a, const State& b);
  /// All lanes as one, pairwise.
  State across_lanes(State state);
  /// The results that the reduction defines. `nonempty`: a bool that says whether there was an element; "" if there was.
  State results(const State& state, const std::string& nonempty);
  State select(const std::string& mask, const State& on, const State& off);

 private:
  int lanes(const State& state) const { return emit_.type(state[0]).lanes; }
  std::string cast(const std::string& value, DType dtype);
  std::string op(Fn fn, const std::string& a, const std::string& b);
  std::string number(DType dtype, int lanes, double value);
  State merge_extreme(const State& a, const State& b);
  State merge_welford(const State& a, const State& b);
  State merge_product(const State& a, const State& b);
  State merge_softmax(const State& a, const State& b);
  State with_exponent(const std::string& x, const std::string& exponent);
  std::string without_exponent(const State& state);
  Fn function() const;

  Emitter& emit_;
  std::string name_;  ///< what its values are called
  Combiner combiner_;
  std::vector<DType> results_;
  std::vector<DType> dtypes_;
  size_t operands_;
  bool has_exponent_ = false;  ///< of a product
};

}  // namespace deplo::tile_to_kernel
