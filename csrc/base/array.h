#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "scalar/functions.h"

namespace deplo {

/// A dense row-major tensor in an interpreter: small, obvious, slow. Floats are stored as double, the rest as int64.
struct Array {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<double> floats;  ///< used when is_float(dtype)
  std::vector<int64_t> ints;   ///< otherwise

  static Array filled(DType dtype, std::vector<int64_t> shape, Scalar value);
  static Array zeros(DType dtype, std::vector<int64_t> shape);
  /// Undefined contents: NaN, or an improbable integer, shows a read before the write.
  static Array undefined(DType dtype, std::vector<int64_t> shape);
  void make_undefined();
  int64_t count() const;
  Scalar get(int64_t flat) const;
  void set(int64_t flat, const Scalar& value);
  /// Flat position of a multi-index; InternalError quoting index and shape if it is out of range.
  int64_t flat_index(std::span<const int64_t> index) const;
};

}  // namespace deplo
