#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "expr/expr.h"

namespace deplo {

// Products of a group of threads, a statement that Tile IR and Kernel IR share: what matrix units read of shared memory themselves. Its text is
// multiply_group acc[0] += x_tile at 4096 * (t // 128) lines 128 * w_tile at 8192 * s lines 64 turned columns 128 depth 64 lanes 2
// multiply_group acc[0] += (p0, p1, p2, p3) * v_tile at 0 lines 64 turned columns 128 depth 64 lanes 2 pending 1

constexpr int64_t kGroupThreads = 128;
constexpr int64_t kGroupRows = 64;        ///< of the sums
constexpr int64_t kGroupDepth = 16;       ///< of k in an instruction; of bytes twice as many
constexpr int64_t kGroupLine = 64;        ///< elements of 16 bits in a line of 128 bytes
constexpr int64_t kGroupLines = 8;        ///< lines that lie in all banks: what begins a tile is a multiple of them
constexpr int64_t kGroupColumnStep = 16;  ///< columns come in multiples of it
constexpr int64_t kMostGroupColumns = 256;

/// A factor in shared memory, of bf16, f16 or bytes, from element `at` of an array on. Boxes of `lines` lines of 128 bytes follow each other. A line
/// is a row (a column of the sums), and a box 64 of k, of bytes 128; `turned`: a line is one of k, and a box 64 rows. Chunk c of 16 bytes of line l
/// of the array is at c xor l % 8.
struct GroupFactor {
  std::string tile;
  Expr at;
  int64_t lines = 0;
  bool turned = false;
  bool operator==(const GroupFactor&) const = default;

  /// Where an element of `bytes` lies in the array, `from` being what `at` is.
  int64_t place(int64_t from, int64_t row, int64_t k, int64_t bytes) const {
    const int64_t length = 2 * kGroupLine / bytes;
    const int64_t chunk = length / kGroupLines;
    const int64_t line = from / length + (turned ? row : k) / length * lines + (turned ? k : row);
    const int64_t column = from % length + (turned ? row : k) % length;
    return line * length + ((column / chunk) ^ (line % kGroupLines)) * chunk + column % chunk;
  }
};

/// For the threads of each group of 128 of a block: sums[row, column] += the sum over `depth` of k of a[row, k] * b[column, k], of 64 rows and
/// `columns` columns. Thread t of a group has row 16 (t // 32) + t % 32 // 4 + 8 h and columns 8 g + 2 (t % 4) and the next one. a lies in shared
/// memory, or is `matrices`, one for 16 of k each, of which thread t holds what `mma` takes of its warp's 16 rows. `lanes` sums lie side by side:
/// those of lanes / 2 values of g. Up to `pending` such statements, this one last, may be under way when it ends: their sums are known, and their
/// factors may be overwritten, behind one that leaves fewer. A depth of 0 waits, and multiplies nothing.
struct GroupProducts {
  GroupFactor a, b;
  std::vector<std::string> matrices;
  int64_t columns = 0, depth = 0;
  int64_t lanes = 2;
  int pending = 0;
  bool operator==(const GroupProducts&) const = default;
};

/// Calls f on where each factor in shared memory begins.
template <class Products, class F>
void for_each_place(Products& s, const F& f) {
  if (s.matrices.empty()) f(s.a.at);
  f(s.b.at);
}

/// What is wrong with the statement, but for its names and expressions; empty: nothing.
std::string problem_of(const GroupProducts& s);
std::string print(const GroupProducts& s);
class Lexer;
GroupProducts parse_group_products(Lexer& lexer);

/// add(thread of the group, half, group of 8 columns, one of 2, sum of products) for each sum; a(row, k), b(column, k).
template <class A, class B, class Add>
void multiply_group(const GroupProducts& s, const A& a, const B& b, const Add& add) {
  for (int64_t thread = 0; thread < kGroupThreads; ++thread)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t g = 0; g < s.columns / 8; ++g)
        for (int64_t c = 0; c < 2; ++c) {
          double sum = 0;
          for (int64_t k = 0; k < s.depth; ++k) sum += a(thread / 32 * 16 + thread % 32 / 4 + 8 * h, k) * b(8 * g + 2 * (thread % 4) + c, k);
          add(thread, h, g, c, sum);
        }
}

/// Of a row of 64 and 16 of k: which thread of the group holds it, and which of its elements it is.
inline int64_t matrix_thread(int64_t row, int64_t k) { return row / 16 * 32 + row % 8 * 4 + k % 8 / 2; }
inline int64_t matrix_element(int64_t row, int64_t k) { return (k % 16 / 8 * 2 + row % 16 / 8) * 2 + k % 2; }

}  // namespace deplo
