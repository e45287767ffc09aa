#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/array.h"
#include "base/dtype.h"
#include "scalar/functions.h"

namespace deplo {

// What interpreters share of a GPU's warps: where matrices lie in 32 threads, and copies that take place when they are waited for.

constexpr size_t kWarpThreads = 32;

/// What each thread gets of `count` matrices of 8 x 8: element(thread, column) is one of the row that a thread names.
template <class Element>
std::vector<std::vector<Scalar>> load_matrices(int count, bool transposed, const Element& element) {
  std::vector<std::vector<Scalar>> out(kWarpThreads);
  for (size_t thread = 0; thread < kWarpThreads; ++thread)
    for (size_t m = 0; m < static_cast<size_t>(count); ++m)
      for (size_t pair : {0, 1}) {
        const size_t across = thread / 4;
        const size_t along = thread % 4 * 2 + pair;
        out[thread].push_back(element(m * 8 + (transposed ? along : across), transposed ? across : along));
      }
  return out;
}

/// Adds a product of 16 x 16 and 16 x 8 elements to the sums of 32 threads, each with 8, 4 and 4 of them; typed sums are rounded once.
inline void multiply_matrices(const std::vector<std::vector<Scalar>>& a, const std::vector<std::vector<Scalar>>& b,
                              std::vector<std::vector<Scalar>>& sums, Mode mode) {
  for (size_t thread = 0; thread < kWarpThreads; ++thread)
    for (size_t s = 0; s < 4; ++s) {
      const size_t row = thread / 4;
      const size_t column = thread % 4 * 2 + s % 2;
      double sum = sums[thread][s].f;
      for (size_t k = 0; k < 16; ++k) {
        const size_t part = k % 8 / 2;
        sum += a[row * 4 + part][k / 8 * 4 + s / 2 * 2 + k % 2].f * b[column * 4 + part][k / 8 * 2 + k % 2].f;
      }
      sums[thread][s] = mode == Mode::typed ? Scalar::of_float(DType::f32, sum) : Scalar{DType::f32, sum, 0};
    }
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
          copy.to->set(copy.at + e, static_cast<size_t>(e) < copy.places.size() ? copy.from->get(copy.places[static_cast<size_t>(e)])
                                                                                : Scalar::of_float(copy.to->dtype, 0));
  }

 private:
  std::vector<Copy> open_;
  std::deque<std::vector<Copy>> groups_;
};

}  // namespace deplo
