#pragma once

#include <string>
#include <vector>

#include "lower/tile_to_kernel/emit.h"

namespace deplo::tile_to_kernel {

/// The running state of a reduction or scan in registers: one value per part, all of one lane count.
/// sum, prod, min, max: (value); prod of float64: (value, error). argmin, argmax: (value, index). welford: (count, mean, m2). online_softmax: (m, s).
using State = std::vector<std::string>;

class Combination {
 public:
  /// `scans`: every partial result counts; sums and products of float32 run in float64.
  Combination(Emitter& emit, std::string name, Combiner combiner, std::vector<DType> results, size_t operand_count, bool scans);

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
  Fn function() const;

  Emitter& emit_;
  std::string name_;  ///< what its values are called
  Combiner combiner_;
  std::vector<DType> results_;
  std::vector<DType> dtypes_;
  size_t operands_;
};

}  // namespace deplo::tile_to_kernel
