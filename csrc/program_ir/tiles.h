#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "expr/expr.h"
#include "expr/named.h"

namespace deplo {

// Products of tiles, a statement that Tile IR and Kernel IR share: what a block multiplies while copies of later tiles are under way. Its text is
// multiply_tiles acc += x by x_tiles [k, m] strides [1, k] at [m0] from 0 rows 128 * w by w_tiles [k, n] strides [1, k] at [n0] from 0 rows 256
//   thread t groups 2 stages 4 flags f after 0

constexpr int64_t kTileDepth = 64;       ///< of k in a tile
constexpr int64_t kTileGroup = 128;      ///< threads that multiply together
constexpr int64_t kTileGroupRows = 64;   ///< of the sums of a group
constexpr int64_t kTileColumnStep = 64;  ///< columns of a tile come in multiples of it
constexpr int64_t kMostTileColumns = 256;
constexpr int64_t kMostTileDimensions = 5;

/// A factor: a parameter of bf16 or f16 as an array of up to five dimensions, and the tiles of it that a block takes: `rows` rows, or columns, from
/// at[0] on, at the further coordinates at[1], ..., and 64 of k, from the first to the last. What lies beyond the extents counts as 0. Extents,
/// strides and the offset are sizes; the strides but for the first one, and the offset, are multiples of 16 bytes.
struct TileFactor {
  std::string buffer;
  std::string tiles;          ///< the shared array that its tiles lie in
  std::vector<Expr> extents;  ///< of k, of its rows, and of further dimensions; turned: of its rows, of k, ...
  std::vector<Expr> strides;  ///< in elements, the first one 1
  std::vector<Expr> at;       ///< row, and further coordinates
  Expr offset;                ///< of the first element
  int64_t rows = 0;
  bool turned = false;  ///< memory runs along the rows, not along k
  bool operator==(const TileFactor&) const = default;

  Expr depth() const { return extents[turned ? 1 : 0]; }
  Expr width() const { return extents[turned ? 0 : 1]; }
  int64_t elements() const { return rows * kTileDepth; }
};

/// For the threads of each group of 128, 64 rows of sums below each other: sums[row, column] += the sum over k of a[row, k] * b[column, k]. Thread t
/// of a group has row 16 (t // 32) + t % 32 // 4 + 8 h and columns 8 g + 2 (t % 4) and the next one, for h below 2 and g below a number of columns /
/// 8. Threads behind the groups help. All threads of the block are there. `stages` tiles of each factor are in shared memory; `flags`: a shared
/// array of 2 * stages i64. Several such statements follow each other with the same arrays: `after` is how many tiles of k came before.
struct TileProducts {
  TileFactor a, b;
  Expr thread;  ///< its number
  int64_t groups = 1;
  int64_t stages = 2;
  std::string flags;
  Expr after = 0;
  bool operator==(const TileProducts&) const = default;

  Expr tiles_of_k() const { return ceildiv(a.depth(), kTileDepth); }
  int64_t threads() const { return groups * kTileGroup; }
};

/// Calls f on each expression.
template <class Products, class F>
  requires std::same_as<std::remove_const_t<Products>, TileProducts>
void for_each_expr(Products& s, const F& f) {
  for (auto* factor : {&s.a, &s.b}) {
    for (auto& e : factor->extents) f(e);
    for (auto& e : factor->strides) f(e);
    for (auto& e : factor->at) f(e);
    f(factor->offset);
  }
  f(s.thread);
  f(s.after);
}

/// What is wrong with the statement, but for its names and expressions; empty: nothing.
std::string problem_of(const TileProducts& s);
std::string print(const TileProducts& s);
class Lexer;
TileProducts parse_tile_products(Lexer& lexer);

/// What one thread adds to its sum number `which` (in the order g, h, and two columns); get(factor, element) reads a parameter.
template <class Get>
double tile_product(const TileProducts& s, const NamedIntegers& integers, int64_t which, const Get& get) {
  const int64_t thread = evaluate(s.thread, integers);
  if (thread >= s.threads()) return 0;
  const int64_t lane = thread % 32;
  const int64_t places[] = {thread / 32 * 16 + lane / 4 + which / 2 % 2 * 8, which / 4 * 8 + lane % 4 * 2 + which % 2};
  const int64_t depth = evaluate(s.a.depth(), integers);
  const TileFactor* factors[] = {&s.a, &s.b};
  int64_t from[2];
  int64_t step[2];
  for (int i : {0, 1}) {
    const TileFactor& f = *factors[i];
    const int64_t row = evaluate(f.at[0], integers) + places[i];
    if (row < 0 || row >= evaluate(f.width(), integers)) return 0;
    step[i] = evaluate(f.strides[f.turned ? 1 : 0], integers);
    from[i] = evaluate(f.offset, integers) + row * evaluate(f.strides[f.turned ? 0 : 1], integers);
    for (size_t d = 1; d < f.at.size(); ++d) from[i] += evaluate(f.at[d], integers) * evaluate(f.strides[d + 1], integers);
  }
  double sum = 0;
  for (int64_t k = 0; k < depth; ++k) sum += get(s.a, from[0] + k * step[0]) * get(s.b, from[1] + k * step[1]);
  return sum;
}

}  // namespace deplo
