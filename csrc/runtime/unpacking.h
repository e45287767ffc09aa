#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/dtype.h"

namespace deplo::runtime {

/// Where each element of an input lies in what was packed of it: at row_at[r] + col_at[c] for element r * cols + c of the input's memory.
struct Unpacking {
  int element = 0;      ///< bytes of an element of the input
  bool halved = false;  ///< elements of one byte lie in half a byte each, eight in a word of 32 bits, and places count halves
  int turn = 0;         ///< of halves: bits by which words were rotated to the left
  int zero = 0;         ///< of halves: what stands for 0
  int least = 0;        ///< of halves: the least of the 16 values
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<int64_t> row_at;
  std::vector<int64_t> col_at;
  size_t output = 0;  ///< which of the packed buffers

  /// Elements first .. last. Safe in a signal handler: neither allocates nor locks.
  void read(const char* packed, int64_t first, int64_t last, char* out) const;
  /// Whether reading all elements gives exactly these bytes.
  bool gives(const char* packed, const char* elements) const;
};

struct Bytes {
  char* data = nullptr;
  int64_t bytes = 0;
};

/// Finds out by packing inputs whose elements are numbered: nothing where elements are lost, computed with, or lie in another way. What is found
/// holds for the numbered elements only, the first row and the first column of `rows` x `cols`: who relies on it compares by gives(). `pack(input)`
/// fills `outputs` from elements of `dtype`. Throws ExecutionError where memory for the input is missing.
std::optional<Unpacking> find_unpacking(DType dtype, int64_t rows, int64_t cols, const std::vector<Bytes>& outputs,
                                        const std::function<void(const char*)>& pack);

/// Zeros from the system, given back to it at the end: pages that are only read take no memory.
class Zeros {
 public:
  explicit Zeros(int64_t bytes);  ///< throws ExecutionError where the system has no more
  ~Zeros();
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace deplo::runtime
