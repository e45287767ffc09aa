#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/array.h"
#include "base/dtype.h"
#include "base/tf32.h"
#include "scalar/functions.h"

namespace deplo {

// What interpreters share of a GPU's warps: where matrices lie in 32 threads, and copies that take place when they are waited for.

constexpr size_t kWarpThreads = 32;
constexpr int64_t kWarpRowBytes = 16;  ///< of a row of a matrix of 8 rows, and of an asynchronous copy

/// What matrix units multiply: floats of 16 bits, bytes, and float32 rounded to tf32.
inline bool is_matrix_dtype(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::i8 || dtype == DType::u8 || dtype == DType::f32;
}

/// Elements of a matrix that a thread holds in a register, side by side in a row: one of 32 bits, two of 16, four bytes. Rows are 16 bytes long.
inline int lanes_of_matrix(DType dtype) { return 4 / static_cast<int>(size_of(dtype)); }

/// A number as matrix units take it.
inline Scalar as_factor(const Scalar& number) {
  return number.dtype == DType::f32 ? Scalar::of_float(DType::f32, static_cast<double>(round_to_tf32(static_cast<float>(number.f)))) : number;
}

/// What each thread gets of `count` matrices of 8 rows of 16 bytes: element(thread, column) is one of the row that a thread names. `transposed`
/// matrices are of 16 bits.
template <class Element>
std::vector<std::vector<Scalar>> load_matrices(int count, DType dtype, bool transposed, const Element& element) {
  std::vector<std::vector<Scalar>> out(kWarpThreads);
  for (size_t thread = 0; thread < kWarpThreads; ++thread)
    for (size_t m = 0; m < static_cast<size_t>(count); ++m)
      for (size_t lane = 0, lanes = static_cast<size_t>(lanes_of_matrix(dtype)); lane < lanes; ++lane) {
        const size_t across = thread / 4;
        const size_t along = thread % 4 * lanes + lane;
        out[thread].push_back(as_factor(element(m * 8 + (transposed ? along : across), transposed ? across : along)));
      }
  return out;
}

/// Adds a product of 16 x 16 and 16 x 8 elements of 16 bits, of 16 x 8 and 8 x 8 of f32, or of 16 x 32 and 32 x 8 bytes, to the sums of 32 threads,
/// each with four registers of the first, two of the second and four sums; typed sums of floats are rounded once, those of bytes are exact and wrap.
inline void multiply_matrices(const std::vector<std::vector<Scalar>>& a, const std::vector<std::vector<Scalar>>& b,
                              std::vector<std::vector<Scalar>>& sums, Mode mode) {
  for (size_t thread = 0; thread < kWarpThreads; ++thread)
    for (size_t s = 0; s < 4; ++s) {
      const size_t row = thread / 4;
      const size_t column = thread % 4 * 2 + s % 2;
      const size_t lanes = a[0].size() / 4;
      const auto products = [&](const auto& add) {
        for (size_t k = 0; k < 8 * lanes; ++k) {
          const size_t part = k % (4 * lanes) / lanes;
          const size_t half = k / (4 * lanes);
          add(a[row * 4 + part][(half * 2 + s / 2) * lanes + k % lanes], b[column * 4 + part][half * lanes + k % lanes]);
        }
      };
      if (sums[thread][s].dtype == DType::i32) {
        int64_t sum = sums[thread][s].i;
        products([&](const Scalar& x, const Scalar& y) { sum += x.i * y.i; });
        sums[thread][s] = Scalar::of_int(DType::i32, static_cast<int32_t>(static_cast<uint32_t>(sum)));
        continue;
      }
      double sum = sums[thread][s].f;
      products([&](const Scalar& x, const Scalar& y) { sum += x.f * y.f; });
      sums[thread][s] = mode == Mode::typed ? Scalar::of_float(DType::f32, sum) : Scalar{DType::f32, sum, 0};
    }
}

/// A sum, of f32 or i32, and further products; typed floats are rounded once, integers are exact and wrap.
inline Scalar sum_of_products(const Scalar& sum, double more, Mode mode) {
  if (sum.dtype == DType::i32) return Scalar::of_int(DType::i32, static_cast<int32_t>(static_cast<uint32_t>(sum.i + static_cast<int64_t>(more))));
  return mode == Mode::typed ? Scalar::of_float(DType::f32, sum.f + more) : Scalar{DType::f32, sum.f + more, 0};
}

/// A thread's copies under way.
class PendingCopies {
 public:
  struct Copy {
    std::shared_ptr<Array> to, from;
    int64_t at = 0;
    std::vector<int64_t> places;  ///< in `from`
    int64_t elements = 0;         ///< those behind the places are 0
  };

  void add(Copy copy) { open_.push_back(std::move(copy)); }
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  void wait(size_t pending) {
    for (; groups_.size() > pending; groups_.pop_front())
      for (const Copy& copy : groups_.front())
        for (int64_t e = 0; e < copy.elements; ++e)
          copy.to->set(copy.at + e, static_cast<size_t>(e) < copy.places.size()
                                        ? copy.from->get(copy.places[static_cast<size_t>(e)])
                                        : (is_float(copy.to->dtype) ? Scalar::of_float(copy.to->dtype, 0) : Scalar::of_int(copy.to->dtype, 0)));
  }

 private:
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;
};

}  // namespace deplo
